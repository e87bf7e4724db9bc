"""Gradients along depth: of the stream at every sublayer in [S + 1] numbers, and of parameters by role and block.

G_s = |d loss / d x_s|,  s = 0 (before the first sublayer), ..., S (the closed stream)
"""

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
    params: Params
    """The gradient itself."""


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
    squares_SL = jnp.stack(list(gradient[TAPS]["blocks"].values()))
    squares_S = jnp.append(squares_SL.T.reshape(-1), gradient[TAPS]["closed"])
    return GradientProfile(jnp.sqrt(squares_S), gradient["params"])


def parameter_profile(gradient: Params, params: Params) -> dict[str, tuple[Array, Array]]:
    """Return by role (root mean square of the gradient, |gradient| / |parameters|), [L] for the blocks', else scalars.

    A role with several parameters, such as the norms of a block, is taken as one vector.
    """
    sums: dict[str, list[Array]] = {}
    for (path, g), p, role in zip(
        jax.tree_util.tree_leaves_with_path(gradient),
        jax.tree.leaves(params),
        jax.tree.leaves(roles(params)),
        strict=True,
    ):
        stacked = getattr(path[0], "key", None) == "blocks"
        axes = tuple(range(1, g.ndim)) if stacked else None
        square = lambda x, axes=axes: jnp.sum(jnp.square(x.astype(jnp.float32)), axis=axes)  # noqa: E731
        name = role if stacked else f"{role} outside the blocks"
        size = g.size // (g.shape[0] if stacked else 1)
        found = jnp.stack([square(g), square(p), jnp.full(square(g).shape, float(size))])
        sums.setdefault(name, []).append(found)
    profile = {}
    for name, parts in sums.items():
        g2, p2, size = sum(parts[1:], parts[0])
        profile[name] = (
            jnp.sqrt(g2 / size),
            jnp.where(p2 > 0, jnp.sqrt(g2 / jnp.where(p2 > 0, p2, 1.0)), 0.0),
        )
    return profile
