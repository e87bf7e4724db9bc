"""What an analysis says, as frozen records of plain values: the report renders them and computes nothing.

Every statistic is an `Estimate` (value, low, high, n, interval) or a `Refusal` (rule, sentence, side). Depth is in
blocks, losses are nats per target, learning rates are peak rates.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxblock.sweeps.results import Event
from jaxblock.sweeps.statistics.basin import Basin
from jaxblock.sweeps.statistics.decay import Decay
from jaxblock.sweeps.statistics.estimate import Estimate, Refusal
from jaxblock.sweeps.statistics.fits import Law, Line, Power
from jaxblock.sweeps.statistics.transfer import StableRate, Transfer

STATUSES: Mapping[str, str] = {
    "pass": "shown by the data, with an interval",
    "note": "a count or a fact of this grid of runs: it shows nothing beyond them",
    "warn": "not resolved, or true with a reservation that the sentence names",
    "fail": "shown by the data that it does not hold",
    "refused": "a rule forbids the statement; the sentence says which",
}


@dataclass(frozen=True, kw_only=True)
class RateRow:
    """All runs of one series, depth and learning rate."""

    rate: float
    total: int
    """Runs of the plan."""
    evidence: int
    """Runs that ended ok, in a plateau, or by divergence: the others say nothing about the rate."""
    failed: int
    """Runs that diverged or were not finite."""
    seeds: tuple[int, ...]
    """Seeds of `losses`, in order."""
    losses: tuple[float, ...]
    """Loss of each run that did not fail: the points behind the mean. A failed run has none."""
    mean: Estimate | Refusal
    """Mean of `losses`: conditional on not failing."""
    capped_mean: Estimate | Refusal
    """Mean over all runs with evidence, a failed one counted as `Analysis.conventions["cap"]` nats."""
    divergence: Estimate | Refusal
    """failed / evidence."""
    wall: bool
    """More than 20 % of the runs failed: left out of the basin's fit, and a wall that bounds it."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One depth of a series: every learning rate and seed of it."""

    depth: int
    sublayers: int
    width: int
    parameters: Mapping[str, int]
    flops_per_token: Mapping[str, float]
    run_ids: tuple[str, ...]
    outcomes: Mapping[str, int]
    """Number of runs of each outcome of `results.OUTCOMES` that occurs."""
    rates: tuple[RateRow, ...]
    """Ascending."""
    basin: Basin | Refusal
    best_rate: float | None
    """Rate of the grid with the lowest mean loss among those that are no wall; None where there is none."""
    best_loss: Estimate | Refusal
    """Mean loss at `best_rate`."""
    best_loss_note: str
    """Why `best_loss` is optimistic, or an upper bound, in words."""
    best_losses: Mapping[int, float]
    """Seed -> loss at `best_rate`."""
    best_run: str
    """Id of the run with the lowest loss at `best_rate`; "" where there is none."""
    worst_run: str
    capped_loss: Estimate | Refusal
    """`RateRow.capped_mean` at `best_rate`."""
    divergence: Estimate | Refusal
    """Over every rate of the grid: comparable only between arms with the same grid."""
    evaluation_error: float | None
    """Standard error of one run's loss from the finite validation set, root mean square over runs at `best_rate`."""
    stable_rate: StableRate | Refusal
    """Largest learning rate up to which fewer than half of the runs fail."""
    sensitivity: Estimate | Refusal
    """Mean over the learning rates common to the series' depths of min(loss, first loss), less the lowest loss."""
    growth_start: Estimate | Refusal
    """rms of the stream after the last block over before the first one, at initialisation."""
    growth_end: Estimate | Refusal
    """The same after training at `best_rate`."""
    law_start: Law | Refusal
    """Which law the stream's size follows along the blocks, at initialisation."""
    law_end: Law | Refusal
    gradient_start: Estimate | Refusal
    """Global gradient norm at the first step."""
    gradient_end: Estimate | Refusal
    """Median over the last tenth of the steps, at `best_rate`."""
    still_falling: Estimate | Refusal
    """Slope of the training loss over the last tenth of the steps, nats per 1,000 steps, at `best_rate`."""
    lanes: tuple[int, ...]
    """Lane counts of the programs that trained these runs; times and bytes are those of the one with the most."""
    step_s: float | None
    """Seconds per step of one run's share: step / lanes of the program with the most lanes (the median of several
    such); None if not measured."""
    run_bytes: float | None
    """Bytes per run: bytes / lanes of the program with the most lanes."""
    compile_s: float | None
    """Seconds of compiling, summed over the programs of this arm as far as the results tell them apart."""


