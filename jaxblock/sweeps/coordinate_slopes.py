"""Slopes of a coordinate check, d log y / d log size with intervals over seeds, and the verdict on them.

What must not depend on the size, at every t >= 2:

    depth   final_stream, logits and change. Branches are shown and not judged: a multiplier L^-alpha makes what each
            writes smaller on purpose, so that the sum of 2 L of them, x_S, is not larger. That x_S and its change
            are of one size in L is the condition both parametrizations are derived from (arXiv 2310.02244, 2505.01618
            section 4 and figure 7); branches that write at full size (standard) break it at x_S.
    width   embedding, branches (means over blocks), final_stream and change: each coordinate keeps its size (arXiv
            2203.03466, appendix D). logits must not grow: under muP their initial part falls as D^(-1/2) on purpose,
            and at small widths that is most of them.

A change that shrinks with the size is as bad as one that grows: the model gets lazy (arXiv 2505.01618, section 5).
A slope passes where its whole 95 % t interval over seeds lies within +-0.1, fails where all of it lies outside, and is
not resolved otherwise. The check fails where a slope fails or a run was not finite, passes where all pass, and is
not resolved otherwise.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from jaxblock.sweeps.statistics.estimate import Estimate, Refusal
from jaxblock.sweeps.statistics.fits import LEAST_DEPTHS, power_law

AXES = ("depth", "width")
JUDGED_IN_DEPTH = ("final_stream", "logits", "change")
BAND = 0.1
"""Largest slope that counts as none."""
FIRST_JUDGED = 2
"""Updates before a slope is judged: initial values and the first update show no more than the initialization."""
PASS, FAIL, UNRESOLVED = "pass", "fail", "not resolved"
MEASURES = ("mean_abs", "rms")
WORDS: Mapping[str, str] = {
    "final_stream": "final stream",
    "feed_forward": "feed-forward",
    "last_attention": "attention, last block",
    "last_feed_forward": "feed-forward, last block",
    "last_parallel": "parallel, last block",
}


class NonFinite(NamedTuple):
    """A run that left the numbers."""

    size: int
    seed: int
    step: int
    """Updates after which it was not finite."""


@dataclass(frozen=True, kw_only=True)
class Slope:
    """One quantity after t updates, against the size."""

    quantity: str
    measure: str
    t: int
    found: Estimate | Refusal
    verdict: str | None
    """pass, fail or not resolved; None where the quantity need not be flat then."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CoordinateCheck:
    """What a coordinate check measured."""

    axis: str
    sizes: tuple[int, ...]
    """N sizes, rising."""
    seeds: tuple[int, ...]
    """R seeds."""
    steps: int
    """T - 1 updates."""
    learning_rate: float
    mean_abs: Mapping[str, np.ndarray]
    """Quantity -> [N, R, T]; NaN from where a run was not finite."""
    rms: Mapping[str, np.ndarray]
    non_finite: tuple[NonFinite, ...]

    @property
    def judged(self) -> tuple[str, ...]:
        """Quantities that must not depend on the size."""
        if self.axis == "width":
            return tuple(name for name in self.rms if not name.startswith("last_"))
        return tuple(name for name in self.rms if name in JUDGED_IN_DEPTH)

    def slope(self, quantity: str, t: int, *, measure: str = "rms") -> Slope:
        """Return one slope; the verdict rests on rms."""
        values_NR = {"mean_abs": self.mean_abs, "rms": self.rms}[measure][quantity][..., t]
        found = self._fit(values_NR)
        verdict = None
        if quantity in self.judged and t >= FIRST_JUDGED:
            verdict = judge(found, falling=self.axis == "width" and quantity == "logits")
        return Slope(quantity=quantity, measure=measure, t=t, found=found, verdict=verdict)

    @cached_property
    def slopes(self) -> tuple[Slope, ...]:
        """Every slope of every quantity after every number of updates, in rms."""
        return tuple(self.slope(quantity, t) for quantity in self.rms for t in range(self.steps + 1))

    @property
    def verdict(self) -> str:
        """pass, fail or not resolved."""
        found = {slope.verdict for slope in self.slopes}
        if self.non_finite or FAIL in found:
            return FAIL
        return UNRESOLVED if UNRESOLVED in found else PASS

    def sentences(self) -> tuple[str, ...]:
        """Return the verdict with its reasons."""
        judged = ", ".join(words(name) for name in self.judged)
        if self.verdict == PASS:
            return (
                f"pass: {judged} depend on {self.axis} by a slope within +-{BAND} for t = 2 to {self.steps}",
            )
        lost = [
            f"{FAIL}: {self.axis} {size}, seed {seed}: not finite after {step} updates"
            for size, seed, step in self.non_finite
        ]
        reasons = [self._reason(name, verdict) for verdict in (FAIL, UNRESOLVED) for name in self.judged]
        return tuple(dict.fromkeys([*lost, *(reason for reason in reasons if reason)]))

    def _reason(self, quantity: str, verdict: str) -> str:
        """Return the sentence on a quantity's worst slope with this verdict; "" where it has none, or a worse one."""
        slopes = [slope for slope in self.slopes if slope.quantity == quantity and slope.verdict is not None]
        same = [slope for slope in slopes if slope.verdict == verdict]
        if not same or (verdict == UNRESOLVED and any(slope.verdict == FAIL for slope in slopes)):
            return ""
        refused = [slope.found.sentence for slope in same if isinstance(slope.found, Refusal)]
        if refused:
            return f"{verdict}: {words(quantity)} has {refused[0]}"
        worst = max(same, key=lambda slope: abs(getattr(slope.found, "value", 0.0)))
        found = f"{verdict}: {words(quantity)} has slope {number(worst.found)} at t = {worst.t}"
        if verdict == FAIL:
            return f"{found}, outside +-{BAND}"
        return f"{found}, across a bound of +-{BAND}; more seeds make the interval narrower"

    def _fit(self, values_NR: np.ndarray) -> Estimate | Refusal:
        if np.isnan(values_NR).any():
            return Refusal(
                rule="no_values", sentence=f"no slope, as a run was not finite at some {self.axis}"
            )
        if len(self.sizes) < LEAST_DEPTHS:
            found = (
                f"no slope in {self.axis} from {len(self.sizes)} sizes; at least {LEAST_DEPTHS} are needed"
            )
            return Refusal(rule="few_depths", sentence=found)
        power = power_law(np.array(self.sizes, np.float64), values_NR)
        if isinstance(power, Refusal):
            return Refusal(rule=power.rule, sentence=f"no slope: {power.sentence}")
        return power.exponent


def judge(found: Estimate | Refusal, *, falling: bool = False) -> str:
    """Return pass, fail or not resolved: the interval of a slope against the band, open below where it may fall."""
    if isinstance(found, Refusal):
        return UNRESOLVED
    least = -math.inf if falling else -BAND
    if found.low >= least and found.high <= BAND:
        return PASS
    return FAIL if found.low > BAND or found.high < least else UNRESOLVED


def words(quantity: str) -> str:
    """Return a quantity's name for people."""
    return WORDS.get(quantity, quantity)


def number(found: Estimate | Refusal) -> str:
    """Return "+0.12 [-0.03, +0.27]", or "-" for a slope that is refused."""
    if isinstance(found, Refusal):
        return "-"
    return f"{found.value:+.2f} [{found.low:+.2f}, {found.high:+.2f}]"
