"""Figures of a run from its metrics: loss, learning rate, gradient norm."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

INK, TRAIN, VALIDATION = "#333333", "#9ecae1", "#08519c"


def plot_run(rows: Sequence[dict[str, Any]], folder: Path, *, baseline: float | None = None) -> list[Path]:
    """Draw loss.png, learning_rate.png and gradient_norm.png; return their paths.

    Args:
      rows: the rows of metrics.jsonl.
      folder: where the figures go.
      baseline: the trigram model's loss, drawn as a line for comparison.
    """
    steps = [row for row in rows if row.get("loss") is not None]
    return [
        _plot_loss(
            steps, [row for row in rows if row.get("val_loss") is not None], folder / "loss.png", baseline
        ),
        _plot_curve(steps, "learning_rate", "learning rate", folder / "learning_rate.png"),
        _plot_curve(
            steps, "gradient_norm", "global gradient norm, before clipping", folder / "gradient_norm.png"
        ),
    ]


def _axes(label: str) -> tuple[Figure, Any]:
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel("step")
    axes.set_ylabel(label)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _plot_loss(
    steps: Sequence[dict[str, Any]],
    evaluations: Sequence[dict[str, Any]],
    path: Path,
    baseline: float | None,
) -> Path:
    figure, axes = _axes("cross entropy, nats per token")
    axes.plot(
        [r["step"] for r in steps], [r["loss"] for r in steps], color=TRAIN, lw=1, label="training batch"
    )
    if evaluations:
        last = evaluations[-1]["val_loss"]
        label = f"validation slice, {last:.3f} at the end"
        points = [r["step"] for r in evaluations], [r["val_loss"] for r in evaluations]
        axes.plot(*points, color=VALIDATION, marker="o", label=label)
    if baseline is not None:
        axes.axhline(baseline, color=INK, ls="--", lw=1, label=f"trigram model, {baseline:.3f}")
    if steps:  # the first steps are far above all that follows
        axes.set_ylim(top=1.1 * max(np.quantile([r["loss"] for r in steps], 0.98), baseline or 0.0))
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)
    return path


def _plot_curve(steps: Sequence[dict[str, Any]], name: str, label: str, path: Path) -> Path:
    figure, axes = _axes(label)
    axes.plot([row["step"] for row in steps], [row[name] for row in steps], color=VALIDATION, lw=1)
    figure.savefig(path, dpi=120)
    return path
