"""The guard: what counts as a spike, that an alarm freezes everything, that it counts what it should."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxblock.training.config import GuardConfig
from jaxblock.training.guard import GOOD, NON_FINITE, SPIKE, is_spike, judge, open_guard, pass_over, remember
from jaxblock.training.step import make_step
from tests.small_training import Bigram, batch, bigram_params, state_of, training

CONFIG = GuardConfig(spike="skip", window=8, deviations=3.0)


def after(values, config: GuardConfig = CONFIG):
    """Return the guard that has seen these (loss, gradient norm) pairs."""
    guard = open_guard(config)
    for pair in values:
        guard = remember(guard, jnp.asarray(pair, jnp.float32))
    return guard


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.tuples(*[st.floats(0.5, 8.0, width=32)] * 2), min_size=1, max_size=20),
    st.tuples(*[st.floats(0.5, 30.0, width=32)] * 2),
)
def test_a_spike_is_what_numpy_says(past, now):
    seen = np.float64(past[-8:])
    bound = seen.mean(0) + 3.0 * seen.std(0)
    # Round-off may decide where the value lies on the bound.
    if np.abs(np.float64(now) - bound).min() < 1e-3:
        return
    want = len(past) >= 4 and bool((np.float64(now) > bound).any())
    assert bool(is_spike(after(past), jnp.asarray(now, jnp.float32), deviations=3.0)) == want


def test_either_value_alone_is_enough_and_a_fall_is_none():
    guard = after([(1.0, 2.0), (1.2, 2.2)] * 4)
    for now, want in {(1.1, 2.1): False, (9.0, 2.1): True, (1.1, 9.0): True, (0.0, 0.0): False}.items():
        assert bool(is_spike(guard, jnp.asarray(now), deviations=3.0)) == want


def test_an_alarm_is_raised_for_what_the_config_looks_for_and_stays():
    guard, high = after([(1.0, 2.0), (1.2, 2.2)] * 4), jnp.asarray([9.0, 2.0])
    assert judge(guard, high, finite=jnp.asarray(True), config=CONFIG) == SPIKE
    assert judge(guard, high, finite=jnp.asarray(True), config=GuardConfig(window=8)) == GOOD
    assert judge(guard, high, finite=jnp.asarray(False), config=CONFIG) == NON_FINITE
    raised = guard._replace(alarm=jnp.int32(SPIKE))
    assert judge(raised, jnp.asarray([1.1, 2.1]), finite=jnp.asarray(True), config=CONFIG) == SPIKE


def test_strikes_are_forgotten_after_a_window_of_good_steps():
    guard = pass_over(after([(1.0, 1.0)] * 3), 5)
    assert (guard.strikes, guard.streak, guard.alarm, guard.good) == (5, 0, GOOD, 3)
    for number in range(1, 9):
        guard = remember(guard, jnp.ones(2))
        assert guard.strikes == (5 if number < 8 else 0)


def test_steps_that_a_rewind_makes_again_do_not_count_as_good_ones():
    guard = pass_over(after([(1.0, 1.0)] * 3), 5, again=6)
    for number in range(1, 15):
        guard = remember(guard, jnp.ones(2))
        assert guard.strikes == (5 if number < 6 + 8 else 0)


def test_a_spike_leaves_the_state_as_it_was_inner_state_and_average_included():
    run = training(
        guard={"spike": "skip", "window": 4, "deviations": 6.0},
        optimizer={"average": 0.9, "learning_rate": 1e-4},
    )
    step = jax.jit(make_step(Bigram(), run))
    state = state_of(run, bigram_params())
    for number in range(6):
        state, metrics = step(state, batch(seed=number), jax.random.key(0))
        assert metrics.alarm == GOOD
    # Weights as if they had been hit: the loss is far above the last four.
    hit = state._replace(params=jax.tree.map(lambda x: 8.0 * x, state.params))
    frozen, metrics = step(hit, batch(seed=6), jax.random.key(0))
    assert metrics.alarm == SPIKE
    assert np.isfinite(metrics.loss)
    chex.assert_trees_all_equal(frozen._replace(guard=hit.guard), hit)
    # Answered, the next good step goes on from there.
    again = state._replace(guard=pass_over(frozen.guard, 1), skipped=state.skipped + 1)
    moved, metrics = step(again, batch(seed=7), jax.random.key(0))
    assert (metrics.alarm, moved.step, moved.skipped, moved.guard.strikes) == (GOOD, 7, 1, 1)


@pytest.mark.parametrize(
    ("field", "value"),
    [("spike", "ignored"), ("non_finite", "ignore"), ("deviations", 0.0), ("window", 3), ("limit", 0)],
)
def test_bad_settings_are_refused_by_name(field, value):
    with pytest.raises(ValueError, match=f"guard.{field} is"):
        GuardConfig(**{field: value})
