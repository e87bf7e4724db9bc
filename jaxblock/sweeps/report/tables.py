"""The tables of the report: one sheet each, with a face for the page and one for its CSV file."""

import csv
import dataclasses
import io
import json
from collections.abc import Mapping
from typing import Any

from jaxblock.sweeps.findings.records import FailedRun
from jaxblock.sweeps.report.marks import Table
from jaxblock.sweeps.report.material import Material
from jaxblock.sweeps.report.scales import number
from jaxblock.sweeps.report.sheets import (
    Column,
    Sheet,
    number_or_refusal,
    outcomes,
    span,
    statistic,
    value,
    values,
)
from jaxblock.sweeps.results import Result
from jaxblock.sweeps.statistics.estimate import Refusal

RUN_MAPPINGS = ("axes", "parameters", "flops_per_token")
"""Fields of `Result` whose entries are columns of their own."""
MIB = 2.0**20


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


def series_sheet(material: Material) -> Sheet:
    """Return what tells the series apart: rule, start and warm-up stand beside every comparison."""
    columns = (
        value("series", "series"),
        Column(files=("reference",), heading="role", show=lambda cell: "reference" if cell else None),
        *values(
            ("residual", "residual"),
            ("initialization", "initialization"),
            ("parametrization", "parametrization"),
            ("warmup", "warm-up, fraction of the steps"),
            ("depths", ""),
        ),
        span("depth", "depths, blocks L"),
    )
    rows = tuple(
        (
            *(one.label, one.reference, one.residual, one.initialization, one.parametrization, one.warmup),
            *(len(one.arms), tuple(arm.depth for arm in one.arms)),
        )
        for one in material.findings.series
    )
    return Sheet(heading="Series", columns=columns, rows=rows)


def arm_sheet(material: Material) -> Sheet:
    """Return one row per series and depth: how its runs ended and what its best learning rate gives."""
    columns = (
        *values(("series", "series"), ("depth_blocks", "blocks L"), ("runs", "runs")),
        *(outcomes(), statistic("optimal_rate", "optimal rate"), statistic("tuned_loss", "loss at it")),
        value("best_measured_rate", "best measured rate"),
        *(statistic("best_measured_loss", "loss there"), value("note", "note")),
    )
    rows = []
    for _, series, arm in material.arms:
        found = arm.basin
        tuned = (found, found) if isinstance(found, Refusal) else (found.optimum, found.loss)
        about = (series.label, arm.depth, len(arm.run_ids), arm.outcomes)
        rows.append((*about, *tuned, arm.best_rate, arm.best_loss, arm.best_loss_note or None))
    notes = (
        ("Optimal rate", "lowest point of a parabola in log2 rate, fitted to the rates around the best one."),
        ("Loss at it", "validation loss read from that parabola, mean over the seeds, nats per target."),
        ("Best measured rate", "rate of the grid with the lowest mean loss, and the mean measured there."),
        ("Intervals", "in brackets, 95 %; their kind is in the file."),
    )
    return Sheet(heading="Arms: outcomes and best rates", columns=columns, rows=tuple(rows), notes=notes)


def size_sheet(material: Material) -> Sheet:
    """Return one row per series and depth: parameters, FLOPs by every convention, lanes, time and memory."""
    parameters = _keys(arm.parameters for _, _, arm in material.arms)
    flops = _keys(arm.flops_per_token for _, _, arm in material.arms)
    columns = (
        *values(("series", "series"), ("depth_blocks", "blocks L"), ("sublayers", "sublayers S")),
        value("width", "width"),
        *(value(f"parameters_{key}", f"N {key}".replace("_", " ")) for key in parameters),
        *(value(f"flops_{key.lower()}", f"FLOPs {key}".replace("_", " ")) for key in flops),
        *(span("lanes", "lanes"), value("step_s_per_run", "s / step / run")),
        Column(
            files=("bytes_per_run",),
            heading="MiB / run",
            show=lambda cell: None if cell is None else cell / MIB,
        ),
        value("compile_s", "compile s"),
    )
    rows = tuple(
        (
            *(series.label, arm.depth, arm.sublayers, arm.width),
            *(_entry(arm.parameters, key) for key in parameters),
            *(_entry(arm.flops_per_token, key) for key in flops),
            *(arm.lanes, arm.step_s, arm.run_bytes, arm.compile_s),
        )
        for _, series, arm in material.arms
    )
    notes = (
        ("FLOPs", "training FLOPs per token, by each counting convention."),
        (
            "Lanes",
            "runs that one program trains at once; time and memory are the program's, divided by its lanes.",
        ),
    )
    heading = "Arms: parameters N, training FLOPs per token, time and memory"
    return Sheet(heading=heading, columns=columns, rows=rows, notes=notes)


