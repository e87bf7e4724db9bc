"""Files that are never seen half-written."""

import os
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
