"""Conclusions with a status, for a machine and a reader; each claim is written so that `pass` means it was shown."""

from collections.abc import Sequence

from jaxblock.sweeps.findings.ranking import rankings
from jaxblock.sweeps.findings.records import Contrast, Failures, Series, Verdict
from jaxblock.sweeps.findings.tallies import completeness, costs, horizon, stability
from jaxblock.sweeps.findings.trends import growths, loss_with_depth, regrets, transfer
from jaxblock.sweeps.results import Sweep


def verdicts_of(
    sweep: Sweep, series: Sequence[Series], contrasts: Sequence[Contrast], failures: Failures
) -> tuple[Verdict, ...]:
    """Return every verdict in the order of `Verdict.headline`, the answer to the sweep's question first."""
    found = [*rankings(series, contrasts), horizon(series), completeness(failures)]
    for one in series:
        found += [
            transfer(one),
            loss_with_depth(one),
            *regrets(one),
            *growths(one),
            stability(one),
            *costs(one, sweep),
        ]
    return tuple(sorted(found, key=lambda verdict: verdict.headline))
