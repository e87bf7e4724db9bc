"""The loss law in depth, L(N) = E + A N^-p, with profile intervals.

For a fixed p the law is linear in E and A, so p is searched on a grid and refined: no starting point can fail. The
losses carry one offset per seed (paired runs), and the interval of p is the set

    {p : SSE(p) <= SSE_min (1 + F_{.95; 1, df} / df)},   df = losses - seeds - 2

At p = 0 the family is continued by a - b log N, and below it by growing powers, so that an interval that contains 0,
which is no law at all, can be seen.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jaxblock.sweeps.statistics.estimate import Estimate, Refusal
from jaxblock.sweeps.statistics.fits import LEAST_DEPTHS, complete_seeds, explained
from jaxblock.sweeps.statistics.means import t_quantile
from jaxblock.sweeps.statistics.root import lowest_between, zero_between

SEARCH = (-3.0, 6.0)
"""Exponents searched."""
STEPS = 181
WORDS = "95 % profile"


@dataclass(frozen=True, kw_only=True)
class Decay:
    """L(N) = floor + amplitude N^-exponent."""

    floor: Estimate
    """E, nats: the loss of infinite depth, if the law held that far."""
    amplitude: Estimate
    exponent: Estimate
    r2: float
    depths: tuple[float, ...]
    excluded: int
    """Seeds left out because one of their losses is missing."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Linear:
    """The fit at one exponent: mean loss, its slope against the (centred) power, and the squares that remain."""

    power_N: np.ndarray
    mean: float
    slope: float
    squares: float


def loss_decay(depth_N: np.ndarray, loss_NS: np.ndarray) -> Decay | Refusal:
    """Return the law over depths and seeds (NaN: no loss).

    Refused for fewer than 5 depths, fewer than 2 seeds that have all of them, an interval of p that contains 0 or has
    no end, and a loss that rises with depth. The floor's interval includes the seeds' spread.
    """
    x_N, y_NS, excluded = complete_seeds(depth_N, loss_NS)
    if len(x_N) < LEAST_DEPTHS:
        return Refusal(
            rule="few_depths", sentence=f"the law over {len(x_N)} depths; {LEAST_DEPTHS} are needed"
        )
    if (x_N <= 0).any():
        raise ValueError(f"depths are above zero; got {x_N.min()}")
    if y_NS.shape[1] < 2:
        return Refusal(
            rule="one_value", sentence=f"{y_NS.shape[1]} seeds have a loss at every depth; 2 are needed"
        )
    log_N = np.log(x_N) - np.log(x_N).mean()
    y_N = y_NS.mean(axis=1)
    seeds = y_NS.shape[1]
    noise = float(np.square(y_NS - y_NS.mean(axis=0) - y_N[:, None] + y_N.mean()).sum())
    df = y_NS.size - seeds - 2
    cost = lambda p: seeds * linear(log_N, y_N, p).squares + noise  # noqa: E731
    grid = np.linspace(*SEARCH, STEPS)
    cost_P = np.array([cost(p) for p in grid])
    start = grid[cost_P.argmin()]
    step = grid[1] - grid[0]
    best = lowest_between(cost, start - step, start + step)
    limit = cost(best) * (1 + t_quantile(df) ** 2 / df)
    refusal = unidentified(grid, cost_P <= limit, linear(log_N, y_N, best), best)
    return refusal or describe(x_N, y_NS, excluded, best, limit - noise)


def linear(log_N: np.ndarray, y_N: np.ndarray, p: float) -> Linear:
    """Return the least squares of mean + slope (power - its mean), power = (1 - N^-p) / p, log N at p = 0."""
    power_N = -np.expm1(-p * log_N) / p if abs(p) > 1e-8 else log_N
    centered_N = power_N - power_N.mean()
    mean, slope = float(y_N.mean()), float(centered_N @ y_N / np.square(centered_N).sum())
    squares = float(np.square(y_N - mean - slope * centered_N).sum())
    return Linear(power_N=power_N, mean=mean, slope=slope, squares=squares)


