"""A parabola with one offset per seed, and the interval of its vertex.

    y_{sk} = a_s + b u_k + c u_k^2 + noise,   vertex u* = -b / 2c

Fieller's interval of the vertex is {u : |b + 2 c u| <= t sd(b + 2 c u)}. A basin that is steeper on one side is no
parabola: the interval is widened to hold the minimum of the cubic too, with its own interval where the cubic term
stands out of the noise.
"""

from dataclasses import dataclass

import numpy as np
from scipy import stats

from jaxblock.sweeps.statistics.means import t_quantile


@dataclass(frozen=True, kw_only=True, eq=False)
class Fit:
    """Coefficients of u, u^2, ... with their covariance, and the offsets of the seeds."""

    offsets_S: np.ndarray
    powers_P: np.ndarray
    covariance_PP: np.ndarray
    df: int


def fit_polynomial(u_W: np.ndarray, losses_WS: np.ndarray, *, degree: int) -> Fit:
    """Return the least squares of a_s + sum_p c_p u^p over the finite losses."""
    row_K, column_K = np.nonzero(np.isfinite(losses_WS))
    seeds = losses_WS.shape[1]
    powers_KP = u_W[row_K, None] ** np.arange(1, degree + 1)
    design_KQ = np.concatenate([np.eye(seeds)[column_K], powers_KP], axis=1)
    y_K = losses_WS[row_K, column_K]
    coefficients_Q = np.linalg.lstsq(design_KQ, y_K, rcond=None)[0]
    df = len(y_K) - seeds - degree
    variance = float(np.square(y_K - design_KQ @ coefficients_Q).sum()) / df
    covariance_QQ = variance * np.linalg.inv(design_KQ.T @ design_KQ)
    return Fit(
        offsets_S=coefficients_Q[:seeds],
        powers_P=coefficients_Q[seeds:],
        covariance_PP=covariance_QQ[seeds:, seeds:],
        df=df,
    )


@dataclass(frozen=True, kw_only=True)
class Misfit:
    """How far the parabola is from the measured means."""

    nats: float
    """Largest |mean over seeds of the residual|; 0 where that is rounding."""
    p: float
    """Lack-of-fit F test against one free mean per rate, seeds as replicates; 1 where nothing is left to test with."""


def measure_misfit(fit: Fit, u_W: np.ndarray, losses_WS: np.ndarray) -> Misfit:
    """Return the misfit of a parabola and its test, over the finite losses.

    F = [(SSE - SSE_pure) / (W - 3)] / [SSE_pure / df_pure], where SSE_pure is that of loss = rate + seed.
    """
    curve_W = np.stack([u_W, u_W**2], axis=1) @ fit.powers_P
    residual_WS = losses_WS - fit.offsets_S - curve_W[:, None]
    rounding = 1e-12 * float(np.nanmax(np.abs(losses_WS)))
    nats = float(np.abs(np.nanmean(residual_WS, axis=1)).max())
    pure, df_pure = pure_error(losses_WS)
    lack, df_lack = float(np.nansum(np.square(residual_WS))) - pure, len(u_W) - 3
    if nats <= rounding or df_lack < 1 or df_pure < 1:
        return Misfit(nats=nats if nats > rounding else 0.0, p=1.0)
    # Seeds that agree to rounding leave no noise: any misfit is then one of the curve.
    noise = max(pure / df_pure, rounding**2)
    return Misfit(nats=nats, p=float(stats.f.sf(max(0.0, lack) / df_lack / noise, df_lack, df_pure)))


def pure_error(losses_WS: np.ndarray) -> tuple[float, int]:
    """Return the squares that loss = rate + seed leaves over the finite losses, and their degrees of freedom."""
    row_K, column_K = np.nonzero(np.isfinite(losses_WS))
    rates, seeds = losses_WS.shape
    design_KQ = np.concatenate([np.eye(seeds)[column_K], np.eye(rates)[row_K]], axis=1)
    y_K = losses_WS[row_K, column_K]
    coefficients_Q, _, rank, _ = np.linalg.lstsq(design_KQ, y_K, rcond=None)
    return float(np.square(y_K - design_KQ @ coefficients_Q).sum()), len(y_K) - int(rank)


def fieller(fit: Fit) -> tuple[float, float] | None:
    """Return the interval of -b / 2c, or None where it is unbounded (c within t standard errors of 0).

    All u with (b + 2 c u)^2 <= t^2 (V_bb + 4 u V_bc + 4 u^2 V_cc): a bounded interval where c^2 > t^2 V_cc.
    """
    t2 = t_quantile(fit.df) ** 2
    b, c = fit.powers_P
    (v_bb, v_bc), (_, v_cc) = fit.covariance_PP
    square = 4 * (c**2 - t2 * v_cc)
    if square <= 0:
        return None
    half_linear = 2 * (b * c - t2 * v_bc)
    constant = b**2 - t2 * v_bb
    root = max(0.0, half_linear**2 - square * constant) ** 0.5
    return float((-half_linear - root) / square), float((-half_linear + root) / square)


def skewed_minimum(u_W: np.ndarray, losses_WS: np.ndarray) -> tuple[float, float] | None:
    """Return where the cubic has its minimum, as an interval that is a point unless the cubic term is significant.

    95 % by the delta method, significant at 5 %. None where the cubic has no minimum inside the window.
    """
    fit = fit_polynomial(u_W, losses_WS, degree=3)
    b, c, d = fit.powers_P
    if c**2 <= 3 * b * d:
        return None
    u = float(
        -b / (c + (c**2 - 3 * b * d) ** 0.5)
    )  # the root of b + 2 c u + 3 d u^2 where the curvature is upward
    if not u_W[0] <= u <= u_W[-1]:
        return None
    t = t_quantile(fit.df)
    if abs(d) <= t * fit.covariance_PP[2, 2] ** 0.5:
        return u, u
    gradient_P = np.array([1.0, 2 * u, 3 * u**2])
    half = t * float(gradient_P @ fit.covariance_PP @ gradient_P) ** 0.5 / float(2 * c + 6 * d * u)
    return u - half, u + half


def read_parabola(u_W: np.ndarray, losses_WS: np.ndarray, u: float) -> np.ndarray:
    """Return each seed's own parabola at u, [S]; NaN for a seed with fewer than 3 finite losses.

    Their mean is the fit with common b and c where nothing is missing, and their spread is that of independent seeds.
    """
    value_S = np.full(losses_WS.shape[1], np.nan)
    for seed, losses_W in enumerate(losses_WS.T):
        finite_W = np.isfinite(losses_W)
        if finite_W.sum() >= 3:
            value_S[seed] = np.polyfit(u_W[finite_W] - u, losses_W[finite_W], 2)[2]
    return value_S
