"""What every figure and table reads: the sweep, its analysis, and the words that are said of both."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from jaxblock.sweeps.findings.records import Arm, Findings, Series
from jaxblock.sweeps.report.marks import Gap, Table
from jaxblock.sweeps.report.scales import Axis, number
from jaxblock.sweeps.results import FAILED, Result, Sweep
from jaxblock.sweeps.statistics.estimate import Estimate, Refusal

NO_EVIDENCE = ("out_of_memory", "killed", "error", "missing")
"""Outcomes that say nothing about a learning rate."""
ESTIMATE_COLUMNS = ("value", "low", "high", "n", "interval", "refused", "refusal")
PARAMETERS = "non_embedding"
"""The parameter count of every axis and caption."""
FLOPS = "causal"
"""The FLOP convention of every axis and caption (`jaxblock.accounting.flop_conventions`)."""


@dataclass(frozen=True)
class Material:
    """A sweep and its analysis."""

    sweep: Sweep
    findings: Findings

    @cached_property
    def runs(self) -> Mapping[str, Result]:
        """Id -> run."""
        return {run.id: run for run in self.sweep.results}

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """Names of the series, in the order of their colors."""
        return tuple(series.label for series in self.findings.series)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Every depth of the sweep, in blocks."""
        return tuple(sorted({arm.depth for _, _, arm in self.arms}))

    @cached_property
    def arms(self) -> tuple[tuple[int, Series, Arm], ...]:
        """(color, series, arm) of every arm."""
        return tuple(
            (color, series, arm) for color, series in enumerate(self.findings.series) for arm in series.arms
        )

    @cached_property
    def rates(self) -> tuple[float, ...]:
        """Every learning rate of the sweep."""
        return tuple(sorted({row.rate for _, _, arm in self.arms for row in arm.rates}))

    @cached_property
    def depth_axis(self) -> Axis:
        """Depth on a logarithmic axis, every value written."""
        return Axis(label="depth, blocks L (log2 axis)", scale="log2", ticks=tuple(map(float, self.depths)))

    @cached_property
    def rate_axis(self) -> Axis:
        """Learning rate on a logarithmic axis, every second value written."""
        every = max(1, -(-len(self.rates) // 6))
        return Axis(label="peak learning rate (log2 axis)", scale="log2", ticks=self.rates[::every])

    def beside(self, depth: float, color: int, octaves: float = 0.0) -> float:
        """Return a place on the depth axis, moved a little so that series do not hide each other.

        Args:
          depth: in blocks.
          color: of the series.
          octaves: moved by this much more, in units of the distance of two neighbouring depths.
        """
        gaps = [math.log2(high / low) for low, high in itertools.pairwise(self.depths)]
        gap, series = min([1.0, *gaps]), len(self.labels)
        apart = min(0.2, 0.6 / max(1, series - 1))
        return depth * 2.0 ** (gap * (apart * (color - (series - 1) / 2) + octaves))

    def gap(self, depth: int, color: int, refusal: Refusal) -> Gap:
        """Return the sign of a refusal at its place on a depth axis."""
        word = f"refused: {reason(refusal)}"
        return Gap(at=self.beside(depth, color), depth=depth, color=color, word=word, title=refusal.sentence)

    @cached_property
    def left_out(self) -> str:
        """Runs that are in no loss, with counts."""
        counts = self.findings.failures.counts
        failed = _counted({name: counts[name] for name in FAILED if counts.get(name)})
        silent = _counted({name: counts[name] for name in NO_EVIDENCE if counts.get(name)})
        if not failed and not silent:
            return "no run failed and none is left out"
        return f"failed: {failed or 'none'}; left out as no evidence: {silent or 'none'}"

    @cached_property
    def facts(self) -> tuple[str, ...]:
        """What holds on every axis: horizon, depth unit, parameter count, FLOP convention, failures, places."""
        steps = sorted({run.planned_steps for run in self.sweep.results})
        tokens = [f"{count * self.sweep.tokens_per_step:,}" for count in steps]
        words = [
            f"Horizon: {_span([f'{count:,}' for count in steps])} steps = {_span(tokens)} tokens.",
            "Depth is in blocks L (sublayers S are in the table of arms). Where series share a depth, their signs "
            "stand a little beside each other; the depth meant is the tick.",
        ]
        sizes = sorted(arm.parameters[PARAMETERS] for _, _, arm in self.arms if PARAMETERS in arm.parameters)
        if sizes:
            words.append(
                f"Parameters: non-embedding, {_span([f'{size:,}' for size in (sizes[0], sizes[-1])])}."
            )
        costs = sorted(arm.flops_per_token[FLOPS] for _, _, arm in self.arms if FLOPS in arm.flops_per_token)
        if costs:
            span = _span([f"{number(cost / 1e6)}" for cost in (costs[0], costs[-1])])
            words.append(f"Training FLOPs per token, convention {FLOPS}: {span} M.")
        words.append("Losses are nats per target; learning rates are peak rates.")
        return tuple(words)

    def caption(self, lead: str, estimates: Iterable[Estimate | Refusal], *, unit: str = "seeds") -> str:
        """Return a caption: what is drawn, how many values and which interval, what is refused and left out.

        Args:
          lead: what is drawn.
          estimates: every statistic that is drawn or refused.
          unit: what n counts.
        """
        found = list(estimates)
        drawn = [one for one in found if isinstance(one, Estimate)]
        counts = sorted({one.n for one in drawn})
        kinds = sorted({one.interval for one in drawn if one.interval})
        words = [lead]
        if counts:
            intervals = f"; intervals: {'; '.join(kinds)}" if kinds else ""
            words.append(f"n = {_span([str(count) for count in counts])} {unit} per estimate{intervals}.")
        else:
            words.append(f"n = 0 {unit}: there is no estimate.")
        if len(drawn) < len(found):
            words.append(f"{len(found) - len(drawn)} of {len(found)} estimates are refused and not drawn.")
        total = len(self.sweep.results)
        words.append(f"Of {total:,} runs, {self.left_out}.")
        return " ".join(words)


def listed(words: Sequence[str], most: int = 4) -> str:
    """Return at most some phrases of a list as one, and how many more there are."""
    more = f"; {len(words) - most} more are in the tables" if len(words) > most else ""
    return "; ".join(words[:most]) + more


def arm_name(series: Series, arm: Arm) -> str:
    """Return how a sentence calls an arm."""
    return f"{series.label}, L = {arm.depth}"


def cells(statistic: Estimate | Refusal | None) -> tuple[object, ...]:
    """Return the cells of `ESTIMATE_COLUMNS`; a refused number leaves all but its reason empty."""
    if isinstance(statistic, Estimate):
        return statistic.value, statistic.low, statistic.high, statistic.n, statistic.interval, None, None
    why = ("not_measured", "not measured") if statistic is None else (statistic.rule, statistic.sentence)
    return None, None, None, None, None, *why


def short(statistic: Estimate | Refusal | None, *, digits: int = 4) -> str:
    """Return a number with its interval for a table, or the word refused."""
    if isinstance(statistic, Estimate):
        value, low, high = (
            f"{value:.{digits}g}" for value in (statistic.value, statistic.low, statistic.high)
        )
        return f"{value} [{low}, {high}]"
    return f"refused: {reason(statistic)}" if statistic is not None else "not measured"


def estimate_table(
    columns: Sequence[str], rows: Iterable[tuple[tuple[object, ...], Estimate | Refusal]]
) -> Table:
    """Return a table of statistics: what each is of, then `ESTIMATE_COLUMNS`."""
    found = tuple((*names, *cells(statistic)) for names, statistic in rows)
    return Table(columns=(*columns, *ESTIMATE_COLUMNS), rows=found)


def refusals(named: Iterable[tuple[str, Estimate | Refusal]]) -> tuple[str, ...]:
    """Return "names: why" of every refused statistic; those with the same reason share a sentence."""
    reasons: dict[str, list[str]] = {}
    for name, one in named:
        if isinstance(one, Refusal):
            reasons.setdefault(one.sentence, []).append(name)
    return tuple(f"{'; '.join(_merged(names))}: {sentence}" for sentence, names in reasons.items())


def _merged(names: Sequence[str]) -> list[str]:
    """Return names with the depths of one thing together: "a, L = 2", "a, L = 4" -> "a, L = 2, 4"."""
    depths: dict[tuple[str, str], list[str]] = {}
    for name in names:
        before, _, after = name.partition(", L = ")
        depth, comma, rest = after.partition(",")
        depths.setdefault((before, comma + rest), []).append(depth)
    return [
        f"{before}, L = {', '.join(dict.fromkeys(found))}{rest}" if found[0] else before
        for (before, rest), found in depths.items()
    ]


def reason(refusal: Refusal) -> str:
    """Return a few words for a figure or a cell; the whole sentence stands below it."""
    return REASONS[refusal.rule] if refusal.rule in REASONS else refusal.rule.replace("_", " ")


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {outcome}" for outcome, number in counts.items())


def _span(words: Sequence[str]) -> str:
    return words[0] if words and words[0] == words[-1] else f"{words[0]} to {words[-1]}" if words else "0"


REASONS: Mapping[str, str] = {
    "edge_left": "grid ends above the optimum",
    "edge_right": "grid ends below the optimum",
    "edge_wall": "optimum at the failing rates",
    "few_rates": "too few rates",
    "few_seeds": "too few seeds",
    "all_failed": "no loss to fit",
    "no_values": "no value",
    "not_convex": "no basin in the losses",
    "vertex_unbounded": "optimum without bounds",
    "lack_of_fit": "parabola misses the losses",
    "failed_there": "runs fail at that rate",
    "diverged_at_minimum": "too many failures",
}
"""Rule -> a few words, where its name is not plain enough."""
