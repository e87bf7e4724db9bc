"""Peak and warm-up as traced values: the rates of the numbers, and one compiled step for many learning rates."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblock.training.config import OptimizerConfig
from jaxblock.training.optimizer import Tuned, learning_rate_schedule, tuned_of
from jaxblock.training.step import make_step
from tests.small_training import Bigram, batch, bigram_params, state_of, training

SHAPES = [
    "cosine(final=0.2)",
    "linear",
    "constant",
    "wsd(decay=0.4, final=0.1)",
    "wsd(decay=0.0)",
    "inverse_sqrt",
]
WARMUPS = (0.0, 0.04, 0.2, 0.75, 1.0)
STEPS = 50
PEAKS = (0.01, 0.1, 0.5)


@functools.cache
def lanes(text: str):
    """Return rates [lanes, updates], the last ones after the run's end."""

    def rates(tuned: Tuned) -> jax.Array:
        config = OptimizerConfig(schedule=text)
        return learning_rate_schedule(config, STEPS, tuned=tuned)(jnp.arange(STEPS + 5))

    warmups = jnp.asarray(WARMUPS, jnp.float32)
    return np.asarray(jax.jit(jax.vmap(rates))(Tuned(0.5 + warmups, warmups)))


@pytest.mark.parametrize("text", SHAPES)
def test_traced_rates_are_those_of_the_numbers(text):
    found = lanes(text)
    assert found.dtype == np.float32
    for row, warmup in zip(found, WARMUPS, strict=True):
        config = OptimizerConfig(schedule=text, learning_rate=0.5 + warmup, warmup=warmup)
        want = learning_rate_schedule(config, STEPS)(jnp.arange(STEPS + 5))
        np.testing.assert_allclose(row, want, rtol=1e-6, atol=1e-7)
        given = learning_rate_schedule(OptimizerConfig(schedule=text), STEPS, tuned=tuned_of(config))
        np.testing.assert_array_equal(given(jnp.arange(STEPS + 5)), want)
    # control: the lanes differ, by peak and by warm-up
    assert len({row.tobytes() for row in found}) == len({row.max() for row in found}) == len(WARMUPS)


def test_a_whole_number_of_updates_over_the_steps_is_that_number():
    """Halves included: in float32 0.15 * 50 = 7.5000005 and a fraction would be rounded to 8."""
    for steps in (3, 7, 50, 2300, 100_000):
        warm = np.unique(np.linspace(0, steps, 200).astype(int))
        fractions = jnp.asarray(warm / steps, jnp.float32)
        np.testing.assert_array_equal(jnp.round(fractions * steps), warm)


@pytest.mark.parametrize(
    ("tuned", "message"),
    [
        (Tuned(-1.0, 0.1), r"tuned\.learning_rate is -1\.0; it must be"),
        (Tuned(0.1, 1.5), r"tuned\.warmup is 1\.5; it must be"),
        (Tuned(float("nan"), 0.0), r"tuned\.learning_rate"),
    ],
)
def test_a_number_no_config_could_hold_is_refused(tuned, message):
    with pytest.raises(ValueError, match=message):
        learning_rate_schedule(OptimizerConfig(), 10, tuned=tuned)


@pytest.mark.parametrize("bad", [jnp.zeros(2), jnp.int32(1)], ids=["vector", "int32"])
def test_an_array_is_a_float32_scalar(bad):
    for tuned in (Tuned(bad, 0.1), Tuned(0.1, bad)):
        with pytest.raises(AssertionError):
            learning_rate_schedule(OptimizerConfig(), 10, tuned=tuned)


def test_three_learning_rates_at_once_are_three_runs():
    """Two steps each: state and metrics of a lane are those of the run with that rate in its config."""
    batches = batch(seed=1), batch(seed=2)
    options = {"schedule": "linear", "warmup": 0.5, "weight_decay": 0.3}
    run = training(steps=4, optimizer=options)
    traces = 0

    def two_steps(tuned: Tuned | None, state, run=run):
        nonlocal traces
        traces += 1
        step = make_step(Bigram(), run, tuned=tuned)
        state, _ = step(state, batches[0], jax.random.key(0))
        return step(state, batches[1], jax.random.key(0))

    states = jax.tree.map(lambda x: jnp.stack([x] * 3), state_of(run, bigram_params()))
    tuned = Tuned(jnp.asarray(PEAKS, jnp.float32), jnp.full(3, 0.5, jnp.float32))
    found = jax.jit(jax.vmap(two_steps))(tuned, states)
    assert traces == 1
    for lane, peak in enumerate(PEAKS):
        single = training(steps=4, optimizer={**options, "learning_rate": peak})
        want = jax.jit(functools.partial(two_steps, None, run=single))(state_of(single, bigram_params()))
        jax.tree.map(
            lambda x, y, lane=lane: np.testing.assert_allclose(x[lane], y, rtol=1e-5, atol=1e-6), found, want
        )
        assert float(found[1].learning_rate[lane]) == pytest.approx(peak)
    tables = found[0].params["embedding"]["table"]
    assert np.abs(np.diff(tables, axis=0)).max(axis=(1, 2)).min() > 1e-2  # control: the lanes went apart
