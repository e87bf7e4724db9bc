"""Learning-rate basins, and the fraction of runs that fail, one panel per depth."""

import math
from collections.abc import Callable

from jaxblock.sweeps.findings.records import Arm, RateRow, Series
from jaxblock.sweeps.report.figures.losses import LOSS
from jaxblock.sweeps.report.marks import Crosses, Figure, Intervals, Line, Mark, Note, Panel, Points, Table
from jaxblock.sweeps.report.material import (
    Material,
    arm_name,
    cells,
    estimate_table,
    reason,
    refusals,
)
from jaxblock.sweeps.report.scales import Axis, number
from jaxblock.sweeps.results import FAILED
from jaxblock.sweeps.statistics.basin import Basin
from jaxblock.sweeps.statistics.estimate import Estimate, Refusal

CURVE_POINTS = 33


def basin_figure(material: Material) -> Figure:
    """Return loss against learning rate: seeds, fitted curve, optimum with its interval, failures at the top."""
    named = [(arm_name(series, arm), _optimum(arm)) for _, series, arm in material.arms]
    lead = (
        "Validation loss against peak learning rate: every seed a small sign, every failed run a cross at the top, in "
        "the color of its series. Where the arm has an optimum: the fitted parabola over the rates it was fitted to, "
        "and the optimum (large sign) with its interval along the rate."
    )
    return Figure(
        name="learning_rate_basins",
        title="Learning-rate basins",
        summary="Validation loss against learning rate, one panel per depth, with the fitted optimum or its refusal.",
        caption=material.caption(lead, [one for _, one in named]),
        panels=_panels(material, Axis(label=LOSS), _basin_marks),
        series=material.labels,
        table=_basin_table(material),
        shared="xy",
        legend={
            "point": "one seed",
            "cross": "a run that failed",
            "interval": "95 % interval of the optimum",
        },
        refusals=refusals(named),
    )


def divergence_figure(material: Material) -> Figure:
    """Return the fraction of failed runs against learning rate, one panel per depth."""
    rows = [
        ((series.label, arm.depth, row.rate, row.failed, row.evidence, row.total), row.divergence)
        for _, series, arm in material.arms
        for row in arm.rates
    ]
    lead = (
        "Runs that diverged or were not finite, over the runs that say anything about the rate; out of memory, killed, "
        "error and missing are in neither."
    )
    return Figure(
        name="divergence_fraction",
        title="Divergence against learning rate",
        summary="Fraction of failed runs against learning rate with its interval, one panel per depth.",
        caption=material.caption(lead, [one for _, one in rows], unit="runs"),
        panels=_panels(
            material,
            Axis(label="failed runs / runs with evidence", floor=0.0, ceiling=1.0),
            _divergence_marks,
        ),
        series=material.labels,
        table=estimate_table(
            ("series", "depth_blocks", "learning_rate", "failed", "evidence", "planned"), rows
        ),
        shared="xy",
        legend={"interval": "95 % Clopper-Pearson interval"},
        refusals=refusals((f"{label}, L = {depth}", one) for (label, depth, *_), one in rows),
    )


ArmMarks = Callable[[Material, Series, Arm, int], list[Mark]]


def _panels(material: Material, y: Axis, draw: ArmMarks) -> tuple[Panel, ...]:
    """Return one panel per depth, with every series that has an arm there."""
    panels = []
    for depth in material.depths:
        marks = [
            mark
            for color, series, arm in material.arms
            if arm.depth == depth
            for mark in draw(material, series, arm, color)
        ]
        if marks:
            panels.append(Panel(title=f"L = {depth} blocks", x=material.rate_axis, y=y, marks=tuple(marks)))
    return tuple(panels)


def _basin_marks(material: Material, series: Series, arm: Arm, color: int) -> list[Mark]:
    measured = [
        (row.rate, loss, seed) for row in arm.rates for seed, loss in zip(row.seeds, row.losses, strict=True)
    ]
    marks: list[Mark] = [
        Points(
            at=tuple((rate, loss) for rate, loss, _ in measured),
            color=color,
            titles=tuple(
                f"{series.label}, seed {seed}, rate {number(rate)}: {loss:.4f}"
                for rate, loss, seed in measured
            ),
            faint=True,
        )
    ]
    failed = [material.runs[run] for run in arm.run_ids if run in material.runs]
    failed = [run for run in failed if run.outcome in FAILED]
    if failed:
        titles = tuple(
            f"{series.label}, seed {run.seed}, rate {number(run.learning_rate)}: {run.outcome}"
            for run in failed
        )
        marks.append(Crosses(at=tuple(run.learning_rate for run in failed), color=color, titles=titles))
    if isinstance(arm.basin, Refusal):
        return [*marks, Note(sentence=f"refused: {reason(arm.basin)}", color=color)]
    optimum = arm.basin.optimum
    title = f"{series.label}: optimum {number(optimum.value)} [{number(optimum.low)}, {number(optimum.high)}]"
    vertex = Intervals(
        at=((optimum.value, arm.basin.loss.value),),
        ends=((optimum.low, optimum.high),),
        color=color,
        along="x",
        titles=(title,),
    )
    return [*marks, Line(at=_parabola(arm.basin), color=color), vertex]


def _parabola(basin: Basin) -> tuple[tuple[float, float], ...]:
    """Return the fitted curve over the rates it was fitted to."""
    ratio = basin.rates[-1] / basin.rates[0]
    rates = [basin.rates[0] * ratio ** (i / (CURVE_POINTS - 1)) for i in range(CURVE_POINTS)]
    return tuple((rate, _fitted(basin, math.log2(rate / basin.center))) for rate in rates)


def _fitted(basin: Basin, octaves: float) -> float:
    return basin.level + basin.slope * octaves + basin.bend * octaves**2


def _divergence_marks(material: Material, series: Series, arm: Arm, color: int) -> list[Mark]:
    found = [(row, row.divergence) for row in arm.rates if isinstance(row.divergence, Estimate)]
    if not found:
        return []
    at = tuple((_beside(material, row, color), one.value) for row, one in found)
    titles = tuple(
        f"{series.label}, rate {number(row.rate)}: {row.failed} of {row.evidence} failed" for row, _ in found
    )
    ends = tuple((one.low, one.high) for _, one in found)
    return [
        Line(at=at, color=color, faint=True),
        Intervals(at=at, ends=ends, color=color, titles=titles),
    ]


def _beside(material: Material, row: RateRow, color: int) -> float:
    """Return a place on the rate axis, moved a little so that series do not hide each other."""
    return row.rate * 2.0 ** (0.16 * (color - (len(material.labels) - 1) / 2))


def _optimum(arm: Arm) -> Estimate | Refusal:
    return arm.basin if isinstance(arm.basin, Refusal) else arm.basin.optimum


def _basin_table(material: Material) -> Table:
    """Return one row per run with a loss or a failure, then the optimum of its arm."""
    rows = []
    for _, series, arm in material.arms:
        value, low, high, _, interval, refused, refusal = cells(_optimum(arm))
        for run in (material.runs[name] for name in arm.run_ids if name in material.runs):
            own = (series.label, arm.depth, run.learning_rate, run.seed, run.outcome, run.val_loss)
            rows.append((*own, value, low, high, interval, refused, refusal))
    columns = ("series", "depth_blocks", "learning_rate", "seed", "outcome", "val_loss")
    return Table(
        columns=(*columns, "optimum", "optimum_low", "optimum_high", "interval", "refused", "refusal"),
        rows=tuple(rows),
    )
