"""Tokenizers: text to ids and back, each with a file form and a fingerprint.

| choice | ids | end of text |
|---|---|---|
| bytes | the text's UTF-8 bytes, 256 ids | none |
| bytes(end_of_text=True) | the same and one more, 257 ids | 256 |
| PATH/tokenizer.json | what the Hugging Face file says | see `read_tokenizer_file` |
| bpe(vocab_size=4096) | byte-level pair encoding, trained on the corpus itself | 0 |

`bytes` has no end of text, because the quickstart's 256 ids have no place for one. Source of byte pairs:
arXiv:1508.07909; of bytes as their alphabet, with its rule for splitting words: GPT-2 (Radford et al., 2019).

Text comes as bytes or str and is never normalised here: a byte order mark is a character, CRLF stays CRLF. The
bytes tokenizer takes every byte; the others read UTF-8 and refuse what is not, naming the byte. Words that name
a special token ("<|endoftext|>" in a web page) are text like any other, so no text can forge the end of a document.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxblock.choices import resolve
from jaxblock.contracts import check_integer
from jaxblock.training.safe_files import path_inside, read_utf8_file
from jaxblock.training.tokenizer_library import find_library, reported

TOKENIZER_FILE = "tokenizer.json"
TOKENIZERS: Mapping[str, Mapping[str, Any]] = {
    "bytes": {"end_of_text": False},
    "bpe": {"vocab_size": 4096, "most_bytes": 1_000_000_000},
}
BYTE_VALUES = 256
_SHOWN_END = "<|endoftext|>"
_ENDS_OF_TEXT = (_SHOWN_END, "<|end_of_text|>", "</s>", "<eos>")
_UNKNOWN = "\ufffd"


class Tokenizer(Protocol):
    """Text to ids and back; the same text always has the same ids."""

    @property
    def name(self) -> str:
        """The one-string form."""
        ...

    @property
    def vocab_size(self) -> int:
        """V: every id is below it."""
        ...

    @property
    def end_of_text(self) -> int | None:
        """The id that stands behind every document; None: there is none."""
        ...

    @property
    def reads_utf8(self) -> bool:
        """Whether bytes that are not UTF-8 are refused."""
        ...

    @property
    def fingerprint(self) -> str:
        """16 hex digits of what decides its ids."""
        ...

    def encode(self, text: bytes | str) -> np.ndarray:
        """Return the ids of a text, int32 [N], without an end of text.

        Raises:
          ValueError: bytes that are not UTF-8 where it reads UTF-8, a str with a lone surrogate.
        """
        ...

    def encode_batch(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Return `encode` of each text; a Hugging Face tokenizer uses every core for it."""
        ...

    def decode(self, ids: np.ndarray) -> str:
        """Return the text of ids [N]; an id that stands for no text is shown as U+FFFD."""
        ...

    def file_text(self) -> str | None:
        """Return what its tokenizer.json holds; None for bytes, which need none."""
        ...


@dataclasses.dataclass(frozen=True)
class ByteTokenizer:
    """A text is its bytes: every byte is taken, nothing is decoded."""

    end_of_text: int | None = None
    reads_utf8: bool = dataclasses.field(default=False, init=False)

    @property
    def name(self) -> str:
        """The one-string form."""
        return "bytes" if self.end_of_text is None else "bytes(end_of_text=True)"

    @property
    def vocab_size(self) -> int:
        """256, and one more for an end of text."""
        return BYTE_VALUES + (self.end_of_text is not None)

    @property
    def fingerprint(self) -> str:
        """16 hex digits of what decides its ids."""
        return _fingerprint(None, self.end_of_text)

    def encode(self, text: bytes | str) -> np.ndarray:
        """Return the bytes of a text, int32 [N]; surrogates of undecodable bytes become those bytes again."""
        if isinstance(text, str):
            text = _as_bytes(text, errors="surrogateescape")
        return np.frombuffer(text, np.uint8).astype(np.int32)

    def encode_batch(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Return `encode` of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: np.ndarray) -> str:
        """Return bytes as UTF-8; what is none is U+FFFD, the end of text is shown as <|endoftext|>."""
        ids = np.asarray(ids)
        is_byte = (ids >= 0) & (ids < BYTE_VALUES)
        runs = bytes(np.where(is_byte, ids, 255).astype(np.uint8))
        if self.end_of_text is None:
            return runs.decode("utf-8", errors="replace")
        edges = np.flatnonzero(ids == self.end_of_text)
        parts = [runs[a + 1 : b] for a, b in itertools.pairwise([-1, *edges.tolist(), len(runs)])]
        return _SHOWN_END.join(part.decode("utf-8", errors="replace") for part in parts)

    def file_text(self) -> None:
        """Bytes need no file."""
        return None


BYTES = ByteTokenizer()


