"""The pure parts of the CompleteP experiment: its bands, its arms and its table, on laws that are made up."""

import csv

import numpy as np
import pytest

from experiments.completep_depth import ARMS, DEPTHS, LAST, STEPS, config_of, placed, report, write_table
from jaxblock.sweeps.coordinate_slopes import CoordinateCheck, NonFinite
from jaxblock.sweeps.statistics.estimate import Estimate


def check(start: float, end: float, *, lost: tuple[NonFinite, ...] = ()) -> CoordinateCheck:
    """A final stream whose exponent goes from `start` at t = 0 to `end` at t = 9."""
    exponents_T = np.linspace(start, end, LAST + 1)
    exponents_T = np.append(exponents_T, [exponents_T[-1]] * (STEPS - LAST))
    noise = np.exp(0.01 * np.random.default_rng(0).normal(size=(len(DEPTHS), 3, STEPS + 1)))
    values = {"final_stream": np.array(DEPTHS, float)[:, None, None] ** exponents_T * noise}
    given = {"sizes": DEPTHS, "seeds": (0, 1, 2), "steps": STEPS, "learning_rate": 1e-3, "non_finite": lost}
    return CoordinateCheck(axis="depth", mean_abs=values, rms=values, **given)


PUBLISHED = {"0": (0.54, 1.25), "1/2": (0.0, 0.02), "1": (-0.42, 0.0)}


def checks(**changes: tuple[float, float]) -> dict[str, CoordinateCheck]:
    return {arm: check(*laws) for arm, laws in {**PUBLISHED, **changes}.items()}


def test_the_published_slopes_lie_in_the_bands():
    lines, good = report(checks())
    assert good
    assert len(lines) == 2 + (LAST + 1) + 2
    assert all("inside" in line for line in lines)


@pytest.mark.parametrize(
    ("arm", "laws", "outside"),
    [
        ("0", (0.9, 1.6), 1),
        ("0", (0.54, 0.6), 1),
        ("1/2", (0.2, 0.0), 5),
        ("1", (0.0, 0.0), 1),
        ("1", (-0.42, -0.42), 1),
    ],
)
def test_a_deviation_is_said(arm, laws, outside):
    lines, good = report(checks(**{arm: laws}))
    assert not good
    assert sum("OUTSIDE" in line for line in lines) == outside


def test_a_run_that_is_not_finite_is_named_and_no_slope_is_made_up():
    found = checks()
    found["0"] = check(0.54, 1.25, lost=(NonFinite(64, 1, 4),))
    found["0"].mean_abs["final_stream"][-1, 1, 4:] = np.nan
    lines, good = report(found)
    assert not good
    assert "size=64, seed=1, step=4" in lines[-1]
    assert sum("not resolved" in line for line in lines) == 1


def test_an_interval_across_a_bound_is_neither():
    found = Estimate(value=0.05, low=0.0, high=0.15, n=3, interval="95 % t")
    assert placed(found, -0.1, 0.1) == "not resolved"
    assert placed(found, -0.1, 0.2) == "inside"
    assert placed(found, 0.2, 0.3) == "OUTSIDE"
    assert placed(found, -0.3, -0.1) == "OUTSIDE"


def test_the_arms_differ_in_their_parametrization_alone():
    made = {arm: config_of(text, 1e-3) for arm, text in ARMS.items()}
    assert {config.model.parametrization for config in made.values()} == set(ARMS.values())
    assert len({config.optimizer for config in made.values()}) == 1
    assert {config.model.initialization for config in made.values()} == {"plain"}


def test_the_table_has_a_row_for_each_value(tmp_path):
    write_table(tmp_path / "t.csv", {1e-3: checks(), 4e-3: checks()})
    with (tmp_path / "t.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 3 * len(DEPTHS) * 3 * (STEPS + 1)
    one = next(
        row for row in rows if (row["alpha"], row["depth"], row["seed"], row["t"]) == ("1", "8", "2", "0")
    )
    assert float(one["rms"]) == pytest.approx(8**-0.42, rel=0.05)
