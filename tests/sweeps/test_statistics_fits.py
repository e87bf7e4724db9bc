"""Fits against depth: exact without noise, covering with it, refused where they say nothing."""

import numpy as np
import pytest
from scipy import stats

from jaxblock.sweeps.statistics import (
    Decay,
    Law,
    Line,
    Power,
    Refusal,
    growth_law,
    loss_decay,
    power_law,
    straight_line,
)

DEPTHS = np.array([2.0, 4.0, 8.0, 16.0, 32.0, 64.0])
DRAWS = 40
LEAST = int(stats.binom.ppf(1e-5, DRAWS, 0.95))


def rule(found) -> str:
    assert isinstance(found, Refusal), found
    return found.rule


def test_a_power_law_is_recovered_and_its_interval_covers():
    exact = power_law(DEPTHS, 3.0 * DEPTHS[:, None] ** np.array([[0.5, 0.5]]))
    assert isinstance(exact, Power)
    assert (exact.exponent.value, exact.scale, exact.r2) == pytest.approx((0.5, 3.0, 1.0))
    draw = np.random.default_rng(1)
    hits = 0
    for _ in range(DRAWS):
        slope_S = 0.5 + 0.05 * draw.normal(size=(1, 3))  # every seed has a slope of its own
        found = power_law(DEPTHS, DEPTHS[:, None] ** slope_S * np.exp(0.1 * draw.normal(size=(6, 3))))
        assert isinstance(found, Power)
        hits += not found.exponent.excludes(0.5)
    assert hits >= LEAST


def test_a_power_law_is_refused_for_few_depths_for_zeros_and_for_one_seed():
    y_NS = DEPTHS[:, None] ** np.array([[0.4, 0.5]])
    assert rule(power_law(DEPTHS[:4], y_NS[:4])) == "few_depths"
    assert rule(power_law(DEPTHS, y_NS - y_NS[0])) == "not_positive"
    assert rule(power_law(DEPTHS, y_NS[:, :1])) == "one_value"
    holes = np.concatenate([y_NS, y_NS[:, :1]], axis=1)
    holes[3, 2] = np.nan
    kept = power_law(DEPTHS, holes)
    assert isinstance(kept, Power)
    assert kept.excluded == 1
    assert kept.exponent.value == pytest.approx(0.45)
    holes[5] = np.nan  # a depth without any run is left out, not the seeds
    assert power_law(DEPTHS, holes).xs == tuple(DEPTHS[:5])


def test_a_law_that_is_no_power_shows_in_r2():
    flat = power_law(DEPTHS, np.array([[1.0, 1.1], [3, 3.1], [1, 1.2], [3, 3.3], [1, 1.1], [3, 3.2]]))
    assert isinstance(flat, Power)
    assert flat.r2 < 0.5


def test_a_line_has_the_intervals_of_least_squares():
    draw = np.random.default_rng(2)
    y_N = 5.0 + 0.25 * DEPTHS + 0.5 * draw.normal(size=6)
    found = straight_line(DEPTHS, y_N)
    reference = stats.linregress(DEPTHS, y_N)
    t = stats.t.ppf(0.975, 4)
    assert isinstance(found, Line)
    assert found.slope.high - found.slope.value == pytest.approx(t * reference.stderr, rel=1e-9)
    assert found.intercept.high - found.intercept.value == pytest.approx(
        t * reference.intercept_stderr, rel=1e-9
    )
    assert (found.slope.value, found.intercept.value) == pytest.approx((reference.slope, reference.intercept))
    assert found.r2 == pytest.approx(reference.rvalue**2)


def test_four_points_are_no_line():
    assert rule(straight_line([1.0, 2.0, 3.0], [1.0, 2.0, 3.1])) == "few_points"
    assert rule(straight_line([1.0, 2.0, 3.0, 4.0, 4.0], [1.0, 2.0, 3.1, 4.0, 4.1])) == "few_points"
    assert isinstance(straight_line([1.0, 2.0, 3.0, 4.0, 5.0], [1.0, 2.0, 3.1, 4.0, 5.0]), Line)
    with pytest.raises(ValueError, match="finite"):
        straight_line([1.0, 2.0, 3.0], [1.0, 2.0, float("nan")])


def decaying(draw, p: float, *, noise: float = 0.01, seeds: int = 5) -> np.ndarray:
    """Losses [N, S] of 2 + 0.8 N^-p with one offset per seed."""
    mean_N = 2 + 0.8 * DEPTHS**-p
    return mean_N[:, None] + 0.05 * draw.normal(size=(1, seeds)) + noise * draw.normal(size=(6, seeds))


