"""Documents of a corpus, read in pieces: a text file, or a line of a JSONL file; no file is ever held."""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from jaxblock.training.token_files import line_text, readable

PIECE_BYTES = 2**17
"""Longest text that is encoded at once; longer documents are cut (`Document.pieces`)."""
_CUT_BYTES = 4096


class Place(NamedTuple):
    """A moment in reading a list of files: `inside` bytes into the document that begins at `offset`, on `line`."""

    file: int = 0
    offset: int = 0
    line: int = 1
    inside: int = 0


BEGINNING = Place()


class Document(NamedTuple):
    """A document of `size` bytes that is read in parts: a text file, or the text of a JSONL line.

    `name` is its file's below the corpus folder, `words` say where it is for people, `place` is where it begins
    and `after` where the next one does.
    """

    name: str
    words: str
    place: Place
    after: Place
    size: int
    read: Callable[[int, int], bytes]

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, bytes]]:
        """Yield the text from `start` to `stop` with its offsets, at most PIECE_BYTES at once.

        Cuts are made before a space or line end that follows an ASCII letter or digit, where the tokenizers of
        GPT-2 and its kin begin a new word, so that a text in pieces has the same tokens as the whole. A text
        without such a place within 4 KiB is cut between two characters. Pieces that start at one of these
        offsets continue the same way.

        Raises:
          ValueError: the file is shorter than it was.
        """
        while start < stop:
            count = min(PIECE_BYTES + 1, stop - start)
            text = self.read(start, count)
            if len(text) < count:
                raise ValueError(f"{self.words} was changed while it was read")
            text = text if count <= PIECE_BYTES else text[: find_cut(text)]
            yield start, text
            start += len(text)

    def cut_near(self, offset: int) -> int:
        """Return the last good place for a cut in the 4 KiB up to `offset`, which lies inside."""
        first = max(0, offset - _CUT_BYTES)
        return first + find_cut(self.read(first, offset - first + 1))


def find_cut(text: bytes) -> int:
    """Return where to cut a text of two bytes or more: the last good place, but neither 0 nor behind the last byte."""
    last = len(text) - 1
    for place in range(last, max(last - _CUT_BYTES, 0), -1):
        if text[place] in b" \t\r\n" and text[place - 1 : place].isalnum():
            return place
    for place in range(last, max(last - 4, 0), -1):
        if text[place] & 0xC0 != 0x80:  # no byte inside a character of UTF-8
            return place
    return last


def iterate_documents(files: Sequence[tuple[str, Path]], start: Place = BEGINNING) -> Iterator[Document]:
    """Yield the documents that are not empty of (name, path) pairs, in order, from `start` on.

    A document can be read until the next one is asked for. A text file is never held; a JSONL line is.

    Raises ValueError as `read_jsonl` does.
    """
    for number in range(start.file, len(files)):
        begin = start if number == start.file else Place(number)
        name, path = files[number]
        with readable(path), open(path, "rb") as file:
            if path.suffix.lower() == ".jsonl":
                yield from _iterate_lines(name, path, file, begin._replace(inside=0))
            else:
                size = os.fstat(file.fileno()).st_size
                if size:
                    yield Document(
                        name, str(path), Place(number), Place(number + 1), size, _reader(path, file)
                    )


def _iterate_lines(name: str, path: Path, file: BinaryIO, place: Place) -> Iterator[Document]:
    file.seek(place.offset)
    while line := file.readline():
        after = Place(place.file, place.offset + len(line), place.line + 1)
        words = f"{path}, line {place.line}"
        text = line_text(line, place.line, words)
        if text:
            yield Document(name, words, place, after, len(text), _slicer(text))
        place = after


def _reader(path: Path, file: BinaryIO) -> Callable[[int, int], bytes]:
    def read(offset: int, count: int) -> bytes:
        with readable(path):
            file.seek(offset)
            return file.read(count)

    return read


def _slicer(text: bytes) -> Callable[[int, int], bytes]:
    return lambda offset, count: text[offset : offset + count]
