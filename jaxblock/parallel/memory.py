"""Bytes of a device, and of a compiled program on it."""

import os
from typing import Any

import jax


def device_bytes() -> int | None:
    """Return the memory of the first device, of the machine for a CPU; None where it is not known."""
    available = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    if available is None and hasattr(os, "sysconf"):  # a CPU has no limit of its own
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return available


def program_bytes(program: Any) -> int:
    """Return the bytes a compiled program needs on a device: arguments, results and temporaries, what is donated once.

    0 where the backend does not say.
    """
    found = program.memory_analysis()
    if found is None:
        return 0
    parts = (found.argument_size_in_bytes, found.output_size_in_bytes, found.temp_size_in_bytes)
    return sum(parts) - found.alias_size_in_bytes


def check_program(program: Any) -> None:
    """Raise ValueError if a compiled step needs more than its device has."""
    needed, available = program_bytes(program), device_bytes()
    if available is not None and needed > available:
        raise ValueError(
            f"the compiled step needs {needed / 2**30:,.1f} GiB on a device, which has {available / 2**30:,.1f} GiB; "
            'choose a larger data.accumulation, execution.remat = "full", execution.loss = "blocked", or a smaller '
            "data.batch, model.context or model"
        )
