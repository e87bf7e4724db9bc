"""The learning-rate basin: recovery and coverage on made-up basins, every refusal with the grid that lifts it."""

import numpy as np
import pytest
from scipy import stats

from jaxblock.sweeps.statistics import Basin, Estimate, Grid, Refusal, fit_basin
from jaxblock.sweeps.statistics.parabola import fieller, fit_polynomial, measure_misfit

RATES = 1e-3 * 2.0 ** np.arange(7)
OCTAVE = np.arange(7.0)
DRAWS = 120
LEAST = int(stats.binom.ppf(1e-5, DRAWS, 0.95))


def losses(optimum: float = 3.3, *, curvature: float = 0.06, skew: float = 0.0) -> np.ndarray:
    """Mean loss at each rate: a minimum of 2 nats, `optimum` octaves above the lowest rate."""
    u_R = OCTAVE - optimum
    return 2.0 + curvature / 2 * u_R**2 + skew * u_R**3


def noisy(
    draw, mean_R: np.ndarray, *, seeds: int = 3, noise: float = 0.01, offset: float = 0.05
) -> np.ndarray:
    """Losses [R, S]: every seed has an offset of its own."""
    return mean_R[:, None] + draw.normal(0, offset, (1, seeds)) + draw.normal(0, noise, (len(mean_R), seeds))


def grid(losses_RS: np.ndarray, absent_RS: np.ndarray | None = None) -> Grid:
    rates_R = RATES[: len(losses_RS)]
    if absent_RS is None:
        return Grid(rates_R=rates_R, losses_RS=losses_RS)
    return Grid(rates_R=rates_R, losses_RS=losses_RS, absent_RS=absent_RS)


def basin(losses_RS: np.ndarray) -> Basin:
    found = fit_basin(grid(losses_RS))
    assert isinstance(found, Basin), found
    return found


def refusal(losses_RS: np.ndarray, absent_RS: np.ndarray | None = None) -> tuple[str, str]:
    found = fit_basin(grid(losses_RS, absent_RS))
    assert isinstance(found, Refusal), found
    return found.rule, found.side


@pytest.fixture
def clean() -> np.ndarray:
    """Three seeds around a minimum inside the grid, with a little noise."""
    return noisy(np.random.default_rng(1), losses(), noise=0.002)


def test_a_parabola_is_recovered_exactly():
    found = basin(losses(3.3)[:, None] + np.array([[0.0, 0.1, -0.2]]))
    assert found.optimum.value == pytest.approx(1e-3 * 2**3.3, rel=1e-9)
    assert found.curvature.value == pytest.approx(0.06, rel=1e-9)
    assert found.loss.value == pytest.approx(2.0 - 0.1 / 3, rel=1e-9)
    assert found.seed_losses == pytest.approx((2.0, 2.1, 1.8), rel=1e-9)
    assert found.grid_rate == RATES[3]
    assert found.rates == tuple(RATES[1:6])
    u = np.log2(RATES[2] / found.center)
    mean = found.level + found.slope * u + found.bend * u**2
    assert mean == pytest.approx(losses(3.3)[2] - 0.1 / 3, rel=1e-9)


@pytest.mark.parametrize(("optimum", "seeds", "noise"), [(3.3, 3, 0.02), (2.5, 5, 0.01)])
def test_the_intervals_of_a_basin_cover_the_truth(optimum, seeds, noise):
    draw = np.random.default_rng(seeds)
    hits = np.zeros(3)
    for _ in range(DRAWS):
        found = basin(noisy(draw, losses(optimum), seeds=seeds, noise=noise))
        hits += (
            not found.optimum.excludes(1e-3 * 2**optimum),
            not found.curvature.excludes(0.06),
            not found.loss.excludes(2.0),
        )
    assert hits.min() >= LEAST, hits


