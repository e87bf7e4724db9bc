"""Text files: which a path holds, and how one is read as bytes, or as JSONL documents, into a TokenFile.

Text is never decoded: a file is its bytes, so invalid UTF-8, a byte order mark, CRLF line ends and the locale
of the machine change nothing. Every failure is a ValueError of one sentence that names the file.
"""

import json
import os
import platform
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxblock.contracts import nearest

MAPPED_BYTES = 64 * 2**20
"""Text files of this size and above are memory-mapped, smaller ones read: a mapping costs a descriptor."""

_NOT_SOURCE = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages"})
_BINARY_PROBE_BYTES = 8192


class DataError(ValueError):
    """A file of the data cannot be read, or does not hold what it should; it may be found out while a run trains."""


class Tokens(Protocol):
    """What an array [N] and the lazy `MappedTokens` share; np.asarray reads."""

    @property
    def dtype(self) -> Any:
        """The type of a token."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of all tokens."""
        ...

    def __len__(self) -> int: ...
    def __getitem__(self, span: slice, /) -> "Tokens": ...
    def __array__(self, dtype: Any = None, /, *, copy: bool | None = None) -> np.ndarray: ...


@dataclass(frozen=True, eq=False)
class TokenFile:
    """The tokens of one file.

    `name` is its path below the corpus folder with forward slashes, `tokens` [N] is uint8, or little-endian uint16
    or uint32, and `starts` holds the int64 offsets at which its documents begin (the first is 0).
    """

    name: str
    tokens: Tokens
    starts: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    def cut(self, start: int, stop: int) -> "TokenFile":
        """Return the tokens from `start` to `stop`; what is left of a document counts as a document."""
        inside = self.starts[(self.starts > start) & (self.starts < stop)] - start
        return TokenFile(self.name, self.tokens[start:stop], np.concatenate([one_document(), inside]))


def one_document() -> np.ndarray:
    """Return the `starts` of a file that is one document."""
    return np.zeros(1, np.int64)


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn an operating system error about `path` into a DataError of one sentence."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


def is_binary(path: Path) -> bool:
    """Whether the first 8 KiB hold a NUL byte (images, archives, UTF-16 text)."""
    with readable(path), open(path, "rb") as file:
        return b"\0" in file.read(_BINARY_PROBE_BYTES)


def is_hidden(name: str) -> bool:
    """Whether a folder's entry is left out of every corpus: dot files and Python's caches."""
    return name.startswith(".") or name == "__pycache__"


def find_files(folder: Path, *, without: frozenset[str] = frozenset()) -> tuple[list[Path], Counter[str]]:
    """Return the regular files below `folder`, sorted by relative path, and counts of what was left out.

    Links are followed, each folder and each file once (so a loop ends, and no text stands in the corpus twice
    under two names). Folders named in `without` are left out silently, hidden ones are counted.
    """
    skipped: Counter[str] = Counter()
    seen_folders: set[tuple[int, int]] = set()
    found: list[Path] = []

    def fail(error: OSError) -> None:
        raise error

    with readable(folder):
        for root, folders, names in os.walk(folder, onerror=fail, followlinks=True):
            status = os.stat(root)
            first_visit = (status.st_dev, status.st_ino) not in seen_folders
            seen_folders.add((status.st_dev, status.st_ino))
            if not first_visit:
                folders.clear()
                continue
            skipped["hidden files or folders"] += sum(map(is_hidden, [*folders, *names]))
            # The order of the walk decides under which of two names a linked folder is read.
            folders[:] = sorted(name for name in folders if not is_hidden(name) and name not in without)
            found += [Path(root, name) for name in names if not is_hidden(name)]
    return _regular_files(folder, found, skipped), skipped


def _regular_files(folder: Path, found: list[Path], skipped: Counter[str]) -> list[Path]:
    """Keep each regular file once, under its own name rather than a link's, sorted by relative path."""
    kept: dict[tuple[int, int], Path] = {}
    for path in sorted(found, key=lambda path: (path.is_symlink(), relative_name(path, folder))):
        if not path.is_file():
            skipped["entries that are no regular files"] += 1
            continue
        with readable(path):
            status = path.stat()
        if kept.setdefault((status.st_dev, status.st_ino), path) is not path:
            skipped["files that are links to another one"] += 1
    return sorted(kept.values(), key=lambda path: relative_name(path, folder))


def relative_name(path: Path, folder: Path) -> str:
    """Return the path of a file below `folder` with forward slashes: the same wherever the folder lies."""
    return path.relative_to(folder).as_posix()


@dataclass(frozen=True, eq=False)
class TextFiles:
    """The text and `.jsonl` files of a corpus, by name in the order of their names; `words` name it for people."""

    words: str
    files: list[tuple[str, Path]]
    notes: tuple[str, ...]


