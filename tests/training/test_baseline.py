"""The trigram baseline: equal to a dictionary implementation of its equation, a distribution, one number."""

import itertools
import math
from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxblock.training import baseline
from jaxblock.training.baseline import (
    DenseCounts,
    SparseCounts,
    fit_trigram,
    trigram_baseline,
    trigram_loss,
)
from jaxblock.training.corpus import TokenStream

FEW = settings(deadline=None, max_examples=40)
TOKENS = st.lists(st.integers(0, 4), min_size=2, max_size=40)
TABLES = (DenseCounts, SparseCounts)


def stream_of(tokens) -> TokenStream:
    tokens = np.asarray(tokens, np.uint16)
    return TokenStream([tokens[: len(tokens) // 2], tokens[len(tokens) // 2 :]])


def witten_bell(train: list[int], vocab_size: int):
    """Return p(w, context) by dictionaries, straight from the equation."""
    after = defaultdict(Counter)
    for place, token in enumerate(train):
        for length in range(min(place, 2) + 1):
            after[tuple(train[place - length : place])][token] += 1

    def probability(token: int, context: tuple[int, ...]) -> float:
        lower = probability(token, context[1:]) if context else 1 / vocab_size
        seen = after[context]
        total, distinct = sum(seen.values()), len(seen)
        return (seen[token] + distinct * lower) / (total + distinct) if total else lower

    return probability


def slow_loss(train: list[int], validation: list[int], vocab_size: int, *, longest: int = 2) -> float:
    probability = witten_bell(train, vocab_size)
    nats = [
        -math.log(probability(validation[place], tuple(validation[max(0, place - longest) : place])))
        for place in range(1, len(validation))
    ]
    return sum(nats) / len(nats)


@FEW
@given(TOKENS, TOKENS, st.sampled_from(TABLES), st.sampled_from([5, 7]))
def test_equal_to_the_dictionary_implementation(train, validation, table, vocab_size):
    fast = fit_trigram(stream_of(train), vocab_size, counts=table).score(stream_of(validation))
    assert fast == pytest.approx(slow_loss(train, validation, vocab_size), rel=1e-12)


def test_control_a_bigram_is_another_number():
    train, validation = [0, 1, 2, 0, 3, 2, 1, 1, 0, 2] * 3, [0, 1, 2, 3, 0, 1]
    fast = trigram_loss(stream_of(train), stream_of(validation), 5)
    assert fast == pytest.approx(slow_loss(train, validation, 5), rel=1e-12)
    assert fast != pytest.approx(slow_loss(train, validation, 5, longest=1), rel=1e-2)


def test_a_value_by_hand():
    # Train 0 1: p(1) = (1 + 2/2) / (2 + 2) = 1/2, p(1 | 0) = (1 + 1/2) / (1 + 1) = 3/4.
    assert trigram_loss(stream_of([0, 1]), stream_of([0, 1]), 2) == pytest.approx(-math.log(3 / 4))
    # The context 00 was never seen, so p(1 | 0 0) = p(1 | 0); and p(0 | 0) = (0 + 1/2) / 2 = 1/4.
    expected = -(math.log(1 / 4) + math.log(3 / 4)) / 2
    assert trigram_loss(stream_of([0, 1]), stream_of([0, 0, 1]), 2) == pytest.approx(expected)


@FEW
@given(TOKENS, st.sampled_from(TABLES), st.integers(1, 3))
def test_probabilities_sum_to_one(train, table, size):
    model = fit_trigram(stream_of(train), 5, counts=table)
    contexts = np.array(list(itertools.product(range(5), repeat=size - 1)), np.int64)
    sums = sum(
        model.probabilities(np.concatenate([contexts, np.full((len(contexts), 1), token)], axis=1))
        for token in range(5)
    )
    np.testing.assert_allclose(sums, 1.0, rtol=1e-12)


def test_dense_equals_sparse_on_bytes():
    rng = np.random.default_rng(0)
    train, validation = (stream_of((rng.normal(size=n) * 40 + 128).clip(0, 255)) for n in (20_000, 3000))
    dense, sparse = (fit_trigram(train, 256, counts=table).score(validation) for table in TABLES)
    assert dense == pytest.approx(sparse, rel=1e-13)
    assert trigram_loss(train, validation, 256) == dense
    assert trigram_loss(train, validation, 50_257) > dense


def test_the_size_of_the_chunks_does_not_matter(monkeypatch):
    rng = np.random.default_rng(1)
    train, validation = (stream_of(rng.integers(0, 6, size=n)) for n in (200, 50))
    whole = [fit_trigram(train, 6, counts=table).score(validation) for table in TABLES]
    monkeypatch.setattr(baseline, "_CHUNK_TOKENS", 3)
    parts = [fit_trigram(train, 6, counts=table).score(validation) for table in TABLES]
    np.testing.assert_allclose(parts, whole, rtol=1e-12)


def test_the_cap_takes_the_first_tokens_and_is_reported():
    rng = np.random.default_rng(2)
    tokens, validation = rng.integers(0, 6, size=200), stream_of(rng.integers(0, 6, size=50))
    capped = trigram_baseline(stream_of(tokens), [validation], 6, most_tokens=80)
    assert (capped.fitted_tokens, capped.scored_tokens) == (80, 49)
    assert capped.loss == trigram_loss(stream_of(tokens[:80]), validation, 6)
    assert capped.loss != trigram_loss(stream_of(tokens), validation, 6)
    assert trigram_baseline(stream_of(tokens), [validation], 6).fitted_tokens == 200


def test_counts_beat_uniform_where_there_is_something_to_learn():
    tokens = stream_of([0, 1, 2, 3] * 50)
    assert trigram_loss(tokens, tokens, 256) < 0.1 < math.log(256)


def test_what_is_refused():
    good = stream_of([0, 1, 2])
    with pytest.raises(ValueError, match="token id 2; vocab_size is 2"):
        trigram_loss(good, good, 2)
    with pytest.raises(ValueError, match="most_tokens is 0"):
        trigram_loss(good, good, 3, most_tokens=0)
    with pytest.raises(ValueError, match="vocab_size is 4194304"):
        trigram_loss(good, good, 2**22)
    with pytest.raises(ValueError, match="holds 1 tokens"):
        trigram_loss(good, TokenStream([np.zeros(1, np.uint8)]), 3)
