"""Training curves of the best and the worst seed of every arm at its best rate."""

from jaxblock.sweeps.report.marks import Figure, Line, Mark, Panel, Table
from jaxblock.sweeps.report.material import Material, arm_name
from jaxblock.sweeps.report.scales import Axis
from jaxblock.sweeps.results import Result

CUT = 0.1
"""First part of the steps that is not drawn: beside its fall nothing else could be seen."""


def curve_figure(material: Material) -> Figure:
    """Return one panel per depth: solid the best seed, dashed the worst."""
    panels, rows = [], []
    for depth in material.depths:
        marks: list[Mark] = []
        for color, series, arm in material.arms:
            if arm.depth != depth:
                continue
            for which, run in _pair(material, arm.best_run, arm.worst_run):
                at = tuple((float(step), loss) for step, loss in run.losses)
                late = tuple(place for place in at if place[0] >= CUT * run.planned_steps)
                marks.append(Line(at=late, color=color, style="solid" if which == "best" else "dashed"))
                rows += [(series.label, depth, which, run.seed, run.learning_rate, *place) for place in at]
        if any(isinstance(mark, Line) and mark.at for mark in marks):
            x, y = (
                Axis(label="optimizer step", floor=0.0),
                Axis(label="training loss of the batch, nats per target"),
            )
            panels.append(Panel(title=f"L = {depth}", x=x, y=y, marks=tuple(marks)))
    return Figure(
        name="training_curves",
        title="Training curves of the best and the worst seed",
        summary="Training loss against step for the best and the worst seed of each arm, one panel per depth.",
        caption=_caption(material),
        facts=material.facts,
        panels=tuple(panels),
        series=material.labels,
        table=Table(
            columns=("series", "depth_blocks", "which", "seed", "learning_rate", "step", "loss"),
            rows=tuple(rows),
        ),
        shared="xy",
        legend={"solid": "best seed", "dashed": "worst seed"},
        refusals=tuple(
            f"{arm_name(series, arm)}: no run to draw" for _, series, arm in material.arms if not arm.best_run
        ),
    )


def _caption(material: Material) -> str:
    lead = (
        "Loss of single training batches, thinned to at most 200 points, at the best measured rate of each arm: the "
        "seeds with the lowest and the highest validation loss. n = 1 seed per line, so there is no interval. "
        f"The first {CUT:.0%} of the steps are in the table and not drawn."
    )
    return f"{lead} Of {len(material.sweep.results):,} runs, {material.left_out}."


def _pair(material: Material, best: str, worst: str) -> list[tuple[str, Result]]:
    """Return the runs to draw; one alone is the best."""
    found = [("best", material.runs[best])] if best in material.runs else []
    if worst in material.runs and worst != best:
        found.append(("worst", material.runs[worst]))
    return found
