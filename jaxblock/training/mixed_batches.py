"""Batches of a mixture of token streams: the global batch is a pure function of (seed, step), shares are exact.

`Interleaving` says which source a window comes from. Each source is gone through on its own, in the order of its own
`Windows`: a small one begins its next epoch, in another order, while a large one is still in its first.
"""

from collections.abc import Iterator, Sequence
from fractions import Fraction

import numpy as np

from jaxblock.training.batches import (
    Batch,
    ValidationBatches,
    Windows,
    check_settings,
    read_places,
    window_numbers,
)
from jaxblock.training.corpus import TokenStream
from jaxblock.training.interleave import Interleaving


class MixedBatches:
    """The endless training batches of a mixture: `batches[step]` is the same on every machine, asked for in any order.

    `streams` are the sources and `shares` the part of the windows that each has (they sum to 1).
    """

    def __init__(
        self,
        streams: Sequence[TokenStream],
        shares: Sequence[Fraction],
        *,
        context: int,
        batch: int,
        seed: int,
        seams: str,
    ):
        for stream in streams:
            check_settings(stream, context=context, batch=batch, seams=seams)
        self._streams, self._seams = tuple(streams), seams
        self.context, self.batch = context, batch
        self._order = Interleaving(shares, seed=seed)
        self._windows = [
            Windows(stream, context=context, seed=_source_seed(seed, number))
            for number, stream in enumerate(streams)
        ]

    def __getitem__(self, step: int) -> Batch:
        return self.rows(step, range(self.batch))

    def rows(self, step: int, rows: Sequence[int]) -> Batch:
        """Return some rows of the global batch of `step`: what one process reads."""
        found = (self._order[number] for number in window_numbers(step, rows, self.batch))
        places = [(self._streams[source], self._windows[source][number]) for source, number in found]
        return read_places(places, context=self.context, seams=self._seams)


def _source_seed(seed: int, number: int) -> int:
    """Return a seed for the order of one source: sources of one size are not gone through in one order."""
    return int(np.random.SeedSequence((seed, number)).generate_state(1)[0])


class MixedValidation:
    """Streams one after the other, each as its own `ValidationBatches`: no window and no batch holds two of them."""

    def __init__(self, streams: Sequence[TokenStream], *, context: int, batch: int, seams: str):
        self.context, self.batch = context, batch
        self._parts = [
            ValidationBatches(stream, context=context, batch=batch, seams=seams) for stream in streams
        ]
        ends = np.cumsum([0, *map(len, self._parts)]).tolist()
        self.parts = tuple(map(range, ends, ends[1:]))
        """The numbers of each stream's batches."""

    def __len__(self) -> int:
        return self.parts[-1].stop

    def __iter__(self) -> Iterator[Batch]:
        return (batch for part in self._parts for batch in part)

    def __getitem__(self, number: int) -> Batch:
        return self.rows(number, range(self.batch))

    def rows(self, number: int, rows: Sequence[int]) -> Batch:
        """Return some rows of the global batch `number`: what one process reads."""
        for part, numbers in zip(self._parts, self.parts, strict=True):
            if number in numbers:
                return part.rows(number - numbers.start, rows)
        raise IndexError(f"batch {number} of {len(self)} validation batches")
