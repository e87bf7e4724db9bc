"""Fits against depth: a power law, a straight line, a loss with a floor, and the growth law of a stream.

Seeds are the unit of replication everywhere: intervals are over seeds, never over steps or layers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxblock.sweeps.statistics.estimate import Estimate, Refusal
from jaxblock.sweeps.statistics.means import finite_vector, mean_interval, t_quantile
from jaxblock.sweeps.statistics.root import lowest_between

LEAST_DEPTHS = 5
LEAST_POINTS = 5
"""Points of a straight line: 3 leave 1 degree of freedom, and an interval that is short by luck."""
LEAST_BLOCKS = 6
TIE = 2.0
"""Units of AICc by which the best growth law must be ahead."""


@dataclass(frozen=True, kw_only=True)
class Power:
    """y = scale x^exponent."""

    exponent: Estimate
    """Mean over seeds of each seed's slope of log y against log x."""
    scale: float
    r2: float
    """Of the mean log y about its line: a power law that bends has a low one."""
    xs: tuple[float, ...]
    excluded: int
    """Seeds left out because one of their values is missing."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """y = intercept + slope x, 95 % t intervals from the scatter about the line."""

    intercept: Estimate
    slope: Estimate
    r2: float


@dataclass(frozen=True, kw_only=True)
class Law:
    """The law a stream's size follows along the blocks, chosen by AICc of log r at blocks 1..L."""

    name: str
    """"constant", "exponential" (log r = a + g l), "additive" (r^2 = a + b l) or "power" (log r = a + p log l)."""
    parameters: Mapping[str, float]
    """a, and g, b or p."""
    aicc: Mapping[str, float]
    """Of every law; lower is better."""
    ahead: float
    """By how much the best is ahead of the second."""
    blocks: int


