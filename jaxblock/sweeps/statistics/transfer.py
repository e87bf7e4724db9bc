"""Does a learning rate tuned at one depth serve at another: slope of the optimum, regret, sensitivity, stability.

log2 lr*(N) = a + s log2 N        R(N) = L(N; lr*_{N0}) - L(N; lr*_N) +- (t over seeds + misfit of the basin at N)
sensitivity = mean over rates of min(L, L_first) - L*        (arXiv 2309.14322, section 2.2)
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy import stats

from jaxblock.sweeps.statistics.basin import MISFIT_WORDS, Basin
from jaxblock.sweeps.statistics.estimate import Estimate, Refusal
from jaxblock.sweeps.statistics.grid import Grid
from jaxblock.sweeps.statistics.means import mean_interval, proportion_interval, t_quantile
from jaxblock.sweeps.statistics.paired import Equivalence, equivalence_of
from jaxblock.sweeps.statistics.parabola import read_parabola

LEAST_DEPTHS = 5
MARGIN = 0.1
"""A slope shown to be smaller than this counts as transfer."""


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """How the optimum moves with depth: log2 lr* = intercept + slope log2 depth."""

    slope: Estimate
    p: float
    """Two-sided p of slope 0."""
    intercept: float
    depths: tuple[int, ...]
    """Depths with an optimum."""
    unfitted: tuple[int, ...]
    """Depths without one."""
    equivalence: Equivalence
    """Whether |slope| < 0.1 is shown."""


@dataclass(frozen=True, kw_only=True)
class StableRate:
    """The largest learning rate below the first one where at least half of the runs fail: known to one grid step."""

    rate: float
    first_unstable: float
    divergence: Estimate
    """Fraction of failed runs at `first_unstable`, 95 % Clopper-Pearson."""


def transfer_slope(basins: Mapping[int, Basin | Refusal]) -> Transfer | Refusal:
    """Return the slope of log2 optimum against log2 depth, weighted by each basin's error; needs 5 optima.

    The interval is the wider of two: from the scatter of the optima about the line (t, depths - 2 degrees of
    freedom), and from the basins' own errors (t with the fewest degrees of freedom among them). Either alone can be
    too narrow: scatter by luck with few depths, errors where the optimum does not follow a line.
    """
    fitted = {depth: basin for depth, basin in sorted(basins.items()) if isinstance(basin, Basin)}
    unfitted = tuple(sorted(set(basins) - set(fitted)))
    if len(fitted) < LEAST_DEPTHS:
        without = f"; none at depth {', '.join(map(str, unfitted))}" if unfitted else ""
        return Refusal(
            rule="few_depths",
            sentence=f"{len(fitted)} of {len(basins)} depths have an optimum, {LEAST_DEPTHS} needed{without}",
        )
    x_N = np.log2(np.array(list(fitted), np.float64))
    y_N = np.log2([basin.optimum.value for basin in fitted.values()])
    # A noiseless basin has error 0; the floor keeps its weight finite.
    error_N = np.maximum([basin.log2_error for basin in fitted.values()], 1e-9)
    weight_N = error_N**-2.0
    center = float((weight_N * x_N).sum() / weight_N.sum())
    spread = float((weight_N * (x_N - center) ** 2).sum())
    slope = float((weight_N * (x_N - center) * y_N).sum()) / spread
    intercept = float((weight_N * (y_N - slope * x_N)).sum() / weight_N.sum())
    df, own_df = len(fitted) - 2, min(basin.df for basin in fitted.values())
    scatter = float((weight_N * (y_N - intercept - slope * x_N) ** 2).sum()) / df
    halves = ((t_quantile(df) * scatter**0.5, scatter**0.5, df), (t_quantile(own_df), 1.0, own_df))
    half, scale, df = max(halves)
    half, error = half * spread**-0.5, scale * spread**-0.5
    return Transfer(
        slope=Estimate(
            value=slope, low=slope - half, high=slope + half, n=len(fitted), interval="95 % t, weighted"
        ),
        p=float(2 * stats.t.sf(abs(slope) / error, df)),
        intercept=intercept,
        depths=tuple(fitted),
        unfitted=unfitted,
        equivalence=equivalence_of(slope, error, df=df, margin=MARGIN),
    )


def losses_at(grid: Grid, basin: Basin, rate: float) -> np.ndarray | Refusal:
    """Return the loss of each seed at a rate, [S], NaN where a seed has none.

    Inside the basin's window from the seed's own quadratic, elsewhere on the line between the two measured rates
    around it in log2(rate), which lies above a convex loss: a regret read there is not flattered.
    """
    if basin.rates[0] <= rate <= basin.rates[-1]:
        window = np.isin(grid.rates_R, basin.rates)
        u_W = np.log2(grid.rates_R[window] / basin.center)
        return read_parabola(u_W, grid.losses_RS[window], float(np.log2(rate / basin.center)))
    if not grid.rates_R[0] <= rate <= grid.rates_R[-1]:
        return Refusal(
            rule="outside_grid",
            sentence=f"{rate:.3g} lies outside the measured {grid.rates_R[0]:.3g} to {grid.rates_R[-1]:.3g}",
        )
    right = int(np.searchsorted(grid.rates_R, rate))
    left = right if grid.rates_R[right] == rate else right - 1
    if not grid.usable[[left, right]].all():
        return Refusal(
            rule="failed_there", sentence=f"runs failed next to {rate:.3g}: the loss there has no mean"
        )
    if left == right:
        return grid.losses_RS[left]
    share = np.log2(rate / grid.rates_R[left]) / np.log2(grid.rates_R[right] / grid.rates_R[left])
    return (1 - share) * grid.losses_RS[left] + share * grid.losses_RS[right]


def regret(grid: Grid, basin: Basin | Refusal, rate: Estimate | Refusal) -> Estimate | Refusal:
    """Return L(rate) - L(optimum) in nats, paired by seed, for an optimum `rate` found at another depth.

    The interval is over seeds for these two rates, widened by the misfit of the basin they are read from; that the
    other depth's optimum is itself an estimate is not in it. At the basin's own optimum it is 0 by definition.
    """
    if isinstance(basin, Refusal) or isinstance(rate, Refusal):
        return Refusal(
            rule="no_optimum", sentence="a learning-rate optimum is missing at one of the two depths"
        )
    if rate.value == basin.optimum.value:
        return Estimate(
            value=0.0, low=0.0, high=0.0, n=basin.loss.n, interval="0 by definition: its own optimum"
        )
    there_S = losses_at(grid, basin, rate.value)
    if isinstance(there_S, Refusal):
        return there_S
    own_S = np.array([np.nan if loss is None else loss for loss in basin.seed_losses])
    difference_S = there_S - own_S
    found = mean_interval(difference_S[np.isfinite(difference_S)])
    return found if isinstance(found, Refusal) else found.widened(basin.misfit, MISFIT_WORDS)


def sensitivity(grid: Grid, basin: Basin | Refusal, *, first_loss: float) -> Estimate | Refusal:
    """Return the mean over the grid's rates of min(loss, first_loss) - L*: t over seeds, widened by the misfit.

    A failed run counts as `first_loss`, as the definition says; a seed with an absent run is left out. It depends on
    the grid: compare only over the same rates.
    """
    if isinstance(basin, Refusal):
        return Refusal(rule="no_optimum", sentence="the lowest loss is that of an optimum, and there is none")
    own_S = np.array([np.nan if loss is None else loss for loss in basin.seed_losses])
    capped_RS = np.where(grid.measured, np.minimum(grid.losses_RS, first_loss), first_loss)
    value_S = np.where(grid.absent_RS.any(axis=0), np.nan, capped_RS.mean(axis=0) - own_S)
    found = mean_interval(value_S[np.isfinite(value_S)])
    return found if isinstance(found, Refusal) else found.widened(basin.misfit, MISFIT_WORDS)


def stable_rate(grid: Grid) -> StableRate | Refusal:
    """Return the largest rate below the first one where at least half of the runs fail."""
    known = np.flatnonzero(grid.evidence > 0)
    half = known[grid.failed[known] >= grid.evidence[known] / 2]
    if len(half) == 0:
        return Refusal(
            rule="no_failure", sentence="at no rate of the grid do half of the runs fail", side="right"
        )
    below = known[known < half[0]]
    if len(below) == 0:
        return Refusal(
            rule="all_failed", sentence="half of the runs fail at the lowest rate already", side="left"
        )
    divergence = proportion_interval(int(grid.failed[half[0]]), int(grid.evidence[half[0]]))
    assert isinstance(divergence, Estimate)
    return StableRate(
        rate=float(grid.rates_R[below[-1]]),
        first_unstable=float(grid.rates_R[half[0]]),
        divergence=divergence,
    )
