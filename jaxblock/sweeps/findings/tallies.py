"""Verdicts about the runs themselves: how many failed, what they cost, whether they had finished."""

from collections.abc import Iterator, Sequence

from jaxblock.sweeps.findings.open_questions import arms_of, still_falling
from jaxblock.sweeps.findings.records import Failures, Series, Verdict
from jaxblock.sweeps.findings.wording import Subject, numbers_of, words_of
from jaxblock.sweeps.results import Sweep
from jaxblock.sweeps.statistics.estimate import Estimate, Refusal
from jaxblock.sweeps.statistics.fits import Line
from jaxblock.sweeps.statistics.transfer import StableRate

DIVERGENCE, COSTS, HORIZON, RUNS = 7, 8, 9, 10


def stability(one: Series) -> Verdict:
    """Count the failed runs: a count over the rates that were chosen, so that none failing shows no stability."""
    rows = [row for arm in one.arms for row in arm.rates]
    failed, total = sum(row.failed for row in rows), sum(row.evidence for row in rows)
    stable = [
        f"{arm.stable_rate.rate:.3g} at depth {arm.depth}"
        for arm in one.arms
        if isinstance(arm.stable_rate, StableRate)
    ]
    rates = sorted({row.rate for row in rows})
    tried = (
        f"of the rates tried, {rates[0]:.3g} to {rates[-1]:.3g}" if len(rates) > 1 else f"at {rates[0]:.3g}"
    )
    more = f"; largest stable learning rate {', '.join(stable)}" if stable else ""
    subject = Subject(
        id=f"divergence/{one.label}",
        headline=DIVERGENCE,
        what=one.label,
        quantity="failed runs",
        series=one.label,
    )
    return subject.verdict(
        "warn" if failed else "note",
        f"{one.label}: {failed} of {total} runs diverged, {tried}{more}",
        {"failed": float(failed), "runs": float(total)},
    )


def costs(one: Series, sweep: Sweep) -> Iterator[Verdict]:
    """State time and memory per block, where a line could be fitted."""
    for name, what, unit, line in (
        ("time", "time", "seconds per step per block", one.time),
        ("bytes", "memory", "bytes per block", one.bytes),
    ):
        subject = Subject(
            id=f"{name}/{one.label}",
            headline=COSTS,
            what=f"{one.label}: {what} against depth",
            quantity=f"{what} per block of one run's share",
            unit=unit,
            series=one.label,
        )
        yield cost(subject, line, doubt=load_words(sweep) if name == "time" else "")


def cost(subject: Subject, line: Line | Refusal, *, doubt: str) -> Verdict:
    """State a line; with a doubt it is never shown."""
    if isinstance(line, Refusal):
        return subject.refused(line)
    resolved = line.slope.excludes(0.0)
    more = ("" if resolved else ": a growth is not resolved") + (f"; {doubt}" if doubt else "")
    return subject.verdict(
        "pass" if resolved and not doubt else "warn",
        f"{subject.series}: one run's share is {line.intercept.value:.3g} + {words_of(line.slope, subject.unit)}{more}",
        numbers_of("slope", line.slope) | numbers_of("intercept", line.intercept),
        estimate=line.slope,
    )


def load_words(sweep: Sweep) -> str:
    """Return what makes a time doubtful, with the load and the workers where they are known."""
    loads = [
        f"{key.replace('_', ' ')} {value:g}"
        for key, value in sweep.environment.items()
        if key.startswith("load_average") and isinstance(value, int | float)
    ]
    workers = sweep.plan.get("sweep", {}).get("workers")
    known = [*loads, *([] if workers is None else [f"workers {workers}"])]
    return "each time is one measurement on a machine that may be loaded" + (
        f" ({', '.join(known)})" if known else ""
    )


def horizon(series: Sequence[Series]) -> Verdict:
    """Claim: the training loss had stopped falling."""
    falling = [name for name, arm in arms_of(series) if still_falling(arm)]
    known = [name for name, arm in arms_of(series) if isinstance(arm.still_falling, Estimate)]
    subject = Subject(
        id="horizon",
        headline=HORIZON,
        what="whether the training losses had stopped falling",
        quantity="arms",
    )
    if not known:
        return subject.refused(Refusal(rule="no_values", sentence="no arm has two slopes at its end"))
    words = f"still falling at the end in {len(falling)} of {len(known)} arms"
    return subject.verdict(
        "warn" if falling else "pass",
        f"the training loss is {words}" + (f": {'; '.join(falling)}" if falling else ""),
        {"falling": float(len(falling)), "arms": float(len(known))},
    )


def completeness(failures: Failures) -> Verdict:
    """Count the runs by outcome."""
    total, ok = sum(failures.counts.values()), failures.counts.get("ok", 0)
    others = {outcome: count for outcome, count in failures.counts.items() if outcome != "ok"}
    words = ", ".join(f"{count} {outcome}" for outcome, count in others.items())
    counts = {outcome: float(count) for outcome, count in failures.counts.items()}
    return Subject(id="runs", headline=RUNS, what="the runs", quantity="runs").verdict(
        "warn" if others else "note",
        f"{ok} of {total} runs are ok" + (f"; {words}: each is listed with its reason" if words else ""),
        {"runs": float(total), **counts},
    )