def test_the_best_of_the_grid_is_optimistic_and_the_vertex_is_not():
    """A shallow basin in noise: the lowest mean of the grid lies below the truth, the fitted minimum much less."""
    draw = np.random.default_rng(23)
    best, vertex = [], []
    for _ in range(DRAWS):
        losses_RS = noisy(draw, losses(3.0, curvature=0.03), noise=0.03, seeds=5, offset=0.0)
        found = fit_basin(grid(losses_RS))
        if isinstance(found, Basin):
            best.append(losses_RS.mean(axis=1).min() - 2.0)
            vertex.append(found.loss.value - 2.0)
    assert len(best) > DRAWS / 2
    assert np.mean(best) < -0.004
    assert np.mean(vertex) > 0.5 * np.mean(best)


@pytest.mark.parametrize("seeds", [3, 8])
def test_pure_noise_is_refused(seeds):
    draw = np.random.default_rng(seeds)
    flat_R = np.full(7, 2.0)
    accepted = sum(isinstance(fit_basin(grid(noisy(draw, flat_R, seeds=seeds))), Basin) for _ in range(400))
    assert accepted <= stats.binom.ppf(1 - 1e-4, 400, 0.025)


def test_offsets_of_seeds_change_the_loss_and_nothing_about_the_optimum(clean):
    shifted = basin(clean + np.array([[1.0, -0.5, 3.0]]))
    plain = basin(clean)
    for name in ("value", "low", "high"):
        assert getattr(shifted.optimum, name) == pytest.approx(getattr(plain.optimum, name), rel=1e-9)
        assert getattr(shifted.curvature, name) == pytest.approx(getattr(plain.curvature, name), rel=1e-6)
    assert shifted.loss.value == pytest.approx(plain.loss.value + 3.5 / 3, rel=1e-9)
    # control: an offset of one learning rate is no offset of a seed
    assert basin(clean + 0.01 * (OCTAVE == 2)[:, None]).optimum.value != pytest.approx(
        plain.optimum.value, rel=1e-3
    )


def test_rates_in_another_unit_scale_the_optimum(clean):
    scaled = fit_basin(Grid(rates_R=10 * RATES, losses_RS=clean))
    assert isinstance(scaled, Basin)
    assert scaled.optimum.value == pytest.approx(10 * basin(clean).optimum.value, rel=1e-9)
    assert scaled.curvature.value == pytest.approx(basin(clean).curvature.value, rel=1e-9)


def test_fiellers_ends_lie_where_the_derivative_is_t_errors_from_zero():
    draw = np.random.default_rng(12)
    for _ in range(20):
        fit = fit_polynomial(OCTAVE[:5] - 1.5, noisy(draw, losses(1.9)[:5], noise=0.02), degree=2)
        ends = fieller(fit)
        assert ends is not None
        for u in ends:
            direction_2 = np.array([1.0, 2 * u])
            error = float(direction_2 @ fit.covariance_PP @ direction_2) ** 0.5
            derivative = abs(float(direction_2 @ fit.powers_P))
            assert derivative == pytest.approx(stats.t.ppf(0.975, fit.df) * error, rel=1e-6)
    # control: where the curvature is within t errors of zero, no interval is bounded
    flat = fit_polynomial(OCTAVE[:5], noisy(draw, np.full(5, 2.0), noise=0.02), degree=2)
    assert abs(flat.powers_P[1]) < 2 * flat.covariance_PP[1, 1] ** 0.5
    assert fieller(flat) is None


def test_a_basin_steeper_on_one_side_has_an_interval_that_holds_its_minimum():
    skewed = losses(3.3, skew=0.004)
    found = basin(noisy(np.random.default_rng(2), skewed, noise=0.001))
    assert len(found.rates) == 5
    truth = 1e-3 * 2**3.3
    assert abs(np.log2(found.optimum.value / truth)) > 0.05  # the parabola misses it
    assert not found.optimum.excludes(truth)
    assert found.optimum.interval == "95 % Fieller, widened for skew"
    assert basin(noisy(np.random.default_rng(2), losses(3.3), noise=0.002)).optimum.interval == "95 % Fieller"


