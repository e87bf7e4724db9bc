"""probes.png: every statistic of probes.jsonl along depth, one line per measured step, colored by step."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

LINES = 12
"""Most steps that are drawn."""
COLUMNS = 4
LEFT_OUT = ("stream_rms_before",)
"""stream_rms, one sublayer later."""
DECADES = 1.0
"""An axis is logarithmic where positive values span so many."""
MOSTLY = 0.75
"""Least share of positive values on such an axis; the others are 0, as all updates of a branch that starts at 0."""
LABELS: Mapping[str, str] = {
    "stream_rms": "rms x after the sublayer",
    "update_rms": "rms u, the update of x",
    "relative_update": "rms(u) / rms(x)",
    "budget_before": "mean |x|²/D before the sublayer",
    "budget_cross": "mean 2⟨x, u⟩/D",
    "budget_update": "mean |u|²/D",
    "budget_cosine": "mean cos(x, u)",
    "constant_share": "|mean x| / rms x",
    "token_similarity": "cosine of two tokens",
    "read_rms": "rms a branch reads",
    "output_rms": "rms a branch writes",
    "branch_gain": "rms written / rms read",
    "not_finite": "share of pieces not finite",
    "stream_gradient": "|d loss / d x_s|",
    "outlier": "max |x| / rms x",
    "outlier_without_first": "max |x| / rms x, first token left out",
    "kurtosis": "kurtosis",
    "kurtosis_without_first": "kurtosis, first token left out",
    "absorbed": "share of u that is lost",
    "update_bits": "bits of u that are kept",
    "stream_rank": "effective rank of x",
    "update_rank": "effective rank of u",
}


class Profiles(NamedTuple):
    """One panel: a statistic at the chosen steps."""

    title: str
    along: str
    """What x counts: "sublayer" or "block"."""
    first: int
    """What the first entry is counted as."""
    lines: list[tuple[int, np.ndarray]]
    """(step, values); NaN where not finite."""


def plot_probes(rows: Sequence[Mapping[str, Any]], path: Path) -> Path | None:
    """Draw probes.png; return its path, or None where no step was measured.

    Args:
      rows: the rows of probes.jsonl.
      path: the figure's file, replaced in one move.
    """
    panels = profiles_of(chosen([row for row in rows if "event" not in row]))
    if not panels:
        return None
    steps = [step for panel in panels for step, _ in panel.lines]
    colors = ScalarMappable(
        Normalize(min(steps), max(max(steps), min(steps) + 1)), matplotlib.colormaps["viridis"]
    )
    height = math.ceil(len(panels) / COLUMNS)
    figure = Figure(figsize=(3.1 * COLUMNS, 0.4 + 2.4 * height), layout="constrained")
    axes = figure.subplots(height, COLUMNS, squeeze=False)
    for place, panel in zip(axes.flat, panels, strict=False):
        _draw(place, panel, colors)
    for place in list(axes.flat)[len(panels) :]:
        place.set_axis_off()
    bar = figure.colorbar(colors, ax=axes, label="step", shrink=min(1.0, 2 / height), aspect=30, pad=0.01)
    bar.ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    temporary = path.with_name(path.name + ".partial")
    figure.savefig(temporary, dpi=110, format="png")
    temporary.replace(path)
    return path


def chosen(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return at most `LINES` rows, evenly, the first and the last among them."""
    if len(rows) <= LINES:
        return list(rows)
    return [rows[place] for place in np.linspace(0, len(rows) - 1, LINES).round().astype(int)]


def profiles_of(rows: Sequence[Mapping[str, Any]]) -> list[Profiles]:
    """Return the panels of some rows, in the order of `LABELS`, then the updates of parameters."""
    panels: dict[str, Profiles] = {}
    for row in rows:
        for name, values in row.items():
            if isinstance(values, list) and name not in LEFT_OUT:
                first = 0 if name == "stream_gradient" else 1
                panel = panels.setdefault(name, Profiles(LABELS.get(name, name), "sublayer", first, []))
                panel.lines.append((row["step"], np.array(values, float)))
        for role, found in row.get("parameter_update", {}).items():
            if isinstance(found["relative"], list):  # what lies outside the blocks has no depth
                title = f"relative update: {role}"
                panel = panels.setdefault(title, Profiles(title, "block", 1, []))
                panel.lines.append((row["step"], np.array(found["relative"], float)))
    quiet = "not_finite" in panels and not any(np.any(y) for _, y in panels["not_finite"].lines)
    order = [*(name for name in LABELS if name in panels), *(name for name in panels if name not in LABELS)]
    return [panels[name] for name in order if not (quiet and name == "not_finite")]


def _draw(axes: Axes, panel: Profiles, colors: ScalarMappable) -> None:
    for step, values in panel.lines:
        x = np.arange(panel.first, panel.first + len(values))
        marker = "." if len(values) <= 24 else ""
        axes.plot(x, values, color=colors.to_rgba(step), lw=1.1, marker=marker, ms=4)  # pyright: ignore[reportArgumentType]
    values = np.concatenate([values for _, values in panel.lines])
    title = panel.title
    if is_logarithmic(values):
        axes.set_yscale("log")
        title += " (0 is not drawn)" if np.any(values == 0) else ""
    axes.set_title(title, fontsize=9)
    axes.set_xlabel(panel.along, fontsize=8)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25, lw=0.5)
    axes.spines[["top", "right"]].set_visible(False)


def is_logarithmic(values: np.ndarray) -> bool:
    """Whether values span decades, none is below 0 and few are 0; what is not finite does not count."""
    finite = values[np.isfinite(values)]
    above = finite[finite > 0]
    if not len(above) or finite.min() < 0 or len(above) < MOSTLY * len(finite):
        return False
    return bool(math.log10(above.max() / above.min()) >= DECADES)