def contrast_sheet(material: Material) -> Sheet:
    """Return every series against the reference, depth by depth, with the detectable difference first."""
    columns = (
        *values(("series", "series"), ("against", "against"), ("depth_blocks", "depth, blocks L")),
        Column(files=("status",), heading=""),
        Column(files=("phrase",), heading="found"),
        number_or_refusal("detectable", "detectable, nats"),
        statistic("difference", "difference, nats"),
        *values(("p", "p, paired t"), ("p_holm", "p, Holm"), ("pairs", "pairs")),
        *values(("excluded", "seeds left out"), ("comparisons", ""), ("misfit", "misfits, nats")),
    )
    rows = tuple(
        (
            *(one.series, one.reference, one.depth, one.status, one.phrase, one.detectable, one.difference),
            *(one.p, one.p_holm, one.pairs, one.excluded, one.comparisons, one.misfit),
        )
        for one in material.findings.contrasts
    )
    notes = (
        ("Detectable", "smallest difference that this many seeds find with 80 % power; read it first."),
        (
            "Difference",
            "loss of the series less that of the reference, each at its own optimum, seed by seed.",
        ),
        (
            "Interval",
            "of the difference: holds for all comparisons of this table at once; its kind is in the file.",
        ),
        ("p, Holm", "the paired t test, adjusted for the number of comparisons in this table."),
        (
            "Misfits",
            "of both fitted parabolas together: a difference up to it may be none; it is in the interval.",
        ),
    )
    heading = "Contrasts against the reference, paired by seed"
    return Sheet(heading=heading, columns=columns, rows=rows, notes=notes)


def failure_table(material: Material) -> Table:
    """Return every run that is not ok."""
    columns = ("outcome", "series", "depth_blocks", "learning_rate", "seed", "reason", "run")
    rows = tuple(
        (one.outcome, one.series, one.depth, one.learning_rate, one.seed, one.reason, one.id)
        for one in material.findings.failures.runs
    )
    return Table(columns=columns, rows=rows)


def failure_sheet(material: Material) -> Sheet:
    """Return the same for the page, runs of an arm with one outcome and reason in one row."""
    groups: dict[tuple[str, str, int, str], list[FailedRun]] = {}
    for one in material.findings.failures.runs:
        groups.setdefault((one.outcome, one.series, one.depth, one.reason), []).append(one)
    headings = ("outcome", "series", "blocks L", "runs", "learning rates", "seeds", "reason")
    rows = tuple(
        (
            *(outcome, series, depth, len(runs)),
            ", ".join(number(rate) for rate in sorted({one.learning_rate for one in runs})),
            ", ".join(str(seed) for seed in sorted({one.seed for one in runs})),
            reason or None,
        )
        for (outcome, series, depth, reason), runs in groups.items()
    )
    columns = tuple(Column(files=(), heading=heading) for heading in headings)
    return Sheet(heading="Runs that failed or are not there", columns=columns, rows=rows)


def event_sheet(material: Material) -> Sheet:
    """Return everything that happened on the way."""
    rows = tuple(
        (event.time, event.kind, event.sentence, len(event.runs) or None)
        for event in material.findings.failures.events
    )
    columns = values(
        ("time_utc", "time, UTC"),
        ("event", "event"),
        ("sentence", "what happened"),
        ("runs_concerned", "runs concerned"),
    )
    return Sheet(heading="What happened on the way", columns=columns, rows=rows)


def mapping_sheet(heading: str, found: Mapping[str, Any]) -> Sheet:
    """Return names and values; a value that is no scalar is written as JSON."""
    rows = tuple((name, plain(one)) for name, one in flatten(found).items())
    return Sheet(heading=heading, columns=values(("setting", "setting"), ("value", "value")), rows=rows)


def flatten(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one: {"a": {"b": 1}} -> {"a.b": 1}."""
    found: dict[str, Any] = {}
    for name, one in nested.items():
        if isinstance(one, Mapping):
            found |= flatten(one, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = one
    return found


def plain(one: Any) -> Any:
    """Return a scalar as it is and anything else as JSON."""
    if one is None or isinstance(one, str | int | float):
        return one
    return json.dumps(list(one) if isinstance(one, tuple) else one, default=str)


def to_csv(table: Table) -> str:
    """Return a table as comma-separated values with a header; None is an empty cell."""
    target = io.StringIO(newline="")
    writer = csv.writer(target, lineterminator="\n")
    writer.writerow(table.columns)
    writer.writerows([["" if cell is None else cell for cell in row] for row in table.rows])
    return target.getvalue()


def _is_scalar(name: str) -> bool:
    return name not in (*RUN_MAPPINGS, "val_losses", "losses", "start", "end", "probe")


def _keys(mappings: Any) -> tuple[str, ...]:
    return tuple(dict.fromkeys(key for mapping in mappings for key in mapping))


def _entry(found: Mapping[str, Any], key: str) -> Any:
    return plain(found[key]) if key in found else None
