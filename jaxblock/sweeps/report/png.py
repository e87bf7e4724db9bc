"""Figures as PNG files, from the same records as the page's drawings: dark on white, for slides and mail."""

import io
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D

from jaxblock.sweeps.report.layout import (
    line_labels,
    note_lines,
    notes_of,
    panel_limits,
    pieces,
    series_drawn,
    unit_place,
)
from jaxblock.sweeps.report.marks import (
    ALARM,
    FAINT,
    INK,
    Bars,
    Crosses,
    Figure,
    Gap,
    Intervals,
    Line,
    Mark,
    Panel,
    Points,
)
from jaxblock.sweeps.report.palette import PAPER, SERIES_LIGHT, sign_of
from jaxblock.sweeps.report.scales import Limits, number

MARKERS, VOID = "os^Dv*hP", r"$\oslash$"
COLUMNS = 3
INCHES = (3.9, 2.1)
"""Of a panel's width with its margins, and of the height between its axes."""
HEAD, BETWEEN, FOOT, NOTE = 0.6, 0.9, 0.5, 0.15
"""Inches above, between and below the rows, and of a line above a panel."""
_STYLES = {"solid": "-", "dashed": "--", "dotted": ":"}
_NAMED = {INK: PAPER["ink"], FAINT: PAPER["faint"], ALARM: PAPER["alarm"]}


def draw_png(figure: Figure) -> bytes:
    """Return a figure as the bytes of a PNG file; one without panels says that there is nothing to draw."""
    columns = min(COLUMNS, max(1, len(figure.panels)))
    rows = max(1, -(-len(figure.panels) // columns))
    lines = NOTE * note_lines(figure)
    wide, between = INCHES[0] * columns, BETWEEN + lines
    high = HEAD + lines + rows * INCHES[1] + (rows - 1) * between + FOOT
    canvas = Canvas(figsize=(wide, high))
    # Margins by hand: matplotlib's own layouts draw everything several times to find them.
    canvas.subplots_adjust(
        left=0.68 / wide,
        right=1 - 0.1 / wide,
        bottom=FOOT / high,
        top=1 - (HEAD + lines) / high,
        wspace=0.28,
        hspace=between / INCHES[1],
    )
    grid = canvas.subplots(rows, columns, squeeze=False).flatten()
    for axes in grid[len(figure.panels) :]:
        axes.set_axis_off()
    if not figure.panels:
        grid[0].text(0.5, 0.5, "nothing to draw yet", ha="center", va="center")
    for axes, panel, ends in zip(grid, figure.panels, panel_limits(figure), strict=False):
        _draw_panel(axes, panel, *ends)
    signs = [_key(color, figure.series[color]) for color in series_drawn(figure)]
    if signs:
        canvas.legend(handles=signs, loc="upper center", ncols=min(4, len(signs)), frameon=False, fontsize=8)
    target = io.BytesIO()
    canvas.savefig(target, dpi=130, format="png", facecolor="white")
    return target.getvalue()


def _draw_panel(axes: Axes, panel: Panel, x: Limits, y: Limits) -> None:
    """Draw on the unit square, where `svg` draws too, so that both agree on every place."""
    axes.set(xlim=(0, 1), ylim=(0, 1.08))
    axes.set_title(_plain(panel.title), fontsize=9, loc="left", pad=6 + 72 * NOTE * len(notes_of(panel)))
    axes.set_xlabel(_plain(panel.x.label), fontsize=8)
    axes.set_ylabel(_plain(panel.y.label), fontsize=8)
    for place, ends, most in ((axes.set_xticks, x, 7), (axes.set_yticks, y, 6)):
        ticks = ends.ticks(most)
        place([ends.place(tick) for tick in ticks], [number(tick) for tick in ticks], fontsize=7)
    axes.grid(axis="y", color=PAPER["grid"], lw=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    notes = notes_of(panel)
    for i, (color, sentence) in enumerate(notes):
        up = 1.02 + (len(notes) - 1 - i) * NOTE / INCHES[1]
        axes.text(0, up, _plain(sentence), color=_color(color), fontsize=6.5, transform=axes.transAxes)
    for across, up, line in line_labels(panel, x, y):
        axes.text(across + 0.012, up, _plain(line.label), color=_color(line.color), fontsize=6, va="center")
    for mark in panel.marks:
        _draw(axes, mark, x, y)


def _draw(axes: Axes, mark: Mark, x: Limits, y: Limits) -> None:
    match mark:
        case Points():
            places = _places(mark.at, x, y)
            face = "none" if mark.hollow else _color(mark.color)
            axes.plot(*_columns(places), **_sign(mark.color, 4), mfc=face, alpha=0.35 if mark.faint else 0.8)
        case Line():
            for piece in pieces(mark.at, x, y):
                axes.plot(
                    *_columns(piece),
                    color=_color(mark.color),
                    ls=_STYLES[mark.style],
                    lw=0.6 if mark.thin else 1.2,
                    alpha=0.4 if mark.faint or mark.thin else 1,
                )
        case Intervals():
            for at, (low, high) in zip(mark.at, mark.ends, strict=True):
                ends = ((low, at[1]), (high, at[1])) if mark.along == "x" else ((at[0], low), (at[0], high))
                axes.plot(*_columns(_places(ends, x, y)), color=_color(mark.color), lw=1.4)
            face = "white" if mark.hollow else _color(mark.color)
            axes.plot(*_columns(_places(mark.at, x, y)), **_sign(mark.color, 6), mfc=face)
        case Bars():
            for at in mark.at:
                foot, head = y.place(0.0), y.place(at[1])
                axes.bar(x.place(at[0]), head - foot, mark.width, foot, color=_color(mark.color))
        case Crosses():
            places = [x.place(at) for at in mark.at]
            axes.plot(places, [1.04] * len(places), "x", color=_color(mark.color), ms=5, clip_on=False)
        case Gap():
            axes.plot(x.place(mark.at), 1.04, marker=VOID, color=_color(mark.color), ms=7, clip_on=False)


def _sign(color: int, size: float) -> dict[str, Any]:
    return {
        "color": _color(color),
        "marker": MARKERS[sign_of(color)] if color >= 0 else "o",
        "ms": size,
        "ls": "",
    }


def _key(color: int, name: str) -> Line2D:
    sign = MARKERS[sign_of(color)]
    return Line2D([], [], color=_color(color), marker=sign, ms=5, ls="", label=_plain(name))


def _color(color: int) -> str:
    return _NAMED[color] if color < 0 else SERIES_LIGHT[color % len(SERIES_LIGHT)]


def _places(at: Sequence[tuple[float, float]], x: Limits, y: Limits) -> list[tuple[float, float]]:
    found = (unit_place(place, x, y) for place in at)
    return [place for place in found if place is not None]


def _columns(places: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in places], [y for _, y in places]


def _plain(words: str) -> str:
    """Return words that matplotlib does not read as mathematics."""
    return words.replace("$", r"\$")
