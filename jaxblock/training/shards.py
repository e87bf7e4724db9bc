"""Token shards: `.bin` files of ids, written so that a kill at any moment loses nothing whole, and read by mapping.

| form | bytes | ids |
|---|---|---|
| raw (nanoGPT), read only | the ids | uint16 |
| llm.c, GPT-2 | 256 int32 (20240520, 1, number of ids, zeros), the ids | uint16 |
| llm.c, Llama 3 | 256 int32 (20240801, 7, number of ids, zeros), the ids | uint32 |

All little-endian. A folder that `jaxblock tokenize` has finished also holds `tokens.json` (`TokenFolder`).
"""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxblock.contracts import check_integer, check_number
from jaxblock.training.mapped_tokens import MappedTokens, ShardMaps
from jaxblock.training.safe_files import path_inside
from jaxblock.training.token_files import TokenFile, one_document, readable
from jaxblock.training.tokenizers import TOKENIZER_FILE

TOKENS_FILE, PROGRESS_FILE = "tokens.json", "progress.json"
SPLITS = ("train", "val")
HEADER_BYTES = 256 * 4
MOST_SHARD_TOKENS = 2**31 - 1  # the header counts in int32
_PARTIAL = ".partial"
_SCAN_TOKENS = 2**22
_BINARY = getattr(os, "O_BINARY", 0)  # Windows would write line ends of its own


class ShardForm(NamedTuple):
    """How a shard with a header is written."""

    magic: int
    version: int
    dtype: np.dtype


FORMS = (ShardForm(20240520, 1, np.dtype("<u2")), ShardForm(20240801, 7, np.dtype("<u4")))


def form_for(vocab_size: int) -> ShardForm:
    """Return the narrower form that holds every id below `vocab_size`."""
    return FORMS[0] if vocab_size <= 2**16 else FORMS[1]


# --- reading


def read_shard(path: Path, name: str, *, vocab_size: int) -> TokenFile:
    """Memory-map a `.bin` shard and check every id of it, in one pass.

    Raises ValueError as `map_shard` does, and for an id >= vocab_size.
    """
    file = map_shard(path, name, vocab_size=vocab_size, maps=ShardMaps())
    for start in range(0, len(file), _SCAN_TOKENS):
        np.asarray(file.tokens[start : start + _SCAN_TOKENS])
    return file


def map_shard(path: Path, name: str, *, vocab_size: int, maps: ShardMaps) -> TokenFile:
    """Return a `.bin` shard in one of the three forms, one document (no seams are known inside).

    Nothing but its header is read; it is mapped, and its ids are checked, where they are read (`MappedTokens`).

    Raises ValueError for an odd or zero length, a header that disagrees with the file.
    """
    with readable(path):
        size = path.stat().st_size
        header = np.fromfile(path, "<i4", count=3)
    if size == 0:
        raise ValueError(f"{path} is empty; a .bin shard holds uint16 or uint32 tokens")
    magic = int(header[0]) if len(header) else None
    form = next((form for form in FORMS if form.magic == magic), None)
    if form is not None:
        _check_header(path, header, size, form)
    elif size % 2:
        raise ValueError(f"{path} has an odd number of bytes, {size}; a .bin shard holds uint16 tokens")
    dtype, offset = (np.dtype("<u2"), 0) if form is None else (form.dtype, HEADER_BYTES)
    tokens = MappedTokens(path, dtype, offset=offset, size=size, vocab_size=vocab_size, maps=maps)
    return TokenFile(name, tokens, one_document())


def _check_header(path: Path, header: np.ndarray, size: int, form: ShardForm) -> None:
    if size <= HEADER_BYTES:
        raise ValueError(f"{path} has {size} bytes: a header of {HEADER_BYTES} bytes and no tokens behind it")
    version, count = (int(value) for value in header[1:3])
    if version != form.version:
        raise ValueError(f"{path} has header version {version}; only version {form.version} is read")
    held, rest = divmod(size - HEADER_BYTES, form.dtype.itemsize)
    if count != held or rest:
        more = f" and {rest} bytes" if rest else ""
        raise ValueError(f"{path} has a header that promises {count} tokens, but the file holds {held}{more}")


