"""The residual stream and the gradient norm against depth, before and after training."""

from collections.abc import Callable
from typing import Any

from jaxblock.sweeps.findings.records import Arm, Series
from jaxblock.sweeps.report.marks import Figure, Intervals, Line, Mark, Panel, Points
from jaxblock.sweeps.report.material import Material, arm_name, estimate_table, listed, refusals, short
from jaxblock.sweeps.report.scales import Axis
from jaxblock.sweeps.statistics.estimate import Estimate, Refusal
from jaxblock.sweeps.statistics.fits import Power

Statistic = Callable[[Arm], Estimate | Refusal]
LEGEND = {"hollow": "at the start, dashed line", "point": "after training, solid line"}


def stream_figure(material: Material) -> Figure:
    """Return the growth of the stream against depth, and its size along the blocks."""
    moments: tuple[tuple[str, Statistic], ...] = (
        ("start", lambda arm: arm.growth_start),
        ("end", lambda arm: arm.growth_end),
    )
    growth = Panel(
        title="Growth over the whole stack",
        x=material.depth_axis,
        y=Axis(label="stream rms, last block / input (log10 axis)", scale="log10"),
        marks=tuple(_against_depth(material, moments)),
    )
    profiles = [_profile(material, color, series) for color, series in enumerate(material.findings.series)]
    powers = [(series.label, series.growth_start, series.growth_end) for series in material.findings.series]
    named = _named(material, moments)
    lead = (
        "First panel: root mean square of the residual stream after the last block over that before the first one. "
        "Other panels: the stream along the blocks, of the best seed at each arm's best rate (n = 1 seed per line). "
        "A line ends at the depth of its arm. "
        f"Exponent of the growth in depth: {_exponents(powers)}."
    )
    return Figure(
        name="stream_growth",
        title="Growth of the residual stream",
        summary="Size of the residual stream against depth, and along the blocks, at the start and after training.",
        caption=material.caption(lead, [one for _, one in named]),
        panels=tuple(panel for panel in (growth, *profiles) if panel.marks),
        series=material.labels,
        table=_table(material, moments),
        legend=LEGEND | {"interval": "95 % interval over seeds"},
        refusals=refusals([*named, *_refused_powers(powers, "exponent of the growth")]),
    )


def gradient_figure(material: Material) -> Figure:
    """Return the global gradient norm against depth, at the first step and over the last tenth."""
    moments: tuple[tuple[str, Statistic], ...] = (
        ("start", lambda arm: arm.gradient_start),
        ("end", lambda arm: arm.gradient_end),
    )
    panel = Panel(
        title="Global gradient norm",
        x=material.depth_axis,
        y=Axis(label="global gradient norm, before clipping (log10 axis)", scale="log10"),
        marks=tuple(_against_depth(material, moments)),
    )
    powers = [
        (series.label, series.gradient_start, series.gradient_end) for series in material.findings.series
    ]
    named = _named(material, moments)
    lead = (
        "Global norm of the gradient before clipping: at the first step, and its median over the last tenth of the "
        f"steps at each arm's best rate. Exponent in depth: {_exponents(powers)}."
    )
    return Figure(
        name="gradient_norm",
        title="Gradient norm against depth",
        summary="Global gradient norm against depth in blocks, at the first step and at the end of training.",
        caption=material.caption(lead, [one for _, one in named]),
        panels=(panel,) if panel.marks else (),
        series=material.labels,
        table=_table(material, moments),
        legend=LEGEND | {"interval": "95 % interval over seeds"},
        refusals=refusals([*named, *_refused_powers(powers, "exponent of the gradient norm")]),
    )


def _against_depth(material: Material, moments: tuple[tuple[str, Statistic], ...]) -> list[Mark]:
    marks: list[Mark] = []
    for color, series in enumerate(material.findings.series):
        for moment, statistic in moments:
            found = [(arm, one) for arm in series.arms if isinstance(one := statistic(arm), Estimate)]
            if not found:
                continue
            at = tuple((material.beside(arm.depth, color), one.value) for arm, one in found)
            titles = tuple(
                f"{arm_name(series, arm)}, {moment}: {short(one)}, n = {one.n}" for arm, one in found
            )
            ends = tuple((one.low, one.high) for _, one in found)
            marks.append(Line(at=at, color=color, style="dashed" if moment == "start" else "solid"))
            marks.append(Intervals(at=at, ends=ends, color=color, titles=titles, hollow=moment == "start"))
    return marks


def _profile(material: Material, color: int, series: Series) -> Panel:
    """Return the stream along the blocks of every depth of a series."""
    marks: list[Mark] = []
    for arm in series.arms:
        if arm.best_run not in material.runs:
            continue
        run = material.runs[arm.best_run]
        for profile, style in ((run.start, "dashed"), (run.end, "solid")):
            if profile is None or not profile.stream:
                continue
            at = tuple((float(block), rms) for block, rms in enumerate(profile.stream))
            label = f"L={arm.depth}" if style == "solid" else ""
            marks.append(Line(at=at, color=color, style=style, label=label))
            titles = tuple(
                f"L = {arm.depth}, after block {block}: rms {rms:.4g}" for block, (_, rms) in enumerate(at)
            )
            marks.append(Points(at=at, color=color, titles=titles, hollow=style == "dashed", faint=True))
    return Panel(
        title=f"Along the blocks: {series.label}",
        x=Axis(label="after block (0 = before the first)", floor=0.0),
        y=Axis(label="rms of the residual stream (log10 axis)", scale="log10"),
        marks=tuple(marks),
    )


def _named(
    material: Material, moments: tuple[tuple[str, Statistic], ...]
) -> list[tuple[str, Estimate | Refusal]]:
    return [
        (f"{arm_name(series, arm)}, {moment}", statistic(arm))
        for _, series, arm in material.arms
        for moment, statistic in moments
    ]


def _table(material: Material, moments: tuple[tuple[str, Statistic], ...]) -> Any:
    return estimate_table(
        ("series", "depth_blocks", "moment"),
        [
            ((series.label, arm.depth, moment), statistic(arm))
            for _, series, arm in material.arms
            for moment, statistic in moments
        ],
    )


def _exponents(powers: list[tuple[str, Power | Refusal, Power | Refusal]]) -> str:
    words = [
        f"{label} {_exponent(start)} at the start, {_exponent(end)} after training"
        for label, start, end in powers
    ]
    return listed(words) or "no series"


def _exponent(power: Power | Refusal) -> str:
    return "refused" if isinstance(power, Refusal) else short(power.exponent, digits=3)


def _refused_powers(
    powers: list[tuple[str, Power | Refusal, Power | Refusal]], what: str
) -> list[tuple[str, Refusal]]:
    found = [(f"{label}, {what} at the start", start) for label, start, _ in powers]
    found += [(f"{label}, {what} after training", end) for label, _, end in powers]
    return [(name, one) for name, one in found if isinstance(one, Refusal)]
