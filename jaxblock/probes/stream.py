"""Statistics of the residual stream at one place in depth: pure functions of arrays, sums in float32.

A sublayer takes the stream x to x + u; u is the update, whatever the rule made it of. Of tokens only real ones count
(`valid_BT`, boolean, None = all), and every mean over tokens is a sum over a sum, so that it is the same number on one
device and on eight. What has no real token is 0, never NaN.
"""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from jaxblock.types import Array


class Growth(NamedTuple):
    """The exact budget |x + u|^2 = |x|^2 + 2 <x, u> + |u|^2, means over tokens, float32 scalars."""

    before: Array
    """mean |x|^2 / D."""
    cross: Array
    """mean 2 <x, u> / D."""
    update: Array
    """mean |u|^2 / D."""
    cosine: Array
    """mean of cos(x, u): below 0 the update erases, near 0 it adds a direction, above 0 it amplifies."""


class Outliers(NamedTuple):
    """How far single entries stick out, float32 scalars."""

    largest: Array
    """max |x| over the root mean square of all entries."""
    kurtosis: Array
    """mean x^4 / (mean x^2)^2: 3 for a normal distribution, D where one channel holds everything."""


class Absorption(NamedTuple):
    """What a sum in the stream's dtype loses, float32 scalars."""

    lost: Array
    """Share of the entries of u that are not 0 and change nothing: x + u == x in the stream's dtype."""
    bits: Array
    """Mean over those entries that do change x of the bits of u that are kept: p + log2(|u| / |x|), at most p."""


def root_mean_square(x_BTD: Array, valid_BT: Array | None = None) -> Array:
    """Return sqrt(mean x^2) over real tokens and channels, a float32 scalar."""
    return jnp.sqrt(_mean(jnp.mean(jnp.square(_wide(x_BTD)), axis=-1), valid_BT))


def relative_update(x_BTD: Array, u_BTD: Array, valid_BT: Array | None = None) -> Array:
    """Return sqrt(sum |u|^2 / sum |x|^2) over real tokens, float32: how much of a stream one sublayer writes."""
    chex.assert_equal_shape([x_BTD, u_BTD])
    return _ratio(root_mean_square(u_BTD, valid_BT), root_mean_square(x_BTD, valid_BT))


def norm_budget(x_BTD: Array, u_BTD: Array, valid_BT: Array | None = None) -> Growth:
    """Return the three terms of |x + u|^2 and the mean cosine."""
    chex.assert_equal_shape([x_BTD, u_BTD])
    x, u = _wide(x_BTD), _wide(u_BTD)
    xx_BT, xu_BT, uu_BT = (jnp.mean(a * b, axis=-1) for a, b in ((x, x), (x, u), (u, u)))
    cosine_BT = _ratio(xu_BT, jnp.sqrt(xx_BT) * jnp.sqrt(uu_BT))
    return Growth(*(_mean(term, valid_BT) for term in (xx_BT, 2.0 * xu_BT, uu_BT, cosine_BT)))


def constant_share(x_BTD: Array, valid_BT: Array | None = None) -> Array:
    """Return the mean over tokens of |mean_D x| / rms_D x, from 0 to 1: what layer norm removes and RMS norm keeps."""
    x = _wide(x_BTD)
    return _mean(_ratio(jnp.abs(x.mean(-1)), jnp.sqrt(jnp.square(x).mean(-1))), valid_BT)


def outliers(x_BTD: Array, valid_BT: Array | None = None) -> Outliers:
    """Return how far single entries stick out; pass `valid_BT` without the first token to leave it out."""
    x = _wide(x_BTD)
    second, fourth = (_mean((x**power).mean(-1), valid_BT) for power in (2, 4))
    largest = jnp.max(jnp.where(_real(valid_BT, x)[..., None], jnp.abs(x), 0.0))
    return Outliers(_ratio(largest, jnp.sqrt(second)), _ratio(fourth, jnp.square(second)))


