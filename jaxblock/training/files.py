"""Text files that are never seen half-written."""

from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Write a file in one move: a reader, or a kill, sees the old text or the new, never a part."""
    temporary = path.with_name(path.name + ".partial")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
