"""Where the marks of a figure lie: the ends of its axes, from every value that is drawn."""

import math
from collections.abc import Iterator

from jaxblock.sweeps.report.marks import (
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
