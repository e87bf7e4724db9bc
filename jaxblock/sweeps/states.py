"""The state of a program in training, all lanes, as one file that is there whole or not at all."""

import io
import zipfile
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxblock.training.files import replace_bytes


def save_state(path: Path, state: Any) -> None:
    """Write a tree of arrays, in one move."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(jax.device_get(state))]
    buffer = io.BytesIO()
    np.savez(buffer, *leaves)
    replace_bytes(path, buffer.getvalue())


def load_state(path: Path, like: Any) -> Any | None:
    """Return the tree that was saved, or None where the file is missing, damaged or of another structure.

    Args:
      path: the file.
      like: a tree of the same structure, its leaves with shape and dtype.
    """
    wanted, structure = jax.tree.flatten(like)
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
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
