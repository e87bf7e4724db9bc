"""Mixing over positions against numpy in float64 and against XLA's convolution; causality; padding."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxblock.functional.feed_forward import FeedForwardWeights
from jaxblock.functional.token_mixing import (
    ConvolutionWeights,
    Grid,
    convolution,
    convolution_mixing,
    mlp_mixing,
    tap_count,
    zero_padding,
)

convolve_jitted = jax.jit(convolution, static_argnames="grid")
branch_jitted = jax.jit(convolution_mixing, static_argnums=(2, 3), static_argnames="before_outer")
mlp_jitted = jax.jit(mlp_mixing, static_argnums=2, static_argnames="before_down")


def double(hidden):
    return 2 * hidden


REFERENCES = {
    "relu": lambda x: np.maximum(x, 0),
    "gelu": lambda x: 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))),
    "geglu": lambda x: 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "swiglu": lambda x: x / (1 + np.exp(-x)),
    "glu": lambda x: 1 / (1 + np.exp(-x)),
}


def drawn(seed: int, *shapes: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def convolve(x_BTD, kernel, bias, grid: Grid) -> np.ndarray:
    """Return the convolution, one output after the other, in float64."""
    batch, length, _ = x_BTD.shape
    columns, (up, across) = length // grid.rows, kernel.shape[:2]
    y = np.zeros((batch, grid.rows, columns, kernel.shape[3])) + bias
    x = x_BTD.reshape(batch, grid.rows, columns, -1).astype(np.float64)
    for r, c, i, j in np.ndindex(grid.rows, columns, up, across):
        row, column = r + i - (up - 1) // 2, c + j - (across - 1 if grid.causal else (across - 1) // 2)
        if 0 <= row < grid.rows and 0 <= column < columns:
            y[:, r, c] += x[:, row, column] @ kernel[i, j].astype(np.float64)
    return y.reshape(batch, length, -1)


@settings(deadline=None, max_examples=5)
@given(
    rows=st.sampled_from([1, 2, 3]),
    columns=st.integers(1, 4),
    size=st.integers(1, 4),
    causal=st.booleans(),
    seed=st.integers(0, 99),
)
def test_the_convolution_equals_numpy_in_float64(rows, columns, size, causal, seed):
    grid = Grid(rows, causal and rows == 1)
    taps = tap_count(size, rows)
    x, kernel, bias = drawn(seed, (2, rows * columns, 3), (*taps, 3, 2), (2,))
    got = convolve_jitted(x, kernel, bias, grid=grid)
    np.testing.assert_allclose(got, convolve(x, kernel, bias, grid), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("grid", "size"), [(Grid(3), 3), (Grid(2), 2), (Grid(1), 3), (Grid(1, True), 3), (Grid(1, True), 4)]
)
def test_the_convolution_equals_the_one_of_xla(grid, size):
    """Even sizes too: both read one more to the right, and below, than to the left."""
    columns, taps = 5, tap_count(size, grid.rows)
    x, kernel = drawn(1, (2, grid.rows * columns, 3), (*taps, 3, 2))
    padding = ((0, 0), (taps[1] - 1, 0)) if grid.causal else "SAME"
    want = jax.lax.conv_general_dilated(
        x.reshape(2, grid.rows, columns, 3),
        kernel,
        (1, 1),
        padding,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    got = convolve_jitted(x, kernel, grid=grid)
    np.testing.assert_allclose(got, want.reshape(got.shape), rtol=1e-5, atol=1e-5)
    flipped = convolve_jitted(x, kernel[::-1, ::-1], grid=grid)  # control
    assert np.abs(flipped - got).max() > 0.1


@pytest.mark.parametrize(
    "activation", ["relu", "swiglu", *(pytest.param(x, marks=pytest.mark.full) for x in ("glu", "gelu"))]
)
def test_the_branch_of_two_convolutions_equals_numpy_in_float64(activation):
    grid = Grid(2)
    x, inner, outer, inner_bias, outer_bias = drawn(2, (2, 6, 3), (3, 3, 3, 3), (3, 3, 3, 3), (3,), (3,))
    weights = ConvolutionWeights(inner, outer, inner_bias, outer_bias)
    got = branch_jitted(x, weights, activation, grid)
    hidden = REFERENCES[activation](convolve(x, inner, inner_bias, grid))
    np.testing.assert_allclose(got, convolve(hidden, outer, outer_bias, grid), rtol=1e-4, atol=1e-4)
    doubled = branch_jitted(x, weights, activation, grid, before_outer=double)
    np.testing.assert_allclose(doubled, convolve(2 * hidden, outer, outer_bias, grid), rtol=1e-4, atol=1e-4)


@settings(deadline=None, max_examples=5)
@given(
    activation=st.sampled_from([*REFERENCES]),
    length=st.integers(1, 5),
    hidden=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_the_mlp_over_positions_equals_numpy_in_float64(activation, length, hidden, seed):
    x, up, down, up_bias, down_bias = drawn(
        seed, (2, length, 3), (length, hidden), (hidden, length), (hidden,), (length,)
    )
    weights = FeedForwardWeights(up, down, up_bias, down_bias)
    got = mlp_jitted(x, weights, activation, before_down=double)
    h_BFD = np.einsum("btd,tf->bfd", x.astype(np.float64), up) + up_bias[:, None]
    want = np.einsum("bfd,ft->btd", 2 * REFERENCES[activation](h_BFD), down) + down_bias[:, None]
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_the_mlp_leaves_channels_apart_and_mixes_every_position():
    """Moving channel 1 at position 2 moves channel 1 alone, at all positions; a convolution moves all channels."""
    x, up, down, kernel = drawn(3, (1, 4, 3), (4, 5), (5, 4), (1, 3, 3, 3))
    moved = x.copy()
    moved[0, 2, 1] += 1.0
    weights = FeedForwardWeights(up, down)
    one, other = (np.asarray(mlp_jitted(h, weights, "gelu"))[0] for h in (x, moved))
    change = other - one
    assert (change[:, 1] != 0).all()
    assert (change[:, [0, 2]] == 0).all()
    one, other = (np.asarray(convolve_jitted(h, kernel, grid=Grid()))[0] for h in (x, moved))
    change = other - one
    assert (change[1:] != 0).all()
    assert (change[0] == 0).all()


def causal_weights() -> ConvolutionWeights:
    return ConvolutionWeights(*drawn(5, (1, 3, 4, 4), (1, 3, 4, 4), (4,), (4,)))


@pytest.mark.parametrize("position", range(1, 8))
def test_a_causal_convolution_reads_no_bit_of_what_comes_later(position):
    (x,) = drawn(6, (2, 8, 4))
    other = x.copy()
    other[:, position:] = np.nan
    one, two, both_sides = (
        np.asarray(branch_jitted(h, causal_weights(), "gelu", Grid(1, causal)))
        for h, causal in ((x, True), (other, True), (other, False))
    )
    np.testing.assert_array_equal(one[:, :position], two[:, :position])
    assert np.isnan(both_sides[:, position - 1]).any()  # control: padded on both sides


def test_a_causal_convolution_is_the_other_one_moved_by_its_reach():
    """Left padding alone is a shift: y_causal[t] = y[t - (X - 1) / 2] of a longer sequence."""
    x, kernel = drawn(7, (1, 6, 2), (1, 5, 2, 2))
    longer = np.concatenate([x, np.zeros((1, 2, 2), np.float32)], axis=1)
    causal = np.asarray(convolve_jitted(longer, kernel, grid=Grid(1, True)))
    plain = np.asarray(convolve_jitted(x, kernel, grid=Grid()))
    np.testing.assert_allclose(causal[:, 2:], plain, rtol=1e-5, atol=1e-6)
    assert np.abs(causal[:, :6] - plain).max() > 0.1


def test_padding_is_zeros_whatever_stood_there():
    (x,) = drawn(8, (2, 4, 3))
    valid = np.array([[True, False, True, False], [True] * 4])
    run = jax.jit(
        jax.value_and_grad(lambda x, v: (jnp.sum(jnp.sin(y := zero_padding(x, v))), y), has_aux=True)
    )
    for mask in (valid, valid[:1]):  # the second: one mask for all rows
        (_, got), gradient = run(np.where(mask[:, :, None], x, np.nan), mask)
        np.testing.assert_array_equal(got, np.where(mask[:, :, None], x, 0))
        assert np.isfinite(gradient).all()
        np.testing.assert_array_equal(np.any(gradient, axis=2), np.broadcast_to(mask, (2, 4)))
    same = jnp.asarray(x)
    assert zero_padding(same, None) is same
    with pytest.raises(ValueError, match="valid_BT has dtype int32"):
        zero_padding(same, jnp.asarray(valid, jnp.int32))


def test_half_precision_sums_taps_in_float32():
    """1 and 8 taps of 2^-8: in bfloat16 every partial sum stays at 1, in float32 they make 1 + 2^-5."""
    x = jnp.asarray([[1.0]] + [[2.0**-8]] * 8, jnp.bfloat16)[None]
    got = convolve_jitted(x, np.ones((1, 9, 1, 1), np.float32), grid=Grid(1, True))
    assert got.dtype == jnp.bfloat16
    assert float(got[0, -1, 0]) == 1 + 2.0**-5
    total = np.float32(1)
    for _ in range(8):  # control: round each partial sum to the 8 bits of bfloat16, ties to even
        total = np.float32(np.asarray(total + 2.0**-8).astype(x.dtype))
    assert total == 1


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda x, k: convolution(x, k, grid=Grid(4)), "6 positions came, and the grid has 4 rows"),
        (lambda x, k: convolution(x, k, grid=Grid(2, True)), "a causal grid has one row; this one has 2"),
        (lambda x, k: convolution(x, k, grid=Grid(0)), "rows is 0"),
        (
            lambda x, k: convolution_mixing(x, ConvolutionWeights(k, k), "gelo", Grid()),
            "activation is 'gelo'.*did you mean 'gelu'",
        ),
        (lambda x, k: mlp_mixing(x, FeedForwardWeights(k[0, 0], k[0, 0]), "tanh"), "activation is 'tanh'"),
    ],
)
def test_what_cannot_be_mixed_is_refused(run, message):
    with pytest.raises(ValueError, match=message):
        run(jnp.zeros((1, 6, 2)), jnp.zeros((1, 3, 2, 2)))


def test_shapes_that_do_not_match_are_refused():
    kernel = jnp.zeros((1, 3, 2, 2))
    for x in (jnp.zeros((1, 6, 3)), jnp.zeros((6, 2)), jnp.zeros((1, 6, 2), jnp.int32)):
        with pytest.raises(AssertionError):
            convolution(x, kernel, grid=Grid())
    with pytest.raises(AssertionError):
        convolution(jnp.zeros((1, 6, 2)), kernel, jnp.zeros(3), grid=Grid())
    with pytest.raises(AssertionError):
        mlp_mixing(jnp.zeros((1, 6, 2)), FeedForwardWeights(jnp.zeros((5, 3)), jnp.zeros((3, 5))), "gelu")
