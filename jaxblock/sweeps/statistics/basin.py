"""The learning-rate basin of one arm: where its minimum lies, how sharp it is, and whether it is one.

    loss_{rs} = a_s + b u_r + c u_r^2 + noise,   u_r = log2(rate_r / center)
    u* = -b / 2c,  its interval by Fieller: {u : |b + 2 c u| <= t sd(b + 2 c u)}
    misfit = max over r of |mean over s of the residual|,   interval of the loss: t over seeds, +- misfit on both sides
    F = [(SSE - SSE_pure) / (W - 3)] / [SSE_pure / df_pure],   SSE_pure of loss_{rs} = a_s + e_r: no curve at all

One offset a_s per seed: the runs of a seed share data order and initial keys, and what all its rates share says
nothing about the optimum. The window is the rates within a factor of 4 of the grid's lowest mean, at least 4 of them;
where the parabola lacks fit there, the widest of the narrower windows (still 4 rates) where it does not.

Failures. A rate where more than 20 % of the runs failed is a wall: a mean over its survivors is a mean over the lucky
ones, so it takes no part in the fit. It is evidence that the loss is not lower there, so a wall above the minimum
bounds it from the right as a measured higher loss would; but it says nothing about where the minimum is, so the
vertex must then lie at or below the highest rate that holds, or the basin is refused and the gap has to be measured.
A wall below the minimum bounds nothing: failing at a small rate is not the far side of a basin. Up to 20 % failures,
the fit takes the survivors and says how many failed. Survivors that look best at a wall refuse the basin.

Misfit. Seeds show how far the mean of a rate may move, not how far the parabola is from the loss between the rates.
The distance at the rates is measured, so it stands for the distance between them. A parabola that misses by more
than a tenth of the range of the window's means, and by more than the seeds explain (F test at 1 %), is refused: the
range is the depth of the basin, and what is ranked are floors that differ by less than it.
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy import stats

from jaxblock.sweeps.statistics.estimate import Estimate, Refusal
from jaxblock.sweeps.statistics.grid import Grid
from jaxblock.sweeps.statistics.means import mean_interval, t_quantile
from jaxblock.sweeps.statistics.parabola import (
    Fit,
    Misfit,
    fieller,
    fit_polynomial,
    measure_misfit,
    read_parabola,
    skewed_minimum,
)

LEAST_RATES = 4
LEAST_SEEDS = 3
OCTAVES = 2.0
"""Half-width of the window: a factor of 4 in the rate."""
MISFIT_SHARE = 0.1
"""Largest misfit over the range of the window's means."""
MISFIT_P = 0.01
"""Level of the lack-of-fit test."""
MISFIT_WORDS = "the misfit"


@dataclass(frozen=True, kw_only=True)
class Basin:
    """A fitted minimum. Inside `rates`, the mean loss is level + slope u + bend u^2 with u = log2(rate / center)."""

    optimum: Estimate
    """Learning rate of the vertex, 95 % Fieller."""
    log2_error: float
    """Half the width of that interval in octaves, over the t quantile: what a fit over depths weighs with."""
    curvature: Estimate
    """Second derivative 2c, nats per octave squared, 95 % t."""
    curvature_p: float
    """p of no curvature, two-sided, times the number of places where the grid's minimum could have been."""
    loss: Estimate
    """Mean over seeds of the loss at the vertex, t interval widened by `misfit`: seeds alone do not show how far the
    parabola is from the loss between the measured rates. Less optimistic than the best of the grid."""
    misfit: float
    """Nats by which the parabola misses: largest |mean over seeds of the residual| over `rates`; 0 for an exact fit."""
    seed_losses: tuple[float | None, ...]
    """Loss of each seed at the vertex, in the grid's order; None with fewer than 3 of the window's rates."""
    rates: tuple[float, ...]
    """The window."""
    grid_rate: float
    """Rate of the grid with the lowest mean."""
    failed: int
    """Failed runs at the rates of the window, left out of the fit."""
    bounded_by_wall: bool
    """No higher rate holds: the right side is where runs fail."""
    df: int
    center: float
    level: float
    slope: float
    bend: float


def fit_basin(grid: Grid) -> Basin | Refusal:
    """Return the basin of a grid, or the first rule it breaks.

    Order: no usable rate, survivors best at a wall, minimum at an edge (`side` says where to extend), fewer than 4
    usable rates, fewer than 3 seeds, no upward curvature, curvature within the noise, lack of fit (side "finer"),
    vertex beyond the last rate.
    """
    refusal = unbracketed(grid)
    if refusal is not None:
        return refusal
    found = fit_window(grid, windows_of(grid)[0])
    if isinstance(found, Basin) or found.rule != "lack_of_fit":
        return found
    narrower = (fit_window(grid, window) for window in windows_of(grid)[1:])
    return next((one for one in narrower if isinstance(one, Basin)), found)


