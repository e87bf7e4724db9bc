"""Mixing over positions without attention: an MLP over them, and two convolutions over the grid they stand in.

    mlp            y = W2 act(W1 h)              over the position axis, the same for every channel
    convolution    y = conv2(act(conv1(h)))      over a grid of so many rows, zeros around it

Sources: arXiv 2105.01601, eq. 1 (the token-mixing MLP); arXiv 1512.03385, section 3.3 (the basic branch).
"""

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jaxblock.contracts import check_boolean, check_choice, check_integer
from jaxblock.functional.dense import dense
from jaxblock.functional.feed_forward import ACTIVATIONS, GATES, FeedForwardWeights
from jaxblock.types import Array

MIXING_ACTIVATIONS = {**ACTIVATIONS, **GATES}
"""By the name of a feed-forward: its activation, of a gated one what it applies to its gate (swiglu: silu)."""


class ConvolutionWeights(NamedTuple):
    """Kernels [Y, X, D, D] (rows, columns, inputs, outputs) and biases [D] or None, of the first and the second."""

    inner: Array
    outer: Array
    inner_bias: Array | None = None
    outer_bias: Array | None = None


class Grid(NamedTuple):
    """How positions lie: row after row, so many rows; one row is a sequence."""

    rows: int = 1
    causal: bool = False
    """Whether a position reads only itself and those to its left; only of one row."""


def _identity(hidden: Array) -> Array:
    return hidden


def zero_padding(x_BTD: Array, valid_BT: Array | None) -> Array:
    """Return x with exact zeros where `valid_BT`, boolean [B or 1, T], is False, whatever stood there, NaN included.

    Raises:
      ValueError: a mask that is not boolean.
    """
    chex.assert_rank(x_BTD, 3)
    if valid_BT is None:
        return x_BTD
    check_boolean("valid_BT", valid_BT)
    chex.assert_is_broadcastable(valid_BT.shape, x_BTD.shape[:2])
    return jnp.where(valid_BT[:, :, None], x_BTD, jnp.zeros((1, 1, 1), x_BTD.dtype))


def mlp_mixing(
    x_BTD: Array,
    weights: FeedForwardWeights,
    activation: str,
    *,
    before_down: Callable[[Array], Array] = _identity,
) -> Array:
    """Return the MLP over positions of every channel, [B, T, D] -> [B, T, D] in x's dtype.

    y_{:,d} = down^T before_down(act(up^T x_{:,d} + up_bias)) + down_bias

    Args:
      x_BTD: T is what the kernels are made for.
      weights: up [T, F], down [F, T], biases [F] and [T] or None.
      activation: a name in `MIXING_ACTIVATIONS`.
      before_down: applied to the hidden activations [B, D, F]: dropout, a norm.

    Raises:
      ValueError: an unknown activation. AssertionError: shapes that do not match, a dtype that is not floating.
    """
    chex.assert_rank(x_BTD, 3)
    check_choice("activation", activation, MIXING_ACTIVATIONS)
    hidden_BDF = MIXING_ACTIVATIONS[activation](dense(x_BTD.swapaxes(1, 2), weights.up, weights.up_bias))
    return dense(before_down(hidden_BDF), weights.down, weights.down_bias).swapaxes(1, 2)


def convolution_mixing(
    x_BTD: Array,
    weights: ConvolutionWeights,
    activation: str,
    grid: Grid,
    *,
    before_outer: Callable[[Array], Array] = _identity,
) -> Array:
    """Return conv2(before_outer(act(conv1(x)))), [B, T, D] -> [B, T, D] in x's dtype.

    Args:
      x_BTD: T is a multiple of the grid's rows.
      weights: the two kernels and biases.
      activation: a name in `MIXING_ACTIVATIONS`.
      grid: how positions lie.
      before_outer: applied to the hidden activations [B, T, D]: dropout, a norm, zeros at padding.

    Raises:
      ValueError: as `convolution`, or an unknown activation. AssertionError: as `convolution`.
    """
    check_choice("activation", activation, MIXING_ACTIVATIONS)
    hidden_BTD = convolution(x_BTD, weights.inner, weights.inner_bias, grid=grid)
    hidden_BTD = before_outer(MIXING_ACTIVATIONS[activation](hidden_BTD))
    return convolution(hidden_BTD, weights.outer, weights.outer_bias, grid=grid)