@dataclasses.dataclass(frozen=True)
class FileTokenizer:
    """What a Hugging Face tokenizer.json says, run by the library `tokenizers` (extra `hf`).

    Truncation, padding and added special tokens are switched off whatever the file asks for: a document keeps all
    of its tokens and gets no others. Equality is that of the file's text.
    """

    text: str = dataclasses.field(repr=False)
    name: str
    end_of_text: int | None
    reads_utf8: bool = dataclasses.field(default=True, init=False)

    @functools.cached_property
    def _backend(self) -> Any:
        library = find_library(f"the tokenizer {self.name!r}")
        with reported(f"{self.name} is not a tokenizer file"):
            backend = library.Tokenizer.from_str(self.text)
            backend.no_truncation()
            backend.no_padding()
            backend.encode_special_tokens = True
            return backend

    @functools.cached_property
    def _largest_id(self) -> int:
        with reported(f"{self.name} is not a tokenizer file"):
            largest = max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1)
        check_integer(f"{self.name}: the largest id", largest, least=0, most=2**31 - 2)
        return largest

    @property
    def vocab_size(self) -> int:
        """The largest id and one: ids may have holes."""
        return self._largest_id + 1

    @property
    def fingerprint(self) -> str:
        """16 hex digits of what decides its ids."""
        return _fingerprint(self.text, self.end_of_text)

    def encode(self, text: bytes | str) -> np.ndarray:
        """Return the ids of a text, int32 [N].

        Raises:
          ValueError: bytes that are not UTF-8, a str with a lone surrogate.
        """
        return self.encode_batch([text if isinstance(text, bytes) else _as_bytes(text)])[0]

    def encode_batch(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Return `encode` of each text, on every core."""
        given = [_as_utf8(text) for text in texts]
        with reported(f"the tokenizer {self.name!r} cannot encode the text"):
            encodings = self._backend.encode_batch_fast(given, add_special_tokens=False)
            return [np.asarray(encoding.ids, np.int32) for encoding in encodings]

    def decode(self, ids: np.ndarray) -> str:
        """Return the text of ids [N]; special tokens are shown, an id the vocabulary lacks is U+FFFD.

        Raises:
          ValueError: the file's decoder fails.
        """
        with reported(f"the tokenizer {self.name!r} cannot decode"):
            return self._decode(np.asarray(ids))

    def _decode(self, ids: np.ndarray) -> str:
        missing = {token for token in np.unique(ids).tolist() if not self._knows(token)}
        words = []
        for is_missing, run in itertools.groupby(ids.tolist(), missing.__contains__):
            run = list(run)
            words.append(
                _UNKNOWN * len(run) if is_missing else self._backend.decode(run, skip_special_tokens=False)
            )
        return "".join(words)

    def _knows(self, token: int) -> bool:
        return 0 <= token < self.vocab_size and self._backend.id_to_token(token) is not None

    def file_text(self) -> str:
        """Return what its tokenizer.json holds."""
        return self.text


@dataclasses.dataclass(frozen=True)
class BytePairTraining:
    """A byte-level BPE that does not exist yet: `train` makes it.

    `vocab_size` ids: the end of text, 256 bytes and the merges, most frequent pair first; `most_bytes` bounds the
    text it is trained on, a sample of the corpus where that is larger. Training is deterministic.
    """

    vocab_size: int
    most_bytes: int
    reads_utf8: bool = dataclasses.field(default=True, init=False)

    def __post_init__(self) -> None:
        check_integer("tokenizer: vocab_size of bpe", self.vocab_size, least=BYTE_VALUES + 1)
        check_integer("tokenizer: most_bytes of bpe", self.most_bytes, least=1, most=2**63 - 1)

    @property
    def name(self) -> str:
        """The one-string form, every option written out."""
        return f"bpe(vocab_size={self.vocab_size}, most_bytes={self.most_bytes})"

    def train(self, texts: Iterable[bytes]) -> FileTokenizer:
        """Return the BPE of these texts, which are read once and not held.

        Raises:
          ValueError: the library is missing, or the texts repeat too little for so many ids.
        """
        library = find_library(f"the tokenizer {self.name!r}")
        split = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        backend = library.Tokenizer(library.models.BPE())
        backend.pre_tokenizer, backend.decoder = split, library.decoders.ByteLevel()
        trainer = library.trainers.BpeTrainer(
            vocab_size=self.vocab_size,
            min_frequency=2,  # a pair that occurs once is a memory of the corpus, not a part of words
            special_tokens=[_SHOWN_END],
            initial_alphabet=sorted(split.alphabet()),
            show_progress=False,
        )
        backend.train_from_iterator((_as_utf8(text) for text in texts), trainer)
        tokenizer = FileTokenizer(backend.to_str(), self.name, end_of_text=0)
        if tokenizer.vocab_size != self.vocab_size:
            raise ValueError(
                f"tokenizer is {self.name!r}, but in this corpus pairs repeat for {tokenizer.vocab_size} ids only: "
                f"choose a vocab_size of at most that, or more text"
            )
        return tokenizer


def choose_tokenizer(text: str) -> Tokenizer | BytePairTraining:
    """Return what a one-string form names: bytes, PATH/tokenizer.json or "bpe(vocab_size=4096)".

    Raises:
      ValueError: an unknown name or option, a file that cannot be read, the library is missing.
    """
    if text.lower().endswith(".json"):
        return read_tokenizer_file(Path(text))
    choice = resolve("tokenizer", text, TOKENIZERS)
    if choice.name == "bytes":
        return ByteTokenizer(BYTE_VALUES if choice.options["end_of_text"] else None)
    training = BytePairTraining(**choice.options)
    find_library(f"the tokenizer {training.name!r}")
    return training


def read_tokenizer_file(path: Path) -> FileTokenizer:
    """Return the tokenizer of a Hugging Face tokenizer.json.

    Its end of text is the "eos_token" of a tokenizer_config.json beside it, else the first of <|endoftext|>,
    <|end_of_text|>, </s>, <eos> among its added tokens, else none.

    Raises:
      ValueError: the file cannot be read or is no tokenizer, the library is missing, an eos_token without an id.
    """
    text = read_utf8_file(path)
    tokenizer = FileTokenizer(text, str(path), end_of_text=None)
    check_integer(f"{path}: vocab_size", tokenizer.vocab_size, least=1)
    added = {token.content: number for number, token in tokenizer._backend.get_added_tokens_decoder().items()}
    beside = path.with_name("tokenizer_config.json")
    end = _configured_end(beside) if beside.exists() else None
    if end is not None and tokenizer._backend.token_to_id(end) is None:
        raise ValueError(f'{beside} names the "eos_token" {end!r}, which {path} does not have')
    found = next((added[name] for name in _ENDS_OF_TEXT if name in added), None)
    return dataclasses.replace(
        tokenizer, end_of_text=found if end is None else tokenizer._backend.token_to_id(end)
    )


def tokenizer_record(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return what `restore_tokenizer` needs beside the file, as JSON holds it."""
    return {
        "name": tokenizer.name,
        "file": None if tokenizer.file_text() is None else TOKENIZER_FILE,
        "vocab_size": tokenizer.vocab_size,
        "end_of_text": tokenizer.end_of_text,
        "fingerprint": tokenizer.fingerprint,
    }


def restore_tokenizer(record: Mapping[str, Any], folder: Path) -> Tokenizer:
    """Return the tokenizer of a `tokenizer_record` whose file, if it has one, lies in `folder`.

    Raises:
      ValueError: the file cannot be read or is not the one of the record, the library is missing.
    """
    if record["file"] is None:
        tokenizer: Tokenizer = ByteTokenizer(record["end_of_text"])
    else:
        if record["file"] != TOKENIZER_FILE:
            raise ValueError(
                f"the tokenizer of {folder} is in {record['file']!r}; it must be in {TOKENIZER_FILE!r}"
            )
        path = path_inside(folder, TOKENIZER_FILE, where=str(folder))
        tokenizer = FileTokenizer(read_utf8_file(path), record["name"], record["end_of_text"])
    if tokenizer.fingerprint != record["fingerprint"]:
        raise ValueError(
            f"the tokenizer {record['name']!r} of {folder} has fingerprint {tokenizer.fingerprint}, "
            f"not {record['fingerprint']}: its file was changed"
        )
    return tokenizer


def _as_utf8(text: bytes) -> str:
    """Return the text of UTF-8 bytes; ValueError with the offset of the first byte that is none."""
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"the text is not UTF-8 at byte {error.start}") from error


def _as_bytes(text: str, *, errors: str = "strict") -> bytes:
    try:
        return text.encode("utf-8", errors=errors)
    except UnicodeEncodeError as error:
        raise ValueError(f"the text has a lone surrogate at character {error.start}") from error


def _configured_end(path: Path) -> str | None:
    """Return the "eos_token" of a tokenizer_config.json: a string, or an object with its "content"."""
    text = read_utf8_file(path)
    try:
        end = json.loads(text).get("eos_token")
        end = end["content"] if isinstance(end, dict) else end
    except (ValueError, AttributeError, KeyError, RecursionError) as error:
        raise ValueError(f"{path} is not a tokenizer config: {error!r}") from error
    if end is not None and (
        not isinstance(end, str) or any("\ud800" <= letter <= "\udfff" for letter in end)
    ):
        raise ValueError(f'{path} names the "eos_token" {end!r}; it must be a string of Unicode')
    return end


def _fingerprint(text: str | None, end_of_text: int | None) -> str:
    kind = "bytes" if text is None else text
    return hashlib.sha256(f"{end_of_text}\0{kind}".encode()).hexdigest()[:16]
