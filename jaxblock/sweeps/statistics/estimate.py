"""A number with its interval, or the rule that forbids one: what every function of this package returns."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

RULES: Mapping[str, str] = {
    "one_value": "an interval needs at least two values",
    "no_values": "a statistic needs a value",
    "no_spread": "a test needs values that are not all the same",
    "few_pairs": "a paired comparison needs at least two seeds with a finite loss on both sides",
    "few_seeds": "a learning-rate basin needs at least 3 seeds",
    "few_rates": "a learning-rate basin needs at least 4 learning rates where at most 20 % of the runs failed",
    "not_tuned": "an arm whose learning rate is not tuned cannot be compared: the grid needs more than one rate",
    "edge_left": "the minimum must lie inside the grid: a lower learning rate has to be measured",
    "edge_right": "the minimum must lie inside the grid: a higher learning rate has to be measured",
    "edge_wall": "the minimum must lie below the rates where runs fail: a rate between the two has to be measured",
    "diverged_at_minimum": "at most 20 % of the runs at the minimum may have failed",
    "not_convex": "the losses around the minimum must curve upwards",
    "vertex_unbounded": "the curvature must stand out of the noise, or the optimum has no bounded interval",
    "lack_of_fit": "a parabola must not miss the measured means by more than a tenth of their range where the seeds "
    "show that it does: a finer grid of learning rates has to be measured",
    "few_depths": "a law in depth needs at least 5 depths",
    "few_points": "a straight line with an interval needs at least 5 points",
    "few_layers": "a growth law needs a profile of at least 6 blocks",
    "not_positive": "a power law needs values above zero",
    "exponent_contains_zero": "the interval of the exponent p must not contain 0",
    "exponent_unbounded": "the interval of the exponent p must be bounded",
    "loss_rises": "L = E + A N^-p needs a loss that falls with depth",
    "laws_tie": "the best law must be ahead of the second by 2 units of AICc",
    "outside_grid": "a loss is read only between learning rates that were measured at that depth",
    "failed_there": "a loss is read only at learning rates where at most 20 % of the runs failed",
    "no_optimum": "it needs a learning-rate optimum that is not refused",
    "no_failure": "the largest stable rate needs a higher rate where at least half of the runs fail",
    "all_failed": "some rate must have runs that did not fail",
    "lanes_differ": "times and bytes are compared only between programs with the same number of lanes",
}
"""What each rule asks for. A rule that fires leaves a `Refusal` where the number would have been."""

SIDES = ("", "left", "right", "between", "finer")


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A finite number and its interval; building one from NaN or infinity is an error of the program."""

    value: float
    low: float
    high: float
    n: int
    """Values (mostly seeds) it was computed from."""
    interval: str
    """What the interval is, as "95 % t", "95 % t, small n, widened by the misfit", "95 % Fieller"."""

    def __post_init__(self) -> None:
        """Raise ValueError where a number is not finite or the interval is empty."""
        if not all(math.isfinite(number) for number in (self.value, self.low, self.high)):
            raise ValueError(f"an Estimate is finite; got {self.value} [{self.low}, {self.high}]")
        if self.low > self.high:
            raise ValueError(f"an interval has low <= high; got [{self.low}, {self.high}]")

    def excludes(self, number: float) -> bool:
        """Whether the interval leaves the number out."""
        return not self.low <= number <= self.high

    def widened(self, by: float, words: str) -> "Estimate":
        """Return it with an interval longer by `by` on both sides and words that say so; itself where `by` is 0."""
        if by < 0:
            raise ValueError(f"an interval is widened by 0 or more; got {by}")
        if by == 0:
            return self
        interval = f"{self.interval}, widened by {words}"
        return dataclasses.replace(self, low=self.low - by, high=self.high + by, interval=interval)


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A number that is not given, and why."""

    rule: str
    """A key of `RULES`."""
    sentence: str
    """What was found and what would help, with the names and values of this case."""
    side: str = ""
    """Where a learning-rate grid has to grow: "left", "right", "between" (below the failing rates), "finer" (between
    the rates around the minimum), or ""."""

    def __post_init__(self) -> None:
        """Raise ValueError for a rule or side that does not exist."""
        if self.rule not in RULES:
            raise ValueError(f"rule {self.rule!r} is none of {', '.join(RULES)}")
        if self.side not in SIDES:
            raise ValueError(f"side {self.side!r} is none of {SIDES}")
