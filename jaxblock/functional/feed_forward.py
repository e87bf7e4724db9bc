"""Position-wise feed-forward maps: down(act(up x)), and the gated form down(act(gate x) * up x).

Sources: arXiv 1706.03762, eq. 2 (plain); arXiv 2002.05202, eqs. 5 and 6 (gated).
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxblock.contracts import check_choice
from jaxblock.functional.dense import dense
from jaxblock.types import Array


class FeedForwardWeights(NamedTuple):
    """Kernels up [D, F] and down [F, D], biases [F] and [D] or None."""

    up: Array
    down: Array
    up_bias: Array | None = None
    down_bias: Array | None = None


class GatedWeights(NamedTuple):
    """Kernels gate [D, F], up [D, F] and down [F, D], biases [F], [F] and [D] or None."""

    gate: Array
    up: Array
    down: Array
    gate_bias: Array | None = None
    up_bias: Array | None = None
    down_bias: Array | None = None


def _gelu(x: Array) -> Array:
    """x * Phi(x) with the exact normal distribution function (erf); arXiv 1606.08415. In float32 and cast back.

    By 1 + erf, within 2e-7 |x| of it: erfc keeps the digits of a tail that is all but 0, and takes twice the time.
    """
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return (0.5 * wide * (1.0 + jax.lax.erf(wide * math.sqrt(0.5)))).astype(x.dtype)


def _gelu_tanh(x: Array) -> Array:
    """The tanh approximation of `gelu` (GPT-2's); differs from it by up to 5e-4."""
    return jax.nn.gelu(x, approximate=True)


ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "relu": jax.nn.relu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "silu": jax.nn.silu,
}
"""The plain form's activations by name."""

GATES: Mapping[str, Callable[[Array], Array]] = {
    "glu": jax.nn.sigmoid,
    "geglu": _gelu,
    "swiglu": jax.nn.silu,
}
"""What the gated form applies to `gate x`; geglu is the exact (erf) gelu, swiglu has beta = 1."""


def _identity(hidden: Array) -> Array:
    return hidden


def feed_forward(
    x: Array,
    weights: FeedForwardWeights,
    activation: str,
    *,
    hidden_dropout: Callable[[Array], Array] = _identity,
) -> Array:
    """Return hidden_dropout(act(x up + up_bias)) down + down_bias.

    x: [..., D], each position on its own; the result has the shape and dtype of x. `activation` is a name in
    `ACTIVATIONS`. Raises ValueError for another name, AssertionError (chex) for shapes that do not match.
    Source: arXiv 1706.03762, eq. 2, any activation.
    """
    check_choice("activation", activation, ACTIVATIONS)
    # Of what an activation computes only its input is kept: the backward pass makes the rest again, where it is used.
    hidden = jax.checkpoint(ACTIVATIONS[activation])(dense(x, weights.up, weights.up_bias))
    return dense(hidden_dropout(hidden), weights.down, weights.down_bias)


def gated_feed_forward(
    x: Array,
    weights: GatedWeights,
    gate: str,
    *,
    hidden_dropout: Callable[[Array], Array] = _identity,
) -> Array:
    """Return hidden_dropout(act(x gate + gate_bias) * (x up + up_bias)) down + down_bias.

    x: [..., D], each position on its own; the result has the shape and dtype of x. `gate` is a name in
    `GATES`. Raises ValueError for another name, AssertionError (chex) for shapes that do not match.
    Source: arXiv 2002.05202, eqs. 5 and 6.
    """
    check_choice("gate", gate, GATES)

    def gated(opening: Array, up: Array) -> Array:
        return GATES[gate](opening) * up

    opening, up = dense(x, weights.gate, weights.gate_bias), dense(x, weights.up, weights.up_bias)
    hidden = jax.checkpoint(gated)(opening, up)  # as in `feed_forward`
    return dense(hidden_dropout(hidden), weights.down, weights.down_bias)
