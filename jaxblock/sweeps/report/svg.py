"""Panels as inline SVG: colors and fonts are the page's, so that one drawing serves light, dark and paper."""

import math
from collections.abc import Callable, Mapping, Sequence

from jaxblock.sweeps.report.layout import (
    has_strip,
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
    Note,
    Panel,
    Points,
)
from jaxblock.sweeps.report.markup import Child, Markup, join, tag
from jaxblock.sweeps.report.palette import SERIES_LIGHT, sign_of
from jaxblock.sweeps.report.scales import Limits, number

SIZE, WIDE = (380, 280), (440, 300)
"""Width and height of a panel among others, and of one alone."""
LEFT, RIGHT, TOP, BOTTOM = 54, 14, 42, 42
STRIP, NOTE = 18, 14
"""Height kept free above the data for failed runs and refusals, and of a line above the panel."""
LABEL = 44
"""Width kept free on the right where lines have labels."""
_CLASSES = {INK: "ink", FAINT: "faint", ALARM: "alarm"}


class _Frame:
    """A panel's axes on the page."""

    def __init__(
        self, panel: Panel, ends: tuple[Limits, Limits], *, size: tuple[int, int], notes: int
    ) -> None:
        self.x, self.y = ends
        self.size = size[0], size[1] + NOTE * notes
        self.labels = line_labels(panel, *ends)
        self.right = self.size[0] - (LABEL if self.labels else RIGHT)
        self.head = TOP + NOTE * notes
        """Where the drawing begins, below the words above it."""
        self.top = self.head + (STRIP if has_strip(panel) else 0)
        self.bottom = self.size[1] - BOTTOM

    def across(self, share: float) -> float:
        return round(LEFT + share * (self.right - LEFT), 1)

    def down(self, share: float) -> float:
        return round(self.bottom - share * (self.bottom - self.top), 1)

    def place(self, at: tuple[float, float]) -> tuple[float, float] | None:
        where = unit_place(at, self.x, self.y)
        return where and (self.across(where[0]), self.down(where[1]))


def draw_panels(figure: Figure) -> list[Markup]:
    """Return one SVG element per panel."""
    size, found = WIDE if len(figure.panels) == 1 else SIZE, []
    for i, (panel, ends) in enumerate(zip(figure.panels, panel_limits(figure), strict=True)):
        frame = _Frame(panel, ends, size=size, notes=note_lines(figure))
        found.append(_draw_panel(panel, frame, f"clip-{figure.name}-{i}"))
    return found


def draw_legend(figure: Figure) -> Markup | None:
    """Return the list of series and signs, or None where there is nothing to tell apart."""
    items: list[Child] = []
    for color in series_drawn(figure):
        key = _key([tag("path", (), {"d": sign(color, 9, 8, 5), "class": "mark"})], color)
        items.append(tag("li", [key, figure.series[color]]))
    for name, meaning in figure.legend.items():
        items.append(tag("li", [_key(_LEGEND_KEYS[name](), INK), meaning]))
    return tag("ul", items, {"class": "legend", "aria-label": "Legend"}) if items else None


def sign(color: int, x: float, y: float, r: float) -> str:
    """Return the path of a series' sign."""
    if color < 0 or sign_of(color) == 0:
        return (
            f"M{x - r:.1f} {y:.1f}a{r:.1f} {r:.1f} 0 1 0 {2 * r:.1f} 0a{r:.1f} {r:.1f} 0 1 0 {-2 * r:.1f} 0z"
        )
    corners = _SIGN_CORNERS[sign_of(color) - 1]
    return "M" + "L".join(f"{x + r * a:.1f} {y + r * b:.1f}" for a, b in corners) + "z"


def _polygon(corners: int, turn: float, inner: float | None = None) -> Sequence[tuple[float, float]]:
    """Return corners on a circle, every second one on an inner circle for a star."""
    steps = corners if inner is None else 2 * corners
    radii = [1.2 if inner is None or i % 2 == 0 else 1.2 * inner for i in range(steps)]
    angles = [turn + 2 * math.pi * i / steps for i in range(steps)]
    return [
        (radius * math.sin(angle), -radius * math.cos(angle))
        for radius, angle in zip(radii, angles, strict=True)
    ]


_SIGN_CORNERS = (
    _polygon(4, math.pi / 4),
    _polygon(3, 0.0),
    _polygon(4, 0.0),
    _polygon(3, math.pi),
    _polygon(5, 0.0, 0.45),
    _polygon(6, 0.0),
    _polygon(4, 0.0, 0.35),
)