@dataclass(frozen=True, kw_only=True)
class Regret:
    """What keeping the learning rate tuned at another depth costs."""

    depth: int
    regret: Estimate | Refusal
    """R(N) = L(N; lr*_{N0}) - L(N; lr*_N), nats, paired by seed."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """Every arm that differs only in depth, learning rate and seed."""

    label: str
    """Made of the axes that vary, as "residual=pre_norm, warmup=0.1"; "all" where none does."""
    axes: Mapping[str, Any]
    """Config path -> value, of those axes."""
    reference: bool
    """Whether the contrasts are taken against this series."""
    residual: str
    initialization: str
    parametrization: str
    warmup: float
    arms: tuple[Arm, ...]
    """By depth."""
    transfer: Transfer | Refusal
    """Slope of log2 optimum against log2 depth."""
    regret_depth: int | None
    """N0: the shallowest depth with an optimum."""
    regrets: tuple[Regret, ...]
    growth_start: Power | Refusal
    """Exponent of `Arm.growth_start` against depth."""
    growth_end: Power | Refusal
    gradient_start: Power | Refusal
    """Exponent of the first gradient norm against depth."""
    gradient_end: Power | Refusal
    time: Line | Refusal
    """`Arm.step_s` against depth."""
    bytes: Line | Refusal
    """`Arm.run_bytes` against depth."""
    loss_law: Decay | Refusal
    """L(N) = E + A N^-p, of the losses at the fitted optimum."""


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """One series against the reference at one depth, paired by seed, each at its own optimum."""

    series: str
    reference: str
    depth: int
    detectable: float | Refusal
    """Smallest difference found with 80 % power at level .05 / comparisons, plus `misfit`, nats; read it first."""
    difference: Estimate | Refusal
    """Loss of `series` less loss of `reference`, nats: below zero where `series` is better.

    The paired t interval, adjusted for `comparisons` (Bonferroni) and widened by `misfit` on both sides.
    """
    comparisons: int
    """Contrasts of the analysis that the interval, `detectable` and `p_holm` are adjusted for; 0 where refused."""
    misfit: float | None
    """Sum of the misfits of both arms' parabolas, nats: a difference up to it may be none. None where refused."""
    p: float | None
    """Two-sided paired t test of a difference no larger than `misfit`."""
    p_holm: float | None
    """The same, adjusted over every contrast of the analysis (Holm)."""
    pairs: int
    """Seeds used."""
    excluded: int
    """Seeds left out because a run of either side failed or is not there."""
    status: str
    """"resolved" (the interval leaves 0 out, so that p_holm < .05), "not resolvable" (it does not), or "refused"."""
    phrase: str
    """What the status means, for a table or a caption: "worse", "better", "not resolvable", or why it is refused."""


@dataclass(frozen=True, kw_only=True)
class FailedRun:
    """A run that is not ok."""

    id: str
    series: str
    depth: int
    learning_rate: float
    seed: int
    outcome: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Failures:
    """Nothing is dropped: every run that is not ok, and everything that happened on the way."""

    runs: tuple[FailedRun, ...]
    counts: Mapping[str, int]
    """Outcome -> runs, of every outcome that occurs, ok too."""
    events: tuple[Event, ...]


@dataclass(frozen=True, kw_only=True)
class Question:
    """Something that would change a conclusion."""

    topic: str
    """"fixed", "horizon", "seeds", "rates", "misfit", "evaluation", "refused", "runs", "start"."""
    sentence: str


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One conclusion, for a machine and for a reader."""

    id: str
    """As "learning_rate_transfer/residual=pre_norm": what / which series (/ which depth)."""
    status: str
    """A key of `STATUSES`."""
    sentence: str
    numbers: Mapping[str, float]
    """Numbers of the sentence; empty where the status is refused."""
    rule: str = ""
    """The rule of a refused one."""
    headline: int = 10
    """Importance, 0 first; the verdicts of an analysis are in this order.

    0 the answer (which series is better), 1 each contrast, 2 whether the optimum moves with depth, 3 loss against
    depth, 4 regret, 5 growth of the stream, 6 gradient, 7 divergence, 8 time and bytes, 9 horizon, 10 runs.
    """
    series: str = ""
    """Label of the series it is about; "" where it is about all."""
    reference: str = ""
    """Label of the series it is compared with; "" where there is none."""
    depth: int | None = None
    """In blocks; None where it is about several."""
    quantity: str = ""
    """What `estimate` is, as "difference in loss" or "slope of the optimal learning rate"."""
    unit: str = ""
    """Of `estimate`, as "nats"."""
    estimate: Estimate | None = None
    """The number it rests on; None where it is refused or a count."""
    refusal: Refusal | None = None
    """Why there is no number; None where the status is not "refused"."""

    def as_dict(self) -> dict[str, Any]:
        """Return it as what JSON can hold: what "verdicts" of the file for machines lists.

        {"id", "status", "headline", "series", "reference", "depth", "quantity", "unit", "sentence", "numbers",
        "estimate": {"value", "low", "high", "n", "interval"} or None, "refusal": {"rule", "sentence"} or None}.
        """
        refusal = self.refusal and {"rule": self.refusal.rule, "sentence": self.refusal.sentence}
        names = ("id", "status", "headline", "series", "reference", "depth", "quantity", "unit", "sentence")
        return {
            **{name: getattr(self, name) for name in names},
            "numbers": dict(self.numbers),
            "estimate": self.estimate and dataclasses.asdict(self.estimate),
            "refusal": refusal,
        }


@dataclass(frozen=True, kw_only=True)
class Findings:
    """Everything the report prints, in the order it prints it (`analysis.Analysis` adds `as_dict`)."""

    name: str
    conventions: Mapping[str, str]
    """In words: "depth", "loss", "parameters", "flops", "cap", "horizon", "growth", "time", "intervals"."""
    series: tuple[Series, ...]
    contrasts: tuple[Contrast, ...]
    failures: Failures
    verdicts: tuple[Verdict, ...]
    open_questions: tuple[Question, ...]
