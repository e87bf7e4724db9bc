"""Inverted dropout: identity without a key, unbiased with one, one draw per entry."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxblock.functional.dropout import dropout

KEY, OTHER_KEY = (jax.random.key(seed, impl="rbg") for seed in (0, 1))  # rbg: threefry is slow to compile


def test_without_a_key_or_at_rate_zero_the_array_itself_comes_back():
    x = jnp.arange(6.0)
    assert dropout(x, 0.5, None) is x
    assert dropout(x, 0.0, KEY) is x
    assert dropout(x, 0, KEY) is x
    assert dropout(x, 0.5, KEY) is not x  # control


@settings(deadline=None, max_examples=8)
@given(rate=st.sampled_from([0.1, 0.25, 0.5, 0.9]), seed=st.integers(0, 99))
def test_an_entry_is_dropped_or_divided_by_one_minus_rate(rate, seed):
    x = jnp.asarray(1.0 + np.random.default_rng(seed).random((3, 5)), jnp.float32)
    y = np.asarray(dropout(x, rate, jax.random.key(seed, impl="rbg")))
    kept = y != 0
    np.testing.assert_allclose(y[kept], np.asarray(x, np.float64)[kept] / (1 - rate), rtol=1e-6)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.8])
def test_rate_and_mean_hold_within_five_standard_errors(rate):
    count = 40_000
    y = np.asarray(dropout(jnp.ones(count), rate, KEY))
    error = np.sqrt(rate * (1 - rate) / count)
    assert abs((y == 0).mean() - rate) < 5 * error
    assert abs(y.mean() - 1) < 5 * error / (1 - rate)
    assert abs((y != 0).mean() - rate) > 5 * error or rate == 0.5  # control: keep and drop swapped


def test_entries_rows_and_keys_have_their_own_draws():
    y = np.asarray(dropout(jnp.ones((8, 64)), 0.5, KEY)) != 0
    assert len({row.tobytes() for row in y}) == 8
    assert len({column.tobytes() for column in y.T}) > 32
    np.testing.assert_array_equal(y, np.asarray(dropout(jnp.ones((8, 64)), 0.5, KEY)) != 0)
    other = np.asarray(dropout(jnp.ones((8, 64)), 0.5, OTHER_KEY)) != 0
    assert (y != other).any()


def test_rate_one_gives_zeros_and_zero_gradient():
    x = jnp.array([1.0, jnp.inf, -2.0])
    np.testing.assert_array_equal(dropout(x, 1.0, KEY), np.zeros(3))
    np.testing.assert_array_equal(jax.grad(lambda x: jnp.sum(dropout(x, 1.0, KEY)))(x), np.zeros(3))


def test_gradient_is_the_mask_over_one_minus_rate():
    x = jnp.arange(1.0, 9.0)
    y, gradient = jax.value_and_grad(lambda x: jnp.sum(dropout(x, 0.5, KEY)))(x)
    np.testing.assert_allclose(gradient, np.where(np.asarray(dropout(x, 0.5, KEY)) != 0, 2.0, 0.0))
    np.testing.assert_allclose(jnp.vdot(gradient, x), y, rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
def test_dtype_is_kept(dtype):
    x = jnp.ones((2, 3), dtype)
    for rate in (0.0, 0.5, 1.0):
        assert jax.eval_shape(lambda rate=rate: dropout(x, rate, KEY)).dtype == dtype


@pytest.mark.parametrize("rate", [-0.1, 1.1, float("nan"), float("inf"), True, "0.5"])
def test_other_rates_are_refused_with_a_key_and_without(rate):
    for key in (KEY, None):
        with pytest.raises(ValueError, match="dropout rate is"):
            dropout(jnp.ones(2), rate, key)


def test_jit_equals_eager():
    x = jnp.arange(1.0, 21.0)
    np.testing.assert_array_equal(jax.jit(lambda x, k: dropout(x, 0.5, k))(x, KEY), dropout(x, 0.5, KEY))
