"""What the rounds of a contest say: medians, quartiles, and ratios to the fastest peer within the same round.

A round has every contender once, a few steps each; its number is the median of those steps. A contender's time is the
median of its rounds, its spread their quartiles. A ratio is made of two numbers of one round, so that what slows the
machine for a while slows both; printed are the median ratio, its quartiles, and a 95 % bootstrap interval of the median
over rounds. The fastest peer is the one whose time, over all rounds, is the least: the same one in every round.
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

RESAMPLES = 2000


class Spread(NamedTuple):
    """A median and its quartiles."""

    median: float
    low: float
    high: float


class Ratio(NamedTuple):
    """A ratio over rounds: median, quartiles, and the 95 % bootstrap interval of the median."""

    spread: Spread
    interval: tuple[float, float]


class Row(NamedTuple):
    """A contender."""

    name: str
    seconds: Spread
    """Of one step."""
    ratio: Ratio | None
    """Its seconds over those of the fastest peer; below 1 = faster. None where no peer ran."""
    share: Spread | None
    """Of the ceiling's rate that it reaches. None where there is no ceiling."""


def spread_of(values: Sequence[float] | np.ndarray) -> Spread:
    """Return the median and the quartiles."""
    low, median, high = (float(end) for end in np.quantile(np.asarray(values, float), [0.25, 0.5, 0.75]))
    return Spread(median, low, high)


def ratio_of(above: Sequence[float], below: Sequence[float]) -> Ratio:
    """Return above / below, round by round.

    Args:
      above: one number a round.
      below: of the same rounds.
    """
    ratios_R = np.asarray(above, float) / np.asarray(below, float)
    draw = np.random.default_rng(0)
    medians = np.median(draw.choice(ratios_R, (RESAMPLES, len(ratios_R))), axis=1)
    low, high = (float(end) for end in np.quantile(medians, [0.025, 0.975]))
    return Ratio(spread_of(ratios_R), (low, high))


def summarise(
    rounds: Mapping[str, Sequence[Sequence[float]]],
    *,
    peers: Collection[str] = (),
    ceiling: str | None = None,
) -> list[Row]:
    """Return a row per contender, in the order given, the ceiling left out.

    Args:
      rounds: name -> seconds of each step, by round.
      peers: the names among which the fastest is looked for; one that did not run is passed over.
      ceiling: the name whose seconds are those of the same work at the machine's best rate.

    Raises:
      ValueError: contenders with different numbers of rounds, or none: nothing can be paired.
    """
    counts = {name: len(one) for name, one in rounds.items()}
    if len(set(counts.values())) != 1 or 0 in counts.values():
        raise ValueError(
            f"rounds of contenders are {counts}; ratios need the same number of each, at least 1"
        )
    medians = {name: [float(np.median(steps)) for steps in one] for name, one in rounds.items()}
    there = [name for name in rounds if name in peers]
    fastest = min(there, key=lambda name: float(np.median(medians[name])), default=None)
    rows = []
    for name, seconds_R in medians.items():
        if name == ceiling:
            continue
        ratio = None if fastest is None else ratio_of(seconds_R, medians[fastest])
        best_R = None if ceiling is None else [min(steps) for steps in rounds[ceiling]]
        share = None if best_R is None else ratio_of(best_R, seconds_R).spread
        rows.append(Row(name, spread_of(seconds_R), ratio, share))
    return rows


def fastest_peer(rows: Sequence[Row], peers: Collection[str]) -> str | None:
    """Return the name of the peer with the least time; None where none ran."""
    there = [row for row in rows if row.name in peers]
    return min(there, key=lambda row: row.seconds.median).name if there else None


def ratio_words(ratio: Ratio | None) -> str:
    """Return "1.02 [1.01, 1.04] (1.01 to 1.03)": median, quartiles, interval; "-" where there is none."""
    if ratio is None:
        return "-"
    (median, low, high), (start, end) = ratio
    return f"{median:.3f} [{low:.3f}, {high:.3f}] ({start:.3f} to {end:.3f})"


def verdict(interval: tuple[float, float], *, low: float = 0.0, high: float) -> str:
    """Return whether what lies in the interval lies within the bounds, as far as the interval can tell.

    Returns:
      "holds" where all of the interval does, "does not hold" where none of it does, and else "not resolved".
    """
    start, end = interval
    if low <= start and end <= high:
        return "holds"
    return "does not hold" if end < low or start > high else "not resolved"


def table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return lines of text in columns; the first column stands left, the others right."""
    widths = [max(len(line[column]) for line in (header, *lines)) for column in range(len(header))]
    rows = []
    for line in (header, *lines):
        first, *others = (
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        rows.append("  ".join((first, *others)).rstrip())
    return "\n".join(rows)


def draw_times(rows: Sequence[Row], path: Path, *, title: str, line: tuple[float, str] | None = None) -> None:
    """Draw each contender's time with its quartiles, and a line at the seconds given, with its label."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 1.2 + 0.42 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for place, row in enumerate(rows):
        median, low, high = (1e3 * x for x in row.seconds)
        color = "tab:blue" if row.name.startswith("ours") else "0.6"
        axes.barh(place, median, color=color, xerr=[[median - low], [high - median]], capsize=3)
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.invert_yaxis()
    if line is not None:
        axes.axvline(1e3 * line[0], color="black", linestyle=":", label=line[1])
        axes.legend(fontsize=8)
    axes.set_xlabel("ms, median of rounds with quartiles")
    axes.set_title(title, fontsize=9)
    figure.savefig(path, dpi=150)
