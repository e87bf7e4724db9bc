"""Which source a window of a mixture comes from: shares kept exactly, the choice a pure function of (seed, number).

Windows are numbered from step 0 and taken in blocks of P. With exact fractions p_s that sum to 1, the first n blocks
give source s

    c_s(n) = floor(nP (p_1 + .. + p_s)) - floor(nP (p_1 + .. + p_{s-1}))

windows: within 1 of nP p_s for every n, so no share drifts. Inside a block each source's windows are spread evenly, the
j-th of c at (j + u) / c, with a phase u of its own drawn from (seed, block). So each batch is close to the shares, and
any window is found without those before it.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

SMALLEST_SHARE = Fraction(1, 10**6)
"""A block must hold two windows of every source, and is found as a whole."""
_LEAST_BLOCK = 1024


class Interleaving:
    """`order[n]` is (source, number): the n-th window of the mixture is that source's window of that number, from 0."""

    def __init__(self, shares: Sequence[Fraction], *, seed: int):
        if sum(shares) != 1 or min(shares) < SMALLEST_SHARE:
            raise ValueError(
                f"shares are {list(map(str, shares))}; they must sum to 1, each at least 1/1000000"
            )
        self._ends, self._seed = list(itertools.accumulate(shares)), seed
        self.block = max(_LEAST_BLOCK, math.ceil(2 / min(shares)))
        """P, windows of a block; with two of each source no count falls from block to block."""
        self._found = functools.lru_cache(maxsize=4)(self._order)

    def counts(self, blocks: int) -> np.ndarray:
        """Return int64 [sources]: the windows of each source in the first `blocks` blocks."""
        windows = blocks * self.block
        marks = [0, *(windows * end.numerator // end.denominator for end in self._ends)]
        return np.diff(np.array(marks, np.int64))

    def __getitem__(self, number: int) -> tuple[int, int]:
        block, place = divmod(number, self.block)
        sources, numbers = self._found(block)
        return int(sources[place]), int(numbers[place])

    def _order(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the source, and the number within it, of each window of a block."""
        before = self.counts(block)
        counts = self.counts(block + 1) - before
        phases = np.random.default_rng((self._seed, block, 1)).random(len(counts))
        sources = np.repeat(np.arange(len(counts)), counts)
        ranks = np.concatenate([np.arange(count) for count in counts])
        order = np.argsort((ranks + phases[sources]) / counts[sources], kind="stable")
        return sources[order], (before[sources] + ranks)[order]
