"""What a learning rate tuned at one depth is worth at another: slope, regret, sensitivity, largest stable rate."""

import dataclasses

import numpy as np
import pytest
from scipy import stats

from jaxblock.sweeps.statistics import (
    Basin,
    Estimate,
    Grid,
    Refusal,
    StableRate,
    Transfer,
    fit_basin,
    regret,
    sensitivity,
    stable_rate,
    transfer_slope,
)

OCTAVE = np.arange(9.0)
RATES = 1e-3 * 2.0**OCTAVE
DEPTHS = (2, 4, 8, 16, 32)
DRAWS = 40
LEAST = int(stats.binom.ppf(1e-5, DRAWS, 0.95))


def arm(optimum: float, *, seeds: int = 3, noise: float = 0.0, draw=None) -> Grid:
    """A basin of curvature 0.06 with its minimum of 2 nats `optimum` octaves above the lowest rate."""
    draw = draw or np.random.default_rng(0)
    mean_R = 2 + 0.03 * (OCTAVE - optimum) ** 2
    losses_RS = mean_R[:, None] + np.linspace(0, 0.1, seeds) + noise * draw.normal(size=(len(RATES), seeds))
    return Grid(rates_R=RATES, losses_RS=losses_RS)


def arms(slope: float, *, noise: float, draw) -> dict[int, Grid]:
    return {
        depth: arm(5.2 + slope * (index - 2), noise=noise, draw=draw) for index, depth in enumerate(DEPTHS)
    }


def basins(grids: dict[int, Grid]) -> dict[int, Basin | Refusal]:
    return {depth: fit_basin(grid) for depth, grid in grids.items()}


@pytest.mark.parametrize(("slope", "moves"), [(0.0, False), (-0.5, True)])
def test_the_slope_of_the_optimum_is_covered_and_a_shift_is_seen(slope, moves):
    draw = np.random.default_rng(1)
    hits, seen, kept = 0, 0, 0
    for _ in range(DRAWS):
        found = transfer_slope(basins(arms(slope, noise=0.015, draw=draw)))
        assert isinstance(found, Transfer)
        hits += not found.slope.excludes(slope)
        seen += found.p < 0.05
        kept += found.equivalence.equivalent
    assert hits >= LEAST
    if moves:
        assert (seen, kept) == (DRAWS, 0)
    else:
        assert seen <= DRAWS - LEAST
        assert kept > DRAWS / 2


def test_a_slope_without_noise_is_exact():
    found = transfer_slope(basins(arms(-0.5, noise=0.0, draw=None)))
    assert isinstance(found, Transfer)
    assert found.slope.value == pytest.approx(-0.5, abs=1e-6)
    assert 2 ** (found.intercept - 0.5) == pytest.approx(1e-3 * 2**6.2, rel=1e-6)  # at depth 2


def test_an_uncertain_optimum_weighs_little():
    found = basins(arms(0.0, noise=0.005, draw=np.random.default_rng(2)))
    off = found[32]
    assert isinstance(off, Basin)
    moved = dataclasses.replace(off.optimum, value=4 * off.optimum.value, high=40 * off.optimum.value)
    sure = transfer_slope({**found, 32: dataclasses.replace(off, optimum=moved)})
    unsure = transfer_slope({**found, 32: dataclasses.replace(off, optimum=moved, log2_error=5.0)})
    assert isinstance(sure, Transfer)
    assert isinstance(unsure, Transfer)
    assert abs(unsure.slope.value) < 0.02 < 0.2 < abs(sure.slope.value)


