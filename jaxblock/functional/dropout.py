"""Inverted dropout: y = x * keep / (1 - rate), keep ~ Bernoulli(1 - rate), so E[y] = x.

Of entries (arXiv 1207.0580), or of whole rows, which as the branch of a residual connection is stochastic depth
(arXiv 1603.09382).

Inside a function mapped over an axis named ROWS_AXIS (pmap, shard_map), which splits a batch's rows over devices, each
device has its rows of the draw for all rows: what is dropped does not depend on the number of devices. Under jit a
draw is the same however its array is split (jax's partitionable threefry).
"""

import chex
import jax
import jax.numpy as jnp

from jaxblock.contracts import check_number
from jaxblock.types import Array

ROWS_AXIS = "rows"
"""The mapped axis over which rows, the first axis of what is dropped from, are split."""


def dropout(x: Array, rate: float, key: Array | None) -> Array:
    """Return x with each entry dropped independently with probability `rate`, the others divided by 1 - rate.

    Without a key, or at rate 0, the result is x itself: dropout is on exactly when a key is passed.
    Rate 1 gives zeros. Shape and dtype are those of x; every entry has its own draw (nothing is broadcast).
    Raises ValueError for a rate outside [0, 1]; the rate is a Python number, fixed when the caller is traced.
    """
    check_number("dropout rate", rate, least=0.0, most=1.0)
    if key is None or rate == 0:
        return x
    if rate == 1:
        return jnp.zeros_like(x)
    keep = _kept(key, 1.0 - rate, x.shape)
    return jnp.where(keep, x / (1.0 - rate), jnp.zeros_like(x))


def drop_rows(x: Array, rate: Array, key: Array | None) -> Array:
    """Return x [B, ...] with each row dropped whole with probability `rate`, the others divided by 1 - rate.

    Without a key the result is x itself. The rate is a float32 scalar in [0, 1), traced where blocks are scanned.
    Raises AssertionError for a rate that is no floating scalar.
    """
    if key is None:
        return x
    chex.assert_rank(rate, 0)
    chex.assert_type(rate, float)
    keep_B = _kept(key, 1.0 - rate, x.shape[:1])
    keep = keep_B.reshape(-1, *(1,) * (x.ndim - 1))
    # Never 1 / 0: a row that is not kept would get a gradient of 0 * inf.
    factor = 1.0 / jnp.maximum(1.0 - rate, jnp.finfo(jnp.float32).eps)
    return jnp.where(keep, x * factor.astype(x.dtype), jnp.zeros_like(x))


def _kept(key: Array, probability: float | Array, shape: tuple[int, ...]) -> Array:
    """Return Bernoulli draws, boolean of `shape`: this device's rows, where a mapped axis splits them."""
    try:
        device = jax.lax.axis_index(ROWS_AXIS)
    except NameError:  # no such axis: these are all rows
        return jax.random.bernoulli(key, probability, shape)
    if not shape:
        return jax.random.bernoulli(key, probability, shape)
    rows, rest = shape[0], shape[1:]
    # Drawn for all and cut: a draw is elementwise, so the compiler makes this device's rows only.
    everyone = jax.random.bernoulli(key, probability, (jax.lax.axis_size(ROWS_AXIS) * rows, *rest))
    return jax.lax.dynamic_slice_in_dim(everyone, device * rows, rows)