def fit_window(grid: Grid, window: np.ndarray) -> Basin | Refusal:
    """Return the basin of some rates of a grid whose minimum is bracketed."""
    seeds = np.flatnonzero(grid.measured[window].sum(axis=0) >= 3)
    if len(seeds) < LEAST_SEEDS:
        return Refusal(
            rule="few_seeds",
            sentence=f"{len(seeds)} seeds have at least 3 learning rates around the minimum; run {LEAST_SEEDS} or more",
        )
    u_W = np.log2(grid.rates_R[window] / grid.rates_R[grid.best])
    losses_WS = grid.losses_RS[np.ix_(window, seeds)]
    fit = fit_polynomial(u_W, losses_WS, degree=2)
    misfit = measure_misfit(fit, u_W, losses_WS)
    return (
        uncurved(grid, fit)
        or ill_fitting(grid, window, misfit)
        or beyond(grid, window, fit)
        or describe(grid, window, seeds, fit, misfit.nats)
    )


def unbracketed(grid: Grid) -> Refusal | None:
    """Return the rule that the grid breaks before anything is fitted."""
    usable, best = np.flatnonzero(grid.usable), grid.best
    if best is None and not grid.evidence.any():
        return Refusal(rule="no_values", sentence="no run of any learning rate was trained to an end")
    if best is None:
        return Refusal(
            rule="all_failed", sentence=f"none of {len(grid.rates_R)} learning rates has runs that hold"
        )
    effects_R, rate = grid.effects, grid.rates_R[best]
    lowest = int(np.nanargmin(effects_R))
    if grid.wall[lowest]:
        return Refusal(
            rule="diverged_at_minimum",
            sentence=f"the lowest mean is at {grid.rates_R[lowest]:.3g}, where {grid.failed[lowest]} of "
            f"{grid.evidence[lowest]} runs failed: the survivors do not speak for the rate",
        )
    if len(usable) > 1 and best == usable[0]:
        return Refusal(
            rule="edge_left",
            sentence=f"the lowest mean is at the lowest rate that holds, {rate:.3g}; measure {rate / 2:.3g}",
            side="left",
        )
    if len(usable) > 1 and best == usable[-1] and not grid.wall[best:].any():
        return Refusal(
            rule="edge_right",
            sentence=f"the lowest mean is at the highest rate measured, {rate:.3g}; measure {2 * rate:.3g}",
            side="right",
        )
    if len(usable) < LEAST_RATES:
        return Refusal(
            rule="few_rates",
            sentence=f"{len(usable)} of {len(grid.rates_R)} learning rates can be fitted; {LEAST_RATES} are needed",
        )
    return None


def windows_of(grid: Grid) -> list[np.ndarray]:
    """Return the positions of the rates to fit: within 2 octaves of the lowest mean, and the nearest up to 4.

    After it the narrower windows, each without the farthest rate of the one before, down to 4 rates: they are fitted
    only where the wider one lacks fit.
    """
    usable = np.flatnonzero(grid.usable)
    assert grid.best is not None
    distance_U = np.abs(np.log2(grid.rates_R[usable] / grid.rates_R[grid.best]))
    count = max(LEAST_RATES, int((distance_U <= OCTAVES + 1e-6).sum()))
    nearest_U = usable[np.argsort(distance_U, kind="stable")]
    return [np.sort(nearest_U[:kept]) for kept in range(min(count, len(usable)), LEAST_RATES - 1, -1)]


def curvature_p(grid: Grid, fit: Fit) -> float:
    """Return p of c = 0, times the number of inner usable rates: the window was placed where the mean is lowest."""
    error = float(fit.covariance_PP[1, 1]) ** 0.5
    t = abs(float(fit.powers_P[1])) / error if error > 0 else math.inf
    return float(min(1.0, 2 * stats.t.sf(t, fit.df) * max(1, int(grid.usable.sum()) - 2)))


def uncurved(grid: Grid, fit: Fit) -> Refusal | None:
    """Return the rule about curvature that the fitted quadratic breaks."""
    if fit.powers_P[1] <= 0:
        return Refusal(
            rule="not_convex",
            sentence=f"the losses around {grid.rates_R[grid.best]:.3g} do not curve upwards",
        )
    p = curvature_p(grid, fit)
    if fieller(fit) is None or p >= 0.05:
        return Refusal(
            rule="vertex_unbounded",
            sentence=f"the curvature does not stand out of the noise (p = {p:.2g}); run more seeds or a wider grid",
        )
    return None


