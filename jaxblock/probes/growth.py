"""Which law the stream's size follows along the sublayers: exponential, additive or power; on the host, in float64.

    exponential   log r_s = a + g s             every sublayer multiplies by e^g
    additive      r_s^2   = r_0^2 + b s         uncorrelated branches of one size, what pre-norm starts as
    power         log r_s = a + p log s, s >= 1

Each has two numbers and is fitted to log r_s by least squares, so that residuals are relative errors in all three. The
best has the least AICc, n log(RSS / n) + 2 k + 2 k (k + 1) / (n - k - 1), k = 3 with the residuals' variance, over the
sublayers that all three describe (s >= 1). Residuals along one stack are no independent draws: an interval is Student's
t over runs (seeds), and there is none for one run.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

LEAST_SUBLAYERS = 5
"""AICc with k = 3 needs n - k - 1 > 0."""


class GrowthLaw(NamedTuple):
    """One law fitted to the stream's sizes."""

    name: str
    """exponential, additive or power."""
    number: float
    """g, b / r_0^2 (so that it does not depend on the stream's unit; r_0 is the law's, fitted), or p; mean over runs.
    NaN where the best additive law has no b or no r_0 left, as for a stream that grows faster than any."""
    low: float | None
    """95 % t interval over runs; None for one run."""
    high: float | None
    aicc: float
    """Mean over runs; only differences between laws mean anything."""
    residual: float
    """Root mean square of log r_s - fit, mean over runs: a relative error."""


def growth_laws(sizes_RS: np.ndarray) -> tuple[GrowthLaw, ...]:
    """Return the three laws, the best first.

    Args:
      sizes_RS: r_0, ..., r_S of R runs, [R, S + 1], or of one, [S + 1]; above 0. Laws are fitted to r_1, ..., r_S.

    Raises:
      ValueError: fewer than 5 sublayers, or a size that is not a finite number above 0.
    """
    sizes_RS = np.atleast_2d(np.asarray(sizes_RS, np.float64))
    if sizes_RS.ndim != 2 or sizes_RS.shape[1] <= LEAST_SUBLAYERS:
        raise ValueError(
            f"sizes have shape {sizes_RS.shape}; they must be [runs, sublayers + 1] of at "
            f"least {LEAST_SUBLAYERS} sublayers"
        )
    if not np.all(np.isfinite(sizes_RS) & (sizes_RS > 0)):
        raise ValueError("a size of the stream is not a finite number above 0: there is no law to fit")
    laws = [_fitted(name, fit, sizes_RS) for name, fit in _FITS.items()]
    return tuple(sorted(laws, key=lambda law: law.aicc))


def _fitted(
    name: str, fit: Callable[[np.ndarray], tuple[float, np.ndarray]], sizes_RS: np.ndarray
) -> GrowthLaw:
    numbers, criteria, residuals = [], [], []
    for sizes_S in sizes_RS:
        number, error_S = fit(sizes_S)
        n, k, mean_square = len(error_S), 3, float(np.mean(np.square(error_S)))
        numbers.append(number)
        # Sizes that obey a law to round-off have no residual to take the logarithm of.
        criteria.append(n * np.log(max(mean_square, 1e-24)) + 2 * k + 2 * k * (k + 1) / (n - k - 1))
        residuals.append(np.sqrt(mean_square))
    low = high = None
    if len(numbers) > 1:
        from scipy import stats  # a second to import, and the config imports this package

        half = stats.t.ppf(0.975, len(numbers) - 1) * np.std(numbers, ddof=1) / np.sqrt(len(numbers))
        low, high = float(np.mean(numbers) - half), float(np.mean(numbers) + half)
    return GrowthLaw(
        name, float(np.mean(numbers)), low, high, float(np.mean(criteria)), float(np.mean(residuals))
    )


def _exponential(sizes_S: np.ndarray) -> tuple[float, np.ndarray]:
    return _line(np.arange(1.0, len(sizes_S)), np.log(sizes_S[1:]))


def _power(sizes_S: np.ndarray) -> tuple[float, np.ndarray]:
    return _line(np.log(np.arange(1.0, len(sizes_S))), np.log(sizes_S[1:]))


def _line(t_S: np.ndarray, y_S: np.ndarray) -> tuple[float, np.ndarray]:
    """Return the slope of y against t, and the residuals."""
    slope, intercept = np.polyfit(t_S, y_S, 1)
    return float(slope), y_S - (intercept + slope * t_S)


def _additive(sizes_S: np.ndarray) -> tuple[float, np.ndarray]:
    """Fit log r = a + log(1 + c s) / 2 over c above 0; a is linear and falls out."""
    s_S, y_S = np.arange(1.0, len(sizes_S)), np.log(sizes_S[1:])

    def error(log_c: float) -> np.ndarray:
        shape = np.log1p(np.exp(log_c) * s_S) / 2
        return y_S - shape - np.mean(y_S - shape)

    from scipy import optimize

    found: Any = optimize.minimize_scalar(
        lambda c: np.sum(error(c) ** 2), bounds=(-25.0, 25.0), method="bounded"
    )
    # At a bound r_0 does not matter, or nothing is added: the law fits as it can, and its number says nothing.
    number = float(np.exp(found.x)) if abs(found.x) < 24.9 else float("nan")
    return number, error(found.x)


_FITS = {"exponential": _exponential, "additive": _additive, "power": _power}
