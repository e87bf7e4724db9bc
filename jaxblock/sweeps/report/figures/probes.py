"""The stream and its updates along depth after training, against relative depth s / S: what [probe] measured."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxblock.sweeps.findings.arms import TRAINED
from jaxblock.sweeps.findings.records import Arm, Series
from jaxblock.sweeps.report.marks import Figure, Line, Mark, Panel, Points, Table
from jaxblock.sweeps.report.material import Material, arm_name, listed
from jaxblock.sweeps.report.scales import Axis
from jaxblock.sweeps.results import Result

DRAWN: Mapping[str, tuple[str, str]] = {
    "stream_rms": ("Stream", "rms of the stream after sublayer s (log10 axis)"),
    "relative_update": ("Update", "rms(u) / rms(x) of sublayer s (log10 axis)"),
}
"""Statistic -> (what a panel is called, its y axis); the table has every one that was measured."""
OFF = "nothing was measured along depth, as probe.every of the plan is 0"
LACKS = "no run at the best rate was measured, or the topology's stream is not one array"


class Profile(NamedTuple):
    """One statistic of an arm along depth."""

    values: tuple[float, ...]
    """Median over seeds at each sublayer; NaN where no seed has a finite value."""
    counts: tuple[int, ...]
    """Seeds behind each."""


def probe_figure(material: Material) -> Figure:
    """Return stream size and relative update against relative depth, one line per depth and series."""
    found = [
        (color, series, arm, profiles_of(arm_runs(material, arm))) for color, series, arm in material.arms
    ]
    panels = [
        _panel(series, statistic, [one for one in found if one[0] == color])
        for statistic in DRAWN
        for color, series in enumerate(material.findings.series)
    ]
    silent = [arm_name(series, arm) for _, series, arm, profiles in found if not profiles]
    asked = any(run.probe for run in material.sweep.results)
    counts = [n for *_, profiles in found for profile in profiles.values() for n in profile.counts]
    return Figure(
        name="probes",
        title="The stream along relative depth",
        summary="Size of the residual stream and of each sublayer's relative update against relative depth s / S, "
        "after training, one line per depth.",
        caption=_caption(material, counts),
        panels=tuple(panel for panel in panels if panel.marks),
        series=material.labels,
        table=_table([(series, arm, profiles) for _, series, arm, profiles in found]),
        legend={"point": "one sublayer, median over seeds"},
        refusals=(f"{listed(silent)}: {LACKS if asked else OFF}",) if silent else (),
    )


def arm_runs(material: Material, arm: Arm) -> list[Result]:
    """Return the measured runs of an arm at its best rate, one per seed."""
    runs = [material.runs[name] for name in arm.run_ids]
    chosen = [
        run for run in runs if run.learning_rate == arm.best_rate and run.probe and run.outcome in TRAINED
    ]
    return list({run.seed: run for run in chosen}.values())


def profiles_of(runs: Sequence[Result]) -> dict[str, Profile]:
    """Return statistic -> its median over runs; what is not finite in a run is left out of it."""
    names = dict.fromkeys(name for run in runs for name in run.probe)
    profiles = {}
    for name in names:
        values_RS = np.array([run.probe[name] for run in runs if name in run.probe], float)
        finite_RS = np.isfinite(values_RS)
        columns = [values_RS[finite_RS[:, s], s] for s in range(values_RS.shape[1])]
        medians = tuple(float(np.median(column)) if len(column) else float("nan") for column in columns)
        profiles[name] = Profile(medians, tuple(len(column) for column in columns))
    return profiles


def _panel(
    series: Series, statistic: str, found: Sequence[tuple[int, Series, Arm, Mapping[str, Profile]]]
) -> Panel:
    """Return one statistic of every depth of a series."""
    marks: list[Mark] = []
    for color, _, arm, profiles in found:
        if statistic not in profiles:
            continue
        profile = profiles[statistic]
        at = tuple(zip(_relative(statistic, profile), profile.values, strict=True))
        titles = tuple(
            f"{arm_name(series, arm)}, s / S = {place:.3g}: {value:.4g}, n = {n}"
            for (place, value), n in zip(at, profile.counts, strict=True)
        )
        marks.append(Line(at=at, color=color, label=f"L={arm.depth}"))
        marks.append(Points(at=at, color=color, titles=titles, faint=True))
    name, label = DRAWN[statistic]
    return Panel(
        title=f"{name}: {series.label}",
        x=Axis(label="relative depth s / S, sublayers", floor=0.0),
        y=Axis(label=label, scale="log10"),
        marks=tuple(marks),
    )


def _relative(statistic: str, profile: Profile) -> tuple[float, ...]:
    """Return s / S of each value: after sublayer s = 1, ..., S; of the stream's gradient also s = 0."""
    first = 0 if statistic == "stream_gradient" else 1
    last = len(profile.values) - 1 + first
    return tuple(s / last for s in range(first, last + 1))


def _table(found: Sequence[tuple[Series, Arm, Mapping[str, Profile]]]) -> Table:
    rows = [
        (series.label, arm.depth, name, place, value if np.isfinite(value) else None, n)
        for series, arm, profiles in found
        for name, profile in profiles.items()
        for place, value, n in zip(_relative(name, profile), profile.values, profile.counts, strict=True)
    ]
    columns = ("series", "depth_blocks", "statistic", "relative_depth", "median", "seeds")
    return Table(columns=columns, rows=tuple(rows))


def _caption(material: Material, counts: Sequence[int]) -> str:
    ends = sorted({min(counts, default=0), max(counts, default=0)})
    span = " to ".join(str(end) for end in ends)
    lead = (
        "Statistics of every sublayer on the first validation batch, after the last step of each run that trained to "
        "the end at its arm's best rate. Any probe.every above 0 means this one measurement in a sweep. "
        f"Median over seeds, n = {span} seeds per value; no interval is given. A line is one depth; s / S = 1 is the "
        "last sublayer."
    )
    return f"{lead} Of {len(material.sweep.results):,} runs, {material.left_out}."
