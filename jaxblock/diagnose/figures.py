"""Two figures of a diagnosis: rows learnt at several rates, and what the stream does along depth."""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxblock.diagnose.table import Measured

FIGURES = ("learning.png", "depth.png")
COLORS = ("#9ecae1", "#08519c", "#fd8d3c", "#cb181d")
INK = "#333333"
PANELS = (
    (("stream_rms", "read_rms"), "size of the stream, root mean square"),
    (("relative_update", "output_rms"), "relative update |u| / |x|"),
    (("token_similarity", "branch_gain"), "mean cosine of two tokens of a row"),
)
"""What is drawn along depth, or in its place where the stream is not one array."""
INSTEAD = {
    "read_rms": "what the branches read, root mean square",
    "output_rms": "what the branches write, root mean square",
    "branch_gain": "gain of the branches, written / read",
}


def draw_figures(measured: Measured, folder: Path) -> list[Path]:
    """Draw both figures into a folder, which is made where there is none; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / name for name in FIGURES]
    for path, draw in zip(paths, (_learning, _depth), strict=True):
        figure = draw(measured)
        figure.savefig(path, dpi=130)
    return paths


def _learning(measured: Measured) -> Figure:
    """Draw the loss of the same rows, a line per multiple of the learning rate."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    panel, curves = figure.subplots(), measured.curves
    for color, (factor, losses) in zip(COLORS, curves.lanes.items(), strict=True):
        finite = np.where(np.isfinite(losses), losses, np.nan)
        rate = factor * curves.learning_rate
        panel.plot(
            np.arange(1, len(losses) + 1), finite, color=color, label=f"{factor:g} x the rate ({rate:.2g})"
        )
    panel.plot(
        np.arange(1, len(curves.blind) + 1), curves.blind, color=INK, ls=":", label="control: blind rows"
    )
    panel.axhline(curves.known, color=INK, lw=0.8, ls="--")
    panel.text(1, curves.known, " known by heart", va="bottom", fontsize=8, color=INK)
    panel.set(yscale="log", xlabel="step", ylabel="loss of the same rows, nats", title="Rows learnt by heart")
    panel.legend(frameon=False, fontsize=8)
    _plain(panel)
    return figure


def _depth(measured: Measured) -> Figure:
    """Draw the profile along depth, a marker per kind of sublayer, and the stream's gradient."""
    depth = measured.depth
    figure = Figure(figsize=(10, 7), layout="constrained")
    panels = list(figure.subplots(2, 2).flat)
    count = len(depth.branches)
    for panel, (names, title) in zip(panels, PANELS, strict=False):
        name = next(name for name in names if name in depth.profile)
        values = depth.profile[name]
        panel.plot(np.arange(1, len(values) + 1), values, color="#bbbbbb", lw=1, zorder=1)
        for place, branch in enumerate(depth.branches):
            at = np.arange(place, len(values), count)
            panel.scatter(
                at + 1, values[at], color=COLORS[1 + 2 * place], s=18, label=branch.replace("_", " ")
            )
        panel.set_title(INSTEAD.get(name, title), fontsize=10)
        panel.legend(frameon=False, fontsize=8)
    panel = panels[-1]
    inner = depth.stream_gradient[:-1]
    if inner.any():
        panel.plot(
            np.arange(len(depth.stream_gradient)), depth.stream_gradient, color=COLORS[1], marker="o", ms=3
        )
        panel.set_yscale("log")
    else:
        panel.text(0.5, 0.5, "the stream is not one array", ha="center", transform=panel.transAxes, color=INK)
    panel.set_title("norm of the stream's gradient", fontsize=10)
    for panel in panels:
        panel.set_xlabel("sublayer")
        _plain(panel)
    return figure


def _plain(panel: Axes) -> None:
    panel.spines[["top", "right"]].set_visible(False)