def test_the_interval_of_the_slope_is_the_wider_of_scatter_and_error():
    found = basins(arms(0.0, noise=0.005, draw=np.random.default_rng(5)))

    def half(shift: float, error: float) -> float:
        """Half the interval with every other optimum moved by `shift` octaves, and all errors `error`."""
        moved: dict[int, Basin | Refusal] = {}
        for index, (depth, basin) in enumerate(found.items()):
            assert isinstance(basin, Basin)
            rate = 1e-3 * 2 ** (5.2 + shift * (index % 2))
            optimum = Estimate(value=rate, low=rate / 2, high=rate * 2, n=3, interval="95 % Fieller")
            moved[depth] = dataclasses.replace(basin, optimum=optimum, log2_error=error)
        transfer = transfer_slope(moved)
        assert isinstance(transfer, Transfer)
        return transfer.slope.high - transfer.slope.value

    assert half(0.5, 0.01) > 0.2  # optima off the line, each one sure
    assert half(0.0, 0.5) > 0.2  # optima on the line, each one unsure
    assert half(0.0, 0.01) < 0.02


def test_four_optima_have_no_slope_and_the_depth_without_one_is_named():
    found = basins(arms(0.0, noise=0.01, draw=np.random.default_rng(3)))
    flat = Grid(rates_R=RATES, losses_RS=np.full((9, 3), np.nan))
    refused = transfer_slope({**found, 8: fit_basin(flat)})
    assert isinstance(refused, Refusal)
    assert refused.rule == "few_depths"
    assert "depth 8" in refused.sentence
    assert isinstance(transfer_slope(found), Transfer)
    six = transfer_slope({**found, 64: fit_basin(flat)})
    assert isinstance(six, Transfer)
    assert six.unfitted == (64,)


def estimate(rate: float) -> Estimate:
    return Estimate(value=rate, low=rate, high=rate, n=3, interval="95 % Fieller")


def test_the_regret_of_a_parabola_is_half_its_curvature_times_the_square_of_the_shift():
    grid = arm(4.3)
    basin = fit_basin(grid)
    found = regret(grid, basin, estimate(1e-3 * 2**5.5))
    assert isinstance(found, Estimate)
    assert found.value == pytest.approx(0.03 * 1.2**2, rel=1e-6)
    own = regret(grid, basin, estimate(1e-3 * 2**4.3))
    assert isinstance(own, Estimate)
    assert own.value == pytest.approx(0.0, abs=1e-9)


def test_a_regret_outside_the_window_is_read_between_two_measured_losses_and_is_not_flattered():
    grid = arm(4.3)
    basin = fit_basin(grid)
    assert isinstance(basin, Basin)
    rate = 1e-3 * 2**7.25
    assert rate > basin.rates[-1]
    found = regret(grid, basin, estimate(rate))
    assert isinstance(found, Estimate)
    assert found.value == pytest.approx(0.03 * (0.75 * 2.7**2 + 0.25 * 3.7**2), rel=1e-6)
    assert found.value > 0.03 * 2.95**2


def test_a_regret_is_paired_by_seed():
    draw = np.random.default_rng(4)
    quiet, offsets = arm(4.3, noise=0.002, draw=draw), np.array([[0.0, 2.0, -3.0]])
    loud = Grid(rates_R=RATES, losses_RS=quiet.losses_RS + offsets)
    rate = estimate(1e-3 * 2**6.0)
    first, second = regret(quiet, fit_basin(quiet), rate), regret(loud, fit_basin(loud), rate)
    assert isinstance(first, Estimate)
    assert isinstance(second, Estimate)
    assert (first.low, first.high) == pytest.approx((second.low, second.high), abs=1e-9)
    assert first.high - first.low < 0.05


def test_a_regret_is_refused_outside_the_grid_at_failing_rates_and_without_an_optimum():
    grid = arm(4.3)
    basin = fit_basin(grid)
    refused = regret(grid, basin, estimate(1.0))
    assert isinstance(refused, Refusal)
    assert refused.rule == "outside_grid"
    losses_RS = grid.losses_RS.copy()
    losses_RS[8] = np.nan
    walled = Grid(rates_R=RATES, losses_RS=losses_RS)
    failing = regret(walled, fit_basin(walled), estimate(1e-3 * 2**7.5))
    assert isinstance(failing, Refusal)
    assert failing.rule == "failed_there"
    none = Refusal(rule="edge_left", sentence="", side="left")
    assert regret(grid, none, estimate(1e-3)).rule == "no_optimum"
    assert regret(grid, basin, none).rule == "no_optimum"
    assert isinstance(regret(grid, basin, estimate(RATES[8])), Estimate)


