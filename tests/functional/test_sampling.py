"""Greedy and sampled decoding: filters against numpy, frequencies, temperature 0, padded vocabulary (B72)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxblock.functional.sampling import SamplingRule, greedy, keep_top_k, keep_top_p, sample

KEY, OTHER_KEY = (jax.random.key(seed, impl="rbg") for seed in (0, 1))  # rbg: threefry is slow to compile
jit_sample = jax.jit(sample, static_argnums=2)
jit_top_k = jax.jit(keep_top_k, static_argnums=1)
jit_top_p = jax.jit(keep_top_p, static_argnums=1)
jit_greedy = jax.jit(greedy, static_argnames="vocab_size")


@functools.partial(jax.jit, static_argnums=2)
def many(logits, key, rule):
    """4096 draws from one row."""
    return sample(jnp.broadcast_to(logits, (4096, logits.shape[-1])), key, rule)


def draw(seed, shape=(2, 3, 6)):
    """Logits in steps of one half, so that ties are frequent."""
    return (np.random.default_rng(seed).integers(-4, 5, shape) / 2).astype(np.float32)


def softmax(row):
    p = np.exp(np.asarray(row, np.float64) - np.max(row))
    return p / p.sum()


def test_greedy_is_the_lowest_id_among_the_largest():
    logits = np.array([[0.0, 2.0, 2.0], [5.0, -1.0, 5.0]], np.float32)
    got = jit_greedy(logits)
    assert got.dtype == jnp.int32
    np.testing.assert_array_equal(got, [1, 0])
    assert jit_greedy(logits[0]).shape == ()


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 999), k=st.sampled_from([1, 2, 5, 6, 9]))
def test_top_k_keeps_exactly_k_the_lower_id_among_equals(seed, k):
    logits = draw(seed)
    got = np.asarray(jit_top_k(logits, k))
    for row, kept in zip(logits.reshape(-1, 6), got.reshape(-1, 6), strict=True):
        want = np.full(6, -np.inf)
        ids = sorted(range(6), key=lambda i: (-row[i], i))[:k]
        want[ids] = row[ids]
        np.testing.assert_array_equal(kept, want)


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 999), p=st.sampled_from([1e-6, 0.3, 0.7, 0.95, 1.0]))
def test_top_p_keeps_the_smallest_set_that_reaches_p(seed, p):
    logits = np.random.default_rng(seed).normal(size=(2, 3, 6)).astype(np.float32)
    got = np.asarray(jit_top_p(logits, p))
    for row, kept in zip(logits.reshape(-1, 6), got.reshape(-1, 6), strict=True):
        ids, probability = np.flatnonzero(kept > -np.inf), softmax(row)
        np.testing.assert_array_equal(kept[ids], row[ids])
        assert len(ids) >= 1
        assert probability[ids].min() >= np.delete(probability, ids).max(initial=0.0)
        assert probability[ids].sum() >= p - 1e-6
        if len(ids) > 1:  # control: one fewer does not reach p
            assert probability[ids].sum() - probability[ids].min() < p + 1e-6


def test_top_p_at_the_boundary_among_equals_and_at_one():
    equal = np.zeros(64, np.float32)
    np.testing.assert_array_equal(np.asarray(jit_top_p(equal, 0.5)) > -np.inf, np.arange(64) < 32)
    np.testing.assert_array_equal(np.asarray(jit_top_p(equal, 0.501)) > -np.inf, np.arange(64) < 33)
    tail = np.array([[0.0, -40.0, -80.0]], np.float32)
    np.testing.assert_array_equal(jit_top_p(tail, 1.0), tail)


@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 999))
def test_temperature_zero_top_k_one_and_a_tiny_top_p_are_greedy(seed):
    logits = draw(seed)
    want, key = jit_greedy(logits), jax.random.key(seed, impl="rbg")
    for rule in (SamplingRule(temperature=0), SamplingRule(top_k=1), SamplingRule(top_p=1e-6)):
        np.testing.assert_array_equal(jit_sample(logits, key, rule), want)


def test_a_tiny_temperature_is_greedy_and_never_nan():
    logits = 1e3 * np.random.default_rng(0).normal(size=(64, 6)).astype(np.float32)
    for rule in (SamplingRule(temperature=1e-36, top_k=3), SamplingRule(temperature=1e-300, top_p=0.9)):
        np.testing.assert_array_equal(jit_sample(logits, KEY, rule), jit_greedy(logits))
    # Control: at temperature 1e3 these logits are drawn, not picked.
    assert (jit_sample(logits, KEY, SamplingRule(temperature=1e3)) != jit_greedy(logits)).any()


@pytest.mark.parametrize(
    "rule",
    [
        SamplingRule(),
        SamplingRule(temperature=0.5),
        SamplingRule(temperature=2.0),
        SamplingRule(top_k=2),
        SamplingRule(top_p=0.75),
        SamplingRule(temperature=2.0, top_k=3, top_p=0.8, vocab_size=4),
    ],
)
def test_frequencies_follow_the_filtered_distribution(rule):
    logits = np.array([1.0, 0.0, 0.5, -1.0, 1.2], np.float32)
    want = np.full(5, -np.inf)
    want[: rule.vocab_size] = logits[: rule.vocab_size] / rule.temperature
    order = np.argsort(-want)
    want[order[rule.top_k or 5 :]] = -np.inf
    before = np.cumsum(softmax(want)[order]) - softmax(want)[order]
    want[order[before >= (rule.top_p or 2.0)]] = -np.inf
    probability = softmax(want)
    counts = np.bincount(many(logits, KEY, rule), minlength=5) / 4096
    assert (counts[probability == 0] == 0).all()
    error = np.sqrt(probability * (1 - probability) / 4096)
    assert (np.abs(counts - probability) <= 5 * error).all()
    if rule != SamplingRule():  # control: the unfiltered distribution is visibly another
        plain = softmax(logits)
        assert (np.abs(counts - plain) > 5 * np.sqrt(plain * (1 - plain) / 4096)).any()


def test_temperature_acts_before_top_p():
    logits = np.log(np.array([0.5, 0.3, 0.2], np.float32))
    assert set(np.asarray(many(logits, KEY, SamplingRule(top_p=0.5))).tolist()) == {0}
    assert set(np.asarray(many(logits, KEY, SamplingRule(top_p=0.5, temperature=4.0))).tolist()) == {0, 1}


def test_b72_a_padded_vocabulary_id_is_never_emitted():
    for padding in (50.0, np.nan):
        logits = np.array([0.0, 0.3, -0.2, padding], np.float32)
        assert jit_greedy(logits, vocab_size=3) == 1
        for rule in (
            SamplingRule(vocab_size=3),
            SamplingRule(vocab_size=3, temperature=0),
            SamplingRule(vocab_size=3, temperature=100.0, top_k=4, top_p=0.99),
        ):
            ids = np.asarray(many(logits, KEY, rule))
            assert ids.min() >= 0
            assert ids.max() < 3
    # Control: without the size, the forced column wins.
    logits = np.array([0.0, 0.3, -0.2, 50.0], np.float32)
    assert jit_greedy(logits) == 3
    assert (np.asarray(many(logits, KEY, SamplingRule())) == 3).all()


def test_rows_draw_apart_and_a_key_repeats():
    logits = np.zeros(5, np.float32)
    ids = np.asarray(many(logits, KEY, SamplingRule()))
    assert set(ids.tolist()) == {0, 1, 2, 3, 4}
    np.testing.assert_array_equal(ids, many(logits, KEY, SamplingRule()))
    assert (ids != np.asarray(many(logits, OTHER_KEY, SamplingRule()))).any()


def test_vmap_with_a_key_per_row_equals_row_by_row():
    logits, rule = draw(0, (3, 6)), SamplingRule(top_k=4, temperature=0.7, vocab_size=5)
    keys = jax.random.split(jax.random.key(0), 3)
    # The default generator: rbg keys draw otherwise under vmap.
    mapped = jax.jit(jax.vmap(lambda row, key: sample(row, key, rule)))(logits, keys)
    np.testing.assert_array_equal(mapped, [jit_sample(logits[i], keys[i], rule) for i in range(3)])


def test_jit_equals_eager():
    logits, rule = jnp.asarray(draw(1)), SamplingRule(top_k=2, temperature=0.7, vocab_size=5)
    np.testing.assert_array_equal(sample(logits, KEY, rule), jit_sample(logits, KEY, rule))
    np.testing.assert_array_equal(greedy(logits), jit_greedy(logits))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_narrow_logits_are_filtered_in_float32(dtype):
    logits = jnp.asarray(draw(2), dtype)
    assert jax.eval_shape(lambda: keep_top_k(logits, 2)).dtype == jnp.float32
    assert jax.eval_shape(lambda: keep_top_p(logits, 0.5)).dtype == jnp.float32
    rule = SamplingRule(temperature=0.7)
    ids = jit_sample(logits, KEY, rule)
    np.testing.assert_array_equal(ids, jit_sample(logits.astype(jnp.float32), KEY, rule))
    assert ids.dtype == jnp.int32


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", [-0.1, float("nan"), float("inf"), True, "1"]),
        ("top_k", [0, -1, 2.0, True]),
        ("top_p", [0.0, 1.1, -0.5, float("nan")]),
        ("vocab_size", [0, 3.0]),
    ],
)
def test_rules_out_of_range_are_refused(field, values):
    for value in values:
        with pytest.raises(ValueError, match=f"{field} is"):
            SamplingRule(**{field: value})


def test_filters_and_vocabulary_check_their_numbers_too():
    logits = jnp.zeros(4)
    for call, text in (
        (lambda: keep_top_k(logits, 0), "top_k is 0"),
        (lambda: keep_top_p(logits, 0.0), "top_p is 0.0"),
        (lambda: greedy(logits, vocab_size=5), "vocab_size is 5; it must be at most 4"),
        (lambda: sample(logits, KEY, SamplingRule(vocab_size=5)), "vocab_size is 5; it must be at most 4"),
    ):
        with pytest.raises(ValueError, match=text):
            call()
    with pytest.raises(AssertionError):
        greedy(jnp.zeros(4, jnp.int32))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_nan_gives_no_token(temperature):
    logits = jnp.asarray([[0.0, 1.0, 2.0], [0.0, jnp.nan, 2.0]])
    drawn = sample(logits, jax.random.key(0), SamplingRule(temperature=temperature))
    assert drawn[0] in (0, 1, 2)
    assert drawn[1] == -1
