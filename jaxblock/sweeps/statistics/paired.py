"""Comparisons paired by seed: the difference, the smallest one that could be found, Holm, and equivalence.

    d_s = x_s - y_s,   t = mean(d) sqrt(n) / sd(d)   with n - 1 degrees of freedom

Detectable is the difference found with 80 % power at two-sided level .05: delta with P(|T| > t_.975) = .8 for a
noncentral T of noncentrality delta sqrt(n) / sd(d). Equivalence is two one-sided tests (Schuirmann, 1987).

With C comparisons the level of each is .05 / C (Bonferroni). Where both sides were read from curves that miss by m in
sum, a difference up to m may be none: the interval is mean(d) +- (t sd(d) / sqrt(n) + m), and
t = max(0, |mean(d)| - m) sqrt(n) / sd(d), so that p C < .05 exactly where the interval leaves 0 out.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from jaxblock.sweeps.statistics.estimate import Estimate, Refusal
from jaxblock.sweeps.statistics.means import finite_vector, t_quantile, t_words
from jaxblock.sweeps.statistics.root import zero_between

POWER = 0.8
ALPHA = 0.05


@dataclass(frozen=True, kw_only=True)
class Paired:
    """A difference between two sets of runs that share their seeds."""

    difference: Estimate
    """Mean of first less second, its interval adjusted for the comparisons and widened by the misfit."""
    p: float
    """Two-sided paired t test of a difference no larger than the misfit; not adjusted."""
    detectable: float
    """Smallest difference found with 80 % power at level .05 / comparisons, from these differences; plus the misfit."""
    pairs: int
    excluded: int
    """Seeds left out because either side has no loss."""


@dataclass(frozen=True, kw_only=True)
class Equivalence:
    """Whether a difference is shown to be smaller than a margin declared beforehand."""

    equivalent: bool
    """p < .05, which is: the 90 % interval lies inside +- margin."""
    p: float
    """The larger of the two one-sided p values."""
    margin: float
    interval: Estimate
    """90 % t."""


def paired_values(first_S: np.ndarray, second_S: np.ndarray) -> tuple[np.ndarray, int]:
    """Return the differences of the seeds where both sides are finite, and the number of the other seeds."""
    first_S, second_S = np.asarray(first_S, np.float64), np.asarray(second_S, np.float64)
    if first_S.ndim != 1 or first_S.shape != second_S.shape:
        raise ValueError(
            f"paired losses have one axis and one length; got {first_S.shape} and {second_S.shape}"
        )
    both_S = np.isfinite(first_S) & np.isfinite(second_S)
    return first_S[both_S] - second_S[both_S], int((~both_S).sum())


def paired_difference(
    first_S: np.ndarray, second_S: np.ndarray, *, comparisons: int = 1, misfit: float = 0.0
) -> Paired | Refusal:
    """Return mean(first - second) over seeds, position by position the same seed; NaN is a run without a loss.

    Pairs with a NaN are left out and counted. Refused for fewer than two pairs, and where all differences are the
    same number, which leaves nothing to judge chance by.

    Args:
      first_S: losses of one side.
      second_S: losses of the other.
      comparisons: how many differences are looked at; the interval holds for all of them at once.
      misfit: by how much the curves that both sides were read from may miss, in sum.
    """
    if comparisons < 1 or misfit < 0:
        raise ValueError(f"comparisons >= 1 and misfit >= 0 are needed; got {comparisons} and {misfit}")
    d_P, excluded = paired_values(first_S, second_S)
    n = len(d_P)
    if n < 2:
        return Refusal(rule="few_pairs", sentence=f"{n} of {n + excluded} seeds have a loss on both sides")
    if np.ptp(d_P) == 0:
        return Refusal(rule="no_spread", sentence=f"all {n} differences are the same number")
    mean, error = float(d_P.mean()), float(d_P.std(ddof=1)) / n**0.5
    half = t_quantile(n - 1, comparisons=comparisons) * error
    words = t_words(n) + (f", Bonferroni for {comparisons} comparisons" if comparisons > 1 else "")
    difference = Estimate(value=mean, low=mean - half, high=mean + half, n=n, interval=words)
    return Paired(
        difference=difference.widened(misfit, "the misfits of both arms"),
        p=float(2 * stats.t.sf(max(0.0, abs(mean) - misfit) / error, n - 1)),
        detectable=noncentrality(n, comparisons) * error + misfit,
        pairs=n,
        excluded=excluded,
    )


def detectable_effect(spread: float, n: int) -> float:
    """Return the difference found with 80 % power by a paired t test of n pairs with standard deviation `spread`."""
    if spread < 0 or n < 2:
        raise ValueError(f"spread >= 0 and n >= 2 are needed; got {spread} and {n}")
    return noncentrality(n, 1) * spread / n**0.5


@functools.cache
def noncentrality(n: int, comparisons: int) -> float:
    """Return where a two-sided t test of n pairs at level .05 / comparisons has 80 % power; about 2.8 for large n."""
    limit = t_quantile(n - 1, comparisons=comparisons)
    return zero_between(lambda nc: power_of(nc, n - 1, limit) - POWER, 0.1, 4.0 * limit + 4.0)


def power_of(noncentrality: float, df: int, limit: float) -> float:
    """Return P(|T| > limit) for a noncentral T: the mean over W = sqrt(chi^2 / df) of P(|Z + nc| > limit W)."""
    # 2,000 midpoints in probability; scipy's noncentral t is NaN for some of the arguments needed here.
    w_Q = np.sqrt(stats.chi2.ppf((np.arange(2000) + 0.5) / 2000, df) / df)
    reached_Q = stats.norm.sf(limit * w_Q - noncentrality) + stats.norm.cdf(-limit * w_Q - noncentrality)
    return float(reached_Q.mean())


def holm(p_values: Sequence[float]) -> tuple[float, ...]:
    """Return Holm's adjusted p values, in the given order: p_(i) -> max_{j <= i} min(1, (m - j + 1) p_(j))."""
    p_C = finite_vector(p_values, "p_values")
    if ((p_C < 0) | (p_C > 1)).any():
        raise ValueError(f"p values lie between 0 and 1; got {p_C.min()} to {p_C.max()}")
    order_C = np.argsort(p_C, kind="stable")
    scaled_C = np.minimum(1.0, p_C[order_C] * np.arange(len(p_C), 0, -1))
    adjusted_C = np.empty_like(p_C)
    adjusted_C[order_C] = np.maximum.accumulate(scaled_C)
    return tuple(float(p) for p in adjusted_C)


