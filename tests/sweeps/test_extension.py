"""A grid is widened where its lowest loss lies at the edge, on that side, by its own ratio, with every seed."""

import dataclasses

import numpy as np
import pytest

from jaxblock.sweeps.extension import widened_again, wider_runs
from jaxblock.sweeps.results import Result
from tests.sweeps.small_sweeps import plan

RATES = [1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2]


def results(made, *, best, fail_from=1.0, missing=0):
    """Return results whose loss is a parabola in the octaves from `best`, with runs above `fail_from` diverged."""
    noise = np.random.default_rng(0)
    found = []
    for number, run in enumerate(made.runs()):
        rate = run.config.optimizer.learning_rate
        failed = rate > fail_from
        found.append(
            Result(
                id=str(number),
                axes=run.axes,
                depth=1,
                sublayers=2,
                width=8,
                residual="pre_norm",
                initialization="plain",
                parametrization="standard",
                learning_rate=rate,
                warmup=0.0,
                seed=run.config.run.seed,
                planned_steps=8,
                outcome="missing" if number < missing else "non_finite" if failed else "ok",
                val_loss=None if failed else 2 + 0.1 * np.log2(rate / best) ** 2 + 0.001 * noise.normal(),
            )
        )
    return found


@pytest.fixture
def made(tmp_path):
    return plan(tmp_path, sweep={"extend": 1}, axes={"optimizer.learning_rate": RATES, "run.seed": [0, 1, 2]})


@pytest.mark.parametrize(
    ("best", "fail_from", "wanted"),
    [
        (4e-3, 1.0, []),  # inside
        (1e-4, 1.0, [5e-4]),
        (1e-1, 1.0, [3.2e-2]),
        (1e-1, 4e-3, [pytest.approx(5.65685e-3)]),  # half-way to what fails
    ],
)
def test_the_next_rate_is_where_the_minimum_is(made, best, fail_from, wanted):
    added = wider_runs(made, results(made, best=best, fail_from=fail_from))
    assert [run.config.optimizer.learning_rate for wider in added for run in wider.runs[:1]] == wanted
    for wider in added:
        assert [run.config.run.seed for run in wider.runs] == [0, 1, 2]
        assert len({run.config.optimizer.learning_rate for run in wider.runs}) == 1


def test_an_arm_that_is_not_there_whole_is_left_alone(made):
    assert wider_runs(made, results(made, best=1e-4, missing=1)) == []


def test_one_rate_is_no_grid(tmp_path):
    made = plan(tmp_path, axes={"run.seed": [0, 1, 2]})
    assert wider_runs(made, results(made, best=1e-4)) == []


def test_each_arm_is_widened_by_itself(tmp_path):
    axes = {
        "model.residual": ["pre_norm", "post_norm"],
        "optimizer.learning_rate": RATES,
        "run.seed": [0, 1, 2],
    }
    made = plan(tmp_path, sweep={"extend": 1}, axes=axes)
    low, high = results(made, best=1e-4), results(made, best=4e-3)
    mixed = [a if a.axes["model.residual"] == "post_norm" else b for a, b in zip(low, high, strict=True)]
    added = wider_runs(made, mixed)
    assert len(added) == 1
    assert {run.axes["model.residual"] for run in added[0].runs} == {"post_norm"}
    assert "post_norm" in added[0].sentence


def test_an_arm_is_widened_so_often_however_often_the_sweep_is_started(made):
    first = wider_runs(made, results(made, best=1e-4))
    wider = made._replace(axes={**made.axes, "optimizer.learning_rate": (5e-4, *RATES)})
    assert wider_runs(made, results(wider, best=1e-4)) == []
    assert len(first) == 1


def test_a_rate_that_is_no_float32_is_not_measured(tmp_path):
    rates = [1e-37, 2e-37, 4e-37, 8e-37]
    axes = {"optimizer.learning_rate": rates, "run.seed": [0, 1, 2]}
    made = plan(tmp_path, sweep={"extend": 1}, axes=axes)
    assert wider_runs(made, results(made, best=rates[0] / 100)) == []


def test_a_later_plan_keeps_the_wider_grid_of_the_arms_it_has(made, tmp_path):
    widened = [run.axes for wider in wider_runs(made, results(made, best=1e-4)) for run in wider.runs]
    more = plan(tmp_path, axes={"optimizer.learning_rate": RATES, "run.seed": [0, 1, 2, 3]})
    again = widened_again(more, widened)
    assert [(run.axes["optimizer.learning_rate"], run.axes["run.seed"]) for run in again] == [
        (5e-4, seed) for seed in range(4)
    ]
    other = plan(tmp_path, axes={"optimizer.learning_rate": RATES, "optimizer.warmup": [0.0, 0.1]})
    assert widened_again(other, widened) == []


def test_where_no_parabola_fits_the_grid_becomes_finer(tmp_path):
    """A kink at the best rate, 3e-3 nats of noise: half-way to the better neighbour."""
    rates = [1e-3, 4e-3, 1.6e-2, 6.4e-2]
    axes = {"optimizer.learning_rate": rates, "run.seed": [0, 1, 2]}
    made = plan(tmp_path, sweep={"extend": 1}, axes=axes)
    kinked = [
        dataclasses.replace(one, val_loss=one.val_loss - (0.25 if one.learning_rate == 1.6e-2 else 0.0))
        for one in results(made, best=8e-3)
    ]
    added = wider_runs(made, kinked)
    assert [wider.runs[0].config.optimizer.learning_rate for wider in added] == [pytest.approx(8e-3)]
