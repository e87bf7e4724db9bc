"""Keep the memory that XLA's CPU programs free between steps, instead of returning it and faulting it in again.

A step's temporaries are one large block, which glibc maps afresh and zeroes page by page every time: a fifth of the
step at depth 6, width 256. This tells glibc's malloc to serve it from the heap and never to trim that. Only the heap of
the main thread holds blocks above 64 MB, so programs are to run in the thread that calls them, not in one of JAX's own.
"""

import ctypes
import importlib.util
import platform

import jax

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h
_ACCELERATORS = ("jax_plugins", "libtpu")
"""Packages that bring another backend than the CPU."""


def keep_freed_memory() -> None:
    """Set this process to keep what it frees; to be called before anything is computed, which starts the backend.

    Does nothing off glibc or where arrays may live on a GPU or TPU: as `jax_platforms` says, or what is installed.
    """
    if platform.libc_ver()[0] != "glibc" or not _computes_on_cpu():
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_MAX, 0)
    libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
    jax.config.update("jax_cpu_enable_async_dispatch", False)


def _computes_on_cpu() -> bool:
    platforms = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    if platforms:
        return platforms.split(",")[0] == "cpu"
    return not any(importlib.util.find_spec(name) for name in _ACCELERATORS)
