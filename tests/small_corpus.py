"""Corpora small enough to read by eye, shared by the tests of the data."""

from pathlib import Path

import numpy as np

from jaxblock.training.corpus import Corpus, TokenStream, load_corpus


def load(
    path: Path | None, *, context: int = 2, vocab_size: int = 256, validation_tokens: int = 50
) -> Corpus:
    return load_corpus(path, vocab_size=vocab_size, context=context, validation_tokens=validation_tokens)


def everything(stream: TokenStream) -> list[int]:
    return stream.read(0, len(stream)).tolist()


def content(stream: TokenStream) -> bytes:
    return bytes(everything(stream))


def write_folder(folder: Path, names: list[str]) -> Path:
    """Files of 60 to 100 bytes; each file's bytes are its own, so a token tells its file."""
    for number, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes([65 + number]) * (60 + 7 * number % 41))
    return folder


NAMES = ["a.txt", "b.py", "deep/c.md", "deep/er/d", "e.txt", "f.txt"]


def write_shard(path: Path, tokens, *, header=None) -> Path:
    start = b"" if header is None else np.array(header + [0] * (256 - len(header)), "<i4").tobytes()
    path.write_bytes(start + np.asarray(tokens, "<u2").tobytes())
    return path
