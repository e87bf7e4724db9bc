"""The learning-rate optimum against depth, and what keeping one rate at every depth costs."""

from jaxblock.sweeps.report.answer import moved
from jaxblock.sweeps.report.marks import FAINT, Bars, Figure, Gap, Intervals, Line, Mark, Panel
from jaxblock.sweeps.report.material import Material, arm_name, estimate_table, listed, refusals, short
from jaxblock.sweeps.report.scales import Axis
from jaxblock.sweeps.statistics.estimate import Estimate, Refusal

SLOPES = ((0.0, "slope 0"), (-0.5, "-1/2"), (-1.0, "-1"))
"""Reference laws lr* ~ depth^slope."""


def rate_figure(material: Material) -> Figure:
    """Return optimum against depth with reference slopes, and regret bars."""
    optima = Panel(
        title="Optimum of the learning rate",
        x=material.depth_axis,
        y=Axis(label="optimal peak learning rate (log2 axis)", scale="log2", ticks=material.rates),
        marks=(*_reference_slopes(material), *_optima(material)),
    )
    regret = Panel(
        title="Regret of one rate for all depths",
        x=material.depth_axis,
        y=Axis(label="loss above the depth's own optimum, nats", floor=0.0),
        marks=tuple(_regrets(material)),
    )
    slopes = [(series.label, series.transfer) for series in material.findings.series]
    words = [
        f"{label} {'refused' if isinstance(one, Refusal) else short(one.slope, digits=3) + f' ({one.slope.interval})'}"
        for label, one in slopes
    ]
    named = [
        (arm_name(series, arm), arm.basin if isinstance(arm.basin, Refusal) else arm.basin.optimum)
        for _, series, arm in material.arms
    ]
    costs = [
        (f"{series.label}, L = {one.depth}, regret", one.regret)
        for series in material.findings.series
        for one in series.regrets
    ]
    base = [
        f"{series.label} L = {series.regret_depth}"
        for series in material.findings.series
        if series.regret_depth
    ]
    lead = (
        f"Left: fitted optimum with its interval. Slope of log2 rate against log2 depth: "
        f"{listed(words) or 'no series'}. "
        "Dotted: reference slopes. Right: loss lost by keeping the optimum of the base depth "
        f"({listed(base) or 'no arm has one'}), paired by seed."
    )
    return Figure(
        name="optimum_against_depth",
        title="Does the learning rate transfer over depth?",
        answer=moved(material.findings),
        summary="Learning-rate optimum against depth with reference slopes, and the regret of keeping one rate.",
        caption=material.caption(lead, [one for _, one in [*named, *costs]]),
        panels=tuple(panel for panel in (optima, regret) if panel.marks),
        series=material.labels,
        table=estimate_table(
            ("series", "depth_blocks", "quantity"),
            [
                *(
                    ((series.label, arm.depth, "optimal_learning_rate"), one)
                    for (_, series, arm), (_, one) in zip(material.arms, named, strict=True)
                ),
                *(
                    ((series.label, one.depth, "regret_nats"), one.regret)
                    for series in material.findings.series
                    for one in series.regrets
                ),
            ],
        ),
        shared="x",
        legend={"interval": "95 % interval", "dotted": "reference slope"}
        | (
            {"refused": "refused"}
            if any(isinstance(mark, Gap) for mark in [*optima.marks, *regret.marks])
            else {}
        ),
        refusals=refusals(
            [*named, *costs, *((f"{label}, slope", one) for label, one in slopes if isinstance(one, Refusal))]
        ),
    )


def _optima(material: Material) -> list[Mark]:
    marks: list[Mark] = []
    for color, series, arm in material.arms:
        x = material.beside(arm.depth, color)
        if isinstance(arm.basin, Refusal):
            marks.append(material.gap(arm.depth, color, arm.basin))
            continue
        one = arm.basin.optimum
        title = f"{arm_name(series, arm)}: {short(one)}, {one.interval}, n = {one.n}"
        marks.append(
            Intervals(at=((x, one.value),), ends=((one.low, one.high),), color=color, titles=(title,))
        )
    for color, series in enumerate(material.findings.series):
        if not isinstance(series.transfer, Refusal):
            law = series.transfer
            ends = (law.depths[0], law.depths[-1])
            at = tuple((float(depth), 2**law.intercept * depth**law.slope.value) for depth in ends)
            marks.append(Line(at=at, color=color, faint=True))
    return marks


def _reference_slopes(material: Material) -> list[Mark]:
    """Return the laws through the first optimum, as far as the depths go."""
    found = [
        (arm.depth, arm.basin.optimum.value)
        for _, _, arm in material.arms
        if not isinstance(arm.basin, Refusal)
    ]
    if not found or len(material.depths) < 2:
        return []
    depth, rate = min(found)
    last = material.depths[-1]
    return [
        Line(
            at=((float(depth), rate), (float(last), rate * (last / depth) ** slope)),
            color=FAINT,
            style="dotted",
            label=label,
        )
        for slope, label in SLOPES
    ]


def _regrets(material: Material) -> list[Mark]:
    marks: list[Mark] = []
    for color, series in enumerate(material.findings.series):
        for one in series.regrets:
            x = material.beside(one.depth, color)
            if isinstance(one.regret, Refusal):
                marks.append(material.gap(one.depth, color, one.regret))
            elif isinstance(one.regret, Estimate):
                title = f"{series.label}, L = {one.depth}: {short(one.regret)} nats, n = {one.regret.n}"
                at, ends = ((x, one.regret.value),), ((one.regret.low, one.regret.high),)
                marks.append(Bars(at=at, color=color, width=0.025, titles=(title,)))
                marks.append(Intervals(at=at, ends=ends, color=color, titles=(title,)))
    return marks