@pytest.mark.parametrize(
    ("optimum", "expected"), [(-0.4, ("edge_left", "left")), (6.4, ("edge_right", "right"))]
)
def test_a_minimum_at_the_edge_is_refused_with_the_side_to_extend(clean, optimum, expected):
    draw = np.random.default_rng(4)
    assert refusal(noisy(draw, losses(optimum), noise=0.002)) == expected
    assert isinstance(fit_basin(grid(clean)), Basin)
    one_seed = noisy(draw, losses(optimum), noise=0.002)[:, :1]
    assert refusal(one_seed) == expected  # the side is known before there are seeds enough for a fit


def test_too_few_rates_are_refused(clean):
    assert refusal(clean[2:5]) == ("few_rates", "")
    assert isinstance(fit_basin(grid(clean[1:5])), Basin)


def test_too_few_seeds_are_refused(clean):
    assert refusal(clean[:, :2]) == ("few_seeds", "")
    thin = clean.copy()
    thin[[1, 2, 5], 2] = np.nan  # the third seed has two rates left
    absent_RS = np.isnan(thin)
    assert refusal(thin, absent_RS) == ("few_seeds", "")


def test_a_narrow_dip_on_a_ridge_is_not_convex():
    dip_R = np.array([2.02, 2.01, 2.08, 2.0, 2.08, 2.01, 2.02])
    assert refusal(np.repeat(dip_R[:, None], 3, axis=1)) == ("not_convex", "")
    bowl_R = np.array([2.09, 2.04, 2.01, 2.0, 2.01, 2.04, 2.09])
    assert isinstance(fit_basin(grid(np.repeat(bowl_R[:, None], 3, axis=1))), Basin)


def test_a_basin_hidden_in_noise_has_no_bounded_optimum_and_more_seeds_lift_it():
    draw = np.random.default_rng(6)
    mean_R = losses(3.0, curvature=0.03)
    losses_RS = noisy(draw, mean_R, seeds=20, noise=0.06)
    rules = [refusal(losses_RS[:, 3 * i : 3 * i + 3])[0] for i in (0, 1, 2)]
    assert "vertex_unbounded" in rules
    assert isinstance(fit_basin(grid(losses_RS)), Basin)


def test_a_wall_above_the_minimum_bounds_it_as_a_higher_loss_would(clean):
    walled = clean.copy()
    walled[4:] = np.nan  # the minimum is at 3.3 octaves, the highest rate that holds at 3
    found = fit_basin(grid(walled))
    assert refusal(clean[:4]) == ("edge_right", "right")  # control: the same without the failures
    assert isinstance(found, Refusal)
    assert (found.rule, found.side) == ("edge_wall", "between")
    inside = noisy(np.random.default_rng(8), losses(2.6), noise=0.002)
    inside[4:] = np.nan
    bounded = basin(inside)
    assert bounded.bounded_by_wall
    assert not bounded.optimum.excludes(1e-3 * 2**2.6)
    assert not basin(clean).bounded_by_wall


def test_a_wall_below_the_minimum_bounds_nothing():
    draw = np.random.default_rng(9)
    losses_RS = noisy(draw, losses(1.7), noise=0.002)
    losses_RS[:2] = np.nan
    assert refusal(losses_RS) == ("edge_left", "left")


def test_survivors_at_a_wall_take_no_part_and_refuse_the_basin_where_they_look_best(clean):
    walled = clean.copy()
    walled[5, 1:] = np.nan  # two of three runs failed
    survivor = walled.copy()
    survivor[5, 0] += 0.05
    assert basin(walled) == basin(survivor)
    lucky = walled.copy()
    lucky[5, 0] -= 1.0
    assert refusal(lucky) == ("diverged_at_minimum", "")


def test_up_to_a_fifth_of_failures_is_fitted_and_counted():
    losses_RS = noisy(np.random.default_rng(10), losses(), seeds=5, noise=0.002)
    losses_RS[4, 0] = np.nan  # 20 % of five
    found = basin(losses_RS)
    assert found.failed == 1
    assert RATES[4] in found.rates
    losses_RS[4, 1] = np.nan  # 40 %
    assert RATES[4] not in basin(losses_RS).rates


