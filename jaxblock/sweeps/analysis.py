"""`analyse(sweep)`: every statistic of a sweep with its interval or its refusal, as plain records.

The record definitions are in `findings/records.py`; `Basin`, `Transfer`, `Power`, ... in `statistics/`.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxblock.sweeps.findings.arms import Losses
from jaxblock.sweeps.findings.contrasts import contrasts_of
from jaxblock.sweeps.findings.conventions import conventions_of
from jaxblock.sweeps.findings.failures import failures_of
from jaxblock.sweeps.findings.open_questions import questions_of
from jaxblock.sweeps.findings.records import Findings
from jaxblock.sweeps.findings.series import describe_series, measure_series, outer_axes, split_series
from jaxblock.sweeps.findings.verdicts import verdicts_of
from jaxblock.sweeps.results import Sweep
from jaxblock.sweeps.statistics.estimate import Refusal


@dataclass(frozen=True, kw_only=True)
class Analysis(Findings):
    """What a sweep says."""

    def as_dict(self) -> dict[str, Any]:
        """Return it as what JSON can hold; a refusal is {"refused": rule, "sentence": ..., "side": ...}.

        Raises:
          ValueError: a number is not finite, which would be an error of this package.
        """
        return {field.name: plain(getattr(self, field.name)) for field in dataclasses.fields(self)}


def plain(value: Any) -> Any:
    """Return records, mappings and tuples as dictionaries and lists; keys become strings."""
    if isinstance(value, Refusal):
        return {"refused": value.rule, "sentence": value.sentence, "side": value.side}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"an analysis holds finite numbers; got {value}")
    if value is None or isinstance(value, str | bool | int | float):
        return value
    return str(value)


def analyse(sweep: Sweep) -> Analysis:
    """Return everything that may be said about a sweep, finished or not.

    Raises:
      ValueError: a sweep without runs, or one whose learning rates are not above zero.
    """
    if not sweep.results:
        raise ValueError(f"sweep {sweep.name!r} has no runs: its plan is empty")
    losses, split = Losses.of(sweep), split_series(sweep)
    measured = {label: measure_series(runs, losses) for label, runs in split.items()}
    series = tuple(
        describe_series(
            label,
            runs,
            measured[label],
            axes={path: runs[0].axes[path] for path in outer_axes(sweep)},
            reference=index == 0,
        )
        for index, (label, runs) in enumerate(split.items())
    )
    contrasts, failures = contrasts_of(measured), failures_of(sweep, split)
    return Analysis(
        name=sweep.name,
        conventions=conventions_of(sweep, losses),
        series=series,
        contrasts=contrasts,
        failures=failures,
        verdicts=verdicts_of(sweep, series, contrasts, failures),
        open_questions=questions_of(sweep, series, contrasts),
    )


__all__ = ["Analysis", "analyse"]
