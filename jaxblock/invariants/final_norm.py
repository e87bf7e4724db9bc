"""Whether a model's exit has its final norm: logits that do not follow the size of the stream, or that do."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxblock.types import Array

_SCALES = (2.0**12, 2.0**16, 2.0**20)
_HOLDS = 5e-3


class ExitStructure(NamedTuple):
    """What stands between the stream and the logits, and why."""

    name: str
    """"normalized" (a final norm, or a stream that leaves its last sublayer normalized), "missing final norm", or
    "unknown"."""
    invariant: float
    """Logits of 2^16 x against those of 2^12 x: 0 = they do not follow the size of the stream."""
    affine: float
    """How far logits are from affine in the size of the stream, 0 = nothing between it and the head; inf = they
    do not depend on it."""
    varies: float
    """How much of the logits differs between tokens; 0 = the exit does not see the stream at all."""


def describe_exit(apply: Callable[[Array], Array]) -> ExitStructure:
    """Name a model's exit by the logits of a stream at three sizes: h(norm(c x)) = h(norm(x)), h(c x) is affine in c.

    Large sizes, so that neither a norm's epsilon nor biases behind the branches matter beside the stream. Without a
    norm the size of logits grows with depth as the stream does.

    Args:
      apply: scale -> logits [B, T, V] of that many times the same stream; see `switch_exit`.

    Raises:
      ValueError: logits that are not finite.
    """
    small, middle, large = (np.asarray(apply(jnp.float32(scale)), np.float64) for scale in _SCALES)
    if not all(np.isfinite(logits).all() for logits in (small, middle, large)):
        raise ValueError("logits are not finite: a stream of ordinary size must be passed")
    spread = np.linalg.norm(small - small.mean(axis=(0, 1)))
    varies = spread / max(float(np.linalg.norm(small)), 1e-30)
    first, second = middle - small, large - middle
    invariant = np.linalg.norm(first) / max(float(spread), 1e-30)
    largest = max(np.linalg.norm(second), np.linalg.norm(16.0 * first))
    affine = np.linalg.norm(second - 16.0 * first) / largest if largest > 0 else np.inf
    name = "unknown"
    if varies > 1e-6 and invariant <= _HOLDS:
        name = "normalized"
    elif varies > 1e-6 and affine <= _HOLDS:
        name = "missing final norm"
    return ExitStructure(name, float(invariant), float(affine), float(varies))
