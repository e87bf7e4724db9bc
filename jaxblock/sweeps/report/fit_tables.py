"""Tables of what was fitted: laws in depth by series, and how sharp, stable and finished each arm is."""

from jaxblock.sweeps.report.marks import Table
from jaxblock.sweeps.report.material import Material, cells, reason, short
from jaxblock.sweeps.report.scales import number
from jaxblock.sweeps.statistics.estimate import Estimate, Refusal
from jaxblock.sweeps.statistics.fits import Law
from jaxblock.sweeps.statistics.transfer import StableRate


def law_table(material: Material) -> Table:
    """Return one row per fitted number: each law in depth of each series, with its interval or its refusal."""
    rows = []
    for series in material.findings.series:
        powers = (
            ("growth of the stream at the start", series.growth_start),
            ("growth of the stream after training", series.growth_end),
            ("gradient norm at the first step", series.gradient_start),
            ("gradient norm at the end", series.gradient_end),
        )
        decay, transfer = series.loss_law, series.transfer
        found: list[tuple[str, str, Estimate | Refusal]] = [
            (
                "optimal learning rate",
                "log2 slope",
                transfer if isinstance(transfer, Refusal) else transfer.slope,
            ),
            *((name, "exponent", one if isinstance(one, Refusal) else one.exponent) for name, one in powers),
        ]
        if isinstance(decay, Refusal):
            found.append(("loss = E + A L^-p", "p", decay))
        else:
            law = "loss = E + A L^-p"
            found += [(law, "p", decay.exponent), (law, "E", decay.floor), (law, "A", decay.amplitude)]
        for name, line in (("seconds per step per run", series.time), ("bytes per run", series.bytes)):
            found.append((name, "per block", line if isinstance(line, Refusal) else line.slope))
        rows += [(series.label, name, symbol, *cells(one)) for name, symbol, one in found]
    columns = ("series", "law in depth", "number", "value", "low", "high", "n", "interval", "refused")
    return Table(columns=columns, rows=tuple(rows))


def diagnosis_table(material: Material) -> Table:
    """Return one row per series and depth: curvature, sensitivity, stability, growth law, what still falls."""
    columns = (
        *("series", "blocks L", "curvature, nats / octave^2", "sensitivity, nats", "largest stable rate"),
        *("failed / evidence", "loss, failures capped", "stream law at the start", "stream law at the end"),
        *("still falling, nats / 1,000 steps", "evaluation s.e."),
    )
    rows = tuple(
        (
            *(series.label, arm.depth),
            short(arm.basin if isinstance(arm.basin, Refusal) else arm.basin.curvature, digits=3),
            *(short(arm.sensitivity, digits=3), _stable(arm.stable_rate), short(arm.divergence, digits=2)),
            *(short(arm.capped_loss), _law(arm.law_start), _law(arm.law_end)),
            *(short(arm.still_falling, digits=3), arm.evaluation_error),
        )
        for _, series, arm in material.arms
    )
    return Table(columns=columns, rows=rows)


def _stable(found: StableRate | Refusal) -> str:
    if isinstance(found, Refusal):
        return f"refused: {reason(found)}"
    return f"{number(found.rate)}; half fail at {number(found.first_unstable)}"


def _law(found: Law | Refusal) -> str:
    if isinstance(found, Refusal):
        return f"refused: {reason(found)}"
    return f"{found.name}, ahead by {found.ahead:.1f} AICc"
