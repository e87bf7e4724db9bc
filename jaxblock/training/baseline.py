"""What counting reaches, the mark for a model: an interpolated trigram with Witten-Bell smoothing.

    p(w | uv) = (c(uvw) + T(uv) p(w | v)) / (c(uv) + T(uv))

c counts in the train tokens, T(uv) is the number of distinct tokens seen after uv; p(w | v) and p(w) are the
same with shorter contexts, and below them is the uniform 1 / V. A context that was never seen has the
probabilities of the shorter one. Source: Witten and Bell (1991), IEEE Trans. Inf. Theory 37(4), method C, in
the interpolated form of Chen and Goodman, arXiv cmp-lg/9606011.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from jaxblock.contracts import check_integer
from jaxblock.training.corpus import TokenStream

ORDER = 3
MOST_TOKENS = 50_000_000
"""Training tokens that are counted, at most."""
_CHUNK_TOKENS = 2**22
_MOST_DENSE_VOCAB = 256
MOST_VOCAB = 2**21 - 1  # V^3 must stay below 2^63


@dataclass(frozen=True, eq=False)
class DenseCounts:
    """Counts of each token after each context, as a table [V^n, V]: for bytes."""

    counts: np.ndarray
    totals: np.ndarray
    distinct: np.ndarray

    @classmethod
    def fit(cls, keys: Iterator[np.ndarray], *, contexts: int, vocab_size: int) -> "DenseCounts":
        """Count the keys, context * V + token, in a table with a row for every context."""
        counts = np.zeros(contexts * vocab_size, np.int64)
        for chunk in keys:
            # Scattered additions touch only what occurs: bincount would return the whole table per chunk.
            np.add.at(counts, chunk, 1)
        table = counts.reshape(contexts, vocab_size)
        return cls(counts, table.sum(axis=1), np.count_nonzero(table, axis=1))

    def look_up(self, keys: np.ndarray, *, vocab_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return c(context, w), c(context) and T(context) for each key = context * V + w."""
        contexts = keys // vocab_size
        return self.counts[keys], self.totals[contexts], self.distinct[contexts]