def token_similarity(x_BTD: Array, valid_BT: Array | None = None) -> Array:
    """Return the mean cosine of two different real tokens of a row, in [-1, 1], a float32 scalar; 1 = collapsed.

    (|sum_t n_t|^2 - T) / (T (T - 1)) with unit vectors n_t; rows with fewer than two real tokens do not count.
    """
    x, real_BT = _wide(x_BTD), _real(valid_BT, x_BTD)
    unit = _ratio(x, jnp.sqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True)))
    unit = jnp.where(real_BT[..., None], unit, 0.0)
    sums_B, own_B = jnp.square(unit.sum(1)).sum(-1), jnp.square(unit).sum((1, 2))
    count_B = real_BT.sum(1).astype(jnp.float32)
    pairs_B = count_B * (count_B - 1.0)
    return _ratio(jnp.sum(jnp.where(pairs_B > 0, sums_B - own_B, 0.0)), jnp.sum(pairs_B))


def effective_rank(x_BTD: Array, valid_BT: Array | None = None) -> Array:
    """Return the participation ratio tr(C)^2 / tr(C^2) of C = mean x x^T, from 1 to D; O(tokens D^2)."""
    x = jnp.where(_real(valid_BT, x_BTD)[..., None], _wide(x_BTD), 0.0).reshape(-1, x_BTD.shape[-1])
    c_DD = jnp.matmul(x.T, x, precision=jax.lax.Precision.HIGHEST)
    return _ratio(jnp.square(jnp.trace(c_DD)), jnp.sum(jnp.square(c_DD)))


def absorption(x_BTD: Array, u_BTD: Array, valid_BT: Array | None = None) -> Absorption:
    """Return what x + u loses in x's dtype (see `Absorption`)."""
    chex.assert_equal_shape([x_BTD, u_BTD])
    u = u_BTD.astype(x_BTD.dtype)
    written = (u_BTD != 0) & _real(valid_BT, x_BTD)[..., None]
    lost = written & (x_BTD + u == x_BTD)
    precision = float(jnp.finfo(x_BTD.dtype).nmant + 1)
    size = _ratio(jnp.abs(_wide(u_BTD)), jnp.abs(_wide(x_BTD)))
    kept = jnp.clip(precision + jnp.log2(jnp.where(size > 0, size, 1.0)), 0.0, precision)
    changed = written & ~lost
    count = lambda x: jnp.sum(x.astype(jnp.float32))  # noqa: E731
    return Absorption(
        _ratio(count(lost), count(written)), _ratio(jnp.sum(jnp.where(changed, kept, 0.0)), count(changed))
    )


def epsilon_share(x_BTD: Array, epsilon: float, valid_BT: Array | None = None) -> Array:
    """Return the largest epsilon / (mean x^2 + epsilon) of a real token: near 1 a norm no longer norms."""
    share_BT = epsilon / (jnp.square(_wide(x_BTD)).mean(-1) + epsilon)
    return jnp.max(jnp.where(_real(valid_BT, x_BTD), share_BT, 0.0))


def not_finite(x_BTD: Array, valid_BT: Array | None = None) -> Array:
    """Return whether any entry of a real token is NaN or infinite, a boolean scalar."""
    return jnp.any(~jnp.isfinite(x_BTD) & _real(valid_BT, x_BTD)[..., None])


def _wide(x: Array) -> Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _real(valid_BT: Array | None, x_BTD: Array) -> Array:
    """Return which tokens count, boolean [B, T]."""
    if valid_BT is None:
        return jnp.ones(x_BTD.shape[:2], jnp.bool_)
    return jnp.broadcast_to(valid_BT, x_BTD.shape[:2])


def _mean(x_BT: Array, valid_BT: Array | None) -> Array:
    """Return the mean over real tokens."""
    real_BT = _real(valid_BT, x_BT[..., None])
    return _ratio(jnp.sum(jnp.where(real_BT, x_BT, 0.0)), jnp.sum(real_BT.astype(x_BT.dtype)))


def _ratio(a: Array, b: Array) -> Array:
    """Return a / b, 0 where b is 0."""
    return jnp.where(b == 0, 0.0, a / jnp.where(b == 0, 1.0, b))