def unidentified(grid: np.ndarray, inside_P: np.ndarray, fit: Linear, best: float) -> Refusal | None:
    """Return the rule that the exponent's interval breaks."""
    accepted = grid[inside_P] if inside_P.any() else np.array([best])
    low, high = min(float(accepted.min()), best), max(float(accepted.max()), best)
    if low <= 0:
        return Refusal(
            rule="exponent_contains_zero",
            sentence="the interval of p reaches 0: depths, seeds or noise do not show a loss that levels off",
        )
    if fit.slope > 0:
        return Refusal(rule="loss_rises", sentence="the loss rises with depth")
    if high >= SEARCH[1]:
        return Refusal(
            rule="exponent_unbounded",
            sentence=f"the interval of p has no upper end below {SEARCH[1]:g}: the shallowest depth alone differs",
        )
    return None


def describe(x_N: np.ndarray, y_NS: np.ndarray, excluded: int, best: float, limit: float) -> Decay:
    """Return the law with the profile intervals of its three coefficients.

    For E (and A) the profile is a union of intervals: at each accepted p, all E within what the limit leaves over.
    """
    log_N, y_N, seeds = np.log(x_N), y_NS.mean(axis=1), y_NS.shape[1]
    exact = lambda p: law(x_N, y_N, p)  # noqa: E731
    spare = lambda p: limit - seeds * exact(p)[2]  # noqa: E731
    ends = end_of(spare, best, 1e-6), end_of(spare, best, SEARCH[1])
    bounds = {0: [np.inf, -np.inf], 1: [np.inf, -np.inf]}
    for p in [*np.linspace(ends[0], ends[1], 41), best]:
        value_2, variance_2, _ = exact(p)
        for which, bound in bounds.items():
            reach = (max(0.0, spare(p)) * variance_2[which] / seeds) ** 0.5
            bound[0], bound[1] = min(bound[0], value_2[which] - reach), max(bound[1], value_2[which] + reach)
    (floor, amplitude), _, _ = exact(best)
    # The profile holds the seeds' offsets fixed; their spread is what another set of seeds would change.
    drawn = t_quantile(seeds - 1) * float(y_NS.mean(axis=0).std(ddof=1)) / seeds**0.5
    low, high = (float(np.hypot(bound - floor, drawn)) for bound in bounds[0])
    return Decay(
        floor=Estimate(
            value=floor, low=floor - low, high=floor + high, n=seeds, interval=WORDS + " and t over seeds"
        ),
        amplitude=Estimate(value=amplitude, low=bounds[1][0], high=bounds[1][1], n=seeds, interval=WORDS),
        exponent=Estimate(value=best, low=ends[0], high=ends[1], n=seeds, interval=WORDS),
        r2=explained(y_N, floor + amplitude * np.exp(-best * log_N)),
        depths=tuple(float(x) for x in x_N),
        excluded=excluded,
    )


def law(x_N: np.ndarray, y_N: np.ndarray, p: float) -> tuple[tuple[float, float], tuple[float, float], float]:
    """Return (E, A), their variances per unit noise, and the squares that remain, at one exponent."""
    design_N2 = np.column_stack([np.ones_like(x_N), x_N**-p])
    inverse_22 = np.linalg.inv(design_N2.T @ design_N2)
    floor, amplitude = inverse_22 @ design_N2.T @ y_N
    squares = float(np.square(y_N - design_N2 @ np.array([floor, amplitude])).sum())
    return (float(floor), float(amplitude)), (float(inverse_22[0, 0]), float(inverse_22[1, 1])), squares


def end_of(spare: Callable[[float], float], best: float, limit: float) -> float:
    """Return the exponent between best and limit at which nothing is left over."""
    return zero_between(spare, best, limit) if spare(best) > 0 > spare(limit) else best
