"""Gradients along depth: of the stream at every sublayer in [S + 1] numbers, and of parameters by role and block.

G_s = |d loss / d x_s|,  s = 0 (before the first sublayer), ..., S (the closed stream)
noise = tr Cov(g) / |E g|^2 over micro-batches, by role and block
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxblock.axes import roles
from jaxblock.config import ModelConfig
from jaxblock.models.observation import TAPS
from jaxblock.modules.intermediates import BRANCHES
from jaxblock.types import Array, Params


class GradientProfile(NamedTuple):
    """Norms of one gradient."""

    stream_S: Array
    """|d loss / d x_s|, float32 [S + 1]; 0 before every sublayer where the stream is not one array."""
    gradient: Params
    """Of the parameters, the gradient itself."""


def open_taps(config: ModelConfig) -> dict[str, Any]:
    """Return the collection "taps" of a model, all 0: put it beside "params" and differentiate with respect to it."""
    first = "attention" if config.token_mixer_choice.name == "attention" else "token_mixer"
    first = "parallel" if config.wiring == "parallel" else first
    (branches,) = (names for names in BRANCHES if names[0] == first)
    zeros = {name: jnp.zeros((config.depth,), jnp.float32) for name in branches}
    return {"blocks": zeros, "closed": jnp.zeros((), jnp.float32)}


def gradient_profile(
    config: ModelConfig, loss: Callable[[Mapping[str, Any]], Array], params: Params
) -> GradientProfile:
    """Return the norms of a loss's gradient along the stream, from one backward pass.

    Args:
      config: the model's.
      loss: a function of the model's variables, {"params": ..., "taps": ...}, that hands them on to `model.apply`.
      params: where.
    """
    variables = {"params": params, TAPS: open_taps(config)}
    gradient = jax.grad(loss)(variables)
    return GradientProfile(stream_gradient(gradient[TAPS]), gradient["params"])


def stream_gradient(taps: Mapping[str, Any]) -> Array:
    """Return |d loss / d x_s|, float32 [S + 1], from the "gradient" of the collection "taps"."""
    # A gradient's keys come back sorted: the order of the sublayers is that of BRANCHES.
    (branches,) = (names for names in BRANCHES if set(names) == set(taps["blocks"]))
    squares_LN = jnp.stack([taps["blocks"][name] for name in branches], axis=1)
    return jnp.sqrt(jnp.append(squares_LN.reshape(-1), taps["closed"]))


class GradientNoise(NamedTuple):
    """Spread of micro-batches' gradients of one role, float32: [L] in the blocks, else scalars."""

    covariance: Array
    """tr Cov(g), unbiased: sum over micro-batches and entries of (g - mean)^2 / (K - 1)."""
    mean_square: Array
    """|E g|^2, unbiased: |mean|^2 - covariance / K, which may come out below 0 where noise is all there is."""
    ratio: Array
    """covariance / mean_square: how many micro-batches make noise and signal equal (times the micro-batch's size, the
    simple noise scale of arXiv 1812.06162, eq. 2.9); infinite where mean_square is not above 0, 0 without noise."""


def parameter_profile(gradient: Params, params: Params) -> dict[str, tuple[Array, Array]]:
    """Return by role (root mean square of the gradient, |gradient| / |parameters|), [L] for the blocks', else scalars.

    A role with several parameters, such as the norms of a block, is taken as one vector.
    """
    g2s, p2s = _by_role(gradient, _sum_of_squares), _by_role(params, _sum_of_squares)
    sizes = _by_role(params, lambda x, axes: float(math.prod(x.shape[axis] for axis in axes)))
    return {
        name: (
            jnp.sqrt(g2 / sizes[name]),
            jnp.where(p2 > 0, jnp.sqrt(g2 / jnp.where(p2 > 0, p2, 1.0)), 0.0),
        )
        for (name, g2), p2 in zip(g2s.items(), p2s.values(), strict=True)
    }


def gradient_noise(
    loss: Callable[[Params, Any], Array], params: Params, batches: Any
) -> dict[str, GradientNoise]:
    """Return by role how micro-batches' gradients differ, from one backward pass each, one at a time.

    Welford's update keeps it exact where the noise is far below the mean; memory is two gradients, whatever K.

    Args:
      loss: (parameters, one micro-batch) -> a scalar, a mean over equally many targets of each.
      params: where.
      batches: a pytree of arrays [K, ...], K >= 2 micro-batches.

    Raises:
      ValueError: fewer than two micro-batches.
    """
    counts = {leaf.shape[0] for leaf in jax.tree.leaves(batches)}
    if len(counts) != 1 or min(counts) < 2:
        raise ValueError(
            f"batches has leading axes of {sorted(counts)}; it must be one number K of micro-batches, at least 2"
        )
    (k,) = counts

    def step(carry: tuple[Params, dict[str, Array]], numbered: tuple[Array, Any]) -> tuple[Any, None]:
        (mean, spread), (number, batch) = carry, numbered
        g = jax.tree.map(lambda x: x.astype(jnp.float32), jax.grad(loss)(params, batch))
        after = jax.tree.map(lambda m, x: m + (x - m) / number, mean, g)
        products = _by_role(
            jax.tree.map(lambda x, m, a: (x - m) * (x - a), g, mean, after),
            lambda x, axes: jnp.sum(x, axis=axes),
        )
        return (after, {name: spread[name] + x for name, x in products.items()}), None

    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    start = (zeros, _by_role(zeros, _sum_of_squares))
    numbers_K = jnp.arange(1, k + 1, dtype=jnp.float32)
    (mean, spread), _ = jax.lax.scan(step, start, (numbers_K, batches))
    mean2 = _by_role(mean, _sum_of_squares)
    return {name: _noise(m2 / (k - 1), mean2[name], k) for name, m2 in spread.items()}


def _noise(covariance: Array, mean2: Array, k: int) -> GradientNoise:
    signal = mean2 - covariance / k
    ratio = jnp.where(signal > 0, covariance / jnp.where(signal > 0, signal, 1.0), jnp.inf)
    return GradientNoise(covariance, signal, jnp.where(covariance > 0, ratio, 0.0))


def _by_role(tree: Params, number: Callable[[Array, tuple[int, ...]], Any]) -> dict[str, Any]:
    """Return number(leaf, axes to reduce) added up by role: all axes, but for the blocks' the first."""
    sums: dict[str, Any] = {}
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    for (path, x), role in zip(leaves, jax.tree.leaves(roles(tree)), strict=True):
        stacked = getattr(path[0], "key", None) == "blocks"
        name = role if stacked else f"{role} outside the blocks"
        found = number(x, tuple(range(int(stacked), x.ndim)))
        sums[name] = sums[name] + found if name in sums else found
    return sums


def _sum_of_squares(x: Array, axes: tuple[int, ...]) -> Array:
    return jnp.sum(jnp.square(x.astype(jnp.float32)), axis=axes)