def convolution(x_BTD: Array, kernel: Array, bias: Array | None = None, *, grid: Grid) -> Array:
    """Return the convolution over the grid, zeros around it, [B, T, D] -> [B, T, F] in x's dtype.

    y[r, c] = bias + sum_{i,j} x[r + i - (Y - 1) // 2, c + j - (X - 1) // 2] kernel[i, j]

    With a causal grid the column is c + j - (X - 1): nothing to the right is read. It equals
    `lax.conv_general_dilated` (NHWC, HWIO), padded "SAME", and is computed as one product of matrices a tap, summed in
    float32: on CPU the derivative of that function inside a scan is 25 times slower, outside 1.5 times faster.

    Args:
      x_BTD: T is a multiple of the grid's rows.
      kernel: [Y, X, D, F], cast to x's dtype.
      bias: [F], or None.
      grid: how positions lie.

    Raises:
      ValueError: rows that do not divide T; a causal grid of more than one row.
      AssertionError: shapes that do not match, a dtype that is not floating.
    """
    chex.assert_rank([x_BTD, kernel], [3, 4])
    chex.assert_type([x_BTD, kernel], float)
    batch, length, width = x_BTD.shape
    chex.assert_axis_dimension(kernel, 2, width)
    columns = _columns(grid, length)
    taps, (above, left) = kernel.shape[:2], _before(grid, kernel.shape[:2])
    around = ((0, 0), (above, taps[0] - 1 - above), (left, taps[1] - 1 - left), (0, 0))
    wide = jnp.promote_types(x_BTD.dtype, jnp.float32)

    def sum_taps(x_BTD: Array, kernel: Array) -> Array:
        padded_BRCD = jnp.pad(x_BTD.reshape(batch, grid.rows, columns, width), around)

        def tap(i: int, j: int) -> Array:
            rows = padded_BRCD[:, i : i + grid.rows, j : j + columns].reshape(-1, width)
            return jnp.matmul(rows, kernel[i, j], preferred_element_type=wide)

        return functools.reduce(jnp.add, itertools.starmap(tap, np.ndindex(*taps)))

    # Kept for the backward pass is x, not a shifted copy of it for every tap.
    y = jax.checkpoint(sum_taps, prevent_cse=False)(x_BTD, kernel.astype(x_BTD.dtype))
    if bias is not None:
        chex.assert_shape(bias, kernel.shape[3:])
        y = y + bias.astype(wide)[None]
    return y.astype(x_BTD.dtype).reshape(batch, length, -1)


def tap_count(size: int, rows: int) -> tuple[int, int]:
    """Return how many rows and columns a kernel of this size has: one row where the grid has one."""
    return (1 if rows == 1 else size, size)


def _before(grid: Grid, taps: tuple[int, ...]) -> tuple[int, int]:
    """Return how many rows above and columns to the left of a position are read."""
    return (taps[0] - 1) // 2, taps[1] - 1 if grid.causal else (taps[1] - 1) // 2


def _columns(grid: Grid, length: int) -> int:
    """Return the columns of a grid that so many positions fill."""
    check_integer("rows", grid.rows, least=1)
    if length % grid.rows:
        raise ValueError(
            f"{length} positions came, and the grid has {grid.rows} rows, which must divide them"
        )
    if grid.causal and grid.rows > 1:
        raise ValueError(f"a causal grid has one row; this one has {grid.rows}")
    return length // grid.rows
