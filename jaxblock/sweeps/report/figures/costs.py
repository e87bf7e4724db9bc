"""Time and memory against depth."""

from jaxblock.sweeps.report.marks import Figure, Line, Mark, Panel, Points, Table
from jaxblock.sweeps.report.material import Material, arm_name, refusals
from jaxblock.sweeps.report.scales import Axis, number
from jaxblock.sweeps.statistics.estimate import Refusal

MIB = 2.0**20
COLUMNS = (
    "series",
    "depth_blocks",
    "step_s_per_run",
    "bytes_per_run",
    "lanes_least",
    "lanes_most",
    "compile_s",
)


def cost_figure(material: Material) -> Figure:
    """Return seconds per step and bytes against depth, per run: the program's divided by its lanes."""
    seconds, memory = [], []
    for color, series in enumerate(material.findings.series):
        timed = [(arm, arm.step_s) for arm in series.arms if arm.step_s is not None]
        sized = [(arm, arm.run_bytes / MIB) for arm in series.arms if arm.run_bytes is not None]
        for marks, values, unit in ((seconds, timed, "s"), (memory, sized, "MiB")):
            at = tuple((float(arm.depth), value) for arm, value in values)
            titles = tuple(
                f"{arm_name(series, arm)}: {number(value)} {unit}, lanes {_lanes(arm.lanes)}"
                for arm, value in values
            )
            if at:
                marks += [Line(at=at, color=color, faint=True), Points(at=at, color=color, titles=titles)]
    lines = [(f"{series.label}, seconds against depth", series.time) for series in material.findings.series]
    lines += [(f"{series.label}, bytes against depth", series.bytes) for series in material.findings.series]
    return Figure(
        name="time_and_memory",
        title="Time and memory against depth",
        summary="Seconds per step and bytes per run against depth in blocks, by series.",
        caption=_caption(material),
        panels=_panels(material, seconds, memory),
        series=material.labels,
        table=Table(
            columns=COLUMNS,
            rows=tuple(
                (
                    *(series.label, arm.depth, arm.step_s, arm.run_bytes),
                    *(min(arm.lanes, default=None), max(arm.lanes, default=None), arm.compile_s),
                )
                for _, series, arm in material.arms
            ),
        ),
        refusals=refusals((name, line) for name, line in lines if isinstance(line, Refusal)),
    )


def _panels(material: Material, seconds: list[Mark], memory: list[Mark]) -> tuple[Panel, ...]:
    found = (
        ("Time", Axis(label="seconds per step per run (program / lanes)", floor=0.0), seconds),
        ("Memory", Axis(label="MiB per run: compiled bytes of the program / lanes", floor=0.0), memory),
    )
    return tuple(
        Panel(title=title, x=material.depth_axis, y=y, marks=tuple(marks))
        for title, y, marks in found
        if marks
    )


def _caption(material: Material) -> str:
    lanes = sorted({count for _, _, arm in material.arms for count in arm.lanes})
    words = [
        "Left: seconds of one optimizer step, of the whole program divided by its lanes, median over its chunks, "
        "compiling not counted. Right: arguments, results and temporaries of the compiled program by its lanes.",
        f"Lanes per program: {_lanes(tuple(lanes))}. n = 1 measurement per program, so there is no interval.",
        f"Of {len(material.sweep.results):,} runs, {material.left_out}.",
    ]
    return " ".join(words)


def _lanes(lanes: tuple[int, ...]) -> str:
    return ", ".join(map(str, lanes)) or "none measured"
