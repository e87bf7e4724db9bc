"""The corpus: two disjoint streams of tokens, train and validation, from the path a user names.

| path | tokens | documents |
|---|---|---|
| none | the source of the running Python's standard library, bytes | one a file |
| a file | its bytes, never decoded | one |
| a `.jsonl` file | the UTF-8 bytes of each line's "text" | one a line |
| a folder | its text and `.jsonl` files, recursively, without hidden, binary and empty ones | as above |
| a `.bin` file, or a folder with `.bin` files directly in it | uint16 ids, memory-mapped | one a shard |

The split: one file gives its tail to validation; several text files are split by file, in the order of a hash
of their paths below the folder, so the split is the same wherever the folder lies and however it is listed;
shards with "val" in their name are validation.
"""

import hashlib
import os
import platform
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxblock.contracts import check_integer, nearest
from jaxblock.training.token_files import (
    TokenFile,
    find_files,
    is_binary,
    is_hidden,
    read_jsonl,
    read_shard,
    read_text,
    readable,
    relative_name,
)

BYTE_VALUES = 256
_NOT_SOURCE = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages"})
_SAMPLED_BYTES = 64 * 2**20
_SAMPLED_BLOCKS, _BLOCK_TOKENS = 64, 2**15


class TokenStream:
    """Tokens of one or several arrays read as one, with the places where documents begin.

    `starts` holds the int64 offset of each document (default: each array is one); the first is 0. Offsets are
    64-bit throughout, and arrays may be memory-mapped: only what is read is loaded.
    """

    def __init__(self, arrays: Sequence[np.ndarray], starts: np.ndarray | None = None):
        self._arrays = tuple(array for array in arrays if len(array))
        self._ends = np.cumsum([len(array) for array in self._arrays], dtype=np.int64)
        begins = self._ends - np.array([len(array) for array in self._arrays], np.int64)
        self.starts: np.ndarray = begins if starts is None else np.asarray(starts, np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, start: int, count: int) -> np.ndarray:
        """Return the `count` tokens from `start` as int32 [count], across array boundaries."""
        self._check_span(start, count)
        tokens = np.empty(count, np.int32)
        part = int(np.searchsorted(self._ends, start, side="right"))
        filled = 0
        while filled < count:
            array = self._arrays[part]
            begin = start + filled - (int(self._ends[part]) - len(array))
            piece = array[begin : begin + count - filled]
            tokens[filled : filled + len(piece)] = piece
            filled += len(piece)
            part += 1
        return tokens

    def segments(self, start: int, count: int) -> np.ndarray:
        """Return int32 [count]: 1 for the document that `start` lies in, one more after each seam."""
        self._check_span(start, count)
        positions = start + np.arange(count, dtype=np.int64)
        before = np.searchsorted(self.starts, start, side="right")
        return (np.searchsorted(self.starts, positions, side="right") - before + 1).astype(np.int32)

    def _check_span(self, start: int, count: int) -> None:
        if start < 0 or count < 0 or start + count > len(self):
            raise ValueError(
                f"tokens {start} to {start + count} lie outside the stream of {len(self)} tokens"
            )


@dataclass(frozen=True, eq=False)
class Corpus:
    """Train and validation tokens, and what a run records about them.

    `fingerprint` names the data: 16 hex digits of a sha256 over the names, sizes and contents of both streams
    (of a `.bin` shard above 64 MiB: its size and 64 blocks of 64 KiB, evenly spaced). `source` is a sentence
    for people, `notes` are sentences about what was left out. Bits per byte are
    loss / ln 2 / bytes_per_token; None where the bytes behind a token are unknown (`.bin` shards).
    """

    train: TokenStream
    validation: TokenStream
    fingerprint: str
    source: str
    notes: tuple[str, ...]
    bytes_per_token: float | None


@dataclass(frozen=True, eq=False)
class _Source:
    """What a path gave: non-empty files in the order of their names, and words about them."""

    words: str
    files: list[TokenFile]
    notes: tuple[str, ...]
    bytes_per_token: float | None