def test_a_run_that_is_not_there_is_no_failure(clean):
    holes = clean.copy()
    holes[4, 1] = np.nan
    absent_RS = np.isnan(holes)
    found = fit_basin(grid(holes, absent_RS))
    assert isinstance(found, Basin)
    assert RATES[4] in found.rates
    assert RATES[4] not in basin(holes).rates  # control: one of three failed
    nothing = np.full_like(clean, np.nan)
    assert refusal(nothing) == ("all_failed", "")
    assert refusal(nothing, np.ones_like(clean, dtype=bool)) == ("no_values", "")


def test_a_missing_seed_does_not_tilt_the_means():
    losses_RS = losses()[:, None] + np.array([[0.0, 0.0, 3.0]])
    holes = losses_RS.copy()
    holes[5, 2] = np.nan
    absent_RS = np.isnan(holes)
    effects_R = grid(holes, absent_RS).effects
    np.testing.assert_allclose(effects_R, losses_RS.mean(axis=1), rtol=1e-12)
    assert (
        np.nanmean(holes, axis=1).argmin() == 5
    )  # control: plain means put the minimum where the seed is missing
    assert grid(holes, absent_RS).best == 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rates_R": RATES[::-1]}, "ascending"),
        ({"rates_R": np.append(RATES[:-1], np.nan)}, "ascending"),
        ({"rates_R": RATES[:3]}, "rates_R is"),
        ({"losses_RS": np.full((7, 3), np.inf)}, "finite or NaN"),
        ({"absent_RS": np.ones((7, 3), dtype=bool)}, "NaN where absent"),
        ({"absent_RS": np.ones((7, 2), dtype=bool)}, "as losses_RS"),
    ],
)
def test_a_grid_that_makes_no_sense_is_an_error(clean, change, words):
    with pytest.raises(ValueError, match=words):
        Grid(**{"rates_R": RATES, "losses_RS": clean, **change})


def test_every_number_of_a_basin_has_its_n(clean):
    found = basin(clean)
    for estimate in (found.optimum, found.curvature, found.loss):
        assert isinstance(estimate, Estimate)
        assert estimate.n == 3
    assert found.loss.interval == "95 % t, small n, widened by the misfit"
    assert found.curvature_p < 0.05


KINK_R = 2.0 + 0.04 * np.abs(OCTAVE - 3.0)
"""A loss with a kink at its minimum, which no parabola follows, however narrow the window."""


def test_the_misfit_is_the_largest_mean_residual_and_an_exact_fit_has_none():
    draw = np.random.default_rng(31)
    losses_RS = noisy(draw, losses(3.3, skew=0.002), noise=0.002)
    found = basin(losses_RS)
    window = np.isin(RATES, found.rates)
    u_W = np.log2(RATES[window] / found.center)
    own_S = [np.polyval(np.polyfit(u_W, y_W, 2), u_W) for y_W in losses_RS[window].T]
    assert found.misfit == pytest.approx(np.abs((losses_RS[window] - np.transpose(own_S)).mean(axis=1)).max())
    exact = basin(losses(3.3)[:, None] + np.array([[0.0, 0.1, -0.2]]))
    assert exact.misfit == 0.0
    assert exact.loss.interval == "95 % t, small n"


def test_the_loss_is_widened_by_the_misfit_on_both_sides():
    losses_RS = noisy(np.random.default_rng(32), losses(3.3, skew=0.003), noise=0.001)
    found = basin(losses_RS)
    half = stats.t.ppf(0.975, 2) * np.std(found.seed_losses, ddof=1) / 3**0.5
    assert found.misfit > 0.002
    assert found.loss.high - found.loss.value == pytest.approx(half + found.misfit, rel=1e-9)
    assert found.loss.value - found.loss.low == pytest.approx(half + found.misfit, rel=1e-9)