def _draw_panel(panel: Panel, frame: _Frame, clip: str) -> Markup:
    width, height = frame.right - LEFT, frame.bottom - frame.head
    box = {"x": LEFT - 8, "y": frame.head - 8, "width": width + 16, "height": height + 16}
    drawn = [_group(mark, frame) for mark in panel.marks if not isinstance(mark, Note)]
    return tag(
        "svg",
        [
            tag("title", panel.title),
            tag("clipPath", tag("rect", (), box), {"id": clip}),
            *_draw_axes(panel, frame),
            tag("g", drawn, {"clip-path": f"url(#{clip})"}),
            *_draw_labels(frame),
            *_draw_notes(panel),
        ],
        {
            "viewBox": f"0 0 {frame.size[0]} {frame.size[1]}",
            "role": "img",
            "class": "panel",
            "aria-label": panel.title,
        },
    )


def _draw_axes(panel: Panel, frame: _Frame) -> list[Markup]:
    found = [
        tag("text", panel.title, {"x": 2, "y": 14, "class": "panel-title"}),
        tag("text", panel.y.label, {"x": 2, "y": frame.head - 10, "class": "axis-label"}),
        tag(
            "text",
            panel.x.label,
            {"x": frame.across(0.5), "y": frame.size[1] - 6, "class": "axis-label", "text-anchor": "middle"},
        ),
    ]
    for tick in frame.y.ticks(6):
        down = frame.down(frame.y.place(tick))
        found.append(_segment("grid", (LEFT, down), (frame.right, down)))
        words = {"x": LEFT - 6, "y": down + 4, "class": "tick", "text-anchor": "end"}
        found.append(tag("text", number(tick), words))
    for tick in frame.x.ticks(7):
        across = frame.across(frame.x.place(tick))
        found.append(_segment("axis", (across, frame.bottom), (across, frame.bottom + 4)))
        words = {"x": across, "y": frame.bottom + 16, "class": "tick", "text-anchor": "middle"}
        found.append(tag("text", number(tick), words))
    return [*found, _segment("axis", (LEFT, frame.bottom), (frame.right, frame.bottom))]


def _draw_notes(panel: Panel) -> list[Markup]:
    """Return the lines above the panel, each behind the sign of its series."""
    found = []
    for i, (color, sentence) in enumerate(notes_of(panel)):
        down = 29 + NOTE * i
        shape = tag("path", (), {"d": sign(color, 7, down - 4, 3.6), "class": "mark"}) if color >= 0 else None
        words = tag("text", sentence, {"x": 15 if color >= 0 else 2, "y": down, "class": "note"})
        found.append(tag("g", [shape, words], {"class": _class(color)}))
    return found


def _draw_labels(frame: _Frame) -> list[Markup]:
    return [
        tag(
            "text",
            line.label,
            {"x": frame.across(x) + 6, "y": frame.down(y) + 4, "class": f"line-label {_class(line.color)}"},
        )
        for x, y, line in frame.labels
    ]


def _group(mark: Mark, frame: _Frame) -> Markup:
    faint = isinstance(mark, Points | Line) and mark.faint
    return tag("g", _shapes(mark, frame), {"class": _class(mark.color) + (" pale" if faint else "")})


def _shapes(mark: Mark, frame: _Frame) -> list[Markup]:
    match mark:
        case Points():
            return _draw_points(mark, frame)
        case Line():
            return _draw_line(mark, frame)
        case Intervals():
            return _draw_intervals(mark, frame)
        case Bars():
            return _draw_bars(mark, frame)
        case Crosses():
            return [
                _titled(
                    "path",
                    {
                        "d": _cross(frame.across(frame.x.place(at)), frame.head + STRIP / 2, 4),
                        "class": "cross",
                    },
                    title,
                )
                for at, title in _with_titles(mark.at, mark.titles)
            ]
        case Gap():
            shape = {
                "d": _void(frame.across(frame.x.place(mark.at)), frame.head + STRIP / 2, 5),
                "class": "void",
            }
            return [_titled("path", shape, f"{mark.word}. {mark.title}")]
    return []


def _draw_points(mark: Points, frame: _Frame) -> list[Markup]:
    found = []
    for at, title in _with_titles(mark.at, mark.titles):
        where = frame.place(at)
        if where is not None:
            shape = {"d": sign(mark.color, *where, 3.2), "class": "hollow" if mark.hollow else "mark"}
            found.append(_titled("path", shape, title))
    return found