class TokenFolder(NamedTuple):
    """What `tokens.json` says about the shards beside it.

    `shards` holds the names and token counts of each split, `tokenizer` is a `tokenizer_record`, `bytes_per_token`
    is that of the validation split: bytes of its text over its tokens, ends of text included.
    """

    shards: Mapping[str, Sequence[tuple[str, int]]]
    tokenizer: Mapping[str, Any]
    bytes_per_token: float

    def open(self, folder: Path, *, vocab_size: int, maps: ShardMaps) -> list[TokenFile]:
        """Return every shard as `map_shard` does, train before validation.

        Raises:
          ValueError: a shard is missing, lies elsewhere or holds another number of tokens than it should.
        """
        files = []
        for name, count in (shard for split in SPLITS for shard in self.shards[split]):
            path = path_inside(folder, name, where=str(folder / TOKENS_FILE))
            files.append(map_shard(path, name, vocab_size=vocab_size, maps=maps))
            if len(files[-1]) != count:
                raise ValueError(
                    f"{folder / name} holds {len(files[-1])} tokens, but {TOKENS_FILE} says {count}"
                )
        return files


def read_token_folder(folder: Path) -> TokenFolder | None:
    """Return what a folder's `tokens.json` says; None where there is none.

    Raises:
      ValueError: the folder is not finished, or its `tokens.json` is broken.
    """
    with readable(folder):
        unfinished, finished = ((folder / name).exists() for name in (PROGRESS_FILE, TOKENS_FILE))
    if unfinished:
        raise ValueError(
            f"{folder} is an unfinished `jaxblock tokenize`; the same command again goes on with it"
        )
    if not finished:
        return None
    path = path_inside(folder, TOKENS_FILE, where=str(folder))
    with readable(path):
        data = path.read_bytes()
    try:
        return _parse_token_folder(json.loads(data))
    except (ValueError, KeyError, TypeError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"{path} is not what `jaxblock tokenize` writes: {error!r}") from error


def _parse_token_folder(record: Any) -> TokenFolder:
    """Return what a tokens.json says; any ordinary error is raised where it says something else."""
    splits, tokenizer = record["splits"], record["tokenizer"]
    shards = {name: [(s["name"], s["tokens"]) for s in splits[name]["shards"]] for name in SPLITS}
    for name, tokens in (shard for split in SPLITS for shard in shards[split]):
        check_integer(f"tokens of shard {name!r}", tokens, least=1, most=MOST_SHARD_TOKENS)
    names = [str(shard[0]) for split in SPLITS for shard in shards[split]]
    if len(set(names)) < len(names):
        raise ValueError(f"shards are {names}; each is named once")
    check_integer("vocab_size", tokenizer["vocab_size"], least=1)
    if tokenizer["end_of_text"] is not None:
        check_integer("end_of_text", tokenizer["end_of_text"], least=0, most=tokenizer["vocab_size"] - 1)
    if not isinstance(tokenizer["name"], str) or tokenizer["file"] not in (None, TOKENIZER_FILE):
        raise ValueError(
            f"the tokenizer is {tokenizer['name']!r} in {tokenizer['file']!r}, not in {TOKENIZER_FILE!r}"
        )
    bytes_per_token = splits["val"]["bytes"] / splits["val"]["tokens"]
    check_number("bytes per token", bytes_per_token, above=0.0)
    keys = ("name", "file", "vocab_size", "end_of_text", "fingerprint")
    return TokenFolder(shards, {key: tokenizer[key] for key in keys}, bytes_per_token)


# --- writing


def write_whole(path: Path, data: bytes) -> None:
    """Write a file in one move: a kill, or a power cut, leaves the old file or the new one, never a part."""
    partial = path.with_name(path.name + _PARTIAL)
    file = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | _BINARY, 0o666)
    try:
        _append(file, data)
        os.fsync(file)
    finally:
        os.close(file)
    os.replace(partial, path)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder for this process, where the system has file locks; a kill releases it.

    Raises:
      ValueError: another process holds it.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    file = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ValueError(f"{folder} is in use by another process") from error
        yield
    finally:
        os.close(file)