def test_the_widened_loss_covers_the_floor_of_a_basin_that_is_no_parabola_and_seeds_alone_do_not():
    """Curves steeper above and with a flat floor; the seeds agree, so that their interval is short."""
    draw = np.random.default_rng(33)
    covered, alone, total = 0, 0, 0
    for optimum in np.linspace(2.6, 3.4, 20):
        for mean_R in (losses(optimum, skew=0.004), losses(optimum) + 0.002 * (OCTAVE - optimum) ** 4):
            found = fit_basin(grid(noisy(draw, mean_R, noise=0.001, offset=0.0)))
            if isinstance(found, Basin):
                total += 1
                covered += not found.loss.excludes(2.0)
                alone += found.loss.low + found.misfit <= 2.0 <= found.loss.high - found.misfit
    assert total >= 20
    assert covered >= 0.9 * total
    assert alone < 0.6 * total


def test_a_parabola_that_misses_by_a_tenth_of_the_basin_is_refused_and_asks_for_finer_rates():
    draw = np.random.default_rng(34)
    kinked = noisy(draw, KINK_R, noise=0.001)
    found = fit_basin(grid(kinked))
    assert isinstance(found, Refusal)
    assert (found.rule, found.side) == ("lack_of_fit", "finer")
    assert "measure rates between" in found.sentence
    # control: the same misfit is no evidence where the seeds scatter as much
    assert isinstance(fit_basin(grid(noisy(draw, KINK_R, noise=0.015))), Basin)
    # control: a basin ten times as deep is known to a tenth of its depth
    assert isinstance(fit_basin(grid(kinked + 10 * (losses(3.0) - 2.0)[:, None])), Basin)


def test_rates_a_factor_4_apart_lack_fit_and_rates_between_them_lift_the_refusal():
    u_R = np.arange(-3.0, 3.5, 0.5)
    mean_R = 2.0 + 0.06 * (np.exp(0.8 * u_R) - 0.8 * u_R - 1)  # steep above, nearly flat below
    losses_RS = mean_R[:, None] + 0.001 * np.random.default_rng(35).normal(size=(len(u_R), 3))
    rates_R = 1e-2 * 2.0**u_R
    coarse = fit_basin(Grid(rates_R=rates_R[::4], losses_RS=losses_RS[::4]))
    fine = fit_basin(Grid(rates_R=rates_R[::2], losses_RS=losses_RS[::2]))
    assert isinstance(coarse, Refusal)
    assert coarse.rule == "lack_of_fit"
    assert isinstance(fine, Basin)
    assert not fine.loss.excludes(2.0)


def test_a_window_that_lacks_fit_is_narrowed_to_the_widest_that_does_not():
    steep_R = losses(3.3, skew=0.006)
    found = basin(noisy(np.random.default_rng(2), steep_R, noise=0.001))
    assert found.rates == tuple(RATES[1:5])
    assert basin(noisy(np.random.default_rng(2), losses(3.3), noise=0.001)).rates == tuple(RATES[1:6])


def test_the_lack_of_fit_test_is_that_of_two_nested_fits_and_keeps_its_level():
    draw = np.random.default_rng(36)
    u_W, p_values = OCTAVE[:5] - 2, []
    for _ in range(DRAWS):
        losses_WS = noisy(draw, losses()[:5])
        p_values.append(measure_misfit(fit_polynomial(u_W, losses_WS, degree=2), u_W, losses_WS).p)
    assert stats.kstest(p_values, "uniform").pvalue > 1e-4
    losses_WS[1, 0] = np.nan
    found = measure_misfit(fit_polynomial(u_W, losses_WS, degree=2), u_W, losses_WS)
    quartic = fit_polynomial(u_W, losses_WS, degree=4)  # through every mean of five rates
    smaller = fit_polynomial(u_W, losses_WS, degree=2)
    squares = [squares_of(fit, u_W, losses_WS) for fit in (smaller, quartic)]
    f = (squares[0] - squares[1]) / 2 / (squares[1] / quartic.df)
    assert found.p == pytest.approx(stats.f.sf(f, 2, quartic.df), rel=1e-6)


def squares_of(fit, u_W: np.ndarray, losses_WS: np.ndarray) -> float:
    """The squares that a fit leaves over the finite losses."""
    powers_WP = u_W[:, None] ** np.arange(1, len(fit.powers_P) + 1)
    residual_WS = losses_WS - fit.offsets_S - (powers_WP @ fit.powers_P)[:, None]
    return float(np.nansum(residual_WS**2))
