"""The pure parts of the linearisation experiment: distances that are known exactly, and the rule of its bands."""

import csv

import jax.numpy as jnp
import numpy as np
import pytest

from experiments import linearisation
from experiments.linearisation import branch, departure, report, slope, write_table
from jaxblock.sweeps.statistics.estimate import Estimate, Refusal

DRAW = np.random.default_rng(0)


def test_a_linear_function_is_its_own_linearisation():
    matrix, param, step = (
        jnp.asarray(DRAW.normal(size=shape), jnp.float32) for shape in ((7, 5), (5,), (5,))
    )
    found = departure(lambda p: matrix @ p, param, step, step)
    assert found.distance < 1e-6
    moved = np.linalg.norm(matrix @ step) / np.linalg.norm(matrix @ (param + step))
    assert found.linear == pytest.approx(moved, rel=1e-5)
    wrong = departure(lambda p: matrix @ p, param, step, step.at[0].set(step[1]))
    assert wrong.distance > 1e-2


@pytest.mark.parametrize("size", [1.0, 0.1, 0.01])
def test_a_square_is_off_by_the_square_of_the_step(size):
    """f(p) = p^2: f(p + s) - f(p) - 2 p s = s^2, and the linearisation is p^2 + 2 p s."""
    param, step = jnp.array([1.0, 2.0, 3.0]), size * jnp.array([1.0, -1.0, 0.5])
    found = departure(jnp.square, param, step, step)
    linear = np.array([1.0, 4.0, 9.0]) + size * np.array([2.0, -4.0, 3.0])
    wanted = np.linalg.norm(size**2 * np.array([1.0, 1.0, 0.25])) / np.linalg.norm(linear)
    assert found.distance == pytest.approx(wanted, rel=1e-2 if size < 0.1 else 1e-5)
    assert found.linear == pytest.approx(
        np.linalg.norm(size * np.array([2, -4, 3])) / np.linalg.norm(linear), rel=1e-5
    )


def test_a_branch_is_two_relu_layers():
    x, first, second = (DRAW.normal(size=shape) for shape in ((3, 4), (4, 4), (4, 4)))
    inner = np.maximum(np.sqrt(2 / 4) * np.maximum(x, 0) @ first.T, 0)
    found = branch(*(jnp.asarray(y, jnp.float32) for y in (x, first, second)))
    np.testing.assert_allclose(found, np.sqrt(2 / 4) * inner @ second.T, rtol=1e-4, atol=1e-5)


def synthetic(depths: list[int], exponents: dict[float, tuple[float, ...]]) -> np.ndarray:
    """[L, Q, A, R]: powers of the depth with a factor for each seed, and for alpha 0 nothing finite from 256 on."""
    noise = np.exp(0.01 * np.random.default_rng(1).normal(size=(len(depths), 5, 3, 4)))
    values = np.ones_like(noise)
    for alpha, powers in exponents.items():
        values[:, :, linearisation.ALPHAS.index(alpha)] = (np.array(depths, float)[:, None] ** powers)[
            ..., None
        ]
    values[np.array(depths) >= 256, :, 0] = np.nan
    return values * noise


DEPTHS = [2**p for p in range(1, 11)]
AS_EXPECTED = {1.0: (0.0,) * 5, 0.5: (-0.5, -0.5, -0.75, -0.25, -0.5)}


def test_every_expectation_is_reported_and_one_outside_is_said():
    lines, good = report(DEPTHS, synthetic(DEPTHS, AS_EXPECTED))
    assert good
    assert len(lines) == 11
    assert not any("OUTSIDE" in line for line in lines)
    for alpha in (1.0, 0.5):
        for q in range(5):
            powers = list(AS_EXPECTED[alpha])
            powers[q] += 0.2
            lines, good = report(DEPTHS, synthetic(DEPTHS, {**AS_EXPECTED, alpha: tuple(powers)}))
            assert not good
            assert sum("OUTSIDE" in line for line in lines) == 1


def test_where_nothing_is_finite_is_an_expectation_too():
    values = synthetic(DEPTHS, AS_EXPECTED)
    values[-1, :, 0] = 1.0
    lines, good = report(DEPTHS, values)
    assert not good
    assert "NOT as expected" in lines[-1]
    values = synthetic(DEPTHS, AS_EXPECTED)
    values[0, :, 1, 0] = np.nan
    lines, good = report(DEPTHS, values)
    assert not good
    assert sum("no slope" in line for line in lines) == 5


def test_a_slope_is_that_of_the_power():
    values_LR = 3.0 * np.array(DEPTHS, float)[:, None] ** -0.5 * np.array([1.0, 2.0, 5.0])
    found = slope(DEPTHS, values_LR)
    assert isinstance(found, Estimate)
    assert found.value == pytest.approx(-0.5, abs=1e-9)
    assert isinstance(slope(DEPTHS, np.where(values_LR < 1, np.nan, values_LR)), Refusal)


def test_the_table_has_a_row_for_each_run(tmp_path):
    write_table(tmp_path / "t.csv", DEPTHS, synthetic(DEPTHS, AS_EXPECTED))
    with (tmp_path / "t.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(DEPTHS) * 3 * 4
    assert {row["distance"] for row in rows if row["alpha"] == "0.0" and int(row["depth"]) >= 256} == {"nan"}
    assert len(rows[0]) == 8


@pytest.mark.full
def test_a_small_run_has_the_expected_order(monkeypatch):
    """At width 16 one seed is noisy; the weight change follows the rate and alpha = 1 departs furthest."""
    monkeypatch.setattr(linearisation, "WIDTH", 16)
    values = np.stack([linearisation.measure(depth, 4) for depth in (2, 32)])
    assert values.shape == (2, 5, 3, 4)
    change = values[1, 0] / values[0, 0]
    np.testing.assert_allclose(change[2], 1.0, rtol=0.1)
    np.testing.assert_allclose(change[1], 0.25, rtol=0.1)
    assert np.median(values[1, 2, 1]) < np.median(values[1, 2, 2])
