"""The learning rate as a function of the number of updates made: a linear warm-up, then one of five shapes."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from jaxblock.contracts import check_number
from jaxblock.training.config import OptimizerConfig
from jaxblock.types import Array

Schedule = Callable[[jax.typing.ArrayLike], Array]
"""Updates already made -> the rate of the next one, float32; jits and vmaps."""


class Tuned(NamedTuple):
    """What a sweep tunes. Arrays, traced and vmapped ones too, are float32 scalars: runs that differ in these alone
    share one compiled step."""

    learning_rate: Array | float
    """Peak learning rate."""
    warmup: Array | float
    """Warm-up as a fraction of run.steps. An array is rounded to a whole number of updates in float32, where a tie
    (0.45 * 10 updates) may fall the other way: w / steps, for a whole w, gives w."""


def tuned_of(config: OptimizerConfig) -> Tuned:
    """Return what the config says of it."""
    return Tuned(config.learning_rate, config.warmup)


class _Span(NamedTuple):
    """A run in updates: its warm-up is 1 to `warm`, its last is `steps`."""

    warm: Array | int
    steps: int

    def progress(self, n: Array) -> Array:
        """Return 0 at the end of the warm-up, 1 at the last update and after it."""
        return jnp.clip((n - self.warm) / _at_least_1(self.steps - self.warm), 0.0, 1.0)


def _rounded(count: Array | float) -> Array | int:
    return round(count) if isinstance(count, float | int) else jnp.round(count)


def _at_least_1(count: Array | int) -> Array | int:
    # A number stays one: the program of a run whose rate is not traced has it as a constant.
    return max(count, 1) if isinstance(count, int) else jnp.maximum(count, 1)


def _cosine(n: Array, span: _Span, *, final: float) -> Array:
    return final + (1.0 - final) * 0.5 * (1.0 + jnp.cos(jnp.pi * span.progress(n)))


def _linear(n: Array, span: _Span, *, final: float) -> Array:
    return final + (1.0 - final) * (1.0 - span.progress(n))


def _constant(n: Array, span: _Span) -> Array:
    return jnp.ones_like(n)


def _wsd(n: Array, span: _Span, *, decay: float, final: float) -> Array:
    falling, room = round(decay * span.steps), span.steps - span.warm
    falling = min(falling, room) if isinstance(room, int) else jnp.minimum(falling, room)
    fall = _linear(n, _Span(span.steps - falling, span.steps), final=final)
    return jnp.where(falling == 0, jnp.ones_like(n), fall)


def _inverse_sqrt(n: Array, span: _Span) -> Array:
    return jnp.sqrt(_at_least_1(span.warm) / jnp.maximum(n, 1.0))


SHAPES: Mapping[str, Callable[..., Array]] = {
    "cosine": _cosine,
    "linear": _linear,
    "constant": _constant,
    "wsd": _wsd,
    "inverse_sqrt": _inverse_sqrt,
}
"""Each is the factor on the peak after the warm-up, of (update, span, options)."""


def learning_rate_schedule(config: OptimizerConfig, steps: int, *, tuned: Tuned | None = None) -> Schedule:
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
      tuned: peak and warm-up in place of the config's.

    Raises:
      ValueError: a tuned number that no config could hold; the value of an array is not checked.
      AssertionError: a tuned array that is no float32 scalar.
    """
    tuned = tuned_of(config) if tuned is None else tuned
    _check_tuned(tuned)
    peak, warmup = tuned
    span = _Span(_rounded(warmup * steps), steps)
    name, options = config.schedule_choice

    def schedule(updates: jax.typing.ArrayLike) -> Array:
        n = jnp.asarray(updates).astype(jnp.float32) + 1.0
        rise = n / _at_least_1(span.warm)
        factor = jnp.where(n <= span.warm, rise, SHAPES[name](n, span, **options))
        return jnp.float32(peak) * factor

    return schedule


def _check_tuned(tuned: Tuned) -> None:
    for name, value, most in (("learning_rate", tuned.learning_rate, None), ("warmup", tuned.warmup, 1.0)):
        if isinstance(value, float | int):
            check_number(f"tuned.{name}", value, least=0.0, most=most)
        else:
            chex.assert_shape(value, ())
            chex.assert_type(value, jnp.float32)
