"""The figures of the report, in its order; every one is always there, with a sentence where nothing can be drawn."""

from jaxblock.sweeps.report.figures.basins import basin_figure, divergence_figure
from jaxblock.sweeps.report.figures.costs import cost_figure
from jaxblock.sweeps.report.figures.curves import curve_figure
from jaxblock.sweeps.report.figures.losses import loss_figure, price_figure
from jaxblock.sweeps.report.figures.probes import probe_figure
from jaxblock.sweeps.report.figures.rates import rate_figure
from jaxblock.sweeps.report.figures.streams import gradient_figure, stream_figure
from jaxblock.sweeps.report.marks import Figure
from jaxblock.sweeps.report.material import Material


def all_figures(material: Material) -> tuple[Figure, ...]:
    """Return every figure."""
    return (
        loss_figure(material),
        price_figure(material),
        basin_figure(material),
        rate_figure(material),
        divergence_figure(material),
        stream_figure(material),
        probe_figure(material),
        gradient_figure(material),
        cost_figure(material),
        curve_figure(material),
    )
