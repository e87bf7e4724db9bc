"""Slots of a cache against a dictionary that is filled token by token; attention over keys in any order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxblock.functional import slot_positions, target_slots, token_positions, write_slots
from jaxblock.functional.attention import IMPLEMENTATIONS, attention
from jaxblock.functional.attention_scores import ScoreRule
from jaxblock.functional.masks import AttentionPattern, visibility
from jaxblock.functional.positions import alibi_slopes

BATCH = 3


def draw(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


# Slots -----------------------------------------------------------------------------------------------------


def fill(slots: int, calls: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return (position, value) of each slot, -1 where it is empty, after calls with these masks; values count up."""
    held, values = np.full((BATCH, slots), -1), np.zeros((BATCH, slots))
    lengths, number = np.zeros(BATCH, int), 0
    for valid in calls:
        for t in range(valid.shape[1]):
            number += 1
            for b in np.flatnonzero(valid[:, t]):
                held[b, lengths[b] % slots], values[b, lengths[b] % slots] = lengths[b], number
                lengths[b] += 1
    return held, values


@jax.jit
def call(cache, lengths, valid, number):
    slots, length = cache.shape[3], valid.shape[1]
    new = jnp.broadcast_to(number + 1.0 + jnp.arange(length)[None], valid.shape)
    targets = target_slots(token_positions(lengths, valid), valid, slots)
    lengths = lengths + valid.sum(1, dtype=jnp.int32)
    cache = write_slots(cache, new.reshape(1, BATCH, length, 1, 1), targets)
    return cache, lengths, jnp.maximum(slot_positions(lengths, slots), -1)