def _draw_line(mark: Line, frame: _Frame) -> list[Markup]:
    found = []
    for piece in pieces(mark.at, frame.x, frame.y):
        places = [(frame.across(x), frame.down(y)) for x, y in piece]
        path = "M" + "L".join(f"{x} {y}" for x, y in places)
        kind = f"line {mark.style}" + (" thin" if mark.thin else "")
        found.append(tag("path", (), {"d": path, "class": kind}))
    return found


def _draw_intervals(mark: Intervals, frame: _Frame) -> list[Markup]:
    found = []
    for (at, title), (low, high) in zip(_with_titles(mark.at, mark.titles), mark.ends, strict=True):
        ends = ((low, at[1]), (high, at[1])) if mark.along == "x" else ((at[0], low), (at[0], high))
        where, first, last = frame.place(at), frame.place(ends[0]), frame.place(ends[1])
        if where is None or first is None or last is None:
            continue
        dx, dy = (0, 4) if mark.along == "x" else (4, 0)
        caps = [((x - dx, y - dy), (x + dx, y + dy)) for x, y in (first, last)]
        bars = [_segment("whisker", start, end) for start, end in ((first, last), *caps)]
        shape = tag(
            "path", (), {"d": sign(mark.color, *where, 5), "class": "hollow" if mark.hollow else "mark"}
        )
        found.append(tag("g", [tag("title", title) if title else None, *bars, shape]))
    return found


def _draw_bars(mark: Bars, frame: _Frame) -> list[Markup]:
    found, width = [], mark.width * (frame.right - LEFT)
    for at, title in _with_titles(mark.at, mark.titles):
        foot, head = frame.place((at[0], 0.0)), frame.place(at)
        if foot is not None and head is not None:
            top, height = min(foot[1], head[1]), abs(foot[1] - head[1])
            shape = {
                "x": round(head[0] - width / 2, 1),
                "y": top,
                "width": round(width, 1),
                "height": round(max(height, 1), 1),
                "class": "bar",
            }
            found.append(_titled("rect", shape, title))
    return found


def _class(color: int) -> str:
    return _CLASSES[color] if color < 0 else f"s{color % len(SERIES_LIGHT)}"


def _with_titles(at: Sequence, titles: Sequence[str]) -> list[tuple]:
    return list(zip(at, titles or [""] * len(at), strict=True))


def _titled(name: str, attributes: Mapping[str, object], title: str) -> Markup:
    return tag(name, tag("title", title) if title else (), attributes)


def _segment(kind: str, start: tuple[float, float], end: tuple[float, float]) -> Markup:
    return tag("path", (), {"d": f"M{start[0]} {start[1]}L{end[0]} {end[1]}", "class": kind})


def _cross(x: float, y: float, r: float) -> str:
    return f"M{x - r} {y - r}L{x + r} {y + r}M{x - r} {y + r}L{x + r} {y - r}"


def _void(x: float, y: float, r: float) -> str:
    """Return a circle with a stroke through it: nothing is here."""
    slant = round(r * 0.707, 1)
    return f"{sign(INK, x, y, r)}M{x - slant} {y + slant}L{x + slant} {y - slant}"


def _key(shapes: Sequence[Markup], color: int) -> Markup:
    box = {"viewBox": "0 0 18 16", "class": f"key {_class(color)}", "aria-hidden": "true"}
    return tag("svg", join(shapes), box)


def _line_key(style: str) -> list[Markup]:
    return [tag("path", (), {"d": "M0 8L18 8", "class": f"line {style}"})]


_LEGEND_KEYS: dict[str, Callable[[], list[Markup]]] = {
    "solid": lambda: _line_key("solid"),
    "dashed": lambda: _line_key("dashed"),
    "dotted": lambda: _line_key("dotted"),
    "pale": lambda: [tag("path", (), {"d": "M0 8L18 8", "class": "line solid pale"})],
    "cross": lambda: [tag("path", (), {"d": _cross(9, 8, 4), "class": "cross"})],
    "dotted pale": lambda: [tag("path", (), {"d": "M0 8L18 8", "class": "line dotted pale"})],
    "thin": lambda: [tag("path", (), {"d": "M0 11L5 5L9 10L13 4L18 9", "class": "line solid thin"})],
    "refused": lambda: [tag("path", (), {"d": _void(9, 8, 5), "class": "void"})],
    "interval": lambda: [
        _segment("whisker", (9, 1), (9, 15)),
        _segment("whisker", (5, 1), (13, 1)),
        _segment("whisker", (5, 15), (13, 15)),
    ],
    "point": lambda: [tag("path", (), {"d": sign(0, 9, 8, 3.2), "class": "mark"})],
    "hollow": lambda: [tag("path", (), {"d": sign(0, 9, 8, 3.2), "class": "hollow"})],
}
