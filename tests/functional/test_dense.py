"""Linear maps against float64 einsum, the compute dtype (B34), embedding ids and float32 logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxblock.functional.dense import dense, embed, logits, unembed


def draw(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def wide(*arrays):
    return [np.asarray(a, np.float64) for a in arrays]


jit_dense = jax.jit(dense, static_argnames="axes")


@settings(deadline=None, max_examples=12)
@given(
    leading=st.sampled_from([(), (3,), (2, 3), (2, 0), (1, 2, 3)]),
    inner=st.sampled_from([(4,), (2, 3)]),
    outer=st.sampled_from([(), (5,), (3, 2)]),
    seed=st.integers(0, 99),
)
def test_dense_equals_the_float64_tensor_product(leading, inner, outer, seed):
    axes = len(inner)
    x, kernel, bias = draw(seed, *leading, *inner), draw(seed + 1, *inner, *outer), draw(seed + 2, *outer)
    got = jit_dense(x, kernel, bias, axes=axes)
    x64, kernel64, bias64 = wide(x, kernel, bias)
    assert got.shape == (*leading, *outer)
    np.testing.assert_allclose(got, np.tensordot(x64, kernel64, axes) + bias64, atol=1e-5)


def test_each_kernel_axis_lands_in_its_place():
    x_BTD, kernel_DHK, bias_HK = draw(0, 2, 3, 4), draw(1, 4, 5, 6), draw(2, 5, 6)
    q_BTHK = dense(x_BTD, kernel_DHK, bias_HK)
    want = np.einsum("btd,dhk->bthk", *wide(x_BTD, kernel_DHK)) + np.asarray(bias_HK)
    np.testing.assert_allclose(q_BTHK, want, atol=1e-5)
    kernel_HKD = draw(3, 5, 6, 4)
    want = np.einsum("bthk,hkd->btd", *wide(q_BTHK, kernel_HKD))
    np.testing.assert_allclose(dense(q_BTHK, kernel_HKD, axes=2), want, atol=2e-5)
    # Control: heads and head dim swapped is another map of the same size.
    swapped = dense(jnp.swapaxes(q_BTHK, -1, -2), kernel_HKD.reshape(6, 5, 4), axes=2)
    assert np.abs(swapped - want).max() > 0.1


def test_gradients_equal_those_of_einsum():
    x, kernel, bias, weight = draw(0, 2, 3, 4), draw(1, 4, 2, 3), draw(2, 2, 3), draw(3, 2, 3, 2, 3)

    def plain(x, k, b):
        return jnp.vdot(weight, jnp.einsum("btd,dhk->bthk", x, k) + b[None, None])

    def ours(x, k, b):
        return jnp.vdot(weight, dense(x, k, b))

    for got, want in zip(
        jax.jit(jax.grad(ours, (0, 1, 2)))(x, kernel, bias),
        jax.jit(jax.grad(plain, (0, 1, 2)))(x, kernel, bias),
        strict=True,
    ):
        np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_b34_float32_parameters_never_lift_a_narrow_input(dtype):
    x, kernel, bias = draw(0, 2, 3, dtype=dtype), draw(1, 3, 4), draw(2, 4)
    y = dense(x, kernel, bias)
    assert y.dtype == dtype
    np.testing.assert_array_equal(y, dense(x, kernel.astype(dtype), bias.astype(dtype)))
    assert (x @ kernel).dtype == jnp.float32  # control: what promotion would do
    gradient = jax.grad(lambda k: jnp.sum(dense(x, k).astype(jnp.float32)))(kernel)
    assert gradient.dtype == jnp.float32


def test_dense_refuses_what_does_not_fit():
    x = jnp.ones((2, 3, 4))
    for kernel, bias, axes in [
        (jnp.ones((5, 2)), None, 1),
        (jnp.ones((4, 3, 2)), None, 2),
        (jnp.ones((4, 2)), jnp.ones(3), 1),
        (jnp.ones((4, 2)), jnp.ones((1, 2)), 1),
        (jnp.ones((2, 3, 4, 1)), None, 0),
        (jnp.ones((1, 2, 3, 4)), None, 4),
    ]:
        with pytest.raises(AssertionError):
            dense(x, kernel, bias, axes=axes)
    with pytest.raises(AssertionError):
        dense(jnp.ones((2, 4), jnp.int32), jnp.ones((4, 2)))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_embed_reads_rows_in_the_tables_dtype(dtype):
    table, tokens = draw(0, 5, 3, dtype=dtype), jnp.array([[0, 4, 2], [2, 2, 1]])
    x = embed(table, tokens)
    assert x.dtype == dtype
    np.testing.assert_array_equal(x, np.asarray(table)[np.asarray(tokens)])
    np.testing.assert_array_equal(embed(table, tokens[0, 1]), table[4])


def test_embed_gradient_counts_each_use():
    gradient = jax.grad(lambda table: jnp.sum(embed(table, jnp.array([2, 0, 2]))))(jnp.ones((4, 2)))
    np.testing.assert_array_equal(gradient, np.array([1, 0, 2, 0])[:, None] * np.ones(2))


def test_a_token_id_outside_the_vocabulary_is_loud_and_teaches_nothing():
    table, tokens = draw(0, 5, 3), jnp.array([4, 5, -1, 0])
    for read in (embed, jax.jit(embed)):
        np.testing.assert_array_equal(np.isnan(read(table, tokens)).all(-1), [False, True, True, False])
    assert not np.isnan(table[tokens]).any()  # control: plain indexing clamps 5 and wraps -1
    gradient = jax.grad(lambda t: jnp.sum(embed(t, tokens)))(table)
    np.testing.assert_array_equal(gradient[:, 0], [1, 0, 0, 0, 1])


def test_embed_refuses_floating_tokens_and_tables_of_other_rank():
    for table, tokens in [(jnp.ones((3, 2)), jnp.ones(2)), (jnp.ones(3), jnp.array([1]))]:
        with pytest.raises(AssertionError):
            embed(table, tokens)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
def test_b34_logits_are_float32_accumulated_whatever_the_compute_dtype(dtype):
    x, kernel = draw(0, 2, 3, 64, dtype=dtype), draw(1, 64, 7)
    got = logits(x, kernel)
    want = np.einsum("btd,dv->btv", *wide(x, kernel.astype(dtype)))
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, want, atol=1e-5)
    np.testing.assert_allclose(unembed(x, kernel.T), got, atol=1e-5)
    np.testing.assert_allclose(logits(x[0, 0], kernel), got[0, 0], atol=1e-5)
    if dtype != jnp.float32:  # control: a result rounded to the compute dtype is visibly further away
        assert np.abs(np.asarray(dense(x, kernel), np.float64) - want).max() > 1e-3


def test_logits_gradients_keep_the_dtypes_of_their_arguments():
    x, kernel = draw(0, 2, 8, dtype=jnp.bfloat16), draw(1, 8, 5)
    for function, matrix in ((logits, kernel), (unembed, kernel.T)):
        slope = jax.jit(jax.grad(lambda x, k, f=function: jnp.sum(jnp.sin(f(x, k))), (0, 1)))
        got_x, got_k = slope(x, matrix)
        assert (got_x.dtype, got_k.dtype) == (jnp.bfloat16, jnp.float32)
        exact = matrix.astype(jnp.bfloat16).astype(jnp.float32)
        want_x, want_k = slope(x.astype(jnp.float32), exact)
        np.testing.assert_allclose(got_x.astype(jnp.float32), want_x, atol=0.03)
        np.testing.assert_allclose(got_k, want_k, atol=0.03)


def test_logits_refuse_a_kernel_of_another_width():
    x = jnp.ones((2, 3))
    with pytest.raises(AssertionError):
        logits(x, jnp.ones((4, 3)))
    with pytest.raises(AssertionError):
        unembed(x, jnp.ones((3, 4)))


def test_jit_and_vmap_equal_eager():
    x, kernel, bias = draw(0, 2, 3, 4), draw(1, 4, 5), draw(2, 5)
    np.testing.assert_allclose(jax.jit(dense)(x, kernel, bias), dense(x, kernel, bias), atol=1e-6)
    mapped = jax.vmap(dense, (0, None, None))(x, kernel, bias)
    np.testing.assert_allclose(mapped, dense(x, kernel, bias), atol=1e-6)
    np.testing.assert_allclose(jax.jit(logits)(x, kernel), logits(x, kernel), atol=1e-6)
