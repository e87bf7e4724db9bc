"""The corpus: two disjoint streams of tokens, train and validation, from the path a user names.

| path | tokens | documents |
|---|---|---|
| none | the source of the running Python's standard library, bytes | one a file |
| a file | its bytes, never decoded | one |
| a `.jsonl` file | the UTF-8 bytes of each line's "text" | one a line |
| a folder | its text and `.jsonl` files, recursively, without hidden, binary and empty ones | as above |
| a `.bin` file, or a folder with `.bin` files directly in it | its ids | one a shard, or by separator |
| a folder of `jaxblock tokenize` | the same | what ends in its end of text |

The split: one file gives its tail to validation; several text files are split by file, in the order of a hash
of their paths below the folder, so the split is the same wherever the folder lies and however it is listed;
shards with "val" in their name are validation.

A separator (an end of text) belongs to the document before it, which so learns to end; the token behind it starts
the next one. In shards where the separator *starts* a document (llm.c, 50256 of GPT-2) the very first document is
that one token alone, and each text is followed by the separator of the next. Where a separator is known, the edge
of a shard is no seam: documents run on from shard to shard.

Shards are mapped where they are read and their ids checked then (`MappedTokens`): at the start that is what the
fingerprint reads, all of a small corpus and some blocks of a large one.
"""

import functools
import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxblock.contracts import check_integer
from jaxblock.training.mapped_tokens import ShardMaps
from jaxblock.training.shards import TokenFolder, map_shard, read_token_folder
from jaxblock.training.token_files import (
    TextFiles,
    TokenFile,
    Tokens,
    find_shards,
    find_texts,
    no_text,
    note_skipped,
    read_jsonl,
    read_text,
    readable,
)
from jaxblock.training.tokenizer_library import has_library
from jaxblock.training.tokenizers import BYTE_VALUES, BYTES, Tokenizer, restore_tokenizer

_SAMPLED_BYTES = 64 * 2**20
_SAMPLED_BLOCKS, _ALL_BLOCKS, _BLOCK_TOKENS = 64, 1024, 2**15
_SCAN_TOKENS = 2**20


class TokenStream:
    """Tokens of one or several arrays read as one, with the places where documents begin.

    Either `starts` holds the int64 offset of each document (default: each array is one), the first 0; or a document
    begins at 0 and behind every `separator`. Offsets are 64-bit throughout, and arrays may be mapped, or lazy: only
    what is read is loaded, separators are looked for in the span that is asked for.
    """

    def __init__(
        self, arrays: Sequence[Tokens], starts: np.ndarray | None = None, *, separator: int | None = None
    ):
        if starts is not None and separator is not None:
            raise ValueError("a stream takes starts or a separator, not both")
        self._arrays = tuple(array for array in arrays if len(array))
        self._ends = np.cumsum([len(array) for array in self._arrays], dtype=np.int64)
        begins = self._ends - np.array([len(array) for array in self._arrays], np.int64)
        self._starts = begins if starts is None else np.asarray(starts, np.int64)
        self.separator = separator

    @property
    def arrays(self) -> tuple[Tokens, ...]:
        """What the stream reads from, one after the other."""
        return self._arrays

    def first(self, count: int) -> "TokenStream":
        """Return the stream that ends after `count` tokens, or this one where it has no more."""
        if count >= len(self):
            return self
        room = [count - int(end) + len(array) for array, end in zip(self._arrays, self._ends, strict=True)]
        arrays = [
            array[: min(left, len(array))] for array, left in zip(self._arrays, room, strict=True) if left > 0
        ]
        starts = None if self.separator is not None else self._starts[self._starts < count]
        return TokenStream(arrays, starts, separator=self.separator)

    @functools.cached_property
    def starts(self) -> np.ndarray:
        """The int64 offset of each document; with a separator, one pass over all tokens, in chunks, finds them."""
        if self.separator is None:
            return self._starts
        found = [np.flatnonzero(self._ends_document(*span)) + span[0] + 1 for span in self._chunks()]
        first = np.zeros(min(1, len(self)), np.int64)
        return np.concatenate([first, *(part for part in found)], dtype=np.int64)

    def has_targets(self) -> bool:
        """Return whether some document has two tokens, so that inside documents there is something to predict."""
        if self.separator is None:
            return bool(np.any(np.diff(self._starts, append=len(self)) >= 2))
        return any(not self._ends_document(*span).all() for span in self._chunks())

    def _chunks(self) -> Iterator[tuple[int, int]]:
        """Yield (start, count) spans of all tokens but the last: nothing begins behind that one."""
        last = len(self) - 1
        return ((start, min(_SCAN_TOKENS, last - start)) for start in range(0, last, _SCAN_TOKENS))

    def _ends_document(self, start: int, count: int) -> np.ndarray:
        return self.read(start, count) == self.separator

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
            tokens[filled : filled + len(piece)] = np.asarray(piece)
            filled += len(piece)
            part += 1
        return tokens

    def segments(self, start: int, count: int) -> np.ndarray:
        """Return int32 [count]: 1 for the document that `start` lies in, one more after each seam."""
        self._check_span(start, count)
        if self.separator is not None:
            ends = np.cumsum(self._ends_document(start, count), dtype=np.int32)
            return np.concatenate([np.zeros(1, np.int32), ends])[:count] + np.int32(1)
        positions = start + np.arange(count, dtype=np.int64)
        before = np.searchsorted(self._starts, start, side="right")
        return (np.searchsorted(self._starts, positions, side="right") - before + 1).astype(np.int32)

    def _check_span(self, start: int, count: int) -> None:
        if start < 0 or count < 0 or start + count > len(self):
            raise ValueError(
                f"tokens {start} to {start + count} lie outside the stream of {len(self)} tokens"
            )


