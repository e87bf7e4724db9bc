"""A figure as data: panels of marks, its caption and the table behind it. `svg` and `png` draw the same records."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxblock.sweeps.report.scales import Axis

INK, FAINT, ALARM = -1, -2, -3
"""Colors that are no series: text, what is only for reference, what failed."""
Pairs = tuple[tuple[float, float], ...]


@dataclass(frozen=True, kw_only=True)
class Points:
    """One sign per observation."""

    at: Pairs
    color: int
    titles: tuple[str, ...] = ()
    """What a pointer over each sign says."""
    hollow: bool = False
    faint: bool = False


@dataclass(frozen=True, kw_only=True)
class Line:
    """Straight pieces through some places, in order."""

    at: Pairs
    color: int
    style: str = "solid"
    """"solid", "dashed", "dotted"."""
    faint: bool = False
    thin: bool = False
    """Only the ground that another line is drawn on."""
    label: str = ""
    """Written to the right of its last place."""


@dataclass(frozen=True, kw_only=True)
class Intervals:
    """An estimate with its interval, along y, or along x."""

    at: Pairs
    ends: Pairs
    """(low, high) of each."""
    color: int
    along: str = "y"
    titles: tuple[str, ...] = ()
    hollow: bool = False


@dataclass(frozen=True, kw_only=True)
class Bars:
    """Bars from zero."""

    at: Pairs
    color: int
    width: float
    """Share of the panel's width, 0 to 1."""
    titles: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Crosses:
    """Runs that failed, at the top of the panel: they have a place on x and no value on y."""

    at: tuple[float, ...]
    color: int
    titles: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Gap:
    """What is refused at one depth: a sign above the data, and words above the panel, never among the points."""

    at: float
    depth: int
    color: int
    word: str
    title: str
    """The reason."""


@dataclass(frozen=True, kw_only=True)
class Note:
    """A sentence above the panel."""

    sentence: str
    color: int = INK


Mark = Points | Line | Intervals | Bars | Crosses | Gap | Note


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One pair of axes."""

    title: str
    x: Axis
    y: Axis
    marks: tuple[Mark, ...]


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of plain values; None is a value that does not exist."""

    columns: tuple[str, ...]
    rows: tuple[tuple[object, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """Panels with shared axes where they ask for it, and everything said about them."""

    name: str
    """Of its files."""
    title: str
    """What it shows, as a heading."""
    answer: str = ""
    """What the verdicts say about it, in a line under the heading."""
    summary: str
    """What it shows in words, for who cannot see it."""
    caption: str
    """What is drawn, of how many, with which interval, and what is left out."""
    panels: tuple[Panel, ...]
    series: tuple[str, ...]
    """Names of colors 0, 1, ...; those drawn are in the legend."""
    table: Table
    shared: str = ""
    """"x", "y" or "xy": axes with equal ends in all panels."""
    legend: Mapping[str, str] = field(default_factory=dict)
    """Sign -> meaning, of the signs that are no series."""
    refusals: tuple[str, ...] = ()
    """One sentence for each thing that is not shown."""
