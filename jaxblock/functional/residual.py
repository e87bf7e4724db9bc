"""The residual equation in its published placements of the norm and scales: pure functions of a stream and a branch.

Each takes the stream x [B, T, D], the branch f and norms with their parameters bound, and returns the stream.
Where there is a factor, products and sums are taken in float32 (float64 stays float64) and cast once to x's dtype.
This file is the one place where these sums are written; `jaxblock.residual` gives them parameters.
"""

import chex
import jax.numpy as jnp

from jaxblock.types import Array, Branch, Norm


def no_residual(x: Array, f: Branch, norm: Norm) -> Array:
    """Replace the stream by the branch: the control without a skip. A zero branch gives 0."""
    return f(norm(x))


def pre_norm(x: Array, f: Branch, norm: Norm) -> Array:
    """Add the branch of the normalized stream: the identity path is never touched (arXiv 2002.04745)."""
    return x + f(norm(x))


def post_norm(x: Array, f: Branch, norm: Norm) -> Array:
    """Normalize the sum, identity path included: the first Transformer (arXiv 1706.03762)."""
    return norm(x + f(x))


def peri_norm(x: Array, f: Branch, norm_in: Norm, norm_out: Norm) -> Array:
    """Normalize the branch at both ends: Sandwich-LN, Peri-LN (arXiv 2105.13290, 2502.02732)."""
    return x + norm_out(f(norm_in(x)))


def branch_norm(x: Array, f: Branch, norm: Norm) -> Array:
    """Normalize the branch's output only: OLMo 2's placement (arXiv 2501.00656)."""
    return x + norm(f(x))


def scaled_branch(x: Array, f: Branch, norm: Norm, scale: Array | float) -> Array:
    """Add the branch times a number, or times one number per channel [D]: LayerScale (arXiv 2103.17239)."""
    return (x + _factor(scale, x) * f(norm(x))).astype(x.dtype)


def rezero(x: Array, f: Branch, alpha: Array | float) -> Array:
    """Add alpha times the branch of the stream as it is: ReZero, SkipInit (arXiv 2003.04887, 2002.10444)."""
    return (x + _factor(alpha, x) * f(x)).astype(x.dtype)


def layer_norm_scaling(x: Array, f: Branch, norm: Norm, number: Array | int) -> Array:
    """Let the branch read norm(x) / sqrt(l), l the block's number, from 1 (arXiv 2502.05795)."""
    scale = 1.0 / jnp.sqrt(_factor(number, x))
    return x + f((scale * norm(x)).astype(x.dtype))


def deep_norm(x: Array, f: Branch, norm: Norm, alpha: float) -> Array:
    """Normalize the sum in which the stream counts alpha times: DeepNorm (arXiv 2203.00555)."""
    return norm(_factor(alpha, x) * x + f(x)).astype(x.dtype)


def keel(x: Array, f: Branch, norm_in: Norm, norm_out: Norm, alpha: float) -> Array:
    """Do as `deep_norm`, with a norm before the branch as well: KEEL (arXiv 2601.19895)."""
    return norm_out(_factor(alpha, x) * x + f(norm_in(x))).astype(x.dtype)


def mix_norm(x: Array, f: Branch, norm: Norm, post: Array) -> Array:
    """Choose post_norm where the boolean scalar `post` is True, else pre_norm: Mix-LN (arXiv 2412.13795)."""
    chex.assert_shape(post, ())
    chex.assert_type(post, bool)
    y = x + f(jnp.where(post, x, norm(x)))
    return jnp.where(post, norm(y), y)


def _factor(factor: Array | float, x: Array) -> Array:
    """Return a number, or numbers [D], so that they multiply x [..., D], in at least float32."""
    wide = jnp.asarray(factor).astype(jnp.promote_types(x.dtype, jnp.float32))
    if wide.ndim == 0:
        return wide
    chex.assert_shape(wide, x.shape[-1:])
    return wide.reshape((1,) * (x.ndim - 1) + (-1,))