def complete_seeds(x_N: np.ndarray, y_NS: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """Return x and y without the x that no seed has and the seeds that miss one, and the number of those seeds."""
    x_N, y_NS = finite_vector(x_N, "x"), np.asarray(y_NS, np.float64)
    if y_NS.ndim != 2 or len(y_NS) != len(x_N):
        raise ValueError(f"x_N is [N] and y_NS [N, S]; got {x_N.shape} and {y_NS.shape}")
    if np.isinf(y_NS).any():
        raise ValueError("y_NS is finite, or NaN where a run has no value")
    some_N = np.isfinite(y_NS).any(axis=1)
    whole_S = np.isfinite(y_NS[some_N]).all(axis=0)
    return x_N[some_N], y_NS[some_N][:, whole_S], int((~whole_S).sum())


def power_law(x_N: np.ndarray, y_NS: np.ndarray) -> Power | Refusal:
    """Return the exponent of y against x: one slope per seed, t interval across seeds; NaN is a missing value.

    Refused for fewer than 5 x, values that are not above zero, and fewer than two seeds that have every x.
    """
    x_N, y_NS, excluded = complete_seeds(x_N, y_NS)
    if len(x_N) < LEAST_DEPTHS:
        return Refusal(
            rule="few_depths", sentence=f"a power law over {len(x_N)} depths; {LEAST_DEPTHS} are needed"
        )
    if (x_N <= 0).any() or (y_NS <= 0).any():
        return Refusal(rule="not_positive", sentence="a value is not above zero and has no logarithm")
    u_N, log_NS = np.log(x_N), np.log(y_NS)
    centered_N = u_N - u_N.mean()
    exponent = mean_interval(centered_N @ log_NS / np.square(centered_N).sum())
    if isinstance(exponent, Refusal):
        without = f"; {excluded} seeds miss a depth" if excluded else ""
        return Refusal(rule=exponent.rule, sentence=exponent.sentence + without)
    log_N = log_NS.mean(axis=1)
    level = float(log_N.mean() - exponent.value * u_N.mean())
    return Power(
        exponent=exponent,
        scale=float(np.exp(level)),
        r2=explained(log_N, level + exponent.value * u_N),
        xs=tuple(float(x) for x in x_N),
        excluded=excluded,
    )


def explained(y: np.ndarray, fitted: np.ndarray) -> float:
    """Return r^2; 0 where y is constant, as there is nothing to explain."""
    total = float(np.square(y - y.mean()).sum())
    return 1 - float(np.square(y - fitted).sum()) / total if total > 0 else 0.0


def straight_line(x: Sequence[float] | np.ndarray, y: Sequence[float] | np.ndarray) -> Line | Refusal:
    """Return intercept and slope of y against x; refused for fewer than 5 points at different x."""
    x_N, y_N = finite_vector(x, "x"), finite_vector(y, "y")
    if x_N.shape != y_N.shape:
        raise ValueError(f"x and y have one length; got {len(x_N)} and {len(y_N)}")
    n = len(np.unique(x_N))
    if n < LEAST_POINTS:
        return Refusal(rule="few_points", sentence=f"a line through {n} depths; {LEAST_POINTS} are needed")
    centered_N = x_N - x_N.mean()
    spread = float(np.square(centered_N).sum())
    slope = float(centered_N @ y_N) / spread
    intercept = float(y_N.mean() - slope * x_N.mean())
    df = len(x_N) - 2
    deviation = (float(np.square(y_N - intercept - slope * x_N).sum()) / df) ** 0.5
    half = t_quantile(df) * deviation * spread**-0.5
    half_0 = t_quantile(df) * deviation * (1 / len(x_N) + float(x_N.mean()) ** 2 / spread) ** 0.5
    words = "95 % t, line"
    return Line(
        intercept=Estimate(
            value=intercept, low=intercept - half_0, high=intercept + half_0, n=len(x_N), interval=words
        ),
        slope=Estimate(value=slope, low=slope - half, high=slope + half, n=len(x_N), interval=words),
        r2=explained(y_N, intercept + slope * x_N),
    )


def growth_law(streams: Sequence[Sequence[float]]) -> Law | Refusal:
    """Return which law the stream's root mean square follows; one profile [L + 1] per seed, averaged in log r.

    Candidates: constant (one coefficient), exponential, additive in the square, power (two). All are compared at
    blocks 1..L, since log 0 is not a number. Errors along a profile are not independent, so AICc here ranks and is
    no probability. Refused for fewer than 6 blocks and where the best two are within 2 units.
    """
    if len(streams) == 0:
        return Refusal(rule="no_values", sentence="no run has a stream that is one array")
    r_SB = np.asarray(streams, np.float64)
    if r_SB.ndim != 2 or not np.isfinite(r_SB).all():
        raise ValueError("streams are finite profiles of one length")
    blocks = r_SB.shape[1] - 1
    if blocks < LEAST_BLOCKS:
        return Refusal(
            rule="few_layers", sentence=f"{blocks} blocks; {LEAST_BLOCKS} are needed to tell laws apart"
        )
    if (r_SB <= 0).any():
        return Refusal(rule="not_positive", sentence="the stream is zero at some block")
    y_L, l_L = np.log(r_SB).mean(axis=0)[1:], np.arange(1.0, blocks + 1)
    fits = {
        "constant": ({"a": float(y_L.mean())}, np.full(blocks, y_L.mean())),
        "exponential": line_law(l_L, y_L, "g"),
        "additive": additive_law(l_L, y_L),
        "power": line_law(np.log(l_L), y_L, "p"),
    }
    aicc = {name: akaike(y_L - fitted_L, len(parameters)) for name, (parameters, fitted_L) in fits.items()}
    best, second = sorted(aicc, key=lambda name: aicc[name])[:2]
    ahead = aicc[second] - aicc[best]
    if ahead < TIE:
        return Refusal(rule="laws_tie", sentence=f"{best} is ahead of {second} by {ahead:.2g} units of AICc")
    return Law(name=best, parameters=fits[best][0], aicc=aicc, ahead=ahead, blocks=blocks)


def line_law(u_L: np.ndarray, y_L: np.ndarray, name: str) -> tuple[dict[str, float], np.ndarray]:
    """Return the least squares of y = a + name u, and its values."""
    slope, level = (float(x) for x in np.polyfit(u_L, y_L, 1))
    return {"a": level, name: slope}, level + slope * u_L


def additive_law(l_L: np.ndarray, y_L: np.ndarray) -> tuple[dict[str, float], np.ndarray]:
    """Return the least squares of 2 y = log(a + b l) with a > 0, b >= 0, and its values."""

    def fitted(log_ratio: float) -> np.ndarray:
        shape_L = 0.5 * np.log1p(np.exp(log_ratio) * l_L)
        return shape_L + (y_L - shape_L).mean()

    cost = lambda log_ratio: float(np.square(y_L - fitted(log_ratio)).sum())  # noqa: E731
    starts = np.linspace(-16.0, 16.0, 65)
    start = starts[np.argmin([cost(s) for s in starts])]
    log_ratio = lowest_between(cost, start - 0.5, start + 0.5)
    fitted_L = fitted(log_ratio)
    a = float(np.exp(2 * fitted_L[0])) / (1 + float(np.exp(log_ratio)))
    return {"a": a, "b": a * float(np.exp(log_ratio))}, fitted_L


def akaike(residual_L: np.ndarray, coefficients: int) -> float:
    """Return AICc of a least-squares fit, its variance counted as a parameter; a perfect fit has the floor's."""
    n, k = len(residual_L), coefficients + 1
    variance = max(
        float(np.square(residual_L).mean()), 1e-12
    )  # 1e-6 in log r: below float32 rounding of a profile
    return n * float(np.log(variance)) + 2 * k + 2 * k * (k + 1) / (n - k - 1)
