"""Training curves of the best and the worst seed of every arm at its best rate."""

from collections.abc import Sequence

from jaxblock.sweeps.report.marks import Figure, Line, Mark, Panel, Table
from jaxblock.sweeps.report.material import Material, arm_name
from jaxblock.sweeps.report.scales import Axis
from jaxblock.sweeps.results import Result

CUT = 0.1
"""First part of the steps that is not drawn: beside its fall nothing else could be seen."""
SHARE = 0.1
"""Share of a curve's recorded steps that a running mean is over."""


def curve_figure(material: Material) -> Figure:
    """Return one panel per depth: solid the best seed, dashed the worst."""
    panels, rows = [], []
    for depth in material.depths:
        marks: list[Mark] = []
        for color, series, arm in material.arms:
            if arm.depth != depth:
                continue
            for which, run in _pair(material, arm.best_run, arm.worst_run):
                smooth, first = running_mean(run.losses), CUT * run.planned_steps
                raw = tuple((float(step), loss) for step, loss in run.losses if step >= first)
                late = tuple((float(step), mean) for step, _, mean in smooth if step >= first)
                if which == "best":
                    marks.insert(0, Line(at=raw, color=color, thin=True))
                marks.append(Line(at=late, color=color, style="solid" if which == "best" else "dashed"))
                rows += [
                    (series.label, depth, which, run.seed, run.learning_rate, *place) for place in smooth
                ]
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
        panels=tuple(panels),
        series=material.labels,
        table=Table(
            columns=(
                "series",
                "depth_blocks",
                "which",
                "seed",
                "learning_rate",
                "step",
                "loss",
                "running_mean",
            ),
            rows=tuple(rows),
        ),
        shared="xy",
        legend={
            "solid": "best seed, running mean",
            "dashed": "worst seed, running mean",
            "thin": "best seed, single batches",
        },
        refusals=tuple(
            f"{arm_name(series, arm)}: no run to draw" for _, series, arm in material.arms if not arm.best_run
        ),
    )


def _caption(material: Material) -> str:
    windows = sorted({window_of(len(run.losses)) for run in material.sweep.results if run.losses})
    span = f"{windows[0]} to {windows[-1]}" if windows and windows[0] < windows[-1] else str([*windows, 0][0])
    lead = (
        "Training loss at the best measured rate of each arm, of the seeds with the lowest and the highest validation "
        f"loss. Strong lines: centred running mean over {span} recorded steps (at most 200 are recorded, as few as "
        "half of them at the ends). Faint: the single batches of the best seed. n = 1 seed per line, so there is no "
        f"interval. The first {CUT:.0%} of the steps are in the table and not drawn."
    )
    return f"{lead} Of {len(material.sweep.results):,} runs, {material.left_out}."


def window_of(count: int) -> int:
    """Return over how many of a curve's recorded steps its running mean is: odd, at least 3."""
    return max(3, 2 * round(SHARE * count / 2) + 1)


def running_mean(losses: Sequence[tuple[int, float]]) -> list[tuple[int, float, float]]:
    """Return (step, loss, mean of the losses around it); at an end the window is cut, but keeps half its losses."""
    half, found = window_of(len(losses)) // 2, []
    for i, (step, loss) in enumerate(losses):
        near = [value for _, value in losses[max(0, i - half) : i + half + 1]]
        found.append((step, loss, sum(near) / len(near)))
    return found


def _pair(material: Material, best: str, worst: str) -> list[tuple[str, Result]]:
    """Return the runs to draw; one alone is the best."""
    found = [("best", material.runs[best])] if best in material.runs else []
    if worst in material.runs and worst != best:
        found.append(("worst", material.runs[worst]))
    return found
