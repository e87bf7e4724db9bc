"""How forward and backward sizes go together along depth, and whether a final norm stands at the end.

    parity product     r_s G_s / (r_0 G_0),  r_s the stream's size before sublayer s, G_s that of its gradient
    radial gradient    <x, d loss / dx> at the closed stream: 0 up to epsilon, where a norm alone reads it

A norm makes the loss a function of the direction of each token's x, so its gradient has no part along x; a layer norm's
also none along the vector of ones. Layer norm, RMS norm: arXiv 1607.06450, 1910.07467.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from jaxblock.models.trunk import Trunk
from jaxblock.modules.intermediates import COLLECTION as INTERMEDIATES
from jaxblock.probes.observer import StreamProfile
from jaxblock.types import Array, Params


class RadialGradient(NamedTuple):
    """Shares of the closed stream's gradient g, float32 scalars in [0, 1]; x and g token by token, sums over tokens.
    0 without a gradient."""

    radial: Array
    """sqrt(sum <x, g>^2 / sum |x|^2 |g|^2). Under a norm about epsilon / (mean x^2 + epsilon) of what it would be."""
    constant: Array
    """sqrt(sum <1, g>^2 / sum D |g|^2): 0 under a layer norm, and under nothing else."""


def stream_sizes(profile: StreamProfile) -> Array | None:
    """Return r_s, the root mean square of the stream before every sublayer and after the last, float32 [S + 1].

    Args:
      profile: of a probe with "sizes".

    Returns:
      None where the stream is not one array, or "sizes" was not asked for.
    """
    values = profile.values
    if "stream_rms" not in values:
        return None
    return jnp.append(values["stream_rms_before"], values["stream_rms"][-1])


def parity_product(sizes_S: Array, gradients_S: Array) -> Array:
    """Return r_s G_s / (r_0 G_0), float32 [S + 1]; 1 everywhere where the gradient shrinks as the stream grows.

    Flat for pre-norm at initialization, where forward and backward gains match; a bend is a sublayer that does not.

    Args:
      sizes_S: r_s, [S + 1], in any unit, as of `stream_sizes`.
      gradients_S: G_s, as of `gradient_profile`.

    Returns:
      NaN everywhere where r_0 G_0 is 0: there is nothing to compare with.
    """
    chex.assert_rank([sizes_S, gradients_S], 1)
    chex.assert_equal_shape([sizes_S, gradients_S])
    product_S = sizes_S.astype(jnp.float32) * gradients_S.astype(jnp.float32)
    return jnp.where(product_S[0] > 0, product_S / jnp.where(product_S[0] > 0, product_S[0], 1.0), jnp.nan)


def radial_gradient(
    model: Trunk,
    params: Params,
    tokens_BT: Array,
    loss: Callable[[Array], Array],
    *,
    valid_BT: Array | None = None,
) -> RadialGradient:
    """Return how much of the closed stream's gradient points along the stream itself.

    Args:
      model: a decoder, an encoder or a classifier.
      params: its parameters.
      tokens_BT: ids read.
      loss: a function of what the model returns, a scalar.
      valid_BT: which tokens are real; None = all.
    """
    topology = model.connections

    def loss_of(added_BTD: Array) -> tuple[Array, Array]:
        def close(config: Any, *, name: str) -> Callable[[Any, Any], Array]:
            def closed(stream: Any, shared: Any) -> Array:
                x = stream if topology.close is None else topology.close(config, name=name)(stream, shared)
                return x + added_BTD.astype(x.dtype) if x.shape == added_BTD.shape else x

            return closed

        seen = model.clone(topology=dataclasses.replace(topology, close=close), observe=None)
        made: Any = seen.apply({"params": params}, tokens_BT, valid_BT=valid_BT, mutable=[INTERMEDIATES])
        return loss(made[0]), made[1][INTERMEDIATES]["resid_final"]

    zeros_BTD = jnp.zeros((*tokens_BT.shape, model.config.width), jnp.float32)
    g_BTD, x_BTD = jax.grad(loss_of, has_aux=True)(zeros_BTD)
    x_BTD = x_BTD.astype(jnp.float32)
    if valid_BT is not None:
        x_BTD, g_BTD = (jnp.where(valid_BT[..., None], y, 0.0) for y in (x_BTD, g_BTD))
    return RadialGradient(_share(x_BTD, g_BTD), _share(jnp.ones_like(x_BTD), g_BTD))


def _share(x_BTD: Array, g_BTD: Array) -> Array:
    dot_BT, x2_BT, g2_BT = (
        jnp.sum(a * b, axis=-1) for a, b in ((x_BTD, g_BTD), (x_BTD, x_BTD), (g_BTD, g_BTD))
    )
    whole = jnp.sum(x2_BT * g2_BT)
    return jnp.sqrt(jnp.sum(jnp.square(dot_BT)) / jnp.where(whole > 0, whole, 1.0))
