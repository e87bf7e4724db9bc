"""Adafactor's direction (arXiv 1804.04235): a kernel's second moments kept as one row and one column.

Kept per layer: the depth axis of a stacked kernel is a batch of matrices. (`optax.adafactor` factors the two largest
axes of a leaf, whichever they are, and clips the leaf as a whole: both would tie the layers together.)
"""

from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import optax

from jaxblock import axes
from jaxblock.training.optimizer.roles import MATRICES, depth_axes
from jaxblock.types import Array, Params


class FactoredMoment(NamedTuple):
    """Second moments of a kernel, averaged over its outputs and over its inputs; averaged axes have length 1."""

    row: Array
    column: Array


class AdafactorState(NamedTuple):
    """The second moments; `square` has a `FactoredMoment` for every matrix and a whole array for the rest."""

    count: Array
    square: Params


def adafactor(*, decay: float, epsilon: float, clipping: float) -> optax.GradientTransformation:
    """Return Adafactor's direction, without its momentum and without its relative step size.

        beta = 1 - t^-decay, t = 1, 2, ...
        R <- beta R + (1 - beta) mean over outputs of (g^2 + epsilon)
        C <- beta C + (1 - beta) mean over inputs of (g^2 + epsilon)
        u = g / sqrt(R C / mean(R))                  algorithm 4; vectors: g / sqrt(V), algorithm 5
        d = u / max(1, rms(u) / clipping)            per parameter of a layer, section 6

    Roles that are matrices are factored whatever their size. The paper's step size, relative to the parameter's own
    rms, is left out (as in arXiv 2106.04560), so that a learning rate means what it means for Adam.
    """

    def init(params: Params) -> optax.OptState:
        zero = jnp.zeros((), jnp.int32)
        return AdafactorState(zero, jax.tree.map(_first_moment, params, axes.roles(params)))

    def update(
        updates: Params, state: optax.OptState, params: Params | None = None
    ) -> tuple[Params, optax.OptState]:
        count, squares = cast(AdafactorState, state)
        count = count + 1
        roles = axes.roles(updates)

        def accumulate(g: Array, role: str, square: Array | FactoredMoment) -> Array | FactoredMoment:
            beta = 1.0 - count.astype(g.dtype) ** -decay
            new = _as_moment(jnp.square(g) + epsilon, role)
            return jax.tree.map(lambda old, fresh: beta * old + (1.0 - beta) * fresh, square, new)

        def direction(g: Array, role: str, depth: int, square: Array | FactoredMoment) -> Array:
            u = _rescaled(g, role, square)
            rms = jnp.sqrt(jnp.mean(jnp.square(u), axis=range(depth, u.ndim), keepdims=True))
            return u / jnp.maximum(1.0, rms / clipping)

        squares = jax.tree.map(accumulate, updates, roles, squares)
        directions = jax.tree.map(direction, updates, roles, depth_axes(updates), squares)
        return directions, AdafactorState(count, squares)

    return optax.GradientTransformation(init, update)


def _as_moment(square: Array, role: str) -> Array | FactoredMoment:
    """Return the row and the column of a matrix of squares; anything else as it is."""
    if role not in MATRICES:
        return square
    inputs, outputs = MATRICES[role]
    return FactoredMoment(square.mean(axis=outputs, keepdims=True), square.mean(axis=inputs, keepdims=True))


def _first_moment(param: Array, role: str) -> Array | FactoredMoment:
    """Return the zeros that `_as_moment` of such a parameter starts from."""
    shapes = jax.eval_shape(lambda x: _as_moment(x, role), param)
    return jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)


def _rescaled(g: Array, role: str, square: Array | FactoredMoment) -> Array:
    """Return g / sqrt(V); a factored V is never multiplied out, as R C may leave the range of float32."""
    if not isinstance(square, FactoredMoment):
        return g * jax.lax.rsqrt(square)
    share = square.row / square.row.mean(axis=MATRICES[role].inputs, keepdims=True)
    return g * jax.lax.rsqrt(share) * jax.lax.rsqrt(square.column)