def ill_fitting(grid: Grid, window: np.ndarray, misfit: Misfit) -> Refusal | None:
    """Return the rule that a parabola breaks which misses the means by more than seeds and a tenth of their range."""
    depth = float(np.ptp(grid.effects[window]))
    if misfit.p >= MISFIT_P or misfit.nats <= MISFIT_SHARE * depth:
        return None
    at = grid.rates_R[window]
    return Refusal(
        rule="lack_of_fit",
        sentence=f"the parabola misses the measured means from {at[0]:.3g} to {at[-1]:.3g} by up to {misfit.nats:.2g} "
        f"nats, {misfit.nats / depth:.0%} of their range (p = {misfit.p:.2g}); measure rates between these",
        side="finer",
    )


def beyond(grid: Grid, window: np.ndarray, fit: Fit) -> Refusal | None:
    """Return the rule that a vertex outside the window breaks."""
    b, c = fit.powers_P
    rates_W = grid.rates_R[window]
    vertex = grid.rates_R[grid.best] * 2 ** (-b / (2 * c))
    if rates_W[0] <= vertex <= rates_W[-1]:
        return None
    if vertex > rates_W[-1] and grid.wall[window[-1] :].any():
        wall = grid.rates_R[window[-1] :][grid.wall[window[-1] :]][0]
        return Refusal(
            rule="edge_wall",
            sentence=f"the loss still falls at {rates_W[-1]:.3g} and runs fail at {wall:.3g}; measure a rate between",
            side="between",
        )
    right = vertex > rates_W[-1]
    above, higher = ("above", "a higher") if right else ("below", "a lower")
    fitted = f"{rates_W[0]:.3g} to {rates_W[-1]:.3g}"
    return Refusal(
        rule="edge_right" if right else "edge_left",
        sentence=f"the fitted minimum lies {above} the rates it was fitted to, {fitted}; measure {higher} one",
        side="right" if right else "left",
    )


def vertex_interval(fit: Fit, u_W: np.ndarray, losses_WS: np.ndarray) -> tuple[float, float, str]:
    """Return the vertex's interval in octaves from the center, and its name."""
    vertex, bounds = float(-fit.powers_P[0] / (2 * fit.powers_P[1])), fieller(fit)
    assert bounds is not None
    skewed = skewed_minimum(u_W, losses_WS) or bounds
    low, high = min(vertex, bounds[0], skewed[0]), max(vertex, bounds[1], skewed[1])
    widened = skewed[0] < bounds[0] or skewed[1] > bounds[1]
    return low, high, "95 % Fieller, widened for skew" if widened else "95 % Fieller"


def describe(grid: Grid, window: np.ndarray, seeds: np.ndarray, fit: Fit, misfit: float) -> Basin | Refusal:
    """Return the record of a fit that breaks no rule."""
    rates_W, losses_WS = grid.rates_R[window], grid.losses_RS[window]
    assert grid.best is not None
    center = float(grid.rates_R[grid.best])
    u_W = np.log2(rates_W / center)
    b, c = (float(x) for x in fit.powers_P)
    low, high, words = vertex_interval(fit, u_W, losses_WS[:, seeds])
    value_S = read_parabola(u_W, losses_WS, -b / (2 * c))
    loss = mean_interval(value_S[seeds])
    if isinstance(loss, Refusal):
        return loss
    rates = Estimate(
        value=center * 2 ** (-b / (2 * c)),
        low=center * 2**low,
        high=center * 2**high,
        n=len(seeds),
        interval=words,
    )
    half = t_quantile(fit.df) * float(fit.covariance_PP[1, 1]) ** 0.5
    return Basin(
        optimum=rates,
        log2_error=(high - low) / (2 * t_quantile(fit.df)),
        curvature=Estimate(
            value=2 * c, low=2 * (c - half), high=2 * (c + half), n=len(seeds), interval="95 % t, parabola"
        ),
        curvature_p=curvature_p(grid, fit),
        loss=loss.widened(misfit, MISFIT_WORDS),
        misfit=misfit,
        seed_losses=tuple(float(x) if math.isfinite(x) else None for x in value_S),
        rates=tuple(float(rate) for rate in rates_W),
        grid_rate=center,
        failed=int(grid.failed[window].sum()),
        bounded_by_wall=not grid.usable[grid.best + 1 :].any(),
        df=fit.df,
        center=center,
        level=float(fit.offsets_S.mean()),
        slope=b,
        bend=c,
    )
