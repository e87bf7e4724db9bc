"""Readers of token files: text as bytes, JSONL documents, and uint16 `.bin` shards, each into a TokenFile.

Text is never decoded: a file is its bytes, so invalid UTF-8, a byte order mark, CRLF line ends and the locale
of the machine change nothing. Every failure is a ValueError of one sentence that names the file.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

MAPPED_BYTES = 64 * 2**20
"""Text files of this size and above are memory-mapped, smaller ones read: a mapping costs a descriptor."""

_BINARY_PROBE_BYTES = 8192
_SCAN_TOKENS = 2**24
_HEADER_BYTES = 256 * 4
_MAGIC, _VERSION = 20240520, 1
_MAGIC_UINT32 = 20240801  # llm.c's Llama 3 shards, uint32 tokens


@dataclass(frozen=True, eq=False)
class TokenFile:
    """The tokens of one file.

    `name` is its path below the corpus folder with forward slashes, `tokens` [N] is uint8 or little-endian
    uint16, and `starts` holds the int64 offsets at which its documents begin (the first is 0).
    """

    name: str
    tokens: np.ndarray
    starts: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    def cut(self, start: int, stop: int) -> "TokenFile":
        """Return the tokens from `start` to `stop`; what is left of a document counts as a document."""
        inside = self.starts[(self.starts > start) & (self.starts < stop)] - start
        return TokenFile(self.name, self.tokens[start:stop], np.concatenate([_one_document(), inside]))


def _one_document() -> np.ndarray:
    return np.zeros(1, np.int64)


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn an operating system error about `path` into a ValueError of one sentence."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error


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


def read_text(path: Path, name: str) -> TokenFile:
    """Read any file as its bytes, one document."""
    with readable(path):
        if path.stat().st_size >= MAPPED_BYTES:
            tokens = np.asarray(np.memmap(path, np.uint8, mode="r"))
        else:
            tokens = np.frombuffer(path.read_bytes(), np.uint8)
    return TokenFile(name, tokens, _one_document())


def read_jsonl(path: Path, name: str) -> TokenFile:
    """Read the "text" field of each line as a document, in UTF-8 bytes; blank lines and empty texts are none.

    Raises ValueError, naming the file and the line, for a line that is not UTF-8, not JSON, no object,
    without a "text" that is a string, or with a text that has no UTF-8 form (a lone surrogate).
    """
    documents: list[bytes] = []
    with readable(path), open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if line.strip():
                documents.append(_jsonl_text(line, f"{path}, line {number},"))
    documents = [document for document in documents if document]
    sizes = np.array([0, *map(len, documents[:-1])], np.int64)
    return TokenFile(name, np.frombuffer(b"".join(documents), np.uint8), np.cumsum(sizes))


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


def read_shard(path: Path, name: str, *, vocab_size: int) -> TokenFile:
    """Memory-map a `.bin` shard of little-endian uint16 tokens, one document (no seams are known inside).

    Either raw tokens (nanoGPT), or the form of llm.c and modded-nanogpt: 256 int32 (20240520, 1, number of
    tokens, zeros), then the tokens.

    Raises ValueError for an odd or zero length, a header that disagrees with the file, an id >= vocab_size.
    """
    with readable(path):
        size = path.stat().st_size
        header = np.fromfile(path, "<i4", count=3)
    if size == 0:
        raise ValueError(f"{path} is empty; a .bin shard holds uint16 tokens")
    if size % 2:
        raise ValueError(f"{path} has an odd number of bytes, {size}; a .bin shard holds uint16 tokens")
    offset = _header_bytes(path, header, size)
    with readable(path):
        tokens = np.asarray(np.memmap(path, "<u2", mode="r", offset=offset))
    _check_ids(path, tokens, vocab_size=vocab_size)
    return TokenFile(name, tokens, _one_document())


def _header_bytes(path: Path, header: np.ndarray, size: int) -> int:
    """Return the length of the header: 0 for raw tokens."""
    magic = int(header[0]) if len(header) else None
    if magic == _MAGIC_UINT32:
        raise ValueError(f"{path} is a shard of uint32 tokens (magic {magic}); only uint16 shards are read")
    if magic != _MAGIC:
        return 0
    if size <= _HEADER_BYTES:
        raise ValueError(
            f"{path} has {size} bytes: a header of {_HEADER_BYTES} bytes and no tokens behind it"
        )
    version, count = (int(value) for value in header[1:3])
    if version != _VERSION:
        raise ValueError(f"{path} has header version {version}; only version {_VERSION} is read")
    held = (size - _HEADER_BYTES) // 2
    if count != held:
        raise ValueError(f"{path} has a header that promises {count} tokens, but the file holds {held}")
    return _HEADER_BYTES


def _check_ids(path: Path, tokens: np.ndarray, *, vocab_size: int) -> None:
    if vocab_size > np.iinfo(np.uint16).max:
        return
    for start in range(0, len(tokens), _SCAN_TOKENS):
        chunk = tokens[start : start + _SCAN_TOKENS]
        if chunk.max() >= vocab_size:
            offset = start + int(np.argmax(chunk >= vocab_size))
            raise ValueError(
                f"{path} holds the token id {tokens[offset]} at offset {offset} (counted in tokens), but "
                f"vocab_size is {vocab_size}; every id must be below it"
            )
