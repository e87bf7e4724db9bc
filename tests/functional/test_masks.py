"""Patterns against loops over (query, key), slices against the whole, and the sentences of refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxblock.functional.masks import EVERYONE, AttentionPattern, check_pattern, cut, visibility, visible

WINDOWS = [None, 1, 2, 5, (0, 0), (2, 0), (0, 2), (1, 3), (None, 1), (2, None)]


def may_attend(distance, causal, window):
    """The rule in words, for distance = query position - key position."""
    if causal and distance < 0:
        return False
    if isinstance(window, tuple):
        left, right = window
        return (left is None or distance <= left) and (right is None or -distance <= right)
    return window is None or abs(distance) < window


def by_loops(queries, keys, causal, window):
    rows = [[may_attend(i + keys - queries - j, causal, window) for j in range(keys)] for i in range(queries)]
    return np.array(rows)


def whole(pattern, queries, keys, batch=1, heads=1):
    mask = visibility(pattern, queries, keys)
    shape = (batch, heads, queries, keys)
    return np.ones(shape, bool) if mask is None else np.broadcast_to(mask, shape)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("causal", [False, True])
def test_causal_and_window_equal_the_rule_in_words(causal, window):
    for queries, keys in ((5, 5), (2, 6), (6, 4)):
        mask = whole(AttentionPattern(causal=causal, window=window), queries, keys)[0, 0]
        np.testing.assert_array_equal(mask, by_loops(queries, keys, causal, window))


def test_causal_is_aligned_to_the_end():
    mask = whole(AttentionPattern(causal=True), 2, 4)[0, 0]
    np.testing.assert_array_equal(mask, [[1, 1, 1, 0], [1, 1, 1, 1]])
    aligned_to_the_start = np.tril(np.ones((2, 4), bool))
    assert (mask != aligned_to_the_start).any()


def test_nothing_hidden_is_none():
    assert visibility(EVERYONE, 3, 4) is None
    assert visibility(AttentionPattern(window=(None, None)), 3, 4) is None
    assert visibility(AttentionPattern(causal=True), 3, 4) is not None


@pytest.mark.parametrize("causal", [False, True])
def test_a_window_array_means_the_int_and_zero_is_unlimited(causal):
    def mask_of(window):
        return visibility(AttentionPattern(causal=causal, window=window), 4, 5) & jnp.ones((1, 1, 4, 5), bool)

    masks = jax.lax.map(mask_of, jnp.array([0, 1, 3], jnp.int32))
    for mask, window in zip(masks, (None, 1, 3), strict=True):
        np.testing.assert_array_equal(mask[0, 0], by_loops(4, 5, causal, window))


def test_the_parts_of_a_pattern_are_combined_by_and():
    rng = np.random.default_rng(0)
    valid, mask = rng.random((2, 5)) < 0.7, rng.random((2, 3, 1, 5)) < 0.7
    queries, keys = rng.integers(0, 2, (1, 4)), rng.integers(0, 2, (2, 5))
    pattern = AttentionPattern(
        causal=True,
        window=3,
        key_valid_BT=jnp.array(valid),
        query_segments_BQ=jnp.array(queries),
        key_segments_BT=jnp.array(keys),
        mask=jnp.array(mask),
    )
    found, band = whole(pattern, 4, 5, batch=2, heads=3), by_loops(4, 5, True, 3)
    for b, h, i, j in np.ndindex(2, 3, 4, 5):
        expected = band[i, j] and valid[b, j] and queries[0, i] == keys[b, j] and mask[b, h, 0, j]
        assert found[b, h, i, j] == expected


@settings(deadline=None, max_examples=10)
@given(data=st.data(), seed=st.integers(0, 99))
def test_a_slice_equals_the_slice_of_the_whole(data, seed):
    rng = np.random.default_rng(seed)
    queries, keys = data.draw(st.sampled_from([(5, 5), (3, 6), (1, 4)]))
    q, t = data.draw(st.integers(1, queries)), data.draw(st.integers(1, keys))
    q0, t0 = data.draw(st.integers(0, queries - q)), data.draw(st.integers(0, keys - t))
    mask_queries = data.draw(st.sampled_from([1, queries]))
    pattern = AttentionPattern(
        causal=data.draw(st.booleans()),
        window=data.draw(st.sampled_from(WINDOWS)),
        key_valid_BT=jnp.array(rng.random((2, keys)) < 0.7),
        query_segments_BQ=jnp.array(rng.integers(0, 2, (2, queries))),
        key_segments_BT=jnp.array(rng.integers(0, 2, (2, keys))),
        mask=jnp.array(rng.random((1, 2, mask_queries, keys)) < 0.7),
    )

    @jax.jit
    def block_at(pattern, q0, t0):
        part = cut(pattern, query_start=q0, queries=q, key_start=t0, keys=t)
        return visible(part, jnp.arange(q) + q0 + keys - queries, jnp.arange(t) + t0)

    block = block_at(pattern, q0, t0)
    expected = whole(pattern, queries, keys, batch=2, heads=2)[:, :, q0 : q0 + q, t0 : t0 + t]
    np.testing.assert_array_equal(np.broadcast_to(block, expected.shape), expected)


def test_positions_may_differ_by_row():
    # Two rows of a decoder with a key buffer of 6, their new tokens at positions 2 and 4.
    mask = visible(AttentionPattern(causal=True, window=3), jnp.array([[2], [4]]), jnp.arange(6))
    np.testing.assert_array_equal(mask[:, 0, 0], [[1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 0]])


def test_a_pattern_is_a_pytree_with_arrays_as_leaves():
    valid = jnp.ones((1, 3), bool)
    static = AttentionPattern(causal=True, window=(2, 0), key_valid_BT=valid)
    leaves, tree = jax.tree.flatten(static)
    assert len(leaves) == 1
    again = jax.tree.unflatten(tree, leaves)
    assert again.causal is True
    assert again.window == (2, 0)
    assert again.mask is None
    assert len(jax.tree.leaves(AttentionPattern(window=jnp.int32(2), key_valid_BT=valid))) == 2
    assert jax.tree.map(lambda x: x.shape, static).key_valid_BT == (1, 3)
    scanned = AttentionPattern(window=jnp.int32(2), key_valid_BT=valid)
    for placeholder in (0, (1, 0), object()):  # what transformations put where a leaf was
        again = jax.tree.unflatten(jax.tree.structure(scanned), [placeholder, valid])
        assert jax.tree.structure(scanned).flatten_up_to(again) == [placeholder, valid]
    # A static window stays a Python int under jit, and another value is another trace.
    seen = []
    mask_of = jax.jit(lambda pattern: seen.append(pattern.window) or visibility(pattern, 3, 3))
    (
        mask_of(AttentionPattern(window=2)),
        mask_of(AttentionPattern(window=2)),
        mask_of(AttentionPattern(window=3)),
    )
    assert seen == [2, 3]


@pytest.mark.parametrize(
    "window", [0, -1, True, 2.0, "2", (-1, 0), (0, -1), (1,), (1, 2, 3), (1.0, 0), [1, 2]]
)
def test_a_window_that_is_not_positive_is_refused(window):
    with pytest.raises(ValueError, match="window"):
        AttentionPattern(window=window)


@pytest.mark.parametrize("window", [jnp.ones(2, jnp.int32), jnp.float32(2), np.float64(2)])
def test_a_window_array_must_be_an_integer_scalar(window):
    with pytest.raises(ValueError, match="integer scalar"):
        visibility(AttentionPattern(window=window), 3, 3)


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.float32, jnp.uint8])
@pytest.mark.parametrize("field", ["key_valid_BT", "mask"])
def test_b09_masks_that_are_not_boolean_are_refused(field, dtype):
    shape = (1, 3) if field == "key_valid_BT" else (1, 1, 3, 3)
    with pytest.raises(ValueError, match=f"{field}.*boolean"):
        visibility(AttentionPattern(**{field: jnp.ones(shape, dtype)}), 3, 3)
    with pytest.raises(ValueError, match=f"{field}.*boolean"):
        visible(AttentionPattern(**{field: jnp.ones(shape, dtype)}), jnp.arange(3), jnp.arange(3))


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4), (2, 5, 3, 4), (3, 1, 3, 4), (2, 1, 3, 5), (2, 1, 2, 4)])
def test_b14_a_mask_that_does_not_fit_is_refused_with_the_allowed_shapes(shape):
    pattern = AttentionPattern(mask=jnp.ones(shape, bool))
    with pytest.raises(ValueError, match=r"\[2 or 1, 6 or 1, 3 or 1, 4\].*\[B,1,1,T\]"):
        check_pattern(pattern, batch=2, heads=6, queries=3, keys=4)


def test_other_arrays_that_do_not_fit_are_refused():
    three, four = jnp.zeros((2, 3), int), jnp.zeros((2, 4), int)
    with pytest.raises(ValueError, match=r"key_valid_BT has shape \(2, 3\); it must be \[B or 1, 4\]"):
        visibility(AttentionPattern(key_valid_BT=three.astype(bool)), 3, 4)
    with pytest.raises(ValueError, match="go together"):
        visibility(AttentionPattern(key_segments_BT=four), 3, 4)
    with pytest.raises(ValueError, match="query_segments_BQ has shape"):
        visibility(AttentionPattern(query_segments_BQ=four, key_segments_BT=four), 3, 4)
    with pytest.raises(ValueError, match="segments are integers"):
        visibility(AttentionPattern(query_segments_BQ=three, key_segments_BT=four.astype(float)), 3, 4)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [0, 2])
def test_a_window_of_any_integer_type_is_the_same_window(dtype, causal, size):
    array = AttentionPattern(causal=causal, window=jnp.asarray(size, dtype))
    plain = AttentionPattern(causal=causal, window=size or None)
    want = visibility(plain, 4, 4)
    want = np.ones((1, 1, 4, 4), bool) if want is None else np.broadcast_to(want, (1, 1, 4, 4))
    np.testing.assert_array_equal(np.broadcast_to(visibility(array, 4, 4), (1, 1, 4, 4)), want)


def test_causal_is_a_boolean():
    with pytest.raises(ValueError, match="causal is 'no'"):
        AttentionPattern(causal="no")
