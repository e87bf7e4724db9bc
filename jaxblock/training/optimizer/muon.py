"""Muon's direction (K. Jordan 2024, arXiv 2502.16982): the momentum of each kernel, orthogonalised.

Each block's kernel is one matrix, its inputs by its outputs: query [D, H K], output [H K, D]. The depth axis is a
batch axis, so a stacked model moves exactly as an unstacked one.
"""

import math
from collections.abc import Callable, Mapping
from typing import cast

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from jaxblock import axes
from jaxblock.training.optimizer.adam import adamw
from jaxblock.training.optimizer.roles import HIDDEN_KERNELS
from jaxblock.types import Array, Params

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""(a, b, c) of one Newton-Schulz iteration X <- a X + (b A + c A A) X with A = X X^T, K. Jordan's."""
ADAM_EPSILON = 1e-8
"""Of the parameters that AdamW moves."""


def _rms_scale(inputs: int, outputs: int) -> float:
    return 0.2 * math.sqrt(max(inputs, outputs))


def _spectral_scale(inputs: int, outputs: int) -> float:
    return math.sqrt(max(1.0, outputs / inputs))


SCALES: Mapping[str, Callable[[int, int], float]] = {"rms": _rms_scale, "spectral": _spectral_scale}
"""Factors on an orthogonal direction, by inputs and outputs of the matrix."""


def muon(
    *,
    momentum: float,
    nesterov: bool,
    iterations: int,
    scale: str,
    beta1: float = 0.9,
    beta2: float = 0.95,
) -> optax.GradientTransformation:
    """Return Muon's direction for the kernels of the blocks and AdamW's for every other parameter.

        m <- momentum m + (1 - momentum) g
        x = momentum m' + (1 - momentum) g'  with nesterov, else m'       (' = divided by its bias, as in NAdam)
        X = x / ||x||, then `iterations` times  X <- a X + (b A + c A A) X,  A = X X^T
        d = s(inputs, outputs) X

    X is close to U V^T where x = U S V^T: its singular values are near 1 (0.7 to 1.2 after five iterations).
    Embedding, head, positions, norms, biases and whatever a residual connection declares have AdamW's direction
    with `beta1` and `beta2`, at the same learning rate. The scale s:

      rms       0.2 sqrt(max(inputs, outputs)), arXiv 2502.16982 eq. (4): the direction's rms is about 0.2, that of
                AdamW in practice, so that a learning rate and a weight decay found for AdamW serve both.
      spectral  sqrt(max(1, outputs / inputs)), K. Jordan's: its rms shrinks with the width, and its rate (near 0.02)
                is far above AdamW's: set `role_rates` for the roles that AdamW updates.
    """
    momenta = optax.contrib.scale_by_muon(
        ns_coeffs=COEFFICIENTS,
        ns_steps=iterations,
        beta=momentum,
        nesterov=nesterov,
        weight_dimension_numbers=dimension_numbers,
    )
    kernels = optax.chain(
        _without_coefficients(momenta), optax.stateless(lambda updates, _: _scaled(updates, scale))
    )
    others = adamw(beta1=beta1, beta2=beta2, epsilon=ADAM_EPSILON)
    return optax.partition({"muon": kernels, "adamw": others}, _algorithms)


def dimension_numbers(params: Params) -> Params:
    """Return a tree of `optax.contrib.MuonDimensionNumbers`, for a tree of kernels of the blocks."""

    def numbers(role: str) -> optax.contrib.MuonDimensionNumbers:
        inputs, outputs = HIDDEN_KERNELS[role]
        return optax.contrib.MuonDimensionNumbers(reduction_axis=inputs, output_axis=outputs)

    return jax.tree.map(numbers, axes.roles(params))


def _without_coefficients(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Keep the constants out of the state: they are no moments, and a state would share them with the next one."""

    def without(state: optax.OptState) -> optax.OptState:
        return cast(optax.contrib.MuonState, state)._replace(ns_coeffs=())

    def init(params: Params) -> optax.OptState:
        return without(inner.init(params))

    def update(
        updates: Params, state: optax.OptState, params: Params | None = None
    ) -> tuple[Params, optax.OptState]:
        whole = cast(optax.contrib.MuonState, state)._replace(ns_coeffs=jnp.asarray(COEFFICIENTS))
        updates, whole = inner.update(updates, whole, params)
        return updates, without(whole)

    return optax.GradientTransformation(init, update)


def _algorithms(params: Params) -> Params:
    return jax.tree.map(lambda role: "muon" if role in HIDDEN_KERNELS else "adamw", axes.roles(params))


def _scaled(updates: Params, scale: str) -> Params:
    def scaled(x: Array, role: str) -> Array:
        inputs, outputs = (math.prod(x.shape[axis] for axis in group) for group in HIDDEN_KERNELS[role])
        return SCALES[scale](inputs, outputs) * x

    return jax.tree.map(scaled, updates, axes.roles(updates))
