"""Normalization over the last axis: y = scale * (x - mean) / sqrt(var + epsilon) + bias, or without the mean.

Sources: layer norm arXiv 1607.06450, eq. 4; RMS norm arXiv 1910.07467, eq. 4.

Cast order (the same for both): x is raised to float32 (float64 stays float64), statistics are taken there,
scale and bias are applied there, and the result is cast ONCE to x.dtype, last. Code that casts before it
multiplies by the scale (Llama in transformers) rounds twice and may differ in the last bfloat16 place.
"""

import chex
import jax
import jax.numpy as jnp

from jaxblock.types import Array


def layer_norm(
    x: Array, scale: Array | None = None, bias: Array | None = None, *, epsilon: float = 1e-5
) -> Array:
    """Return scale * (x - mean(x)) / sqrt(mean((x - mean(x))**2) + epsilon) + bias over the last axis.

    x: [..., D] of any floating dtype, which is also the dtype of the result; scale, bias: [D], or None.
    The variance is the mean of squared deviations, never mean(x**2) - mean(x)**2, which can go negative.
    Raises AssertionError (chex) for a non-floating x or a parameter whose shape is not [D].
    Source: arXiv 1607.06450, eq. 4, with epsilon inside the root.
    """
    _check(x, scale, bias)
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    # Rounding of a large mean shifts the whole row, and 1 / sqrt(epsilon) would blow that up when the row is
    # constant: remove what is left of the mean. In exact arithmetic it is zero, hence no gradient.
    centred = centred - jax.lax.stop_gradient(jnp.mean(centred, axis=-1, keepdims=True))
    y = centred * jax.lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + epsilon)
    return _affine(y, scale, bias).astype(x.dtype)


def rms_norm(x: Array, scale: Array | None = None, *, epsilon: float = 1e-6) -> Array:
    """Return scale * x / sqrt(mean(x**2) + epsilon) over the last axis.

    x: [..., D] of any floating dtype, which is also the dtype of the result; scale: [D], or None for none.
    The factor is `scale` itself, not 1 + scale: an importer of (1 + w) weights adds the one.
    Raises AssertionError (chex) for a non-floating x or a scale whose shape is not [D].
    Source: arXiv 1910.07467, eq. 4, with epsilon inside the root.
    """
    _check(x, scale)
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    y = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + epsilon)
    return _affine(y, scale, None).astype(x.dtype)


def _check(x: Array, *parameters: Array | None) -> None:
    chex.assert_type(x, float)
    for parameter in parameters:
        if parameter is not None:
            chex.assert_shape(parameter, (x.shape[-1],))
            chex.assert_type(parameter, float)


def _affine(y: Array, scale: Array | None, bias: Array | None) -> Array:
    last_axis = (1,) * (y.ndim - 1) + (-1,)
    if scale is not None:
        y = y * scale.astype(y.dtype).reshape(last_axis)
    if bias is not None:
        y = y + bias.astype(y.dtype).reshape(last_axis)
    return y
