"""A table with two faces: what a person reads on the page, and one value per cell in its CSV file."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxblock.sweeps.report.marks import Table
from jaxblock.sweeps.report.material import cells, reason, short
from jaxblock.sweeps.report.scales import number
from jaxblock.sweeps.results import OUTCOMES
from jaxblock.sweeps.statistics.estimate import Refusal
from jaxblock.sweeps.statistics.fits import Law
from jaxblock.sweeps.statistics.transfer import StableRate

STATISTIC_PARTS = ("", "_low", "_high", "_n", "_interval", "_refused", "_refusal")
"""Ends of the file's columns of a statistic: value, interval, n, what the interval is, rule and its sentence."""


def same(value: Any) -> Any:
    """Return a value as it is."""
    return value


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column of the page, and the columns of the file that hold the same."""

    files: tuple[str, ...]
    """Names in the file, snake_case; () = only on the page."""
    heading: str
    """On the page; "" = only in the file."""
    show: Callable[[Any], object] = same
    split: Callable[[Any], tuple[object, ...]] = lambda value: (value,)


@dataclass(frozen=True, kw_only=True)
class Sheet:
    """Rows of values and statistics, and what is said above them."""

    heading: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Any, ...], ...]
    notes: tuple[tuple[str, str], ...] = ()
    """(term, sentence) of every column that needs one."""

    def page(self) -> Table:
        """Return the face for a person."""
        kept = [i for i, column in enumerate(self.columns) if column.heading]
        rows = tuple(tuple(self.columns[i].show(row[i]) for i in kept) for row in self.rows)
        return Table(columns=tuple(self.columns[i].heading for i in kept), rows=rows)

    def file(self) -> Table:
        """Return the face for a machine."""
        names = tuple(name for column in self.columns for name in column.files)
        rows = tuple(
            tuple(
                part
                for column, cell in zip(self.columns, row, strict=True)
                if column.files
                for part in column.split(cell)
            )
            for row in self.rows
        )
        return Table(columns=names, rows=rows)


def value(name: str, heading: str) -> Column:
    """Return a column of plain values."""
    return Column(files=(name,), heading=heading)


def values(*named: tuple[str, str]) -> tuple[Column, ...]:
    """Return several columns of plain values, from (name, heading)."""
    return tuple(value(name, heading) for name, heading in named)


def statistic(name: str, heading: str, *, digits: int = 4) -> Column:
    """Return a column of estimates and refusals: number and interval on the page, seven columns in the file."""
    return Column(
        files=tuple(name + part for part in STATISTIC_PARTS),
        heading=heading,
        show=lambda cell: short(cell, digits=digits),
        split=cells,
    )


def number_or_refusal(name: str, heading: str) -> Column:
    """Return a column of numbers without an interval, some of them refused."""
    return Column(
        files=(name, f"{name}_refused", f"{name}_refusal"),
        heading=heading,
        show=lambda cell: f"refused: {reason(cell)}" if isinstance(cell, Refusal) else cell,
        split=lambda cell: _or_refusal(cell, (cell,)),
    )


def outcomes() -> Column:
    """Return a column of outcome -> count: one column per outcome in the file."""

    def show(counts: Mapping[str, int]) -> str:
        return ", ".join(f"{count} {outcome}" for outcome, count in counts.items())

    return Column(
        files=tuple(f"runs_{outcome}" for outcome in OUTCOMES),
        heading="outcomes",
        show=show,
        split=lambda counts: tuple(counts.get(outcome, 0) for outcome in OUTCOMES),
    )


def span(name: str, heading: str) -> Column:
    """Return a column of some whole numbers: all on the page, the least and the most in the file."""

    def split(found: Sequence[int]) -> tuple[object, ...]:
        return (min(found), max(found)) if found else (None, None)

    return Column(
        files=(f"{name}_least", f"{name}_most"),
        heading=heading,
        show=lambda found: ", ".join(map(str, found)) or None,
        split=split,
    )


def stable_rate() -> Column:
    """Return the column of the largest stable rate and the first unstable one."""

    def show(found: StableRate | Refusal) -> str:
        if isinstance(found, Refusal):
            return f"refused: {reason(found)}"
        return f"{number(found.rate)}; half fail at {number(found.first_unstable)}"

    def split(found: StableRate | Refusal) -> tuple[object, ...]:
        return _or_refusal(
            found, (None, None) if isinstance(found, Refusal) else (found.rate, found.first_unstable)
        )

    files = ("stable_rate", "first_unstable_rate", "stable_rate_refused", "stable_rate_refusal")
    return Column(files=files, heading="largest stable rate", show=show, split=split)


def law(name: str, heading: str) -> Column:
    """Return the column of a growth law along the blocks."""

    def show(found: Law | Refusal) -> str:
        if isinstance(found, Refusal):
            return f"refused: {reason(found)}"
        return f"{found.name}, ahead by {found.ahead:.1f} AICc"

    def split(found: Law | Refusal) -> tuple[object, ...]:
        return _or_refusal(found, (None, None) if isinstance(found, Refusal) else (found.name, found.ahead))

    files = (name, f"{name}_ahead_aicc", f"{name}_refused", f"{name}_refusal")
    return Column(files=files, heading=heading, show=show, split=split)


def _or_refusal(cell: Any, found: tuple[object, ...]) -> tuple[object, ...]:
    """Return values and two empty cells, or empty cells with rule and sentence."""
    if isinstance(cell, Refusal):
        return (*(None for _ in found), cell.rule, cell.sentence)
    return (*found, None, None)
