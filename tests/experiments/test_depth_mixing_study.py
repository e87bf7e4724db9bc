"""Measured depth-mixing matrices: the tables known by heart, and coefficients frozen where they depend on the input."""

import csv
import functools

import numpy as np
import pytest

from experiments.depth_mixing import (
    OFF_START,
    OPTIONS,
    WIDTH,
    Picture,
    draw,
    measure,
    mixing_matrix,
    model,
    moved,
    report,
    sources,
    start,
    write_table,
)
from jaxblock.residual import topology

CONFIG = model(2)
READS = CONFIG.sublayers + 1


@functools.cache
def stack(text, noise):
    made = start(topology(text), CONFIG)
    return moved(made, noise) if noise else made


def table(text, noise=0.0):
    return mixing_matrix(stack(text, noise), sources(CONFIG))


def test_i01_pre_norm_is_all_ones_and_that_is_what_it_declares():
    picture = measure("pre_norm", CONFIG)
    np.testing.assert_array_equal(picture.weights, np.tri(READS))
    assert picture.deviation == 0.0
    assert picture.at == "start"


def test_i01_highway_rows_sum_to_1_whatever_its_gates_are():
    weights = table("highway", 1.0)
    np.testing.assert_allclose(weights.sum(1), 1.0, rtol=1e-5)
    assert np.abs(weights - table("highway")).max() > 0.05  # the gates did move
    assert np.abs(table("learned_scale", 0.5).sum(1) - 1.0).max() > 0.5  # not every rule's rows do


def test_i01_dense_former_is_alpha_times_the_cumulative_sum():
    made = stack("dense_former", 0.3)
    alpha = np.eye(3)
    alpha[np.array([1, 1, 2, 2, 2]), np.array([0, 1, 0, 1, 2])] += made.params["shared"]["weight"]
    states, rows, x = [np.eye(READS)[0]], [], np.eye(READS)[0]
    for block in range(2):
        for output in (2 * block + 1, 2 * block + 2):
            rows.append(x)
            x = x + np.eye(READS)[output]
        states.append(x)
        x = sum(alpha[block + 1, j] * state for j, state in enumerate(states))
    np.testing.assert_allclose(table("dense_former", 0.3), [*rows, x], rtol=1e-5, atol=1e-6)


def test_i01_attention_residual_rows_are_weights_and_only_frozen_ones_sum_to_1():
    """Control: where sources are not 0, the derivative is not the weight, as weights depend on what is read."""
    weights = table("attention_residual", 0.2)
    np.testing.assert_allclose(weights.sum(1), 1.0, rtol=1e-5)
    assert weights.min() >= 0.0
    assert np.ptp(weights[-1]) > 0.05  # off its start no mean
    filled = np.random.default_rng(1).normal(size=(READS, WIDTH)).astype(np.float32)
    not_frozen = mixing_matrix(stack("attention_residual", 0.2), filled)
    assert np.abs(not_frozen.sum(1) - 1.0).max() > 0.01


def test_a_table_that_is_not_what_is_measured_is_said():
    right = Picture("a", "start", np.tri(3), 1e-6)
    lines, good = report(
        [right, Picture("b", "start", np.tri(3), None), Picture("c", "off 1", np.eye(3), None)]
    )
    assert good
    assert ["as declared" in line for line in lines] == [True, False, False]
    lines, good = report([right, right._replace(deviation=1e-3)])
    assert not good
    assert "NOT as declared" in lines[1]


def test_table_and_figure_are_written(tmp_path):
    pictures = [
        Picture("pre_norm", "start", np.tri(3), 0.0),
        Picture("lime(bias=1)", "off 1", np.eye(3), None),
    ]
    write_table(tmp_path / "t.csv", pictures)
    with (tmp_path / "t.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 6  # up to the diagonal
    assert {row["weight"] for row in rows if row["topology"] == "pre_norm"} == {"1"}
    draw(tmp_path / "f.png", pictures)
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("text", [*OPTIONS, *OFF_START])
def test_every_name_it_draws_exists(text):
    topology(text)
