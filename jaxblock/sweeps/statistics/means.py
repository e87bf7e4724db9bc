"""Means and proportions with 95 % intervals.

mean:        m +- t_{.975, n-1} s / sqrt(n)
proportion:  Clopper-Pearson, [B_{.025}(k, n-k+1), B_{.975}(k+1, n-k)]  (quantiles of the beta distribution)
"""

from collections.abc import Sequence

import numpy as np
from scipy import stats

from jaxblock.sweeps.statistics.estimate import Estimate, Refusal

LEVEL = 0.95
SMALL = 5
"""Below this many values a t interval is flagged "small n": look at the points."""


def t_quantile(df: float, *, comparisons: int = 1) -> float:
    """Return the two-sided 95 % quantile of the t distribution, at level .05 / comparisons (Bonferroni)."""
    return float(stats.t.isf((1 - LEVEL) / (2 * comparisons), df))


def t_words(n: int) -> str:
    """Name a 95 % t interval of n values."""
    return "95 % t" if n >= SMALL else "95 % t, small n"


def finite_vector(values: Sequence[float] | np.ndarray, name: str) -> np.ndarray:
    """Return values as a float64 vector; ValueError where one is not finite."""
    vector = np.asarray(values, dtype=np.float64)
    if vector.ndim != 1:
        raise ValueError(f"{name} has one axis; got shape {vector.shape}")
    if not np.isfinite(vector).all():
        raise ValueError(
            f"{name} must be finite; got {vector[~np.isfinite(vector)][0]}: leave failed runs out"
        )
    return vector


def mean_interval(values: Sequence[float] | np.ndarray) -> Estimate | Refusal:
    """Return the mean of independent values with its t interval; refused for fewer than two values."""
    x_S = finite_vector(values, "values")
    n = len(x_S)
    if n == 0:
        return Refusal(rule="no_values", sentence="there is no value to average")
    if n == 1:
        return Refusal(rule="one_value", sentence="one value has no interval; run another seed")
    mean = float(x_S.mean())
    half = t_quantile(n - 1) * float(x_S.std(ddof=1)) / n**0.5
    return Estimate(value=mean, low=mean - half, high=mean + half, n=n, interval=t_words(n))


def proportion_interval(count: int, total: int) -> Estimate | Refusal:
    """Return count / total with its Clopper-Pearson interval, exact for every total; refused where total is 0."""
    if not 0 <= count <= total:
        raise ValueError(f"count lies between 0 and total = {total}; got {count}")
    if total == 0:
        return Refusal(rule="no_values", sentence="no run says anything about it")
    tail = (1 - LEVEL) / 2
    low = float(stats.beta.ppf(tail, count, total - count + 1)) if count else 0.0
    high = float(stats.beta.ppf(1 - tail, count + 1, total - count)) if count < total else 1.0
    return Estimate(value=count / total, low=low, high=high, n=total, interval="95 % Clopper-Pearson")
