"""The tables of the report: the same rows go to the page and to CSV files."""

import csv
import dataclasses
import io
import json
from collections.abc import Mapping
from typing import Any

from jaxblock.sweeps.findings.records import FailedRun
from jaxblock.sweeps.report.marks import Table
from jaxblock.sweeps.report.material import Material, reason, short
from jaxblock.sweeps.report.scales import number
from jaxblock.sweeps.results import Result
from jaxblock.sweeps.statistics.estimate import Refusal

RUN_MAPPINGS = ("axes", "parameters", "flops_per_token")
"""Fields of `Result` whose entries are columns of their own."""


def run_table(material: Material) -> Table:
    """Return one row per run with every scalar of `Result`, failures and missing runs too."""
    runs = material.sweep.results
    scalars = [field.name for field in dataclasses.fields(Result) if _is_scalar(field.name)]
    keys = {
        name: tuple(dict.fromkeys(key for run in runs for key in getattr(run, name))) for name in RUN_MAPPINGS
    }
    columns = [*scalars, *(f"{name}.{key}" for name in RUN_MAPPINGS for key in keys[name])]
    rows = tuple(
        (
            *(getattr(run, name) for name in scalars),
            *(_entry(getattr(run, name), key) for name in RUN_MAPPINGS for key in keys[name]),
        )
        for run in runs
    )
    return Table(columns=tuple(columns), rows=rows)


def series_table(material: Material) -> Table:
    """Return what tells the series apart: rule, start and warm-up stand beside every comparison."""
    columns = (
        "series",
        "role",
        "residual",
        "initialization",
        "parametrization",
        "warm-up",
        "depths, blocks L",
    )
    rows = tuple(
        (
            *(one.label, "reference" if one.reference else None, one.residual, one.initialization),
            *(one.parametrization, one.warmup, ", ".join(str(arm.depth) for arm in one.arms)),
        )
        for one in material.findings.series
    )
    return Table(columns=columns, rows=rows)


def arm_table(material: Material) -> Table:
    """Return one row per series and depth: how its runs ended and what its best learning rate gives."""
    columns = (
        *("series", "blocks L", "runs", "outcomes", "optimal rate", "loss at it", "n", "interval"),
        *("best measured rate", "loss there", "note"),
    )
    rows = []
    for _, series, arm in material.arms:
        found = arm.basin
        if isinstance(found, Refusal):
            tuned: tuple[object, ...] = (short(found), short(found), None, None)
        else:
            tuned = (short(found.optimum), short(found.loss), found.loss.n, found.loss.interval)
        rows.append(
            (
                *(series.label, arm.depth, len(arm.run_ids), _counts(arm.outcomes), *tuned),
                *(arm.best_rate, short(arm.best_loss), arm.best_loss_note or None),
            )
        )
    return Table(columns=columns, rows=tuple(rows))


def size_table(material: Material) -> Table:
    """Return one row per series and depth: parameters, FLOPs by every convention, lanes, time and memory."""
    parameters = _keys(arm.parameters for _, _, arm in material.arms)
    flops = _keys(arm.flops_per_token for _, _, arm in material.arms)
    columns = (
        *("series", "blocks L", "sublayers S", "width"),
        *(f"N {key}".replace("_", " ") for key in parameters),
        *(f"FLOPs {key}".replace("_", " ") for key in flops),
        *("lanes", "s / step / run", "MiB / run", "compile s"),
    )
    rows = tuple(
        (
            *(series.label, arm.depth, arm.sublayers, arm.width),
            *(_entry(arm.parameters, key) for key in parameters),
            *(_entry(arm.flops_per_token, key) for key in flops),
            ", ".join(map(str, arm.lanes)) or None,
            arm.step_s,
            None if arm.run_bytes is None else arm.run_bytes / 2**20,
            arm.compile_s,
        )
        for _, series, arm in material.arms
    )
    return Table(columns=columns, rows=rows)


def contrast_table(material: Material) -> Table:
    """Return every series against the reference, depth by depth, with the detectable difference first."""
    columns = (
        *(
            "series",
            "against",
            "depth, blocks L",
            "status",
            "detectable, nats",
            "difference, nats",
            "interval",
        ),
        *("p, paired t", "p, Holm", "pairs", "seeds left out"),
    )
    rows = tuple(
        (
            *(one.series, one.reference, one.depth, one.status),
            _number_or_reason(one.detectable),
            short(one.difference),
            None if isinstance(one.difference, Refusal) else one.difference.interval,
            *(one.p, one.p_holm, one.pairs, one.excluded),
        )
        for one in material.findings.contrasts
    )
    return Table(columns=columns, rows=rows)


def failure_table(material: Material) -> Table:
    """Return every run that is not ok."""
    columns = ("outcome", "series", "depth, blocks L", "learning rate", "seed", "reason", "run")
    rows = tuple(
        (one.outcome, one.series, one.depth, one.learning_rate, one.seed, one.reason, one.id)
        for one in material.findings.failures.runs
    )
    return Table(columns=columns, rows=rows)


def grouped_failures(material: Material) -> Table:
    """Return the same, runs of an arm with one outcome and reason in one row: what a person can read."""
    groups: dict[tuple[str, str, int, str], list[FailedRun]] = {}
    for one in material.findings.failures.runs:
        groups.setdefault((one.outcome, one.series, one.depth, one.reason), []).append(one)
    columns = ("outcome", "series", "blocks L", "runs", "learning rates", "seeds", "reason")
    rows = tuple(
        (
            *(outcome, series, depth, len(runs)),
            ", ".join(number(rate) for rate in sorted({one.learning_rate for one in runs})),
            ", ".join(str(seed) for seed in sorted({one.seed for one in runs})),
            reason or None,
        )
        for (outcome, series, depth, reason), runs in groups.items()
    )
    return Table(columns=columns, rows=rows)


def event_table(material: Material) -> Table:
    """Return everything that happened on the way."""
    rows = tuple(
        (event.time, event.kind, event.sentence, len(event.runs) or None)
        for event in material.findings.failures.events
    )
    return Table(columns=("time, UTC", "event", "what happened", "runs concerned"), rows=rows)


def mapping_table(values: Mapping[str, Any], columns: tuple[str, str]) -> Table:
    """Return names and values; a value that is no scalar is written as JSON."""
    return Table(columns=columns, rows=tuple((name, plain(value)) for name, value in flatten(values).items()))


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one: {"a": {"b": 1}} -> {"a.b": 1}."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= flatten(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def plain(value: Any) -> Any:
    """Return a scalar as it is and anything else as JSON."""
    if value is None or isinstance(value, str | int | float):
        return value
    return json.dumps(list(value) if isinstance(value, tuple) else value, default=str)


def to_csv(table: Table) -> str:
    """Return a table as comma-separated values with a header; None is an empty cell."""
    target = io.StringIO(newline="")
    writer = csv.writer(target, lineterminator="\n")
    writer.writerow(table.columns)
    writer.writerows([["" if cell is None else cell for cell in row] for row in table.rows])
    return target.getvalue()


def _is_scalar(name: str) -> bool:
    return name not in (*RUN_MAPPINGS, "val_losses", "losses", "start", "end")


def _keys(mappings: Any) -> tuple[str, ...]:
    return tuple(dict.fromkeys(key for mapping in mappings for key in mapping))


def _entry(values: Mapping[str, Any], key: str) -> Any:
    return plain(values[key]) if key in values else None


def _counts(outcomes: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())


def _number_or_reason(value: float | Refusal) -> Any:
    return f"refused: {reason(value)}" if isinstance(value, Refusal) else value