def load_corpus(
    path: Path | None, *, vocab_size: int, context: int, validation_tokens: int = 262_144
) -> Corpus:
    """Load the tokens at `path` (the standard library's source for None) and split them.

    Validation holds min(validation_tokens, 10 % of all tokens), or at most validation_tokens of the shards
    named "val". Each split must hold at least context + 1 tokens. Documents are joined without a separator.

    Raises ValueError, in one sentence, for everything that is wrong with the path, the files or the sizes.
    """
    check_integer("vocab_size", vocab_size, least=1)
    check_integer("context", context, least=1)
    check_integer("data.validation_tokens", validation_tokens, least=1)
    source = _read_standard_library() if path is None else _read_path(path, vocab_size=vocab_size)
    if source.bytes_per_token is not None and vocab_size < BYTE_VALUES:
        raise ValueError(
            f"vocab_size is {vocab_size}; it must be at least {BYTE_VALUES} for the bytes of {source.words}"
        )
    train, validation = _split(source, validation_tokens)
    total = sum(map(len, source.files))
    for split, held in (("train", train), ("validation", validation)):
        _check_length(split, sum(map(len, held)), total=total, context=context, words=source.words)
    unit = "tokens" if source.bytes_per_token is None else "bytes as tokens"
    files = "1 file" if len(source.files) == 1 else f"{len(source.files):,} files"
    return Corpus(
        train=_join(train),
        validation=_join(validation),
        fingerprint=_fingerprint(train, validation),
        source=f"{source.words}: {total:,} {unit} in {files}",
        notes=source.notes,
        bytes_per_token=source.bytes_per_token,
    )


def _check_length(split: str, tokens: int, *, total: int, context: int, words: str) -> None:
    if tokens < context + 1:
        raise ValueError(
            f"the {split} split of {words} holds {tokens} of {total} tokens, but it must hold at least "
            f"context + 1 = {context + 1}: use a shorter context or more data"
        )


def _read_standard_library() -> _Source:
    folder = Path(sysconfig.get_path("stdlib"))
    missing = ValueError(
        f"the standard library of this Python has no .py sources in {folder}: name a text file or a folder "
        f"with --data.path"
    )
    if not folder.is_dir():
        raise missing
    paths, _ = find_files(folder, without=_NOT_SOURCE)
    files, notes = _read_texts(folder, [path for path in paths if _is_portable_source(path)])
    if not files:
        raise missing
    return _Source(f"the standard library of Python {platform.python_version()}", files, notes, 1.0)


def _is_portable_source(path: Path) -> bool:
    """Whether a file is the same on every machine with this Python: no build records."""
    generated = path.name.startswith("_sysconfigdata") or path.parent.name.startswith("config-")
    return path.suffix == ".py" and not generated


def _read_path(path: Path, *, vocab_size: int) -> _Source:
    with readable(path):
        if not path.exists():
            siblings = os.listdir(path.parent) if path.parent.is_dir() else []
            raise ValueError(f"data.path {path} does not exist{nearest(path.name, siblings)}")
        if path.is_dir():
            entries = [entry for entry in sorted(path.iterdir()) if not is_hidden(entry.name)]
            shards = [entry for entry in entries if _is_shard(entry) and entry.is_file()]
            return _read_shards(path, shards, vocab_size) if shards else _read_folder(path)
        if not path.is_file():
            raise ValueError(f"data.path {path} is neither a file nor a folder")
    if _is_shard(path):
        return _read_shards(path, [path], vocab_size)
    files, _ = _read_texts(path.parent, [path])
    if not files:
        raise ValueError(f"data.path {path} is empty: it holds no tokens")
    return _Source(str(path), files, (), 1.0)


def _is_shard(path: Path) -> bool:
    return path.suffix.lower() == ".bin"


def _read_shards(path: Path, shards: list[Path], vocab_size: int) -> _Source:
    files = [read_shard(shard, shard.name, vocab_size=vocab_size) for shard in shards]
    skipped: Counter[str] = Counter()
    if path.is_dir():
        with readable(path):
            skipped["files or folders beside the .bin shards"] = len(list(path.iterdir())) - len(shards)
    return _Source(str(path), files, _notes(skipped), None)


