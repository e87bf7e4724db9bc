"""Loss against depth, and the same losses against what they cost."""

from collections.abc import Callable

from jaxblock.sweeps.findings.records import Arm, Series
from jaxblock.sweeps.report.answer import ranking_answer
from jaxblock.sweeps.report.marks import Figure, Gap, Intervals, Line, Mark, Panel, Points, Table
from jaxblock.sweeps.report.material import (
    FLOPS,
    PARAMETERS,
    Material,
    arm_name,
    estimate_table,
    listed,
    refusals,
)
from jaxblock.sweeps.report.scales import Axis, number
from jaxblock.sweeps.statistics.estimate import Estimate, Refusal

LOSS = "validation loss, nats per target"
ASIDE = -0.1
"""How far left of its arm's place what was measured stands."""
FIXED = (
    "Pale and dotted: the mean measured at one rate kept at all depths, the grid's best of the shallowest tuned arm; "
    "where it is also the best of another depth, it goes through the middle of the seeds there"
)


def tuned_loss(arm: Arm) -> Estimate | Refusal:
    """Return the loss at the fitted optimum, or why there is none: then the arm has no place in a comparison."""
    return arm.basin if isinstance(arm.basin, Refusal) else arm.basin.loss


def loss_figure(material: Material) -> Figure:
    """Return loss against depth by series, at each arm's best rate, with every seed."""
    marks: list[Mark] = []
    for color, series in enumerate(material.findings.series):
        marks += [*_fixed_rate(material, series, color), *_tuned(material, series, color)]
    named = [(arm_name(series, arm), tuned_loss(arm)) for _, series, arm in material.arms]
    fixed = [(series.label, rate) for series in material.findings.series if (rate := fixed_rate(series))]
    words = listed([f"{label} at {number(rate)}" for label, rate in fixed])
    lead = (
        "Large signs: mean validation loss at the fitted learning-rate optimum of each depth and series, with its "
        "interval. Small signs, left of them: the loss measured for each seed at the best rate of the grid. The fit "
        "reads between the measured rates, so it may lie below every seed; an arm without an optimum has seeds only."
    )
    panel = Panel(
        title="Loss at each arm's own optimum", x=material.depth_axis, y=Axis(label=LOSS), marks=tuple(marks)
    )
    return Figure(
        name="loss_against_depth",
        title="Loss against depth",
        answer=ranking_answer(material.findings),
        summary=f"Validation loss against depth in blocks for {len(material.labels)} series.",
        caption=material.caption(
            lead + (f" {FIXED} ({words})." if words else ""),
            [one for _, one in named],
        ),
        panels=(panel,) if material.arms and marks else (),
        series=material.labels,
        table=_loss_table(material),
        legend={
            "interval": "95 % interval of the fitted mean",
            "point": "one seed, measured at the best rate",
        }
        | ({"dotted pale": "mean measured at one fixed rate"} if fixed else {})
        | ({"refused": "no optimum: refused"} if any(isinstance(mark, Gap) for mark in marks) else {}),
        refusals=refusals(named),
    )


def fixed_rate(series: Series) -> float | None:
    """Return the rate drawn at all depths: the best one of the shallowest tuned arm, or None without one."""
    for arm in series.arms:
        if not isinstance(arm.basin, Refusal) and arm.best_rate is not None:
            return arm.best_rate
    return None


def _seeds(arm: Arm, x: float, color: int) -> Points:
    """Return the measured loss of every seed at the best rate of the grid."""
    losses = arm.best_losses
    titles = tuple(f"seed {seed} at the best measured rate: {loss:.4f}" for seed, loss in losses.items())
    return Points(at=tuple((x, loss) for loss in losses.values()), color=color, titles=titles, faint=True)


def _tuned(material: Material, series: Series, color: int) -> list[Mark]:
    """Return the means, joined, their seeds, and a gap where the rate is not tuned."""
    marks: list[Mark] = []
    run: list[tuple[float, float]] = []
    for arm in series.arms:
        x, loss = material.beside(arm.depth, color), tuned_loss(arm)
        marks.append(_seeds(arm, material.beside(arm.depth, color, ASIDE), color))
        if isinstance(loss, Refusal):
            marks.append(material.gap(arm.depth, color, loss))
            marks.append(Line(at=tuple(run), color=color))
            run = []
            continue
        run.append((x, loss.value))
        title = f"{arm_name(series, arm)}: {loss.value:.4f} [{loss.low:.4f}, {loss.high:.4f}], n = {loss.n}"
        marks.append(
            Intervals(at=((x, loss.value),), ends=((loss.low, loss.high),), color=color, titles=(title,))
        )
    return [Line(at=tuple(run), color=color), *marks]


