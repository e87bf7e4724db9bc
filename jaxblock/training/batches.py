"""Batches of windows from a token stream: the global batch is a pure function of (seed, step).

A window is `context` inputs and the `context` tokens that follow each of them, its targets. Train windows are
a grain dataset, shuffled anew in every epoch; validation windows come in order and cover every target once.
Two choices of `seams`, for windows that run across the seam between two documents:

    joined      the stream is one text: every target counts
    separate    documents are told apart: `segments_BT` is given, and a target that lies in another document
                than its input is not valid (documents of 3 and 2 tokens have 2 + 1 targets)
"""

import operator
from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast

import grain
import numpy as np

from jaxblock.contracts import check_choice, check_integer
from jaxblock.training.corpus import TokenStream
from jaxblock.training.rows import checked_rows

SEAMS = ("joined", "separate")


class Batch(NamedTuple):
    """Windows as arrays.

    `inputs_BT` and `targets_BT` are int32, `valid_BT` is boolean, True where a target counts; padding is 0.
    `segments_BT` (int32; None when seams are joined) numbers the documents of a row from 1, padding is 0.
    """

    inputs_BT: np.ndarray
    targets_BT: np.ndarray
    valid_BT: np.ndarray
    segments_BT: np.ndarray | None


class Windows:
    """The windows of a stream in the order in which training meets them: `windows[n]` is where the n-th starts.

    An epoch is every window once: floor((N - 1) / context) windows that share no target. Each epoch has its
    own order, and its own place of the first window, so that another ragged end of the stream is left out.
    """

    def __init__(self, stream: TokenStream, *, context: int, seed: int):
        check_integer("seed", seed, least=0, most=2**32 - 1)
        self._stream, self._context, self._seed = stream, context, seed
        self.count = (len(stream) - 1) // context
        """Windows of an epoch."""
        order = grain.MapDataset.range(self.count).seed(seed).shuffle().repeat()
        self._starts = cast(Sequence[int], order.map_with_index(self._start))

    def _start(self, index: int, window: int) -> int:
        """Return where the `index`-th window since step 0 starts."""
        slack = len(self._stream) - 1 - self.count * self._context
        epoch = index // self.count
        shift = int(np.random.default_rng((self._seed, epoch)).integers(slack + 1))
        return shift + window * self._context

    def __getitem__(self, number: int) -> int:
        return self._starts[number]


class TrainBatches:
    """The endless training batches: `batches[step]` is the same on every machine, in any order of asking.

    They hold the stream's `Windows` one after the other; a batch may hold the end of one epoch and the start of the
    next.
    """

    def __init__(self, stream: TokenStream, *, context: int, batch: int, seed: int, seams: str):
        check_settings(stream, context=context, batch=batch, seams=seams)
        self._stream, self._seams = stream, seams
        self.context, self.batch = context, batch
        self._starts = Windows(stream, context=context, seed=seed)
        self.windows = self._starts.count
        """Windows of an epoch."""

    def __getitem__(self, step: int) -> Batch:
        return self.rows(step, range(self.batch))

    def rows(self, step: int, rows: Sequence[int]) -> Batch:
        """Return some rows of the global batch of `step`: what one process reads."""
        starts = [self._starts[number] for number in window_numbers(step, rows, self.batch)]
        return read_windows(self._stream, starts, context=self.context, seams=self._seams)


class ValidationBatches:
    """A stream of N tokens as batches in which each of its N - 1 targets stands exactly once, in order.

    Windows follow each other with stride `context`; the last window and the last batch are padded with places
    that are not valid, so that all batches have one shape. Two tokens are enough.
    """

    def __init__(self, stream: TokenStream, *, context: int, batch: int, seams: str):
        check_settings(stream, context=context, batch=batch, seams=seams, least=2)
        self._stream, self._seams = stream, seams
        self.context, self.batch = context, batch

    def __len__(self) -> int:
        return -(-(len(self._stream) - 1) // (self.context * self.batch))

    def __iter__(self) -> Iterator[Batch]:
        return (self[number] for number in range(len(self)))

    def __getitem__(self, number: int) -> Batch:
        return self.rows(number, range(self.batch))

    def rows(self, number: int, rows: Sequence[int]) -> Batch:
        """Return some rows of the global batch `number`: what one process reads."""
        if not 0 <= number < len(self):
            raise IndexError(f"batch {number} of {len(self)} validation batches")
        windows = [number * self.batch + row for row in checked_rows(rows, self.batch)]
        starts = [window * self.context for window in windows]
        return read_windows(self._stream, starts, context=self.context, seams=self._seams)


def check_settings(
    stream: TokenStream, *, context: int, batch: int, seams: str, least: int | None = None
) -> None:
    """Raise ValueError unless batches can be made; a stream holds `least` tokens, or a whole window."""
    check_choice("data.seams", seams, SEAMS)
    check_integer("context", context, least=1)
    check_integer("batch", batch, least=1)
    wanted, words = (context + 1, f"context + 1 = {context + 1}") if least is None else (least, str(least))
    if len(stream) < wanted:
        raise ValueError(f"the stream holds {len(stream)} tokens, but it must hold at least {words}")


def window_numbers(step: int, rows: Sequence[int], batch: int) -> list[int]:
    """Return the numbers, since step 0, of the windows in some rows of the batch of `step`."""
    step = operator.index(step)
    if step < 0:
        raise ValueError(f"step is {step}; it must be at least 0")
    return [step * batch + row for row in checked_rows(rows, batch)]


def read_windows(stream: TokenStream, starts: Sequence[int], *, context: int, seams: str) -> Batch:
    """Read the window at each of `starts`; what lies behind the end of the stream is padding."""
    return read_places([(stream, start) for start in starts], context=context, seams=seams)


def read_places(places: Sequence[tuple[TokenStream, int]], *, context: int, seams: str) -> Batch:
    """Read the window at each (stream, start); what lies behind the end of its stream is padding."""
    shape = (len(places), context + 1)
    tokens_BT, segments_BT = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    for row, (stream, start) in enumerate(places):
        count = max(0, min(context + 1, len(stream) - start))
        if count:
            tokens_BT[row, :count] = stream.read(start, count)
            segments_BT[row, :count] = stream.segments(start, count) if seams == "separate" else 1
    is_target_BT = segments_BT[:, 1:] > 0
    same_document_BT = segments_BT[:, 1:] == segments_BT[:, :-1]
    return Batch(
        inputs_BT=np.where(is_target_BT, tokens_BT[:, :-1], 0),
        targets_BT=tokens_BT[:, 1:],
        valid_BT=is_target_BT & same_document_BT,
        segments_BT=np.where(is_target_BT, segments_BT[:, :-1], 0) if seams == "separate" else None,
    )