def find_texts(path: Path | None, *, field: str = "data.path") -> TextFiles:
    """Return the text files of a path: a file, what a folder holds, or the standard library's source for None.

    `field` is what sentences call the path.

    Raises:
      ValueError: the path does not exist, cannot be read, is a `.bin` shard or holds no text file.
    """
    if path is None:
        return _find_standard_library()
    with readable(path):
        if not path.exists():
            siblings = os.listdir(path.parent) if path.parent.is_dir() else []
            raise ValueError(f"{field} {path} does not exist{nearest(path.name, siblings)}")
        is_folder = path.is_dir()
        if not is_folder and not path.is_file():
            raise ValueError(f"{field} {path} is neither a file nor a folder")
    if find_shards(path):
        raise ValueError(f"{path} holds .bin shards: these are tokens already, and no text")
    return _find_folder(path) if is_folder else TextFiles(str(path), [(path.name, path)], ())


def _find_standard_library() -> TextFiles:
    folder = Path(sysconfig.get_path("stdlib"))
    paths = find_files(folder, without=_NOT_SOURCE)[0] if folder.is_dir() else []
    files = [(relative_name(path, folder), path) for path in paths if _is_portable_source(path)]
    if not files:
        raise ValueError(
            f"the standard library of this Python has no .py sources in {folder}: name a text file or a folder "
            f"with --data.path"
        )
    return TextFiles(f"the standard library of Python {platform.python_version()}", files, ())


def _is_portable_source(path: Path) -> bool:
    """Whether a file is the same on every machine with this Python: no build records."""
    generated = path.name.startswith("_sysconfigdata") or path.parent.name.startswith("config-")
    return path.suffix == ".py" and not generated


def _find_folder(folder: Path) -> TextFiles:
    paths, skipped = find_files(folder)
    texts = []
    for path in paths:
        if path.suffix.lower() == ".bin":
            skipped[".bin files (shards are read when they lie directly in data.path)"] += 1
        elif is_binary(path):
            skipped["binary files (a NUL byte in the first 8 KiB)"] += 1
        else:
            texts.append((relative_name(path, folder), path))
    return TextFiles(str(folder), texts, note_skipped(skipped))


def find_shards(path: Path) -> list[Path]:
    """Return the path itself if it is a `.bin` file, or those that lie directly in a folder, in order."""
    with readable(path):
        entries = sorted(path.iterdir()) if path.is_dir() else [path]
        return [
            entry
            for entry in entries
            if entry.suffix.lower() == ".bin" and not is_hidden(entry.name) and entry.is_file()
        ]


def no_text(words: str, notes: Sequence[str]) -> str:
    """Return the sentence about a path without a byte of text."""
    return f"{words} is empty: it holds no text" + (f" ({' '.join(notes)})" if notes else "")


def note_skipped(skipped: Counter[str]) -> tuple[str, ...]:
    """Return a sentence for each kind of thing that was left out."""
    return tuple(f"Skipped {count:,} {what}." for what, count in sorted(skipped.items()) if count)


def read_text(path: Path, name: str) -> TokenFile:
    """Read any file as its bytes, one document."""
    with readable(path):
        if path.stat().st_size >= MAPPED_BYTES:
            tokens = np.asarray(np.memmap(path, np.uint8, mode="r"))
        else:
            tokens = np.frombuffer(path.read_bytes(), np.uint8)
    return TokenFile(name, tokens, one_document())


def read_jsonl(path: Path, name: str) -> TokenFile:
    """Read the "text" field of each line as a document, in UTF-8 bytes; blank lines and empty texts are none.

    Raises ValueError, naming the file and the line, for a line that is not UTF-8, not JSON, no object,
    without a "text" that is a string, or with a text that has no UTF-8 form (a lone surrogate).
    """
    with readable(path), open(path, "rb") as file:
        lines = enumerate(file, start=1)
        documents = [line_text(line, number, f"{path}, line {number}") for number, line in lines]
    documents = [document for document in documents if document]
    sizes = np.array([0, *map(len, documents[:-1])], np.int64)
    return TokenFile(name, np.frombuffer(b"".join(documents), np.uint8), np.cumsum(sizes))


def line_text(line: bytes, number: int, words: str) -> bytes:
    """Return the text of a JSONL line, empty for a blank one; a byte order mark may open the first.

    Raises ValueError as `read_jsonl` does; `words` name the line.
    """
    line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
    return _jsonl_text(line, f"{words},") if line.strip() else b""


def _jsonl_text(line: bytes, where: str) -> bytes:
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not UTF-8 at byte {error.start} of the line") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON: {error}") from error
    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
        raise ValueError(f'{where} must be a JSON object with a string field "text"')
    try:
        return record["text"].encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{where} has a lone surrogate at character {error.start} of its text") from error
