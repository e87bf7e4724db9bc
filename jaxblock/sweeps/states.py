"""The state of a program in training, all lanes, as the bytes of one file."""

import io
import zipfile
from typing import Any

import jax
import numpy as np


def state_bytes(state: Any) -> bytes:
    """Return a tree of arrays as bytes."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(jax.device_get(state))]
    buffer = io.BytesIO()
    np.savez(buffer, *leaves)
    return buffer.getvalue()


def state_from(data: bytes, like: Any) -> Any | None:
    """Return the tree that `state_bytes` was given, or None where the bytes are damaged or of another structure.

    Args:
      data: a file's bytes.
      like: a tree of the same structure, its leaves with shape and dtype.
    """
    wanted, structure = jax.tree.flatten(like)
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            found = [arrays[f"arr_{index}"] for index in range(len(arrays.files))]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, NotImplementedError, RuntimeError):
        return None
    if len(found) != len(wanted):
        return None
    # NumPy's format has no bfloat16 and calls its bytes void.
    leaves = [
        x.view(y.dtype) if x.dtype.kind == "V" and x.dtype.itemsize == y.dtype.itemsize else x
        for x, y in zip(found, wanted, strict=True)
    ]
    if any(x.shape != y.shape or x.dtype != y.dtype for x, y in zip(leaves, wanted, strict=True)):
        return None
    return jax.tree.unflatten(structure, leaves)