def equivalence(first_S: np.ndarray, second_S: np.ndarray, *, margin: float) -> Equivalence | Refusal:
    """Return whether |mean(first - second)| < margin is shown at level .05; pairs and refusals as in the difference.

    "Not significantly different" is no evidence of equality; this is.
    """
    d_P, excluded = paired_values(first_S, second_S)
    if len(d_P) < 2:
        return Refusal(
            rule="few_pairs", sentence=f"{len(d_P)} of {len(d_P) + excluded} seeds have both losses"
        )
    if np.ptp(d_P) == 0:
        return Refusal(rule="no_spread", sentence=f"all {len(d_P)} differences are the same number")
    error = float(d_P.std(ddof=1)) / len(d_P) ** 0.5
    return equivalence_of(float(d_P.mean()), error, df=len(d_P) - 1, margin=margin)


def equivalence_of(value: float, error: float, *, df: int, margin: float) -> Equivalence:
    """Return the two one-sided tests of |value| < margin for an estimate with a standard error above zero."""
    if margin <= 0 or error <= 0:
        raise ValueError(f"margin and error must be above zero; got {margin} and {error}")
    p = max(stats.t.sf((margin + value) / error, df), stats.t.sf((margin - value) / error, df))
    half = float(stats.t.ppf(1 - ALPHA, df)) * error
    interval = Estimate(value=value, low=value - half, high=value + half, n=df + 1, interval="90 % t")
    return Equivalence(equivalent=bool(p < ALPHA), p=float(p), margin=margin, interval=interval)
