"""Where the marks of a figure lie: the ends of its axes, from every value that is drawn."""

import math
from collections.abc import Iterator

from jaxblock.sweeps.report.marks import (
    INK,
    Bars,
    Crosses,
    Figure,
    Gap,
    Intervals,
    Line,
    Mark,
    Note,
    Pairs,
    Panel,
    Points,
)
from jaxblock.sweeps.report.scales import Limits, limits

MOST_NOTES = 6
"""Most lines above a panel."""
LABEL_WIDTH, LABEL_HEIGHT = 0.14, 0.07
"""Room of a line's label, as shares of the panel."""
MARGIN = 0.88
"""A line that ends farther right has its label in the margin."""


def panel_limits(figure: Figure) -> list[tuple[Limits, Limits]]:
    """Return the ends of x and y for every panel; shared axes have the same in all."""
    own = [(_values(panel, "x"), _values(panel, "y")) for panel in figure.panels]
    every = [value for x, _ in own for value in x], [value for _, y in own for value in y]
    return [
        (
            limits(panel.x, every[0] if "x" in figure.shared else x),
            limits(panel.y, every[1] if "y" in figure.shared else y),
        )
        for panel, (x, y) in zip(figure.panels, own, strict=True)
    ]


def pieces(at: Pairs, x: Limits, y: Limits) -> list[list[tuple[float, float]]]:
    """Return a line's places on the unit square, cut where a value cannot be drawn (zero on a log axis)."""
    found: list[list[tuple[float, float]]] = [[]]
    for place in at:
        where = unit_place(place, x, y)
        if where is not None:
            found[-1].append(where)
        elif found[-1]:
            found.append([])
    return [piece for piece in found if piece]


def unit_place(at: tuple[float, float], x: Limits, y: Limits) -> tuple[float, float] | None:
    """Return a place on the unit square, or None for one that cannot be drawn."""
    where = x.place(at[0]), y.place(at[1])
    return where if all(math.isfinite(value) for value in where) else None


def series_drawn(figure: Figure) -> list[int]:
    """Return the colors of series that have a mark, in order."""
    colors = {
        mark.color
        for panel in figure.panels
        for mark in panel.marks
        if mark.color >= 0 and (isinstance(mark, Gap | Note) or mark.at)
    }
    return sorted(colors)


def notes_of(panel: Panel) -> list[tuple[int, str]]:
    """Return (color, sentence) of what is written above a panel: its notes, and depths refused for one reason."""
    found = [(mark.color, mark.sentence) for mark in panel.marks if isinstance(mark, Note)]
    gaps: dict[tuple[int, str], list[str]] = {}
    for mark in panel.marks:
        if isinstance(mark, Gap):
            gaps.setdefault((mark.color, mark.word), []).append(str(mark.depth))
    found += [(color, f"L = {', '.join(depths)} {word}") for (color, word), depths in gaps.items()]
    if len(found) > MOST_NOTES:
        more = f"{len(found) - MOST_NOTES + 1} more refusals are listed below"
        found = [*found[: MOST_NOTES - 1], (INK, more)]
    return found


def note_lines(figure: Figure) -> int:
    """Return how many lines every panel keeps free above it, so that panels in a row stay level."""
    return max((len(notes_of(panel)) for panel in figure.panels), default=0)


def has_strip(panel: Panel) -> bool:
    """Whether a panel keeps a strip free above its data, for failed runs and refusals."""
    return any(isinstance(mark, Crosses | Gap) for mark in panel.marks)


def line_labels(panel: Panel, x: Limits, y: Limits) -> list[tuple[float, float, Line]]:
    """Return where the labels of lines stand on the unit square: beside their ends, moved apart where they overlap.

    One whose line ends amid the panel stands above the end: beside it, other lines go on.
    """
    found: list[tuple[float, float, Line]] = []
    lines = [mark for mark in panel.marks if isinstance(mark, Line) and mark.label and mark.at]
    ends = [(unit_place(line.at[-1], x, y), line) for line in lines]
    for where, line in sorted(
        ((where, line) for where, line in ends if where is not None), key=lambda one: one[0][1]
    ):
        across, up = where
        if across < MARGIN:
            up += LABEL_HEIGHT
            across -= LABEL_WIDTH / 3
        for left, height, _ in found:
            if abs(left - across) < LABEL_WIDTH and up < height + LABEL_HEIGHT:
                up = height + LABEL_HEIGHT
        found.append((across, up, line))
    return found


def _values(panel: Panel, along: str) -> list[float]:
    return [value for mark in panel.marks for value in _mark_values(mark, 0 if along == "x" else 1)]


def _mark_values(mark: Mark, i: int) -> Iterator[float]:
    """Yield what a mark needs of axis i (0 = x, 1 = y)."""
    match mark:
        case Points(at=at) | Line(at=at):
            yield from (place[i] for place in at)
        case Intervals(at=at, ends=ends, along=along):
            yield from (place[i] for place in at)
            if along == "xy"[i]:
                yield from (end for pair in ends for end in pair)
        case Bars(at=at):
            yield from (place[i] for place in at)
            if i == 1:
                yield 0.0
        case Crosses(at=places):
            yield from places if i == 0 else ()
        case Gap(at=place):
            yield from (place,) if i == 0 else ()
