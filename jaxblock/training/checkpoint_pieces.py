"""The parts of a checkpoint's arrays that one process holds, and a checksum that parts of an array add up to."""

import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxblock.parallel import processes
from jaxblock.training.files import replace_text

_MASK = 2**64 - 1
_CHUNK = 2**22
"""Entries that are looked at together."""
_PATIENCE = 60.0
"""Seconds in which what another process has written is seen here."""


class Piece(NamedTuple):
    """A part of an array."""

    start: tuple[int, ...]
    """Where its first entry is in the whole array."""
    value: np.ndarray


def is_key(leaf: Any) -> bool:
    """Return whether an array, or its shape, is one of typed random keys."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def raw(leaf: Any) -> Any:
    """Return an array as it is written: a typed random key's data, any other as it is."""
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def spread(leaf: Any) -> bool:
    """Return whether a part of an array lies, or is to lie, where another process has it."""
    sharding = getattr(leaf, "sharding", None)
    return sharding is not None and not sharding.is_fully_addressable


def own_pieces(leaf: Any) -> list[Piece]:
    """Return copies on the host of the parts for which this process answers: of an array that is its own, all."""
    leaf = raw(leaf)
    if not spread(leaf):
        return [Piece((0,) * leaf.ndim, np.array(jax.device_get(leaf)))]
    own = [shard for shard in leaf.addressable_shards if shard.replica_id == 0]
    return [Piece(tuple(at.start or 0 for at in shard.index), np.array(shard.data)) for shard in own]


def digest(pieces: Sequence[Piece], shape: Sequence[int]) -> int:
    """Return the sum of bits_i (2 i + 1) mod 2^64 over the entries i, in row-major order, of parts of an array.

    The sums of all parts add up to the whole array's, however it was cut. The weights are odd, so that one entry
    that differs always shows.
    """
    return sum(_piece_digest(piece, shape) for piece in pieces) & _MASK


def _piece_digest(piece: Piece, shape: Sequence[int]) -> int:
    value = np.ascontiguousarray(piece.value)
    if not value.size:
        return 0
    bits = value.view(f"u{value.dtype.itemsize}").reshape(-1, value.shape[-1])
    # Row r, column j is entry first_r + j of the whole array.
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    first = np.full((), sum(at * stride for at, stride in zip(piece.start, strides, strict=True)), np.uint64)
    for axis, stride in enumerate(strides[:-1]):
        offsets = np.arange(value.shape[axis], dtype=np.uint64) * np.uint64(stride)
        first = first[..., None] + offsets
    first = first.reshape(-1)
    columns = np.arange(bits.shape[1], dtype=np.uint64)
    total, rows = 0, max(1, _CHUNK // bits.shape[1])
    for at in range(0, len(bits), rows):
        part = bits[at : at + rows].astype(np.uint64)
        sums, moments = part.sum(1), part @ columns
        total += int((sums * (2 * first[at : at + rows] + 1) + 2 * moments).sum())
    return total & _MASK


def tell_digests(folder: Path, digests: Mapping[str, int]) -> None:
    """Write this process's sums where the others find them; of an array that all have whole, one tells it."""
    replace_text(folder / f"{jax.process_index()}.json", json.dumps(digests))


def gathered_digests(folder: Path) -> dict[str, int]:
    """Return the sums of all processes, added up.

    Raises:
      OSError: a process has told none in a minute.
    """
    total: dict[str, int] = {}
    for process in range(jax.process_count()):
        for name, value in json.loads(_awaited(folder / f"{process}.json")).items():
            total[name] = (total.get(name, 0) + value) & _MASK
    return total


def _awaited(path: Path) -> str:
    end = time.monotonic() + _PATIENCE
    while not path.is_file() and time.monotonic() < end:
        time.sleep(0.02)
    return path.read_text(encoding="utf-8")


def loaded_digests(leaves: Mapping[str, Any]) -> dict[str, int]:
    """Return the digests of arrays, those that lie on several processes added up; all of them must ask for the same."""
    own = {name: digest(own_pieces(leaf), raw(leaf).shape) for name, leaf in leaves.items()}
    shared = [name for name, leaf in leaves.items() if spread(leaf)]
    return {**own, **dict(zip(shared, processes.sums([own[name] for name in shared]), strict=True))}