@pytest.mark.parametrize("p", [0.5, 1.5])
def test_the_loss_law_is_recovered_and_its_intervals_cover(p):
    exact = loss_decay(DEPTHS, 2 + 0.8 * DEPTHS[:, None] ** -p + np.array([[0.0, 0.1]]))
    assert isinstance(exact, Decay)
    assert (exact.exponent.value, exact.floor.value) == pytest.approx((p, 2.05), rel=1e-4)
    draw = np.random.default_rng(3)
    hits = np.zeros(3)
    for _ in range(DRAWS):
        found = loss_decay(DEPTHS, decaying(draw, p, noise=0.005))
        assert isinstance(found, Decay), found
        hits += (
            not found.exponent.excludes(p),
            not found.floor.excludes(2.0),
            not found.amplitude.excludes(0.8),
        )
    assert hits.min() >= LEAST, hits


def test_a_loss_that_does_not_level_off_has_no_law():
    draw = np.random.default_rng(4)
    flat, logarithm = np.full(6, 2.0), 2 - 0.05 * np.log(DEPTHS)
    accepted = {"flat": 0, "logarithm": 0}
    for _ in range(DRAWS):
        noise_NS = 0.01 * draw.normal(size=(6, 5))
        for name, mean_N in (("flat", flat), ("logarithm", logarithm)):
            accepted[name] += isinstance(loss_decay(DEPTHS, mean_N[:, None] + noise_NS), Decay)
    assert max(accepted.values()) <= stats.binom.ppf(1 - 1e-5, DRAWS, 0.05), accepted


def test_each_rule_of_the_loss_law_fires():
    draw = np.random.default_rng(5)
    good = decaying(draw, 1.0)
    assert isinstance(loss_decay(DEPTHS, good), Decay)
    assert rule(loss_decay(DEPTHS[:4], good[:4])) == "few_depths"
    assert rule(loss_decay(DEPTHS, good[:, :1])) == "one_value"
    assert rule(loss_decay(DEPTHS, 4 - good)) == "loss_rises"
    assert rule(
        loss_decay(DEPTHS, 2 - 0.05 * np.log(DEPTHS)[:, None] + 0.001 * draw.normal(size=(6, 5)))
    ) == ("exponent_contains_zero")
    first_only = 2 + (DEPTHS == 2)[:, None] + 0.01 * draw.normal(size=(6, 5))
    assert rule(loss_decay(DEPTHS, first_only)) == "exponent_unbounded"


@pytest.mark.parametrize(
    ("name", "law"),
    [
        ("exponential", lambda l_B: np.exp(0.05 * l_B)),
        ("additive", lambda l_B: np.sqrt(1 + 0.5 * l_B)),
        ("power", lambda l_B: np.maximum(l_B, 0.5) ** 0.9),
    ],
)
def test_the_growth_law_of_a_stream_is_told_from_the_others(name, law):
    draw = np.random.default_rng(6)
    for _ in range(20):
        found = growth_law([law(np.arange(17.0)) * np.exp(0.01 * draw.normal(size=17)) for _ in range(3)])
        assert isinstance(found, Law), found
        assert found.name == name
        assert found.aicc[name] == min(found.aicc.values())


def test_the_coefficients_of_a_growth_law_are_those_it_was_made_with():
    l_B = np.arange(17.0)
    additive = growth_law([np.sqrt(2 + 0.5 * l_B)])
    exponential = growth_law([3 * np.exp(0.045 * l_B)])
    assert additive.parameters == pytest.approx({"a": 2.0, "b": 0.5}, rel=1e-3)
    assert exponential.parameters == pytest.approx({"a": np.log(3), "g": 0.045}, rel=1e-6)


def test_aicc_is_that_of_hurvich_and_tsai():
    """n log(RSS / n) + 2k + 2k(k + 1) / (n - k - 1), k = 2 for a mean and a variance."""
    found = growth_law([np.exp([0.0, 0.1, -0.1, 0.1, -0.1, 0.1, -0.1])])
    assert isinstance(found, Law)
    assert found.aicc["constant"] == pytest.approx(6 * np.log(0.01) + 4 + 12 / 3)


def test_a_growth_law_is_refused_where_nothing_tells_laws_apart():
    draw = np.random.default_rng(7)
    found = [growth_law([np.exp(0.01 * draw.normal(size=17))]) for _ in range(40)]
    names = [one.rule if isinstance(one, Refusal) else one.name for one in found]
    assert set(names) <= {"constant", "laws_tie", "exponential", "power"}
    assert names.count("constant") + names.count("laws_tie") >= 36
    assert names.count("laws_tie") >= 5
    assert all(one.ahead >= 2 for one in found if isinstance(one, Law))
    assert rule(growth_law([np.ones(6)])) == "few_layers"
    assert rule(growth_law([])) == "no_values"
    assert rule(growth_law([np.zeros(9)])) == "not_positive"
    assert isinstance(growth_law([np.ones(9)]), Law)
    with pytest.raises(ValueError, match="finite"):
        growth_law([np.full(9, np.nan)])
