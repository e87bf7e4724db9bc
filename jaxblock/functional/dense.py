"""Linear maps: y = x kernel + bias over the last axes of x; token embedding and its inverse, the logits.

Every map flattens the leading axes of x into one and the kernel into a matrix, does one product and reshapes
back: on CPU that is much faster than the same contraction of three-dimensional arrays.
"""

import math

import chex
import jax
import jax.numpy as jnp

from jaxblock.types import Array


def dense(x: Array, kernel: Array, bias: Array | None = None, *, axes: int = 1) -> Array:
    """Contract the last `axes` axes of x with the first `axes` axes of kernel, then add bias.

    kernel [D, F] or [D, H, K] with axes=1, [H, K, D] with axes=2; bias has the axes of kernel that remain.
    kernel and bias are cast to x.dtype, the compute dtype, and the result has x.dtype: float32 parameters
    never lift a bfloat16 x. Raises AssertionError (chex) when x is not floating or the axes do not match.
    """
    chex.assert_type([x, kernel], float)
    chex.assert_scalar_positive(axes)
    split = x.ndim - axes
    chex.assert_equal(x.shape[max(split, 0) :], kernel.shape[:axes])
    leading, contracted, features = x.shape[:split], x.shape[split:], kernel.shape[axes:]
    width = math.prod(contracted)
    rows = x.reshape(math.prod(leading), width)
    matrix = kernel.reshape(width, math.prod(features)).astype(x.dtype)
    y = jnp.matmul(rows, matrix)
    if bias is not None:
        chex.assert_shape(bias, features)
        y = y + bias.astype(x.dtype).reshape(1, -1)
    return y.reshape(leading + features)


def embed(table_VD: Array, tokens: Array) -> Array:
    """Return the row of table_VD for each token id: integers [...] -> [..., D] in the table's dtype.

    A token id below 0 or at or above V gives a row of NaN: the value of an id cannot be checked while
    tracing, and a silent clamp would train on the wrong token. Such an id has no gradient. Raises
    AssertionError (chex) when the table is not a floating matrix or the tokens are not integers.
    """
    chex.assert_rank(table_VD, 2)
    chex.assert_type([table_VD, tokens], [float, int])
    return table_VD.at[tokens].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)


def logits(x: Array, kernel_DV: Array) -> Array:
    """Return x kernel_DV, [..., D] x [D, V] -> [..., V], multiplied in x.dtype and accumulated in float32.

    The result is float32 whatever the compute dtype (float64 for a float64 x). The kernel is cast to x.dtype.
    Raises AssertionError (chex) when the shapes do not match or a dtype is not floating.
    """
    chex.assert_rank(kernel_DV, 2)
    return _float32_product(x, kernel_DV, contracted_axis=0)


def unembed(x: Array, table_VD: Array) -> Array:
    """Return x table_VD^T, [..., D] x [V, D] -> [..., V]: the logits of an output tied to the embedding.

    Dtypes and errors as in `logits`. Source of the tie: arXiv 1608.05859.
    """
    chex.assert_rank(table_VD, 2)
    return _float32_product(x, table_VD, contracted_axis=1)


def _float32_product(x: Array, matrix: Array, *, contracted_axis: int) -> Array:
    chex.assert_type([x, matrix], float)
    width = x.shape[-1]
    chex.assert_axis_dimension(matrix, contracted_axis, width)
    rows = x.reshape(math.prod(x.shape[:-1]), width)
    y = jax.lax.dot_general(
        rows,
        matrix.astype(x.dtype),
        (((1,), (contracted_axis,)), ((), ())),
        preferred_element_type=jnp.promote_types(x.dtype, jnp.float32),
    )
    return y.reshape(*x.shape[:-1], matrix.shape[1 - contracted_axis])
