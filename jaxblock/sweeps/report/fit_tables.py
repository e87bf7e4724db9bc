"""Tables of what was fitted: laws in depth by series, and how sharp, stable and finished each arm is."""

from jaxblock.sweeps.findings.records import Series
from jaxblock.sweeps.report.material import ESTIMATE_COLUMNS, Material, cells, short
from jaxblock.sweeps.report.sheets import (
    Column,
    Sheet,
    law,
    number_or_refusal,
    stable_rate,
    statistic,
    value,
    values,
)
from jaxblock.sweeps.statistics.estimate import Estimate, Refusal

DIAGNOSIS_NOTES = (
    ("Curvature", "second derivative of the loss in log2 rate at the optimum: how much a wrong rate costs."),
    ("Misfit", "largest distance of the fitted parabola from a measured mean; intervals of losses read from it are "
     "longer by it on both sides."),
    ("Sensitivity", "mean loss over the rates common to all depths less the lowest one, a run counted at most "
     "with its first loss: how much the choice of the rate matters."),
    ("Largest stable rate", "highest rate up to which fewer than half of the runs fail."),
    ("Failed / evidence", "runs that diverged or were not finite over those that say anything, all rates."),
    ("Loss, failures capped", "mean loss at the best measured rate with every failed run counted at the cap of "
     "the conventions."),
    ("Stream law", "how the residual stream grows along the blocks; \"ahead by\" is the lead in AICc over the second "
     "best law, and 2 or more is asked for."),
    ("Still falling", "slope of the training loss over the last tenth of the steps: below 0, longer training helps."),
    ("Evaluation s.e.", "standard error of one run's loss because the validation set is finite; all runs read the same "
     "set, so it cancels partly in paired differences; by how much is not measured."),
)  # fmt: skip


def law_sheet(material: Material) -> Sheet:
    """Return one row per fitted number: each law in depth of each series, with its interval or its refusal."""
    rows = tuple(
        (series.label, name, symbol, one)
        for series in material.findings.series
        for name, symbol, one in _laws(series)
    )
    columns = (
        *values(("series", "series"), ("law", "law in depth"), ("parameter", "number")),
        Column(
            files=ESTIMATE_COLUMNS,
            heading="value [95 % interval]",
            show=lambda cell: short(cell, digits=3),
            split=cells,
        ),
        Column(files=(), heading="n", show=lambda cell: cell.n if isinstance(cell, Estimate) else None),
        Column(
            files=(),
            heading="interval, or why refused",
            show=lambda cell: cell.interval if isinstance(cell, Estimate) else cell.sentence,
        ),
    )
    rows = tuple((*row, row[-1], row[-1]) for row in rows)
    return Sheet(heading="Laws in depth", columns=columns, rows=rows)


def _laws(series: Series) -> list[tuple[str, str, Estimate | Refusal]]:
    powers = (
        ("growth of the stream at the start", series.growth_start),
        ("growth of the stream after training", series.growth_end),
        ("gradient norm at the first step", series.gradient_start),
        ("gradient norm at the end", series.gradient_end),
    )
    transfer, decay, name = series.transfer, series.loss_law, "loss = E + A L^-p"
    found: list[tuple[str, str, Estimate | Refusal]] = [
        (
            "optimal learning rate",
            "log2 slope",
            transfer if isinstance(transfer, Refusal) else transfer.slope,
        ),
        *((words, "exponent", one if isinstance(one, Refusal) else one.exponent) for words, one in powers),
    ]
    if isinstance(decay, Refusal):
        found.append((name, "p", decay))
    else:
        found += [(name, "p", decay.exponent), (name, "E", decay.floor), (name, "A", decay.amplitude)]
    for words, line in (("seconds per step per run", series.time), ("bytes per run", series.bytes)):
        found.append((words, "per block", line if isinstance(line, Refusal) else line.slope))
    return found


def diagnosis_sheet(material: Material) -> Sheet:
    """Return one row per series and depth: curvature, sensitivity, stability, growth law, what still falls."""
    columns = (
        *values(("series", "series"), ("depth_blocks", "blocks L")),
        statistic("curvature", "curvature, nats / octave^2", digits=3),
        number_or_refusal("fit_misfit", "misfit, nats"),
        statistic("sensitivity", "sensitivity, nats", digits=3),
        stable_rate(),
        statistic("failed_fraction", "failed / evidence", digits=2),
        statistic("capped_loss", "loss, failures capped"),
        law("law_start", "stream law at the start"),
        law("law_end", "stream law at the end"),
        statistic("still_falling", "still falling, nats / 1,000 steps", digits=3),
        value("evaluation_error", "evaluation s.e., nats"),
    )
    rows = tuple(
        (
            *(series.label, arm.depth),
            arm.basin if isinstance(arm.basin, Refusal) else arm.basin.curvature,
            *(arm.basin if isinstance(arm.basin, Refusal) else arm.basin.misfit, arm.sensitivity),
            *(arm.stable_rate, arm.divergence, arm.capped_loss, arm.law_start, arm.law_end),
            *(arm.still_falling, arm.evaluation_error),
        )
        for _, series, arm in material.arms
    )
    heading = "Arms: sharpness, stability, horizon"
    return Sheet(heading=heading, columns=columns, rows=rows, notes=DIAGNOSIS_NOTES)
