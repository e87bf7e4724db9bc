"""Files that are never seen half-written, and folders that one process at a time holds."""

import contextlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO


def replace_text(path: Path, text: str) -> None:
    """Write a file in one move: a reader, or a kill, sees the old text or the new, never a part."""
    temporary = path.with_name(path.name + ".partial")
    with _open_new(temporary) as file:
        file.write(text.encode("utf-8"))
    temporary.replace(path)


def replace_bytes(path: Path, data: bytes) -> None:
    """Write a file in one move, on the disk before it has its name."""
    temporary = path.with_name(path.name + ".partial")
    with _open_new(temporary) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def bring_to_disk(folder: Path) -> None:
    """Wait until a folder, and all that is in it, is on the disk and not only in its cache."""
    with ThreadPoolExecutor(8) as pool:  # the disk takes many at once in the time of a few
        list(pool.map(sync, [*folder.rglob("*"), folder]))


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    if path.is_dir() and os.name == "nt":  # Windows gives no handle to a folder
        return
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _open_new(path: Path) -> BinaryIO:
    """Open a file that is not there yet, in place of what a kill left: a link of that name is not written through."""
    path.unlink(missing_ok=True)
    return path.open("xb")


@contextlib.contextmanager
def held(folder: Path, *, taken: Exception) -> Iterator[None]:
    """Hold a folder for this process, where the system has file locks; a kill releases it.

    Raises:
      Exception: `taken`, where another process holds it.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    lock = os.open(folder, os.O_RDONLY)  # the folder itself: the files in it may be replaced
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise taken from error
    try:
        yield
    finally:
        os.close(lock)
