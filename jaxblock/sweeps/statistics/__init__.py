"""Statistics of a sweep, numpy and scipy only: every function returns a number with its interval, or a refusal."""

from jaxblock.sweeps.statistics.basin import Basin, fit_basin
from jaxblock.sweeps.statistics.decay import Decay, loss_decay
from jaxblock.sweeps.statistics.estimate import RULES, Estimate, Refusal
from jaxblock.sweeps.statistics.fits import Law, Line, Power, growth_law, power_law, straight_line
from jaxblock.sweeps.statistics.grid import Grid
from jaxblock.sweeps.statistics.means import mean_interval, proportion_interval
from jaxblock.sweeps.statistics.paired import (
    Equivalence,
    Paired,
    detectable_effect,
    equivalence,
    holm,
    paired_difference,
)
from jaxblock.sweeps.statistics.transfer import (
    StableRate,
    Transfer,
    regret,
    sensitivity,
    stable_rate,
    transfer_slope,
)

__all__ = [
    "RULES",
    "Basin",
    "Decay",
    "Equivalence",
    "Estimate",
    "Grid",
    "Law",
    "Line",
    "Paired",
    "Power",
    "Refusal",
    "StableRate",
    "Transfer",
    "detectable_effect",
    "equivalence",
    "fit_basin",
    "growth_law",
    "holm",
    "loss_decay",
    "mean_interval",
    "paired_difference",
    "power_law",
    "proportion_interval",
    "regret",
    "sensitivity",
    "stable_rate",
    "straight_line",
    "transfer_slope",
]
