"""A gate per sublayer, x + g_s u_s: what the loss loses without each one, and how deep a model effectively is.

Gates act on the kernels a branch ends in, so what is measured is the model itself; sublayers count from 0, what mixes
positions before the feed-forward. In a topology whose connection normalizes what a branch writes (`scale_free`) a gate
between 0 and 1 does nothing, and its gradient is 0: lesions there are still lesions.

    lesion            dL_s = L(g_s = 0) - L(1)                       S forward passes
    gate gradient     dL / dg_s at g = 1                             one backward pass
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxblock.config import ModelConfig
from jaxblock.contracts import check_integer
from jaxblock.invariants.branches import scale_branches
from jaxblock.types import Array, Params

Loss = Callable[[Params], Array]
"""Parameters -> a scalar, or any array that is averaged outside, such as a loss per token."""


def gate_branches(config: ModelConfig, params: Params, gates_S: Array) -> Params:
    """Return parameters whose sublayer s writes g_s times what it did; in parallel wiring one gate is both branches'.

    Raises:
      ValueError: gates that are not one per sublayer.
    """
    if gates_S.shape != (config.sublayers,):
        raise ValueError(
            f"gates have shape {gates_S.shape}; they must be one per sublayer, ({config.sublayers},)"
        )
    gates_LN = gates_S.reshape(config.depth, -1)
    return scale_branches(params, attention=gates_LN[:, 0], feed_forward=gates_LN[:, -1])


def lesion_losses(config: ModelConfig, loss: Loss, params: Params, *, at_once: int = 1) -> Array:
    """Return L(g_s = 0) for every sublayer, [S, ...], `at_once` of them side by side in memory.

    The lesion is that less `loss(params)`, which is what `effective_depth` takes.
    """
    check_integer("at_once", at_once, least=1)
    lesions_SS = 1.0 - jnp.eye(config.sublayers)
    return jax.lax.map(
        lambda gates_S: loss(gate_branches(config, params, gates_S)), lesions_SS, batch_size=at_once
    )


def gate_gradient(config: ModelConfig, loss: Loss, params: Params) -> Array:
    """Return dL / dg_s at g = 1, float32 [S]; -dL/dg_s is the lesion's first-order estimate."""
    ones_S = jnp.ones((config.sublayers,), jnp.float32)
    return jax.grad(lambda gates_S: loss(gate_branches(config, params, gates_S)))(ones_S)


class EffectiveDepth(NamedTuple):
    """Where in depth the loss is made, from lesions w_s = max(dL_s, 0) / sum; in sublayers, from 0 to S."""

    half: float
    """Sublayers until half of the mass."""
    most: float
    """Until nine tenths."""
    breadth: float
    """exp(entropy of w): S where all count alike, 1 where one does everything."""
    centre: float
    """Mean place of the mass, over S: 0.5 where it is even."""
    idle: float | None
    """Share of sublayers whose lesion is below its standard error; None where none is given."""


def effective_depth(lesions_S: np.ndarray, errors_S: np.ndarray | None = None) -> EffectiveDepth | None:
    """Return where in depth the loss is made; None where no lesion costs anything.

    Args:
      lesions_S: dL_s, the loss without sublayer s less the loss: `lesion_losses(...) - loss(params)`.
      errors_S: their standard errors.

    Raises:
      ValueError: a lesion that is not finite.
    """
    lesions_S = np.asarray(lesions_S, np.float64)
    if not np.all(np.isfinite(lesions_S)):
        raise ValueError(
            "a lesion's loss is not finite: the model without that sublayer has no loss to compare"
        )
    mass_S = np.maximum(lesions_S, 0.0)
    if mass_S.sum() == 0:
        return None
    w_S = mass_S / mass_S.sum()
    share = np.concatenate([[0.0], np.cumsum(w_S)])
    reached = lambda level: float(np.interp(level, share, np.arange(len(share))))  # noqa: E731
    entropy = -np.sum(w_S[w_S > 0] * np.log(w_S[w_S > 0]))
    centre = float(np.sum(w_S * (np.arange(len(w_S)) + 0.5)) / len(w_S))
    idle = None if errors_S is None else float(np.mean(lesions_S < np.asarray(errors_S)))
    return EffectiveDepth(reached(0.5), reached(0.9), float(np.exp(entropy)), centre, idle)