def _fixed_rate(material: Material, series: Series, color: int) -> list[Mark]:
    """Return the losses at one rate over all depths where at most a few runs failed."""
    rate, places = fixed_rate(series), []
    for arm in series.arms:
        for row in arm.rates:
            if row.rate == rate and not row.wall and isinstance(row.mean, Estimate):
                places.append((material.beside(arm.depth, color, ASIDE), row.mean.value))
    return [Line(at=tuple(places), color=color, style="dotted", faint=True)] if len(places) > 1 else []


def _loss_table(material: Material) -> Table:
    rows = [
        ((series.label, arm.depth, arm.sublayers, arm.best_rate), tuned_loss(arm))
        for _, series, arm in material.arms
    ]
    return estimate_table(("series", "depth_blocks", "sublayers", "best_measured_rate"), rows)


def price_figure(material: Material) -> Figure:
    """Return the same losses against parameters, FLOPs and seconds: does the order change with the budget?"""
    panels = []
    for title, label, price in _prices(material):
        marks: list[Mark] = []
        for color, series in enumerate(material.findings.series):
            tuned = [(arm, loss) for arm in series.arms if isinstance(loss := tuned_loss(arm), Estimate)]
            priced = [(cost, loss, arm) for arm, loss in tuned if (cost := price(arm)) is not None]
            if not priced:
                continue
            at = tuple((cost, loss.value) for cost, loss, _ in priced)
            titles = tuple(f"{arm_name(series, arm)}: {loss.value:.4f}" for _, loss, arm in priced)
            ends = tuple((loss.low, loss.high) for _, loss, _ in priced)
            marks += [Line(at=at, color=color, faint=True)]
            marks += [Intervals(at=at, ends=ends, color=color, titles=titles)]
        if marks:
            panels.append(
                Panel(title=title, x=Axis(label=label, scale="log10"), y=Axis(label=LOSS), marks=tuple(marks))
            )
    named = [(arm_name(series, arm), tuned_loss(arm)) for _, series, arm in material.arms]
    lead = "The losses of the figure above at equal parameters, training FLOPs and seconds of a run's share."
    return Figure(
        name="loss_against_cost",
        title="The same losses against what they cost",
        summary="Validation loss against parameters, training FLOPs and seconds; one point per depth and series.",
        caption=material.caption(lead, [one for _, one in named]),
        panels=tuple(panels),
        series=material.labels,
        table=estimate_table(
            (
                "series",
                "depth_blocks",
                "non_embedding_parameters",
                "training_flops_causal",
                "seconds_per_run",
            ),
            [
                (
                    (series.label, arm.depth, *(price(arm) for _, _, price in _prices(material))),
                    tuned_loss(arm),
                )
                for _, series, arm in material.arms
            ],
        ),
        shared="y",
        refusals=refusals(named),
    )


def _prices(material: Material) -> list[tuple[str, str, Callable[[Arm], float | None]]]:
    """Return (title, label, cost of an arm) of every budget."""
    steps = max((run.planned_steps for run in material.sweep.results), default=0)
    tokens = steps * material.sweep.tokens_per_step

    def parameters(arm: Arm) -> float | None:
        return float(arm.parameters[PARAMETERS]) if PARAMETERS in arm.parameters else None

    def flops(arm: Arm) -> float | None:
        return arm.flops_per_token[FLOPS] * tokens if FLOPS in arm.flops_per_token else None

    def seconds(arm: Arm) -> float | None:
        return None if arm.step_s is None else arm.step_s * steps

    return [
        ("At equal parameters", "non-embedding parameters (log10 axis)", parameters),
        ("At equal FLOPs", f"training FLOPs, convention {FLOPS} (log10 axis)", flops),
        ("At equal seconds", "seconds of a run's share, no compiling (log10 axis)", seconds),
    ]