def test_the_sensitivity_caps_losses_and_failures_at_the_first_loss():
    grid = arm(4.0)
    losses_RS = grid.losses_RS.copy()
    losses_RS[8] = np.nan
    losses_RS[7] = 50.0
    walled = Grid(rates_R=RATES, losses_RS=losses_RS)
    found = sensitivity(walled, fit_basin(walled), first_loss=3.0)
    own_S = grid.losses_RS[4]
    capped_RS = np.minimum(np.where(np.isnan(losses_RS), 3.0, losses_RS), 3.0)
    assert isinstance(found, Estimate)
    assert found.value == pytest.approx((capped_RS.mean(axis=0) - own_S).mean(), rel=1e-6)
    absent_RS = np.isnan(losses_RS)
    unknown = Grid(rates_R=RATES, losses_RS=losses_RS, absent_RS=absent_RS)
    refused = sensitivity(unknown, fit_basin(unknown), first_loss=3.0)
    assert isinstance(refused, Refusal)  # no seed has every rate: an absent run is not a failed one
    flat = Refusal(rule="not_convex", sentence="")
    assert sensitivity(walled, flat, first_loss=3.0).rule == "no_optimum"


def test_a_sharper_basin_is_more_sensitive():
    sharp = Grid(rates_R=RATES, losses_RS=2 + 2 * (arm(4.0).losses_RS - 2))
    blunt = arm(4.0)
    values = [sensitivity(grid, fit_basin(grid), first_loss=99.0).value for grid in (blunt, sharp)]
    assert values[1] == pytest.approx(2 * values[0], rel=1e-6)


def test_the_largest_stable_rate_lies_below_the_first_where_half_fail():
    losses_RS = np.full((9, 4), 2.0)
    losses_RS[5, :1] = np.nan
    losses_RS[6, :2] = np.nan
    found = stable_rate(Grid(rates_R=RATES, losses_RS=losses_RS))
    assert isinstance(found, StableRate)
    assert (found.rate, found.first_unstable) == (RATES[5], RATES[6])
    assert found.divergence.value == 0.5
    losses_RS[6, 1] = 2.0
    refused = stable_rate(Grid(rates_R=RATES, losses_RS=losses_RS))
    assert (refused.rule, refused.side) == ("no_failure", "right")
    failing = stable_rate(Grid(rates_R=RATES, losses_RS=np.full((9, 4), np.nan)))
    assert (failing.rule, failing.side) == ("all_failed", "left")


def test_a_regret_and_a_sensitivity_are_widened_by_the_misfit_and_a_regret_at_the_own_optimum_is_0():
    grid = arm(4.3, noise=0.004, draw=np.random.default_rng(6))
    basin = fit_basin(grid)
    assert isinstance(basin, Basin)
    assert basin.misfit > 0
    plain = dataclasses.replace(basin, misfit=0.0)
    rate = estimate(1e-3 * 2**5.5)
    for wide, narrow in (
        (regret(grid, basin, rate), regret(grid, plain, rate)),
        (sensitivity(grid, basin, first_loss=9.0), sensitivity(grid, plain, first_loss=9.0)),
    ):
        assert isinstance(wide, Estimate)
        assert isinstance(narrow, Estimate)
        assert (wide.low, wide.high) == pytest.approx((narrow.low - basin.misfit, narrow.high + basin.misfit))
        assert "misfit" in wide.interval
        assert "misfit" not in narrow.interval
    own = regret(grid, basin, basin.optimum)
    assert isinstance(own, Estimate)
    assert (own.value, own.low, own.high) == (0.0, 0.0, 0.0)
    beside = regret(grid, basin, estimate(1.0001 * basin.optimum.value))
    assert isinstance(beside, Estimate)
    assert beside.high > basin.misfit  # control: only the optimum itself is free of it
