"""The split of a corpus's documents into train and validation, chosen while every document is read once.

Documents in the order of sha256(file name, line), the first of them to validation, until it holds its share of the
corpus's bytes. The document in which the share ends is cut: its tail to validation, its head to train (so a corpus
of one file gives its tail). The choice knows no document but those that may go to validation.
"""

import hashlib
import heapq
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from jaxblock.training.documents import Document, Place, iterate_documents
from jaxblock.training.token_files import TextFiles

Report = Callable[[str, int, int], None]
"""Is told the stage (scan, train or encode), bytes done and tokens so far."""
_BATCH_BYTES = 2**22


class Candidate(NamedTuple):
    """A document that may go to validation: the lower its key, the sooner."""

    key: int
    size: int
    place: Place


class Scan(NamedTuple):
    """What reading every document once has shown; `lowest` are the first candidates, in their order."""

    documents: int
    size: int
    fingerprint: str
    lowest: list[Candidate]


class Split(NamedTuple):
    """Documents with a key below `last` are validation; the one of that key is cut at about `cut` bytes."""

    last: int
    cut: int

    def spans(self, document: Document) -> list[tuple[str, int, int]]:
        """Return (split, start, stop) of the parts of a document, the empty ones left out."""
        key, cut = document_key(document), document.size
        if key == self.last:
            # The first character may be four bytes long, and is not cut.
            cut = 0 if self.cut < 4 else document.cut_near(min(self.cut, document.size - 1))
        elif key < self.last:
            cut = 0
        spans = (("train", 0, cut), ("val", cut, document.size))
        return [span for span in spans if span[1] < span[2]]


class Part(NamedTuple):
    """A piece of text for one split; `ends` its document there, `after` is the place behind it."""

    split: str
    text: bytes
    ends: bool
    words: str
    after: Place


def document_key(document: Document) -> int:
    """Return the document's place in the order of validation: a hash of its file's name and its line."""
    return hash_place(os.fsencode(document.name), document.place.line)


def scan_documents(texts: TextFiles, *, reads_utf8: bool, wanted: int, report: Report) -> Scan:
    """Read every document once.

    Args:
      texts: the corpus.
      reads_utf8: whether text that is not UTF-8 is refused.
      wanted: bytes that the candidates must hold together (or all there are).
      report: is told how far it is.

    Raises:
      ValueError: a file or line that cannot be read, naming it; text that is not UTF-8, naming the byte.
    """
    digest, candidates = hashlib.sha256(), list[tuple[int, int, Place]]()
    documents = size = held = 0
    for document in iterate_documents(texts.files):
        key = document_key(document)
        digest.update(f"{key} {document.size}\0".encode())
        for start, text in document.pieces(0, document.size):
            digest.update(text)
            if reads_utf8:
                _check_utf8(document, start, text)
            report("scan", size + start, 0)
        documents, size, held = documents + 1, size + document.size, held + document.size
        heapq.heappush(candidates, (-key, document.size, document.place))
        while held - candidates[0][1] >= wanted:  # the rest holds enough without the highest key
            held -= heapq.heappop(candidates)[1]
    lowest = sorted(Candidate(-key, length, place) for key, length, place in candidates)
    return Scan(documents, size, digest.hexdigest()[:16], lowest)


def choose_split(scan: Scan, wanted: int) -> Split:
    """Return the split whose validation holds `wanted` bytes (and train 4, the longest character, at least)."""
    left = max(1, min(wanted, scan.size - 4))
    for candidate in scan.lowest:
        if candidate.size >= left:
            return Split(candidate.key, candidate.size - left)
        left -= candidate.size
    last = scan.lowest[-1]  # the candidates hold less than was wanted: all of them
    return Split(last.key, 0)


def iterate_parts(files: Sequence[tuple[str, Path]], split: Split, place: Place) -> Iterator[Part]:
    """Yield every document from `place` on in pieces, each with its split."""
    inside = place.inside
    for document in iterate_documents(files, place):
        for name, first, stop in split.spans(document):
            for start, text in document.pieces(max(first, inside), stop):
                end = start + len(text)
                after = document.after if end == document.size else document.place._replace(inside=end)
                yield Part(name, text, end == stop, document.words, after)
        inside = 0


def first_texts(
    files: Sequence[tuple[str, Path]], candidates: Sequence[Candidate]
) -> Iterator[tuple[bytes, bool]]:
    """Yield the pieces of the candidates in their order, and whether each ends its document."""
    for candidate in candidates:
        for document in itertools.islice(iterate_documents(files, candidate.place), 1):
            for start, text in document.pieces(0, document.size):
                yield text, start + len(text) == document.size


def group_parts(parts: Iterator[Part]) -> Iterator[list[Part]]:
    """Yield the parts in groups of 4 MiB of text, which are encoded at once."""
    batch, held = [], 0
    for part in parts:
        batch.append(part)
        held += len(part.text)
        if held >= _BATCH_BYTES:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


def _check_utf8(document: Document, start: int, text: bytes) -> None:
    try:
        text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{document.words} is not UTF-8 at byte {start + error.start}: convert it, or use --tokenizer bytes, "
            f"which takes every byte"
        ) from error


def hash_place(name: bytes, number: int) -> int:
    """Return 64 bits of the sha256 of a name and a number: the same on every machine."""
    return int.from_bytes(hashlib.sha256(name + f"\0{number}".encode()).digest()[:8], "big")
