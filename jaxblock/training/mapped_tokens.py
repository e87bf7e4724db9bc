"""The ids of a shard as a lazy array: a file is mapped when ids of it are read, and what is read is checked.

A mapping holds an open file, of which systems allow a process few (256 or 1,024 are common), so a corpus of thousands
of shards keeps only those mapped that were read last (`ShardMaps`).
"""

import functools
import mmap
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxblock.training.token_files import DataError, readable


class ShardMaps:
    """Maps shards when they are read, and keeps the `most` that were read last."""

    def __init__(self, most: int = 64):
        self.open = functools.lru_cache(maxsize=most)(_map)
        """(path, dtype, offset in bytes, ids, size of the file in bytes) -> the file, mapped read-only."""


class _Mapped(NamedTuple):
    """A file, and the ids that view it."""

    memory: mmap.mmap
    ids: np.ndarray


def _map(path: Path, dtype: np.dtype, offset: int, count: int, size: int) -> _Mapped:
    with readable(path), open(path, "rb") as file:
        now = os.fstat(file.fileno()).st_size
        if now != size:  # a mapping behind the end of a file kills the process
            raise DataError(
                f"{path} has {now} bytes and had {size} before: it was changed while it was in use"
            )
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if hasattr(mmap, "MADV_RANDOM"):  # else a touch reads megabytes around a window of a few kilobytes
        memory.madvise(mmap.MADV_RANDOM)
    return _Mapped(memory, np.frombuffer(memory, dtype, count, offset))


def _fetch(memory: mmap.mmap, start: int, count: int) -> None:
    """Ask the system for `count` bytes at once; without it each page would be waited for on its own."""
    if count and hasattr(mmap, "MADV_WILLNEED"):
        first = start - start % mmap.PAGESIZE
        memory.madvise(mmap.MADV_WILLNEED, first, start + count - first)


class MappedTokens:
    """Ids of a shard that behave like an array [N]: a slice is as lazy as the whole, `np.asarray` reads.

    Every id that is read is checked: np.asarray raises DataError, naming file and offset, for one that is not below
    `vocab_size`, and where the file went away or has another size than it had. (A file that is cut short between two
    reads, while it stays mapped, is not seen: the system ends the process, as it does for every mapping.)
    """

    def __init__(
        self,
        path: Path,
        dtype: np.dtype,
        *,
        offset: int,
        size: int,
        vocab_size: int,
        maps: ShardMaps,
    ):
        self.path, self.dtype, self.vocab_size = path, dtype, vocab_size
        self._file = (path, dtype, offset, (size - offset) // dtype.itemsize, size)
        self._span = range(self._file[3])
        self._maps = maps

    def __len__(self) -> int:
        return len(self._span)

    @property
    def nbytes(self) -> int:
        """Bytes of the ids."""
        return len(self) * self.dtype.itemsize

    def __getitem__(self, span: slice) -> "MappedTokens":
        """Return some of the ids, in order; nothing is read."""
        if span.step not in (None, 1):
            raise ValueError(f"the step of a slice is {span.step}; ids are read in order, with step 1")
        piece = object.__new__(MappedTokens)
        piece.__dict__.update(self.__dict__)
        piece._span = self._span[span]
        return piece

    def __array__(self, dtype: Any = None, /, *, copy: bool | None = None) -> np.ndarray:
        """Return the ids, checked, without a copy unless another dtype or a copy is asked for."""
        memory, ids = self._maps.open(*self._file)
        _fetch(memory, self._file[2] + self._span.start * self.dtype.itemsize, self.nbytes)
        ids = ids[self._span.start : self._span.stop]
        check_ids(self.path, ids, vocab_size=self.vocab_size, start=self._span.start)
        return np.array(ids, dtype) if copy or dtype not in (None, ids.dtype) else ids


def check_ids(path: Path, ids: np.ndarray, *, vocab_size: int, start: int = 0) -> None:
    """Raise DataError, naming the first that is not, unless all ids [N] are below `vocab_size`.

    `start` is the offset of the first of them in the file at `path`.
    """
    if len(ids) and vocab_size <= np.iinfo(ids.dtype).max and ids.max() >= vocab_size:
        place = int(np.argmax(ids >= vocab_size))
        raise DataError(
            f"{path} holds the token id {ids[place]} at offset {start + place} (counted in tokens), but "
            f"vocab_size is {vocab_size}; every id must be below it"
        )
