"""Every run that is not ok, and everything that happened on the way: no run is dropped from sight."""

from collections import Counter
from collections.abc import Mapping, Sequence

from jaxblock.sweeps.findings.records import FailedRun, Failures
from jaxblock.sweeps.results import OUTCOMES, Result, Sweep


def failures_of(sweep: Sweep, series: Mapping[str, Sequence[Result]]) -> Failures:
    """Return the runs that are not ok in the plan's order, counts of every outcome, and the events."""
    label_of = {run.id: label for label, runs in series.items() for run in runs}
    counts = Counter(run.outcome for run in sweep.results)
    return Failures(
        runs=tuple(
            FailedRun(
                id=run.id,
                series=label_of[run.id],
                depth=run.depth,
                learning_rate=run.learning_rate,
                seed=run.seed,
                outcome=run.outcome,
                reason=run.reason or OUTCOMES[run.outcome],
            )
            for run in sweep.results
            if run.outcome != "ok"
        ),
        counts={outcome: counts[outcome] for outcome in OUTCOMES if counts[outcome]},
        events=sweep.events,
    )