def _read_folder(folder: Path) -> _Source:
    paths, skipped = find_files(folder)
    texts = []
    for path in paths:
        if _is_shard(path):
            skipped[".bin files (shards are read when they lie directly in data.path)"] += 1
        elif is_binary(path):
            skipped["binary files (a NUL byte in the first 8 KiB)"] += 1
        else:
            texts.append(path)
    files, notes = _read_texts(folder, texts)
    notes = (*notes, *_notes(skipped))
    if not files:
        reasons = f" ({' '.join(notes)})" if notes else ""
        raise ValueError(f"data.path {folder} holds no file with text{reasons}")
    return _Source(str(folder), files, notes, 1.0)


def _read_texts(folder: Path, paths: list[Path]) -> tuple[list[TokenFile], tuple[str, ...]]:
    """Read text and `.jsonl` files; return the non-empty ones and a note about the rest."""
    files = []
    for path in paths:
        read = read_jsonl if path.suffix.lower() == ".jsonl" else read_text
        files.append(read(path, relative_name(path, folder)))
    kept = [file for file in files if len(file)]
    return kept, _notes(Counter({"empty files": len(files) - len(kept)}))


def _notes(skipped: Counter[str]) -> tuple[str, ...]:
    return tuple(f"Skipped {count:,} {what}." for what, count in sorted(skipped.items()) if count)


def _split(source: _Source, validation_tokens: int) -> tuple[list[TokenFile], list[TokenFile]]:
    """Return the files of the train and of the validation stream."""
    total = sum(map(len, source.files))
    wanted = min(validation_tokens, max(1, total // 10))
    if len(source.files) > 1:
        if source.bytes_per_token is not None:
            return _split_by_file(source.files, wanted)
        named = [file for file in source.files if "val" in file.name.lower()]
        if named:
            rest = [file for file in source.files if "val" not in file.name.lower()]
            return rest, _span(named, 0, validation_tokens)
    return _span(source.files, 0, total - wanted), _span(source.files, total - wanted, total)


def _split_by_file(files: list[TokenFile], wanted: int) -> tuple[list[TokenFile], list[TokenFile]]:
    """Give whole files, in the order of sha256(name), to validation until it holds `wanted`, then cut it.

    A file above half of the corpus stays in train, so neither stream is empty when there are two files. What
    is cut from the last validation file is used by neither.
    """
    total = sum(map(len, files))
    train, validation, held = [], [], 0
    for file in sorted(files, key=lambda file: hashlib.sha256(os.fsencode(file.name)).digest()):
        if held < wanted and 2 * len(file) <= total:
            validation.append(file)
            held += len(file)
        else:
            train.append(file)
    return train, _span(validation, 0, wanted)


def _span(files: Sequence[TokenFile], start: int, stop: int) -> list[TokenFile]:
    """Return tokens `start` to `stop` of the joined files, as files."""
    pieces, begin = [], 0
    for file in files:
        first, last = max(start - begin, 0), min(stop - begin, len(file))
        if first < last:
            pieces.append(file.cut(first, last))
        begin += len(file)
    return pieces


def _join(files: Sequence[TokenFile]) -> TokenStream:
    begins = np.cumsum([0, *(len(file) for file in files)], dtype=np.int64)
    starts = [file.starts + begin for file, begin in zip(files, begins[:-1], strict=True)]
    return TokenStream([file.tokens for file in files], np.concatenate(starts))


def _fingerprint(train: Sequence[TokenFile], validation: Sequence[TokenFile]) -> str:
    digest = hashlib.sha256()
    for split, files in (("train", train), ("validation", validation)):
        for file in files:
            digest.update(f"{split}\0{len(file)}\0{file.tokens.dtype.str}\0".encode())
            digest.update(os.fsencode(file.name) + b"\0")
            for block in _hashed_blocks(file.tokens):
                digest.update(np.ascontiguousarray(block).view(np.uint8).data)
    return digest.hexdigest()[:16]


def _hashed_blocks(tokens: np.ndarray) -> Iterator[np.ndarray]:
    """Yield everything, or evenly spaced blocks (the first and the last among them) of a large shard."""
    if tokens.dtype.itemsize == 1 or tokens.nbytes <= _SAMPLED_BYTES:
        yield tokens
        return
    for start in np.linspace(0, len(tokens) - _BLOCK_TOKENS, _SAMPLED_BLOCKS, dtype=np.int64):
        yield tokens[start : start + _BLOCK_TOKENS]