@dataclass(frozen=True, eq=False)
class Corpus:
    """Train and validation tokens, and what a run records about them.

    `fingerprint` names the data: 16 hex digits of a sha256 over the names, sizes and contents of both streams (where
    `.bin` shards hold more than 64 MiB in all: their sizes and evenly spaced blocks of 32,768 ids, 64 a shard and of
    more than 16 shards fewer, but two at least). `source` is a sentence for people, `notes` are sentences about what
    was left out. Bits per byte are loss / ln 2 / bytes_per_token; None where the bytes behind a token are unknown
    (`.bin` shards without a `tokens.json`; with one it is the ratio of their validation split, of which a part may be
    used). `tokenizer` turns ids back into text: bytes for text, None where it is unknown or its library is missing;
    `tokenizer_fingerprint` names it, None where it is unknown.
    """

    train: TokenStream
    validation: TokenStream
    fingerprint: str
    source: str
    notes: tuple[str, ...]
    bytes_per_token: float | None
    tokenizer: Tokenizer | None
    tokenizer_fingerprint: str | None


@dataclass(frozen=True, eq=False)
class _Source:
    """What a path gave: non-empty files in the order of their names, and words about them."""

    words: str
    files: list[TokenFile]
    notes: tuple[str, ...]
    bytes_per_token: float | None = None
    tokenizer: Tokenizer | None = None
    tokenizer_fingerprint: str | None = None
    separator: int | None = None
    is_text: bool = False


def load_corpus(
    path: Path | None,
    *,
    vocab_size: int,
    context: int,
    validation_tokens: int = 262_144,
    separator: int | None = None,
    maps: ShardMaps | None = None,
) -> Corpus:
    """Load the tokens at `path` (the standard library's source for None) and split them.

    Validation holds min(validation_tokens, 10 % of all tokens), or at most validation_tokens of the shards
    named "val". Each split must hold at least context + 1 tokens. Texts are joined without a separator;
    `separator` is the id that ends a document inside `.bin` shards, where it is not known from a `tokens.json`.
    `maps` keeps shards mapped; corpora that share it hold as few open files as one.

    Raises ValueError, in one sentence, for everything that is wrong with the path, the files or the sizes.
    """
    check_integer("vocab_size", vocab_size, least=1)
    check_integer("context", context, least=1)
    check_integer("data.validation_tokens", validation_tokens, least=1)
    if separator is not None:
        check_integer("data.separator", separator, least=0, most=vocab_size - 1)
    opening = _Opening(vocab_size, separator, ShardMaps() if maps is None else maps)
    source = _read_source(path, opening)
    train, validation = _split(source, validation_tokens)
    total = sum(map(len, source.files))
    for split, held in (("train", train), ("validation", validation)):
        _check_length(split, sum(map(len, held)), total=total, context=context, words=source.words)
    unit = "bytes as tokens" if source.is_text else "tokens"
    files = "1 file" if len(source.files) == 1 else f"{len(source.files):,} files"
    return Corpus(
        train=_join(train, source.separator),
        validation=_join(validation, source.separator),
        fingerprint=_fingerprint(train, validation),
        source=f"{source.words}: {total:,} {unit} in {files}",
        notes=source.notes,
        bytes_per_token=source.bytes_per_token,
        tokenizer=source.tokenizer,
        tokenizer_fingerprint=source.tokenizer_fingerprint,
    )


def _check_length(split: str, tokens: int, *, total: int, context: int, words: str) -> None:
    if tokens < context + 1:
        raise ValueError(
            f"the {split} split of {words} holds {tokens} of {total} tokens, but it must hold at least "
            f"context + 1 = {context + 1}: use a shorter context or more data"
        )


class _Opening(NamedTuple):
    """What it takes to open shards."""

    vocab_size: int
    separator: int | None
    maps: ShardMaps


def _read_source(path: Path | None, opening: _Opening) -> _Source:
    vocab_size, separator, maps = opening
    folder = None if path is None else read_token_folder(path)
    if path is not None and folder is not None:
        return _read_token_folder(path, folder, opening)
    shards = [] if path is None else find_shards(path)
    if path is not None and shards:
        files = [map_shard(shard, shard.name, vocab_size=vocab_size, maps=maps) for shard in shards]
        return _Source(str(path), files, _beside(path, len(shards)), separator=separator)
    source = _read_texts(find_texts(path))
    if separator is not None:
        raise ValueError(
            f"data.separator is {separator}, but {source.words} is text, whose documents are known: leave it out"
        )
    if vocab_size < BYTE_VALUES:
        raise ValueError(
            f"vocab_size is {vocab_size}; it must be at least {BYTE_VALUES} for the bytes of {source.words}"
        )
    return source


