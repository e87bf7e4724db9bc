"""Files that are never seen half-written, and folders that one process at a time holds."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Write a file in one move: a reader, or a kill, sees the old text or the new, never a part."""
    temporary = path.with_name(path.name + ".partial")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def replace_bytes(path: Path, data: bytes) -> None:
    """Write a file in one move, on the disk before it has its name."""
    temporary = path.with_name(path.name + ".partial")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


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