class ShardWriter:
    """The shards of one split, `SPLIT_000000.bin` on, each of exactly `shard_tokens` ids but the last.

    A shard is written as `NAME.partial` and moved when it is whole. `whole` and `held` say how far it is: the ids
    of each moved shard, and those in the open one. A writer made with an earlier `whole` and `held` takes the
    folder back to that moment, whatever was written since, and goes on from there.
    """

    def __init__(self, folder: Path, split: str, form: ShardForm, *, shard_tokens: int):
        self._folder, self._split, self._form = folder, split, form
        self._shard_tokens = shard_tokens
        self.whole, self.held = 0, 0
        self._file: int | None = None

    def name(self, number: int) -> str:
        """Return the name of a shard."""
        return f"{self._split}_{number:06d}.bin"

    @property
    def shards(self) -> list[tuple[str, int]]:
        """Name and ids of every shard, the open one among them."""
        counts = [self._shard_tokens] * self.whole + [self.held] * (self.held > 0)
        return [(self.name(number), count) for number, count in enumerate(counts)]

    def rewind(self, whole: int, held: int) -> None:
        """Take the folder back to `whole` moved shards and `held` ids in the next one.

        Raises:
          ValueError: a shard that should be there is missing or too short.
        """
        for number in range(whole):
            self._check(self._folder / self.name(number), self._shard_tokens)
        for path in self._folder.glob(f"{self._split}_*.bin*"):
            number = path.name.removesuffix(_PARTIAL).removesuffix(".bin").removeprefix(f"{self._split}_")
            if number.isdigit() and int(number) >= whole + (held > 0):
                path.unlink()
        if held:
            path, partial = self._folder / self.name(whole), self._open_path(whole)
            if path.exists():
                os.replace(path, partial)
            self._check(partial, held)
            os.truncate(partial, HEADER_BYTES + held * self._form.dtype.itemsize)
        self.whole, self.held = whole, held

    def write(self, ids: np.ndarray) -> None:
        """Append ids [N], filling and moving as many shards as they take."""
        data = np.ascontiguousarray(ids, self._form.dtype)
        while len(data):
            piece = data[: self._shard_tokens - self.held]
            if self._file is None:
                self._file = self._open()
            _append(self._file, piece.tobytes())
            self.held += len(piece)
            data = data[len(piece) :]
            if self.held == self._shard_tokens:
                self._move(self._file)
                self.whole, self.held = self.whole + 1, 0

    def flush(self) -> None:
        """Return when everything written is on the disk."""
        if self._file is not None:
            os.fsync(self._file)

    def finish(self) -> None:
        """Move the last shard."""
        if self.held:
            self._move(self._open() if self._file is None else self._file)

    def close(self) -> None:
        """Let go of the open shard."""
        if self._file is not None:
            os.close(self._file)
        self._file = None

    def _open_path(self, number: int) -> Path:
        return self._folder / (self.name(number) + _PARTIAL)

    def _open(self) -> int:
        file = os.open(self._open_path(self.whole), os.O_RDWR | os.O_CREAT | _BINARY, 0o666)
        if os.lseek(file, 0, os.SEEK_END) < HEADER_BYTES:
            os.lseek(file, 0, os.SEEK_SET)
            _append(file, bytes(HEADER_BYTES))
        return file

    def _move(self, file: int) -> None:
        """Write the header, then give the open shard its name."""
        self._file = file
        header = np.zeros(HEADER_BYTES // 4, "<i4")
        header[:3] = self._form.magic, self._form.version, self.held
        os.lseek(file, 0, os.SEEK_SET)
        _append(file, header.tobytes())
        os.fsync(file)
        self.close()
        os.replace(self._open_path(self.whole), self._folder / self.name(self.whole))

    def _check(self, path: Path, count: int) -> None:
        with readable(path):
            size = path.stat().st_size
        if size < HEADER_BYTES + count * self._form.dtype.itemsize:
            raise ValueError(f"{path} is shorter than the {count} tokens that {PROGRESS_FILE} says it has")


def _append(file: int, data: bytes) -> None:
    """Write all of `data`: the system may take less at once."""
    view = memoryview(data)
    while len(view):
        view = view[os.write(file, view) :]
