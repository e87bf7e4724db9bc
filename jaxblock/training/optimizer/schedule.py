"""The learning rate as a function of the number of updates made: a linear warm-up, then one of five shapes."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxblock.training.config import OptimizerConfig
from jaxblock.types import Array

Schedule = Callable[[jax.typing.ArrayLike], Array]
"""Updates already made -> the rate of the next one, float32; jits and vmaps."""


class _Span(NamedTuple):
    """A run in updates: its warm-up is 1 to `warm`, its last is `steps`."""

    warm: int
    steps: int

    def progress(self, n: Array) -> Array:
        """Return 0 at the end of the warm-up, 1 at the last update and after it."""
        return jnp.clip((n - self.warm) / max(self.steps - self.warm, 1), 0.0, 1.0)


def _cosine(n: Array, span: _Span, *, final: float) -> Array:
    return final + (1.0 - final) * 0.5 * (1.0 + jnp.cos(jnp.pi * span.progress(n)))


def _linear(n: Array, span: _Span, *, final: float) -> Array:
    return final + (1.0 - final) * (1.0 - span.progress(n))


def _constant(n: Array, span: _Span) -> Array:
    return jnp.ones_like(n)


def _wsd(n: Array, span: _Span, *, decay: float, final: float) -> Array:
    falling = min(round(decay * span.steps), span.steps - span.warm)
    if falling == 0:
        return jnp.ones_like(n)
    return _linear(n, _Span(span.steps - falling, span.steps), final=final)


def _inverse_sqrt(n: Array, span: _Span) -> Array:
    return jnp.sqrt(max(span.warm, 1) / jnp.maximum(n, 1.0))


SHAPES: Mapping[str, Callable[..., Array]] = {
    "cosine": _cosine,
    "linear": _linear,
    "constant": _constant,
    "wsd": _wsd,
    "inverse_sqrt": _inverse_sqrt,
}
"""Each is the factor on the peak after the warm-up, of (update, span, options)."""


def learning_rate_schedule(config: OptimizerConfig, steps: int) -> Schedule:
    """Return the learning rate as a function of the number of updates already made, float32.

    With w = round(warmup * steps), update n (from 1) has peak * n / w while n <= w. The first update is never 0,
    update w has the peak, and the last one, n = steps, has the shape's end; after it the rate stays there
    (inverse_sqrt goes on falling). The shapes, with worked lists for peak 1, 10 steps, warm-up 4 (wsd: 2):

      cosine(final)      final + (1 - final) * (1 + cos(pi * p)) / 2 with p = (n - w) / (steps - w), arXiv 1608.03983:
                         1/4, 1/2, 3/4, 1, 0.933, 3/4, 1/2, 1/4, 0.067, 0 with final = 0
      linear(final)      final + (1 - final) * (1 - p): 1/4, 1/2, 3/4, 1, 5/6, 4/6, 3/6, 2/6, 1/6, 0
      constant           1/4, 1/2, 3/4, 1, 1, 1, 1, 1, 1, 1
      wsd(decay, final)  constant, then linear to `final` over the last d = round(decay * steps) updates, but never
                         before the warm-up's end; d = 0 is constant (arXiv 2404.06395, 2405.18392).
                         decay = 0.4: 1/2, 1, 1, 1, 1, 1, 3/4, 2/4, 1/4, 0
      inverse_sqrt       sqrt(max(w, 1) / n), arXiv 1706.03762 section 5.3. With w = 0 the first update has the peak.
                         1/4, 1/2, 3/4, 1, 0.894, 0.816, 0.756, 0.707, 0.667, 0.632

    Args:
      config: the run's optimizer.
      steps: optimizer steps of the run.
    """
    span = _Span(round(config.warmup * steps), steps)
    name, options = config.schedule_choice

    def schedule(updates: jax.typing.ArrayLike) -> Array:
        n = jnp.asarray(updates).astype(jnp.float32) + 1.0
        rise = n / max(span.warm, 1)
        factor = jnp.where(n <= span.warm, rise, SHAPES[name](n, span, **options))
        return jnp.float32(config.learning_rate) * factor

    return schedule