@dataclass(frozen=True, eq=False)
class SparseCounts:
    """The same counts as sorted keys: for vocabularies of any size."""

    keys: np.ndarray
    counts: np.ndarray
    contexts: np.ndarray
    totals: np.ndarray
    distinct: np.ndarray

    @classmethod
    def fit(cls, keys: Iterator[np.ndarray], *, contexts: int, vocab_size: int) -> "SparseCounts":
        """Count the keys, context * V + token, that occur; the number of contexts is not needed."""
        del contexts
        parts = [np.unique(chunk, return_counts=True) for chunk in keys]
        merged = np.concatenate([np.zeros(0, np.int64), *(part for part, _ in parts)])
        weights = np.concatenate([np.zeros(0, np.int64), *(weight for _, weight in parts)])
        order = np.argsort(merged, kind="stable")
        seen, first = np.unique(merged[order], return_index=True)
        counts = _sum_runs(weights[order], first)
        seen_contexts, first, distinct = np.unique(seen // vocab_size, return_index=True, return_counts=True)
        return cls(seen, counts, seen_contexts, _sum_runs(counts, first), distinct)

    def look_up(self, keys: np.ndarray, *, vocab_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return c(context, w), c(context) and T(context) for each key = context * V + w."""
        contexts = keys // vocab_size
        return (
            _find(self.keys, keys, self.counts),
            _find(self.contexts, contexts, self.totals),
            _find(self.contexts, contexts, self.distinct),
        )


Counts: TypeAlias = DenseCounts | SparseCounts


def _sum_runs(values: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Return the sums of the runs of `values` that begin at `first`."""
    return np.add.reduceat(values, first) if len(first) else values[:0]


def _find(sorted_keys: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the value of each key, 0 for a key that is not there."""
    if not len(sorted_keys):
        return np.zeros(len(keys), np.int64)
    places = np.minimum(np.searchsorted(sorted_keys, keys), len(sorted_keys) - 1)
    return np.where(sorted_keys[places] == keys, values[places], 0)


@dataclass(frozen=True, eq=False)
class Trigram:
    """The fitted model: the counts of 1, 2 and 3 tokens, and on how many tokens they were taken."""

    orders: tuple[Counts, ...]
    vocab_size: int
    fitted_tokens: int

    def probabilities(self, grams: np.ndarray) -> np.ndarray:
        """Return float64 [n]: p(w | the tokens before it) for the last token of each row of `grams`.

        `grams` is int64 [n, C] with 1 <= C <= 3.
        """
        result = np.full(len(grams), 1.0 / self.vocab_size)
        for size, counts in enumerate(self.orders[: grams.shape[1]], start=1):
            keys = _key(grams[:, grams.shape[1] - size :].T, self.vocab_size)
            count, total, distinct = counts.look_up(keys, vocab_size=self.vocab_size)
            seen = total > 0
            result = np.where(seen, (count + distinct * result) / np.where(seen, total + distinct, 1), result)
        return result

    def score(self, *streams: TokenStream) -> float:
        """Return the mean nats per token over tokens 1 .. N - 1 of each stream (token 1 has one before it)."""
        return sum(map(self._nats, streams)) / sum(len(stream) - 1 for stream in streams)

    def _nats(self, stream: TokenStream) -> float:
        if len(stream) < 2:
            raise ValueError(f"the stream to score holds {len(stream)} tokens; it must hold at least 2")
        nats = -float(np.log(self.probabilities(stream.read(0, 2)[None].astype(np.int64))).sum())
        for columns in _grams(stream, ORDER, tokens=len(stream), vocab_size=self.vocab_size):
            nats -= float(np.log(self.probabilities(columns.T)).sum())
        return nats


@dataclass(frozen=True)
class Baseline:
    """A trigram's loss in nats per token, and how many tokens it was fitted and scored on."""

    loss: float
    fitted_tokens: int
    scored_tokens: int


def fit_trigram(
    train: TokenStream,
    vocab_size: int,
    *,
    most_tokens: int = MOST_TOKENS,
    counts: type[DenseCounts] | type[SparseCounts] | None = None,
) -> Trigram:
    """Count the first `most_tokens` of `train`, across the seams of its documents.

    `counts` is the table (default: dense up to 256 ids, sparse above); both give the same numbers.
    """
    check_integer("most_tokens", most_tokens, least=1)
    check_integer("vocab_size", vocab_size, least=1)
    if vocab_size > MOST_VOCAB:
        raise ValueError(f"vocab_size is {vocab_size}; a trigram is counted up to {MOST_VOCAB}")
    table = counts or (DenseCounts if vocab_size <= _MOST_DENSE_VOCAB else SparseCounts)
    fitted = min(len(train), most_tokens)
    orders = []
    for size in range(1, ORDER + 1):
        grams = _grams(train, size, tokens=fitted, vocab_size=vocab_size)
        keys = (_key(columns, vocab_size) for columns in grams)
        orders.append(table.fit(keys, contexts=vocab_size ** (size - 1), vocab_size=vocab_size))
    return Trigram(tuple(orders), vocab_size, fitted)


def trigram_baseline(
    train: TokenStream,
    validation: Sequence[TokenStream],
    vocab_size: int,
    *,
    most_tokens: int = MOST_TOKENS,
) -> Baseline:
    """Fit a trigram on `train` and score it on the targets of each validation stream, tokens 1 .. N - 1."""
    trigram = fit_trigram(train, vocab_size, most_tokens=most_tokens)
    return Baseline(
        trigram.score(*validation), trigram.fitted_tokens, sum(len(stream) - 1 for stream in validation)
    )


def trigram_loss(
    train: TokenStream, validation: TokenStream, vocab_size: int, *, most_tokens: int = MOST_TOKENS
) -> float:
    """Return the loss of `trigram_baseline` on one stream alone."""
    return trigram_baseline(train, [validation], vocab_size, most_tokens=most_tokens).loss


def _grams(stream: TokenStream, size: int, *, tokens: int, vocab_size: int) -> Iterator[np.ndarray]:
    """Yield int64 [size, n]: each run of `size` tokens among the first `tokens`, in chunks."""
    for start in range(0, tokens - size + 1, _CHUNK_TOKENS):
        chunk = stream.read(start, min(_CHUNK_TOKENS + size - 1, tokens - start)).astype(np.int64)
        if chunk.max() >= vocab_size:
            raise ValueError(f"the stream holds the token id {chunk.max()}; vocab_size is {vocab_size}")
        yield np.stack([chunk[lag : len(chunk) - size + 1 + lag] for lag in range(size)])


def _key(columns: np.ndarray, vocab_size: int) -> np.ndarray:
    """Return a number for each run of tokens, its digits in base V: context * V + w."""
    keys = np.zeros(columns.shape[1], np.int64)
    for tokens in columns:
        keys = keys * vocab_size + tokens
    return keys
