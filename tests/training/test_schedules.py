"""The learning rate by update: worked lists for every shape, end points, off-by-one controls, float32 throughout."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblock.training.config import SCHEDULES, OptimizerConfig
from jaxblock.training.optimizer import learning_rate_schedule
from jaxblock.training.optimizer.schedule import SHAPES

RISE = [1 / 4, 2 / 4, 3 / 4, 1]
HALF_COSINE = [0.5 * (1 + math.cos(math.pi * p / 6)) for p in range(1, 7)]
LISTS = {
    ("cosine", 0.4): [*RISE, *HALF_COSINE[:2], 1 / 2, *HALF_COSINE[3:5], 0],
    ("cosine(final=0.2)", 0.4): [*RISE, *(0.2 + 0.8 * fall for fall in HALF_COSINE)],
    ("linear(final=0.0)", 0.4): [*RISE, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0],
    ("linear(final=0.25)", 0.2): [1 / 2, 1, *(1 - 0.75 * k / 8 for k in range(1, 8)), 1 / 4],
    ("linear", 0.0): [1 - k / 10 for k in range(1, 11)],
    ("constant", 0.4): [*RISE, 1, 1, 1, 1, 1, 1],
    ("constant", 1.0): [k / 10 for k in range(1, 11)],
    ("wsd(decay=0.4)", 0.2): [1 / 2, 1, 1, 1, 1, 1, 3 / 4, 2 / 4, 1 / 4, 0],
    ("wsd", 0.0): [1, 1, 1, 1, 1, 1, 1, 1, 1 / 2, 0],
    ("wsd(decay=0.4, final=0.2)", 0.4): [*RISE, 1, 1, 0.8, 0.6, 0.4, 0.2],
    # The fall never begins before the warm-up's end, and nothing falls where there is no room or no decay.
    ("wsd(decay=1.0)", 0.4): [*RISE, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0],
    ("wsd(decay=0.2)", 1.0): [k / 10 for k in range(1, 11)],
    ("wsd(decay=0.0)", 0.4): [*RISE, 1, 1, 1, 1, 1, 1],
    ("inverse_sqrt", 0.4): [*RISE, *(math.sqrt(4 / n) for n in range(5, 11))],
    ("inverse_sqrt", 0.0): [1 / math.sqrt(n) for n in range(1, 11)],
}


def schedule_of(text: str, warmup: float, *, peak: float = 1.0, steps: int = 10):
    return learning_rate_schedule(OptimizerConfig(schedule=text, warmup=warmup, learning_rate=peak), steps)


def rates(text: str, warmup: float, *, peak: float = 1.0, steps: int = 10) -> np.ndarray:
    """Return the learning rate of updates 1 to `steps`."""
    values = schedule_of(text, warmup, peak=peak, steps=steps)(jnp.arange(steps))
    assert values.dtype == jnp.float32
    return np.asarray(values)


@pytest.mark.parametrize(("text", "warmup"), LISTS)
def test_b57_the_worked_list(text, warmup):
    np.testing.assert_allclose(rates(text, warmup), LISTS[text, warmup], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("text", "warmup"), LISTS)
@pytest.mark.parametrize("shift", [-1, 1])
def test_b57_control_one_update_early_or_late_is_another_list(text, warmup, shift):
    shifted = schedule_of(text, warmup)(jnp.arange(10) + shift)
    assert not np.allclose(shifted, LISTS[text, warmup], atol=0.02)


def test_every_shape_has_a_list():
    assert {text.partition("(")[0] for text, _ in LISTS} == set(SCHEDULES) == set(SHAPES)


@pytest.mark.parametrize(
    "text", ["cosine", "linear(final=0.25)", "constant", "wsd(decay=0.3)", "inverse_sqrt"]
)
@pytest.mark.parametrize("warmup", [0.0, 0.03, 0.3, 1.0])
def test_it_rises_to_the_peak_falls_to_the_end_and_never_jumps(text, warmup):
    values = rates(text, warmup, peak=2.0, steps=1000)
    warm = round(1000 * warmup)
    assert 0 < values[0] <= 2.0
    assert (np.diff(values[:warm]) > 0).all()
    assert (np.diff(values[max(warm - 1, 0) :]) <= 1e-6).all()
    assert values.max() == pytest.approx(2.0, rel=1e-2)
    if warm:
        assert values[warm - 1] == pytest.approx(2.0, rel=1e-6)
    # No discontinuity: after the first few, two neighbours differ by a few hundredths of the peak at most.
    assert np.abs(np.diff(values[8:])).max() <= 2.0 * 0.04
    ends = {"cosine": 0.0, "linear(final=0.25)": 0.25, "wsd(decay=0.3)": 0.0, "constant": 1.0}
    if warm < 1000 and text in ends:
        assert values[-1] == pytest.approx(2.0 * ends[text], abs=1e-6)


@pytest.mark.parametrize(("text", "end"), [("cosine(final=0.1)", 0.1), ("linear", 0.0), ("wsd", 0.0)])
def test_after_the_last_update_it_stays_at_its_end(text, end):
    after = schedule_of(text, 0.1)(jnp.asarray([9, 10, 11, 1000]))
    np.testing.assert_allclose(after, end, rtol=0, atol=1e-7)


def test_a_run_of_one_step():
    for text in ("cosine", "linear", "wsd(decay=1.0)"):
        assert rates(text, 1.0, steps=1) == 1
        assert rates(text, 0.0, steps=1) == pytest.approx(0, abs=1e-7)
    assert rates("inverse_sqrt", 0.0, steps=1) == rates("constant", 0.0, steps=1) == 1


def test_it_is_pure_jits_vmaps_and_stays_float32_in_64_bit_mode():
    schedule = schedule_of("wsd(decay=0.4)", 0.2)
    counts = jnp.arange(10)
    plain = schedule(counts)
    np.testing.assert_array_equal(jax.vmap(schedule)(counts), plain)
    np.testing.assert_array_equal(jax.jit(schedule)(counts), plain)
    with jax.enable_x64(True):
        for count in (3, jnp.int32(3), jnp.arange(10)):
            assert schedule(count).dtype == jnp.float32
        np.testing.assert_array_equal(schedule(jnp.arange(10)), plain)
