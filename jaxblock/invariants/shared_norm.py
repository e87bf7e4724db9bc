"""Whether one norm's parameters serve two sublayers, from the parameter tree and from where gradients come."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxblock.axes import path_name
from jaxblock.types import Array, Params


class NormSites(NamedTuple):
    """Which norm parameters act where, in a block of two sublayers, one after the other; paths as in the tree."""

    shared: tuple[str, ...]
    """Parameters that act through both branches: with attention at gain 0 and with the feed-forward at gain 0."""
    lone: tuple[str, ...]
    """Parameters on the path itself, the only ones of their kind there: one norm where two sublayers need two."""
    attention: tuple[str, ...]
    """Parameters that act with the feed-forward at gain 0."""
    feed_forward: tuple[str, ...]
    """Parameters that act with attention at gain 0."""
    path: tuple[str, ...]
    """Parameters that act with both at gain 0: norms of the stream itself, biases behind a branch."""


def find_shared_norms(
    apply: Callable[[Params, Array, Array, Array], Array],
    params: Params,
    x_BTD: Array,
    *,
    is_norm: Callable[[str], bool] = lambda path: "norm" in path,
) -> NormSites:
    """Return where each norm parameter acts: where the gradient through it is not exactly 0.

    A branch at gain 0 hides the norm before it, so a norm that still acts then belongs to the other sublayer too:
    moving the attention norm's scale moves the feed-forward's input. Shared norms also show in the parameter count,
    D (RMSNorm) or 2 D (LayerNorm) too few per block. A parallel block has one norm by construction: see
    `describe_block`'s order.

    Args:
      apply: (params, x [B, T, D], attention gain, feed-forward gain) -> x [B, T, D]; see `switch_block`.
      params: with branches, scales and biases off 0.
      x_BTD: a random stream.
      is_norm: which paths ("ln_1/scale") are norms' parameters.

    Raises:
      ValueError: no path is a norm's.
    """
    weight_BTD = jnp.cos(jnp.arange(x_BTD.size, dtype=jnp.float32) ** 2).reshape(x_BTD.shape)

    def acting(attention: float, feed_forward: float) -> dict[str, bool]:
        def probe(params: Params) -> Array:
            gains = jnp.float32(attention), jnp.float32(feed_forward)
            return jnp.sum(weight_BTD * apply(params, x_BTD, *gains))

        leaves = jax.tree_util.tree_leaves_with_path(jax.grad(probe)(params))
        return {
            path_name(path): bool(jnp.any(leaf != 0)) for path, leaf in leaves if is_norm(path_name(path))
        }

    on_path, first, second = acting(0, 0), acting(1, 0), acting(0, 1)
    if not on_path:
        raise ValueError("no parameter path is a norm's: pass is_norm, a test of paths such as 'ln_1/scale'")
    shared = [name for name in first if first[name] and second[name] and not on_path[name]]
    kinds = [name.rpartition("/")[2] for name in first if first[name] or second[name]]
    lone = [name for name in first if on_path[name] and kinds.count(name.rpartition("/")[2]) == 1]
    return NormSites(
        tuple(shared), tuple(lone), *(tuple(n for n in site if site[n]) for site in (first, second, on_path))
    )
