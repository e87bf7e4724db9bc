"""Pooling over real tokens: both paddings, holes, empty rows, garbage in padded positions (B74)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxblock.functional.pooling import first_real, last_real, masked_mean

POOLS = [masked_mean, first_real, last_real]
JITTED = {pool: jax.jit(pool) for pool in POOLS}
SLOPES = {pool: jax.jit(jax.grad(lambda x, v, p=pool: jnp.sum(jnp.sin(p(x, v))))) for pool in POOLS}


def draw(seed, shape=(3, 5, 2), dtype=np.float32):
    rng = np.random.default_rng(seed)
    return rng.normal(size=shape).astype(dtype), rng.random(shape[:2]) < 0.5


@settings(deadline=None, max_examples=15)
@given(shape=st.sampled_from([(3, 5, 2), (1, 1, 3)]), seed=st.integers(0, 999))
def test_pools_equal_numpy_row_by_row(shape, seed):
    x, valid = draw(seed, shape)
    for b in range(shape[0]):
        real = x[b][valid[b]].astype(np.float64)
        real = real if len(real) else np.zeros((1, shape[2]))
        np.testing.assert_allclose(JITTED[masked_mean](x, valid)[b], real.mean(0), atol=1e-6)
        np.testing.assert_array_equal(JITTED[first_real](x, valid)[b], real[0].astype(np.float32))
        np.testing.assert_array_equal(JITTED[last_real](x, valid)[b], real[-1].astype(np.float32))


def test_b74_first_and_last_real_token_under_both_paddings():
    x = np.arange(1.0, 6.0, dtype=np.float32)[None, :, None].repeat(2, axis=0)
    valid = np.array([[True, True, True, False, False], [False, False, True, True, True]])
    np.testing.assert_array_equal(JITTED[first_real](x, valid)[:, 0], [1, 3])
    np.testing.assert_array_equal(JITTED[last_real](x, valid)[:, 0], [3, 5])
    np.testing.assert_array_equal(JITTED[masked_mean](x, valid)[:, 0], [2, 4])
    # Control: the fixed indices are wrong in one padding each.
    assert x[1, 0, 0] != 3
    assert x[0, -1, 0] != 3


@pytest.mark.parametrize("pool", POOLS)
def test_b74_a_row_without_a_real_token_gives_zero_and_zero_gradient(pool):
    x, valid = draw(0)
    valid[0], valid[1] = False, True
    for fill in (1.0, np.nan):
        x[0] = fill
        np.testing.assert_array_equal(JITTED[pool](x, valid)[0], [0, 0])
        slope = np.asarray(SLOPES[pool](x, valid))
        np.testing.assert_array_equal(slope[0], np.zeros((5, 2)))
        assert np.abs(slope[1]).max() > 0.1  # control: a real row learns
        assert np.isfinite(slope).all()


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("shape", [(2, 0, 3), (0, 4, 3), (0, 0, 3)])
def test_b74_no_token_and_no_row_give_zeros_of_the_right_shape(pool, shape):
    """Controls: with one token there is an answer that is not zero, and eager equals compiled."""
    x, valid = jnp.ones(shape), jnp.ones(shape[:2], bool)
    for pooled in (pool(x, valid), JITTED[pool](x, valid)):
        assert pooled.shape == (shape[0], 3)
        np.testing.assert_array_equal(pooled, np.zeros((shape[0], 3)))
    assert SLOPES[pool](x, valid).shape == shape
    np.testing.assert_array_equal(pool(jnp.ones((2, 1, 3)), jnp.ones((2, 1), bool)), np.ones((2, 3)))


@pytest.mark.parametrize("garbage", [1e4, np.nan, np.inf])
@pytest.mark.parametrize("pool", POOLS)
def test_garbage_in_padded_positions_changes_no_bit(pool, garbage):
    x, valid = draw(1)
    dirty = np.where(valid[..., None], x, np.float32(garbage))
    np.testing.assert_array_equal(JITTED[pool](dirty, valid), JITTED[pool](x, valid))
    np.testing.assert_array_equal(SLOPES[pool](dirty, valid), SLOPES[pool](x, valid))
    assert (
        JITTED[pool](dirty, valid | True) != JITTED[pool](x, valid | True)
    ).any() or pool is not masked_mean


def test_gradients_reach_exactly_the_tokens_that_were_pooled():
    x, valid = np.zeros((1, 4, 1), np.float32), np.array([[False, True, True, False]])
    for pool, want in (
        (masked_mean, [0, 0.5, 0.5, 0]),
        (first_real, [0, 1, 0, 0]),
        (last_real, [0, 0, 1, 0]),
    ):
        np.testing.assert_array_equal(SLOPES[pool](x, valid)[0, :, 0], want)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_narrow_input_is_summed_in_float32_and_returned_narrow(dtype):
    x, valid = jnp.full((1, 4096, 1), 30.0, dtype), jnp.ones((1, 4096), bool)
    for pool in POOLS:
        y = JITTED[pool](x, valid)
        assert y.dtype == dtype
        np.testing.assert_array_equal(y, [[30]])
    # Control: the sum does not fit the narrow dtype (overflow, or 8 bits of mantissa).
    with np.errstate(over="ignore"):
        total = np.asarray(x[0, :, 0]).cumsum(dtype=x.dtype)[-1]
    assert float(total) != 30 * 4096


def test_eager_equals_jit_and_vmap():
    x, valid = (jnp.asarray(a) for a in draw(2))
    for pool in POOLS:
        np.testing.assert_allclose(pool(x, valid), JITTED[pool](x, valid), atol=1e-7)
        rows = jax.vmap(pool)(x[:, None], valid[:, None])[:, 0]
        np.testing.assert_allclose(rows, JITTED[pool](x, valid), atol=1e-7)


@pytest.mark.parametrize("pool", POOLS)
def test_other_masks_and_shapes_are_refused(pool):
    x = jnp.ones((2, 3, 4))
    for mask in (jnp.ones((2, 3)), jnp.ones((2, 3), jnp.int32)):
        with pytest.raises(ValueError, match="valid_BT has dtype"):
            pool(x, mask)
    for mask in (jnp.ones((2, 4), bool), jnp.ones((2, 3, 4), bool), jnp.ones((1, 3), bool)):
        with pytest.raises(AssertionError):
            pool(x, mask)
