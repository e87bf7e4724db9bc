"""Figures of a run: curves of bounded size that keep every extreme, and files that are there whole."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure

from jaxblock.training import plots
from jaxblock.training.plots import POINTS, Curve, Curves, draw_run, plot_run


def curve_of(values: np.ndarray, *, start: int = 1) -> Curve:
    curve = Curve()
    for step, value in enumerate(values, start):
        curve.add(step, float(value))
    return curve


@settings(deadline=None, max_examples=20)
@given(length=st.integers(1, 900), seed=st.integers(0, 99))
def test_a_curve_is_the_mean_and_the_range_of_equal_pieces(length, seed):
    """Against numpy, at 64 points at most: the same pieces, cut beforehand."""
    values = np.random.default_rng(seed).normal(size=length)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "POINTS", 64)
        curve = curve_of(values)
    step, mean, low, high = curve.arrays()
    assert len(step) <= 64
    stride = curve.points[0].count
    assert stride == 1 or length > 64
    pieces = [values[i : i + stride] for i in range(0, length, stride)]
    np.testing.assert_allclose(mean, [piece.mean() for piece in pieces], rtol=1e-12)
    np.testing.assert_array_equal(low, [piece.min() for piece in pieces])
    np.testing.assert_array_equal(high, [piece.max() for piece in pieces])
    middles = [
        i + 1 + (len(piece) - 1) / 2 for i, piece in zip(range(0, length, stride), pieces, strict=True)
    ]
    np.testing.assert_array_equal(step, middles)


def test_a_long_run_takes_no_more_memory_and_loses_no_spike():
    """One step of 30,000 is high: the range shows it, which the means, or every 15th step, do not."""
    values = np.zeros(30_000)
    values[12_346] = 50.0
    curve = curve_of(values)
    _, mean, _, high = curve.arrays()
    assert len(curve.points) <= POINTS
    assert high.max() == 50.0
    assert mean.max() < 4.0
    assert values[:: len(values) // POINTS].max() == 0.0


def test_steps_made_again_replace_the_ones_before():
    """A rewind to step 5 after step 8: the figure shows steps 6 to 8 as they were made the second time."""
    curve = curve_of(np.arange(8.0))
    for step in (6, 7):
        curve.add(step, 100.0 + step)
    step, mean, _, _ = curve.arrays()
    np.testing.assert_array_equal(step, [1, 2, 3, 4, 5, 6, 7])
    np.testing.assert_array_equal(mean, [0, 1, 2, 3, 4, 106, 107])


def rows() -> list[dict]:
    steps = [
        {"step": i, "loss": 3.0 / i, "learning_rate": 0.1, "gradient_norm": 1.0 if i > 2 else None}
        for i in range(1, 7)
    ]
    bad = {"step": 4, "event": "spike", "loss": 99.0, "gradient_norm": 1e9, "action": "skip"}
    start = {"step": 0, "event": "start", "corpus": "text"}
    return [start, *steps[:3], bad, *steps[3:], {"step": 6, "val_loss": 0.7}, {"step": 6, "val_loss": None}]


def test_bad_steps_are_marks_and_no_points():
    curves = Curves()
    curves.add(rows())
    assert curves.bad_steps == [(4, "spike")]
    assert [point.first for point in curves.loss.points] == [1, 2, 3, 4, 5, 6]
    assert [point.first for point in curves.gradient_norm.points] == [3, 4, 5, 6]
    assert curves.validation.arrays()[1] == [0.7]
    assert curves.loss.arrays()[3].max() == 3.0


def test_the_files_of_a_run(tmp_path):
    paths = plot_run(rows(), tmp_path, baseline=0.9)
    assert [path.name for path in paths] == ["run.png", "loss.png", "learning_rate.png", "gradient_norm.png"]
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in paths}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


def test_a_run_without_rows_has_a_figure_too(tmp_path):
    assert draw_run(Curves(), tmp_path).read_bytes().startswith(b"\x89PNG")


def test_what_is_drawn(tmp_path, monkeypatch):
    """Three panels over one axis of steps; the baseline and the bad step are lines, the loss ends where it should."""
    seen: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **_: (seen.append(self), path.touch()))
    curves = Curves()
    curves.add(rows())
    draw_run(curves, tmp_path, baseline=0.9)
    loss, rate, norm = seen[0].axes
    assert [panel.get_ylabel().split(",")[0] for panel in (loss, rate, norm)] == [
        "cross entropy",
        "learning rate",
        "global gradient norm",
    ]
    assert norm.get_xlabel() == "step"
    training, validation, baseline = loss.get_lines()
    np.testing.assert_allclose(training.get_ydata(), [3.0 / i for i in range(1, 7)])
    np.testing.assert_array_equal(validation.get_xydata(), [[6, 0.7]])
    assert set(baseline.get_ydata()) == {0.9}
    for panel in (loss, rate, norm):
        (marks,) = panel.collections
        assert [segment[0][0] for segment in marks.get_segments()] == [4]


def test_whoever_looks_while_a_figure_is_drawn_sees_the_one_before(tmp_path, monkeypatch):
    path = draw_run(Curves(), tmp_path)
    before = path.read_bytes()

    def stop_half_way(self, file, **_):
        file.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Figure, "savefig", stop_half_way)
    with pytest.raises(OSError, match="No space"):
        draw_run(Curves(), tmp_path)
    assert path.read_bytes() == before