def _read_token_folder(path: Path, folder: TokenFolder, opening: _Opening) -> _Source:
    vocab_size, separator, maps = opening
    name, end_of_text = folder.tokenizer["name"], folder.tokenizer["end_of_text"]
    if vocab_size < folder.tokenizer["vocab_size"]:
        raise ValueError(
            f"vocab_size is {vocab_size}; it must be at least {folder.tokenizer['vocab_size']} for the tokenizer "
            f"{name!r} of {path}"
        )
    if separator is not None and separator != end_of_text:
        raise ValueError(
            f"data.separator is {separator}, but the end of text in {path} is {end_of_text}: leave it out"
        )
    files = folder.open(path, vocab_size=vocab_size, maps=maps)
    notes = _beside(path, len(files) + 1 + (folder.tokenizer["file"] is not None))
    readable_here = folder.tokenizer["file"] is None or has_library()
    if not readable_here:
        notes += (f'Ids stay ids: the tokenizer {name!r} needs pip install "jaxblock[hf]".',)
    tokenizer = restore_tokenizer(folder.tokenizer, path) if readable_here else None
    fingerprint = folder.tokenizer["fingerprint"]
    return _Source(str(path), files, notes, folder.bytes_per_token, tokenizer, fingerprint, end_of_text)


def _beside(path: Path, known: int) -> tuple[str, ...]:
    """Return a note about what lies in a folder of shards beside `known` files."""
    with readable(path):
        others = len(list(path.iterdir())) - known if path.is_dir() else 0
    return note_skipped(Counter({"files or folders beside the .bin shards": others}))


def _read_texts(texts: TextFiles) -> _Source:
    """Read text and `.jsonl` files; what is empty is left out with a note."""
    files = []
    for name, path in texts.files:
        read = read_jsonl if path.suffix.lower() == ".jsonl" else read_text
        files.append(read(path, name))
    kept = [file for file in files if len(file)]
    notes = note_skipped(Counter({"empty files": len(files) - len(kept)})) + texts.notes
    if not kept:
        raise ValueError(no_text(f"data.path {texts.words}", notes))
    return _Source(texts.words, kept, notes, 1.0, BYTES, BYTES.fingerprint, is_text=True)


def _split(source: _Source, validation_tokens: int) -> tuple[list[TokenFile], list[TokenFile]]:
    """Return the files of the train and of the validation stream."""
    total = sum(map(len, source.files))
    wanted = min(validation_tokens, max(1, total // 10))
    if len(source.files) > 1:
        if source.is_text:
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


def _join(files: Sequence[TokenFile], separator: int | None) -> TokenStream:
    arrays = [file.tokens for file in files]
    if separator is not None:
        return TokenStream(arrays, separator=separator)
    begins = np.cumsum([0, *map(len, files)], dtype=np.int64)
    starts = [file.starts + begin for file, begin in zip(files, begins[:-1], strict=True)]
    return TokenStream(arrays, np.concatenate(starts))


def _fingerprint(train: Sequence[TokenFile], validation: Sequence[TokenFile]) -> str:
    digest, blocks = hashlib.sha256(), _blocks_of(train, validation)
    for split, files in (("train", train), ("validation", validation)):
        for file in files:
            digest.update(f"{split}\0{len(file)}\0{file.tokens.dtype.str}\0".encode())
            digest.update(os.fsencode(file.name) + b"\0")
            for block in _hashed_blocks(file.tokens, blocks):
                digest.update(np.ascontiguousarray(block).view(np.uint8).data)
    return digest.hexdigest()[:16]


def _blocks_of(train: Sequence[TokenFile], validation: Sequence[TokenFile]) -> int | None:
    """Return how many blocks of each shard are hashed; None = everything."""
    shards = [file.tokens for file in (*train, *validation) if file.tokens.dtype.itemsize > 1]
    if sum(tokens.nbytes for tokens in shards) <= _SAMPLED_BYTES:
        return None
    return max(2, min(_SAMPLED_BLOCKS, _ALL_BLOCKS // len(shards)))


def _hashed_blocks(tokens: Tokens, blocks: int | None) -> Iterator[np.ndarray]:
    """Yield everything, or evenly spaced blocks (the first and the last among them) of a shard that has more."""
    if tokens.dtype.itemsize == 1 or blocks is None or len(tokens) <= blocks * _BLOCK_TOKENS:
        yield np.asarray(tokens)
        return
    for start in np.linspace(0, len(tokens) - _BLOCK_TOKENS, blocks, dtype=np.int64).tolist():
        yield np.asarray(tokens[start : start + _BLOCK_TOKENS])
