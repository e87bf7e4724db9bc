"""One vector per sequence from its real tokens: their mean, the first of them, the last of them.

In all three a row without a real token, one of no tokens (T = 0) too, gives 0 with zero gradient, and positions
that are not real may hold anything, NaN included, without a bit of the result changing. Left and right padding
(and holes) are alike.
"""

import chex
import jax.numpy as jnp

from jaxblock.contracts import check_boolean
from jaxblock.types import Array


def masked_mean(x_BTD: Array, valid_BT: Array) -> Array:
    """Return sum_t valid_t x_t / sum_t valid_t, [B, T, D] -> [B, D], summed in float32, in x's dtype.

    Raises ValueError for a mask that is not boolean, AssertionError (chex) for shapes that do not match.
    """
    _check(x_BTD, valid_BT)
    wide_BTD = x_BTD.astype(jnp.promote_types(x_BTD.dtype, jnp.float32))
    sum_BD = jnp.sum(jnp.where(valid_BT[..., None], wide_BTD, 0.0), axis=1)
    count_B1 = jnp.sum(valid_BT, axis=1, keepdims=True)
    return (sum_BD / jnp.maximum(count_B1, 1).astype(sum_BD.dtype)).astype(x_BTD.dtype)


def first_real(x_BTD: Array, valid_BT: Array) -> Array:
    """Return x at the first real token of each row, [B, T, D] -> [B, D]; errors as in `masked_mean`."""
    _check(x_BTD, valid_BT)
    return _at_real(x_BTD, valid_BT, from_end=False)


def last_real(x_BTD: Array, valid_BT: Array) -> Array:
    """Return x at the last real token of each row, [B, T, D] -> [B, D]; errors as in `masked_mean`."""
    _check(x_BTD, valid_BT)
    return _at_real(x_BTD, valid_BT, from_end=True)


def _check(x_BTD: Array, valid_BT: Array) -> None:
    chex.assert_rank([x_BTD, valid_BT], [3, 2])
    chex.assert_type(x_BTD, float)
    chex.assert_equal_shape_prefix([x_BTD, valid_BT], 2)
    check_boolean("valid_BT", valid_BT)


def _at_real(x_BTD: Array, valid_BT: Array, *, from_end: bool) -> Array:
    batch, length, width = x_BTD.shape
    if length == 0:  # argmax has no answer for an empty axis
        return jnp.zeros((batch, width), x_BTD.dtype)
    steps_B = jnp.argmax(valid_BT[:, ::-1] if from_end else valid_BT, axis=1)
    index_B = length - 1 - steps_B if from_end else steps_B
    picked_BD = jnp.take_along_axis(x_BTD, index_B[:, None, None], axis=1)[:, 0]
    return jnp.where(jnp.any(valid_BT, axis=1, keepdims=True), picked_BD, jnp.zeros_like(picked_BD))
