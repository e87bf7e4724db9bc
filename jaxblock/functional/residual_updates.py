"""Arithmetic of residual rules that do more than add: gates, projections, low-rank maps, steps on the sphere.

Every function takes arrays and returns arrays; what it computes in float32 it casts back, once, to the dtype of the
stream it was given. Sources: Highway arXiv 1505.00387; orthogonal update arXiv 2505.11881; LAuReL arXiv 2411.07501;
nGPT arXiv 2410.01131.
"""

import chex
import jax
import jax.numpy as jnp

from jaxblock.types import Array

ORTHOGONAL_EPSILON = 1e-6
"""Added to <x, x>, so that a stream of zeros has a projection of 0 and a finite gradient."""
UNIT_EPSILON = 1e-12
"""Added to |v|^2: 5e-13 of a unit vector's length, and the gradient at v = 0 is finite, 1e6."""


def carry_gate(x_BTD: Array, kernel_DD: Array, bias_D: Array) -> Array:
    """Return g = sigmoid(x W + b), float32 [B, T, D]: a gate per channel (arXiv 1505.00387, section 2.2)."""
    chex.assert_shape(kernel_DD, (x_BTD.shape[-1], x_BTD.shape[-1]))
    chex.assert_shape(bias_D, x_BTD.shape[-1:])
    x, kernel, bias = (a.astype(jnp.float32) for a in (x_BTD, kernel_DD, bias_D))
    return jax.nn.sigmoid(jnp.einsum("btd,de->bte", x, kernel) + bias.reshape(1, 1, -1))


def gated_sum(x_BTD: Array, update_BTD: Array, gate_BTD: Array) -> Array:
    """Return (1 - g) x + g u in the stream's dtype, a convex sum per channel."""
    chex.assert_equal_shape([x_BTD, update_BTD, gate_BTD])
    x, update, gate = (a.astype(jnp.float32) for a in (x_BTD, update_BTD, gate_BTD))
    return ((1.0 - gate) * x + gate * update).astype(x_BTD.dtype)


def orthogonal_part(update_BTD: Array, x_BTD: Array) -> Array:
    """Return u - (<u, x> / (<x, x> + epsilon)) x, float32 [B, T, D]: what of u is orthogonal to x, per token."""
    chex.assert_equal_shape([update_BTD, x_BTD])
    update, x = update_BTD.astype(jnp.float32), x_BTD.astype(jnp.float32)
    along = jnp.sum(update * x, axis=-1, keepdims=True)
    size = jnp.sum(jnp.square(x), axis=-1, keepdims=True) + ORTHOGONAL_EPSILON
    return update - (along / size) * x


def pair_weights(logits_2: Array) -> tuple[Array, Array]:
    """Return (a, b) = 2 softmax(logits), float32 scalars that sum to 2 and are (1, 1) at equal logits."""
    chex.assert_shape(logits_2, (2,))
    weights = 2.0 * jax.nn.softmax(logits_2.astype(jnp.float32))
    return weights[0], weights[1]


def low_rank(x_BTD: Array, down_DR: Array, up_RD: Array) -> Array:
    """Return x A B, float32 [B, T, D], through R numbers per token."""
    chex.assert_rank([x_BTD, down_DR, up_RD], [3, 2, 2])
    chex.assert_shape(up_RD, down_DR.shape[::-1])
    inner_BTR = jnp.einsum("btd,dr->btr", x_BTD.astype(jnp.float32), down_DR.astype(jnp.float32))
    return jnp.einsum("btr,rd->btd", inner_BTR, up_RD.astype(jnp.float32))


def unit(v: Array, *, axis: int = -1) -> Array:
    """Return N(v) = v / |v|_2 along an axis, at least float32; N(0) = 0, and its gradient there is finite."""
    chex.assert_type(v, float)
    wide = v.astype(jnp.promote_types(v.dtype, jnp.float32))
    square = jnp.sum(jnp.square(wide), axis=axis, keepdims=True)
    return wide * jax.lax.rsqrt(square + UNIT_EPSILON)


def sphere_step(x_BTD: Array, update_BTD: Array, rate_D: Array) -> Array:
    """Return N(x + |a| (N(u) - N(x))), on the unit sphere, in the stream's dtype (arXiv 2410.01131, eq. 10, 11)."""
    chex.assert_equal_shape([x_BTD, update_BTD])
    chex.assert_shape(rate_D, x_BTD.shape[-1:])
    rate = jnp.abs(rate_D.astype(jnp.float32)).reshape(1, 1, -1)
    step = rate * (unit(update_BTD) - unit(x_BTD))
    return unit(x_BTD.astype(jnp.float32) + step).astype(x_BTD.dtype)
