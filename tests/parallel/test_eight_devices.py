"""Data parallelism on 8 simulated devices gives one device's numbers, whichever device the real targets lie on."""

from typing import Any

import numpy as np
import pytest

from tests.simulated_devices import printed_by

HISTORY = "block_attention_residual"
RESIDUALS = ["pre_norm", pytest.param(HISTORY, marks=pytest.mark.full)]


@pytest.fixture(scope="module")
def report(request) -> dict[str, Any]:
    """Return what `eight_devices.py` prints."""
    full = any(HISTORY in item.name and item.path == request.path for item in request.session.items)
    return printed_by("tests.parallel.eight_devices", "pre_norm", *([HISTORY] if full else []))


def test_the_rows_lie_on_eight_devices_of_unequal_weight(report):
    placed = report["placed"]
    assert report["devices"] == 8
    assert placed["devices"] == [8, 8, 8]  # inputs, targets, valid
    assert placed["shapes"] == [[2, 6]]
    assert placed["rows"] == [list(range(0, 16, 2))] * 3
    assert placed["weights"] == [6, 6, 0, 12, 6, 6, 12, 12]  # one device has nothing to learn from


@pytest.mark.parametrize("form", ["jit", "pmap"])
@pytest.mark.parametrize("residual", RESIDUALS)
def test_eight_devices_train_like_one(report, residual, form):
    trained = report["trained"][residual]
    np.testing.assert_allclose(trained[form]["losses"], trained["one"], rtol=0, atol=1e-5)
    assert trained[form]["parameters"] < 1e-5
    assert trained[form]["whole_on"] == [8]
    assert trained["one"][2] < trained["one"][0] - 0.1  # the steps do something


@pytest.mark.parametrize("residual", RESIDUALS)
def test_the_compiler_moves_sums_and_no_rows(report, residual):
    assert report["trained"][residual]["collectives"] == ["all-reduce"]


def test_the_mean_of_the_devices_means_is_another_loss(report):
    difference = np.abs(np.subtract(report["mean_of_means"], report["trained"]["pre_norm"]["one"]))
    assert difference.min() > 1e-3


@pytest.mark.parametrize("form", ["jit", "pmap"])
def test_b107_six_rows_on_four_devices_are_refused(report, form):
    assert "has 6 rows and there are 4 devices" in report["refusals"][form]


def test_more_devices_than_there_are_are_refused(report):
    assert report["refusals"]["devices"] == "devices is 9; it must be a whole number of at most 8"


@pytest.mark.parametrize(
    "rows", [pytest.param("3", id="b68_three_examples"), pytest.param("6", id="b107_six_rows")]
)
def test_rows_padded_to_a_batch_on_four_devices_give_the_loss_of_the_rows(report, rows):
    padded = report["padded"][rows]
    assert padded["padded"] == pytest.approx(padded["alone"], abs=1e-5)
    assert padded["weight"] == {"3": 9, "6": 12}[rows]


def test_random_keys_in_the_batch_do_not_depend_on_the_devices(report):
    dropped = report["dropped"]
    assert dropped["by_row"] == pytest.approx(dropped["one"], abs=1e-5)
    assert abs(dropped["closed_over"] - dropped["one"]) > 1e-3  # every device draws the same numbers