def cached(slots: int, calls: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return the same by the functions under test."""
    lengths, cache, number = np.zeros(BATCH, np.int32), np.zeros((1, BATCH, 1, slots, 1), np.float32), 0
    held = np.full((BATCH, slots), -1)
    for valid in calls:
        cache, lengths, held = call(cache, lengths, valid, np.float32(number))
        number += valid.shape[1]
    return np.asarray(held), np.asarray(cache[0, :, 0, :, 0])


# Few shapes, since each is compiled; a shorter call is one with more padding.
@settings(deadline=None, max_examples=40)
@given(
    slots=st.sampled_from([1, 3]),
    sizes=st.lists(st.sampled_from([1, 5]), max_size=5),
    seed=st.integers(0, 99),
)
def test_slots_hold_what_a_row_read_last_wherever_its_padding_stands(slots, sizes, seed):
    rng = np.random.default_rng(seed)
    calls = [rng.random((BATCH, size)) < 0.6 for size in sizes]
    for got, want in zip(cached(slots, calls), fill(slots, calls), strict=True):
        np.testing.assert_array_equal(got, want)


def test_a_slot_taken_by_padding_is_noticed():
    """The control: what pads a row on its left moves everything behind it, unless it takes no slot."""
    padded = np.asarray([[False, False, True]] * BATCH)
    right = fill(4, [padded])
    wrong = cached(4, [np.ones_like(padded)])
    assert not np.array_equal(right[0], wrong[0])
    assert not np.array_equal(right[1], wrong[1])


def test_of_tokens_that_share_a_slot_the_last_is_written():
    """Nothing is said of the order in which a scatter writes, so there must be none to say."""
    valid = jnp.asarray([[True] * 5, [True, True, False, True, True]])
    targets = target_slots(token_positions(jnp.asarray([0, 1], jnp.int32), valid), valid, 3)
    assert targets.tolist() == [[3, 3, 2, 0, 1], [3, 2, 3, 0, 1]]


def test_a_target_past_the_end_writes_nothing():
    cache = draw(0, 2, 1, 1, 3, 2)
    new = draw(1, 2, 1, 2, 1, 2)
    written = write_slots(cache, new, jnp.asarray([[3, 1]]))
    np.testing.assert_array_equal(written[:, :, :, 1], new[:, :, 1])
    np.testing.assert_array_equal(written[:, :, :, jnp.asarray([0, 2])], cache[:, :, :, jnp.asarray([0, 2])])


def test_lengths_stay_int32_in_64_bit_mode():
    with jax.enable_x64(True):
        valid = jnp.ones((1, 2), bool)
        positions = token_positions(jnp.zeros(1, jnp.int32), valid)
        made = (positions, target_slots(positions, valid, 3), slot_positions(jnp.zeros(1, jnp.int32), 3))
    assert {x.dtype.name for x in made} == {"int32"}


def test_a_mask_of_numbers_is_refused():
    with pytest.raises(ValueError, match="valid_BT has dtype int32; masks are boolean"):
        token_positions(jnp.zeros(1, jnp.int32), jnp.ones((1, 2), jnp.int32))


# Attention by explicit positions ---------------------------------------------------------------------------

ORDER = np.asarray([3, 0, 5, 1, 4, 2])
PLACES = {
    "query_positions_BQ": jnp.arange(6, dtype=jnp.int32)[None],
    "key_positions_BT": jnp.asarray(ORDER, jnp.int32)[None],
}


@pytest.mark.parametrize(
    ("pattern", "rule"),
    [
        ({"causal": True}, ScoreRule()),
        ({"causal": True, "window": 3}, ScoreRule()),
        ({"window": (2, 1)}, ScoreRule(alibi_slopes_H=alibi_slopes(2))),
        ({"causal": True, "window": jnp.int32(4)}, ScoreRule(alibi_slopes_H=alibi_slopes(2))),
    ],
    ids=["causal", "window", "sides-alibi", "traced-window-alibi"],
)
def test_keys_in_any_order_are_where_their_positions_say(pattern, rule):
    q, k, v = draw(0, 2, 6, 2, 3), draw(1, 2, 6, 1, 3), draw(2, 2, 6, 1, 3)
    want = attention(q, k, v, AttentionPattern(**pattern), scores=rule)
    got = attention(q, k[:, ORDER], v[:, ORDER], AttentionPattern(**pattern, **PLACES), scores=rule)
    np.testing.assert_allclose(got, want, atol=1e-5)
    unsaid = attention(q, k[:, ORDER], v[:, ORDER], AttentionPattern(**pattern), scores=rule)
    assert np.abs(unsaid - want).max() > 1e-2
    shifted = {**PLACES, "query_positions_BQ": PLACES["query_positions_BQ"] + 1}
    moved = attention(q, k[:, ORDER], v[:, ORDER], AttentionPattern(**pattern, **shifted), scores=rule)
    assert np.abs(moved - want).max() > 1e-2


def test_every_row_has_its_own_positions():
    """Two rows one token apart: each is what it would be alone."""
    q, k, v = draw(0, 2, 1, 2, 3), draw(1, 2, 4, 2, 3), draw(2, 2, 4, 2, 3)
    positions = jnp.asarray([[1], [2]], jnp.int32)
    keys = jnp.arange(4, dtype=jnp.int32)[None]
    pattern = AttentionPattern(causal=True, window=2, query_positions_BQ=positions, key_positions_BT=keys)
    rule = ScoreRule(alibi_slopes_H=alibi_slopes(2))
    for row, last in enumerate((2, 3)):
        part = (x[row : row + 1, last - 2 : last] for x in (k, v))
        alone = attention(q[row : row + 1], *part, AttentionPattern(causal=True), scores=rule)
        np.testing.assert_allclose(attention(q, k, v, pattern, scores=rule)[row : row + 1], alone, atol=1e-5)


def test_b15_a_window_over_a_cache_works_without_any_other_mask():
    v = jnp.arange(6.0)[ORDER].reshape(1, 6, 1, 1)
    pattern = AttentionPattern(causal=True, window=2, **PLACES)
    y = attention(jnp.zeros((1, 6, 1, 1)), draw(0, 1, 6, 1, 1), v, pattern)
    np.testing.assert_allclose(y[0, :, 0, 0], [0.0, 0.5, 1.5, 2.5, 3.5, 4.5])


def test_b16_a_left_window_over_a_cache_never_sees_the_future():
    v = jnp.arange(6.0)[ORDER].reshape(1, 6, 1, 1)
    pattern = AttentionPattern(window=(2, 0), **PLACES)
    q, k = draw(0, 1, 6, 1, 1), draw(1, 1, 6, 1, 1)
    changed = v.at[0, int(np.flatnonzero(ORDER == 5)[0])].add(100.0)
    before, after = (np.asarray(attention(q, k, x, pattern)[0, :, 0, 0]) for x in (v, changed))
    np.testing.assert_array_equal(before[:5], after[:5])
    assert after[5] != before[5]


@pytest.mark.parametrize("implementation", [name for name in IMPLEMENTATIONS if name != "xla"])
def test_implementations_that_count_along_the_axes_refuse_positions(implementation):
    x = draw(0, 1, 6, 1, 4)
    with pytest.raises(ValueError, match=f"'{implementation}' counts positions along the axes.*'xla'"):
        attention(x, x, x, AttentionPattern(**PLACES), implementation=implementation)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"key_positions_BT": None}, "query_positions_BQ and key_positions_BT go together; one of them is None"),
        ({"key_positions_BT": jnp.zeros((1, 5), jnp.int32)}, r"key_positions_BT has shape \(1, 5\); .*\[B or 1, 6\]"),
        ({"query_positions_BQ": jnp.zeros((1, 6))}, "query_positions_BQ has dtype float32; positions are integers"),
    ],
)  # fmt: skip
def test_positions_that_do_not_fit_are_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        visibility(AttentionPattern(**{**PLACES, **changes}), 6, 6)
