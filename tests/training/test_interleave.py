"""Which source a window comes from: shares exact at each block, near them anywhere, any window found alone."""

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxblock.training.interleave import Interleaving

FEW = settings(deadline=None, max_examples=25)
THREE = [Fraction(1, 2), Fraction(3, 10), Fraction(1, 5)]
WEIGHTS = st.lists(st.integers(1, 2000), min_size=1, max_size=6)


def shares_of(weights: list[int]) -> list[Fraction]:
    return [Fraction(weight, sum(weights)) for weight in weights]


@FEW
@given(WEIGHTS, st.integers(0, 2**32 - 1))
def test_a_source_is_gone_through_in_order_and_has_its_share(weights, seed):
    shares = shares_of(weights)
    order = Interleaving(shares, seed=seed)
    seen = Counter()
    for number in range(2 * order.block):
        source, own = order[number]
        assert own == seen[source]  # no window of a source is passed over or read twice
        seen[source] += 1
        if (number + 1) % 97 == 0:  # near the shares at any place: at most one window a source off, and one
            off = [abs(seen[s] - (number + 1) * share) for s, share in enumerate(shares)]
            assert max(off) <= len(shares) + 2
    assert all(abs(seen[source] - 2 * order.block * share) < 1 for source, share in enumerate(shares))


@FEW
@given(WEIGHTS, st.integers(0, 2**40))
def test_shares_are_exact_however_many_blocks(weights, blocks):
    shares = shares_of(weights)
    order = Interleaving(shares, seed=0)
    before, after = order.counts(blocks), order.counts(blocks + 1)
    windows = blocks * order.block
    assert before.sum() == windows
    assert all(abs(int(count) - windows * share) < 1 for count, share in zip(before, shares, strict=True))
    assert ((after - before) >= 1).all()


def test_halves_tenths_and_fifths_are_met_in_every_thousand_to_a_window():
    order = Interleaving(THREE, seed=0)
    for first in range(0, 5000, 1000):
        found = Counter(order[number][0] for number in range(first, first + 1000))
        assert [found[0], found[1], found[2]] == pytest.approx([500, 300, 200], abs=4)
    # The control: independent draws are off by tens.
    drawn = np.random.default_rng(0).choice(3, 1000, p=[0.5, 0.3, 0.2])
    assert max(abs(np.bincount(drawn) - [500, 300, 200])) > 4


def test_small_batches_hold_every_source_about_as_often_as_its_share():
    order = Interleaving(THREE, seed=1)
    batches = [
        Counter(order[number][0] for number in range(first, first + 10)) for first in range(0, 1000, 10)
    ]
    assert {batch[0] for batch in batches} <= {4, 5, 6}
    assert {batch[1] for batch in batches} <= {2, 3, 4}
    assert {batch[2] for batch in batches} <= {1, 2, 3}


def test_it_is_a_function_of_seed_and_number():
    numbers = [5000, 3, 10**12, 1023, 1024, 3]
    first, again, other = (Interleaving(THREE, seed=seed) for seed in (7, 7, 8))
    assert [first[number] for number in numbers] == [again[number] for number in reversed(numbers)][::-1]
    assert [first[number] for number in range(100)] != [other[number] for number in range(100)]
    blocks = [[first[start + place][0] for place in range(first.block)] for start in (0, first.block)]
    assert blocks[0] != blocks[1]


def test_a_share_of_a_millionth_is_kept_and_less_refused():
    tiny = Fraction(1, 10**6)
    order = Interleaving([1 - tiny, tiny], seed=0)
    assert order.counts(1).tolist() == [2 * 10**6 - 2, 2]
    for shares in ([1 - tiny / 2, tiny / 2], [Fraction(1, 2)], [Fraction(0), Fraction(1)]):
        with pytest.raises(ValueError, match="must sum to 1, each at least 1/1000000"):
            Interleaving(shares, seed=0)
