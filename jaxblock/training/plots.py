"""Figures of a run from its metrics: loss, learning rate, gradient norm, with bad steps marked.

A curve is kept in at most `POINTS` points however long the run is: each is the mean and the range of equally many
neighbouring steps, and the range is drawn as a band, so that no spike is lost. While a run trains, `draw_run` makes
one figure with three panels, run.png; at its end `plot_run` also draws each panel by itself.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

POINTS = 2000
"""Most points of a curve; when there are more, neighbours are joined in pairs."""
INK, TRAIN, VALIDATION, ALARM = "#333333", "#9ecae1", "#08519c", "#cb181d"
HOUSEKEEPING = ("start", "config")
"""Events of metrics.jsonl that are no bad step."""


class Point(NamedTuple):
    """Some neighbouring steps of a curve."""

    first: int
    last: int
    count: int
    total: float
    low: float
    high: float

    def join(self, other: "Point") -> "Point":
        """Return one point for the steps of both."""
        low, high = min(self.low, other.low), max(self.high, other.high)
        return Point(self.first, other.last, self.count + other.count, self.total + other.total, low, high)


class Curve:
    """One quantity over the steps, in at most `POINTS` points."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self._stride = 1

    def add(self, step: int, value: float) -> None:
        """Add a step after all others; one that was there before replaces what came from it on, as a rewind does."""
        while self.points and self.points[-1].first >= step:
            self.points.pop()
        point = Point(step, step, 1, value, value, value)
        if self.points and self.points[-1].count < self._stride:
            self.points[-1] = self.points[-1].join(point)
            return
        self.points.append(point)
        if len(self.points) > POINTS:
            pairs = zip(self.points[::2], [*self.points[1::2], None], strict=False)
            self.points = [one if other is None else one.join(other) for one, other in pairs]
            self._stride *= 2

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return steps, means, lowest and highest values."""
        table = np.array(self.points, float).reshape(-1, len(Point._fields))
        first, last, count, total, low, high = table.T
        return (first + last) / 2, total / count, low, high


class Curves:
    """What the figures of a run show, gathered row by row: memory does not grow with the run."""

    def __init__(self) -> None:
        self.loss, self.learning_rate, self.gradient_norm = Curve(), Curve(), Curve()
        self.validation = Curve()
        self.bad_steps: list[tuple[int, str]] = []
        """Steps that raised an alarm, and which."""

    def add(self, rows: Iterable[dict[str, Any]]) -> None:
        """Add rows of metrics.jsonl in the order they were written; what a row does not have is left out."""
        for row in rows:
            step, event = row["step"], row.get("event")
            if event is not None:
                if event not in HOUSEKEEPING:
                    self.bad_steps.append((step, event))
                continue
            for name, curve in (
                ("loss", self.loss),
                ("learning_rate", self.learning_rate),
                ("gradient_norm", self.gradient_norm),
                ("val_loss", self.validation),
            ):
                if row.get(name) is not None:
                    curve.add(step, row[name])


def draw_run(curves: Curves, folder: Path, *, baseline: float | None = None) -> Path:
    """Draw run.png, all panels in one figure; return its path.

    Args:
      curves: of the run so far.
      folder: where the figure goes.
      baseline: a loss to compare with, drawn as a line.
    """
    return _save(folder / "run.png", curves, baseline, list(_PANELS))


def plot_run(rows: Sequence[dict[str, Any]], folder: Path, *, baseline: float | None = None) -> list[Path]:
    """Draw run.png, loss.png, learning_rate.png and gradient_norm.png; return their paths.

    Args:
      rows: the rows of metrics.jsonl.
      folder: where the figures go.
      baseline: a loss to compare with, drawn as a line.
    """
    curves = Curves()
    curves.add(rows)
    single = [_save(folder / f"{name}.png", curves, baseline, [name]) for name in _PANELS]
    return [draw_run(curves, folder, baseline=baseline), *single]


def _save(path: Path, curves: Curves, baseline: float | None, panels: list[str]) -> Path:
    """Draw some panels below each other into a file that is replaced in one move."""
    figure = Figure(figsize=(7, 1 + 3 * len(panels)), layout="constrained")
    axes = figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
    for name, panel in zip(panels, axes, strict=True):
        _PANELS[name](panel, curves, baseline)
        _mark_bad_steps(panel, curves)
        panel.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("step")
    temporary = path.with_name(path.name + ".partial")
    figure.savefig(temporary, dpi=120, format="png")
    temporary.replace(path)
    return path


def _draw_loss(axes: Axes, curves: Curves, baseline: float | None) -> None:
    axes.set_ylabel("cross entropy, nats per target")
    _draw_curve(axes, curves.loss, TRAIN, "training batch")
    step, mean, _, _ = curves.validation.arrays()
    if len(step):
        axes.plot(step, mean, color=VALIDATION, marker="o", label=f"validation, last {mean[-1]:.3f}")
    if baseline is not None:
        axes.axhline(baseline, color=INK, ls="--", lw=1, label=f"baseline, {baseline:.3f}")
    _, mean, _, _ = curves.loss.arrays()
    if len(mean):  # the first steps are far above all that follows
        axes.set_ylim(top=1.1 * max(np.quantile(mean, 0.98), baseline or 0.0))
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False)


def _draw_learning_rate(axes: Axes, curves: Curves, baseline: float | None) -> None:
    axes.set_ylabel("learning rate")
    _draw_curve(axes, curves.learning_rate, VALIDATION, "")


def _draw_gradient_norm(axes: Axes, curves: Curves, baseline: float | None) -> None:
    axes.set_ylabel("global gradient norm, before clipping")
    _draw_curve(axes, curves.gradient_norm, VALIDATION, "")


_PANELS: dict[str, Callable[[Axes, Curves, float | None], None]] = {
    "loss": _draw_loss,
    "learning_rate": _draw_learning_rate,
    "gradient_norm": _draw_gradient_norm,
}


def _draw_curve(axes: Axes, curve: Curve, color: str, label: str) -> None:
    step, mean, low, high = curve.arrays()
    if len(step):
        axes.plot(step, mean, color=color, lw=1, label=label or None)
    if (low < high).any():
        axes.fill_between(step, low, high, color=color, alpha=0.3, lw=0)


def _mark_bad_steps(axes: Axes, curves: Curves) -> None:
    """Draw a line over the whole height at every bad step."""
    if curves.bad_steps:
        steps = [step for step, _ in curves.bad_steps]
        axes.vlines(steps, 0, 1, transform=axes.get_xaxis_transform(), color=ALARM, lw=0.8, ls=":")
