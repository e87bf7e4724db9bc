"""The guard inside a step: rolling statistics of loss and gradient norm, and the alarm that freezes the state.

    spike: x > mean + deviations * sd, over the last `window` good steps, once half of them are there

An alarm stays until the loop answers it (stop, skip or rewind); until then nothing is updated, so the state is the
one before the bad step, whose batch can be looked at again. Source of the rule: the skip-step guards of levanter
and OLMo-core (6 deviations over 128 steps, on the loss or the gradient norm).
"""

from typing import NamedTuple

import chex
import jax.numpy as jnp

from jaxblock.training.config import GuardConfig
from jaxblock.types import Array

GOOD, NON_FINITE, SPIKE = 0, 1, 2
NAMES = {NON_FINITE: "non_finite", SPIKE: "spike"}


class Guard(NamedTuple):
    """What the guard carries from step to step; part of the state that is saved."""

    recent_2W: Array
    """Loss (row 0) and gradient norm (row 1) of the last W good steps, float32."""
    good: Array
    """Good steps so far, int32; step i stands in column i mod W."""
    alarm: Array
    """0, or why the state is frozen: 1 non-finite, 2 spike; int32."""
    strikes: Array
    """Bad steps passed over without W good ones in a row since, int32; counted by the loop."""
    streak: Array
    """Good steps since the last bad one, beyond those that a rewind makes again, int32."""


def open_guard(config: GuardConfig) -> Guard:
    """Return the guard before the first step."""
    # A buffer of its own for each: the state is donated, and one buffer cannot be donated twice.
    return Guard(jnp.zeros((2, config.window), jnp.float32), *(jnp.zeros((), jnp.int32) for _ in range(4)))


def judge(guard: Guard, values_2: Array, *, finite: Array, config: GuardConfig) -> Array:
    """Return the alarm after a step, int32.

    Args:
      guard: before the step.
      values_2: the step's loss and gradient norm, float32 [2].
      finite: whether everything that had to be finite was.
      config: `deviations`, `window`, and whether spikes are looked for at all.
    """
    chex.assert_shape(values_2, (2,))
    alarm = jnp.where(finite, GOOD, NON_FINITE)
    if config.spike != "ignore":
        alarm = jnp.where(finite & is_spike(guard, values_2, deviations=config.deviations), SPIKE, alarm)
    return jnp.where(guard.alarm == GOOD, alarm, guard.alarm).astype(jnp.int32)


def is_spike(guard: Guard, values_2: Array, *, deviations: float) -> Array:
    """Return whether loss or gradient norm is a spike against the steps the guard remembers."""
    window = guard.recent_2W.shape[1]
    return (guard.good >= -(-window // 2)) & (values_2 > spike_bounds(guard, deviations=deviations)).any()


def spike_bounds(guard: Guard, *, deviations: float) -> Array:
    """Return mean + deviations * sd of loss and gradient norm over the steps the guard remembers, float32 [2]."""
    window = guard.recent_2W.shape[1]
    there_W = jnp.arange(window) < guard.good
    count = jnp.maximum(there_W.sum(), 1)
    mean_2 = jnp.where(there_W, guard.recent_2W, 0.0).sum(1) / count
    square_2W = jnp.square(guard.recent_2W - mean_2[:, None])
    deviation_2 = jnp.sqrt(jnp.where(there_W, square_2W, 0.0).sum(1) / count)
    return mean_2 + deviations * deviation_2


def remember(guard: Guard, values_2: Array) -> Guard:
    """Return the guard after a good step."""
    window = guard.recent_2W.shape[1]
    streak = guard.streak + 1
    return guard._replace(
        recent_2W=guard.recent_2W.at[:, guard.good % window].set(values_2),
        good=guard.good + 1,
        strikes=jnp.where(streak >= window, 0, guard.strikes),
        streak=streak,
    )


def pass_over(guard: Guard, strikes: int, *, again: int = 0) -> Guard:
    """Return the guard after its alarm has been answered: `strikes` bad steps, and no streak.

    The `again` steps that a rewind makes again do not count: else a fault that comes back would never reach the limit.
    """
    alarm, streak = jnp.zeros((), jnp.int32), jnp.asarray(-again, jnp.int32)
    return guard._replace(alarm=alarm, strikes=jnp.asarray(strikes, jnp.int32), streak=streak)
