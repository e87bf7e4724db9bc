"""What may be said of a made-up sweep: misfits, agreement of interval and p, order, notes, and verdicts as fields."""

import dataclasses
import json
import math

import numpy as np
import pytest

from jaxblock.sweeps.analysis import Analysis, analyse
from jaxblock.sweeps.findings.trends import loss_with_depth
from jaxblock.sweeps.results import Result
from jaxblock.sweeps.statistics import Estimate, Refusal
from tests.sweeps.test_analysis import DEPTHS, GAP, RATES, arm, broken, product, sweep, verdict


@pytest.fixture(scope="module")
def whole() -> Analysis:
    return analyse(sweep(product()))


@pytest.fixture(scope="module")
def damaged() -> Analysis:
    return analyse(sweep(broken()))


def kinked() -> list[Result]:
    """Basins with a kink at their minimum, which no parabola follows."""
    return [
        dataclasses.replace(
            one, val_loss=2.0 + 0.04 * abs(octaves(one) - 3.0) + 0.001 * noise + 0.02 * one.seed
        )
        for one, noise in zip(product(), np.random.default_rng(3).normal(size=210), strict=True)
    ]


def octaves(one: Result) -> float:
    return math.log2(one.learning_rate / RATES[0])


def test_basins_that_no_parabola_fits_leave_no_ranking_and_the_measured_means_stay():
    found = analyse(sweep(kinked()))
    for one in found.series[0].arms:
        assert isinstance(one.basin, Refusal)
        assert (one.basin.rule, one.basin.side) == ("lack_of_fit", "finer")
        assert isinstance(one.best_loss, Estimate)
        assert one.best_rate == RATES[3]
        assert "too far apart" in one.best_loss_note
    first = found.verdicts[0]
    assert (first.id, first.status, first.rule) == ("comparison", "refused", "no_optimum")
    assert any("learning rates between those around" in one.sentence for one in found.open_questions)


def test_the_largest_misfit_is_named_with_the_finer_grid_it_asks_for(whole):
    largest = max(one.basin.misfit for series in whole.series for one in series.arms)
    sentence = next(one.sentence for one in whole.open_questions if one.topic == "misfit")
    assert sentence.startswith("a finer grid of rates")
    assert f"{largest:.2g} nats" in sentence


def test_a_contrast_is_widened_by_both_misfits_and_one_that_the_seeds_show_may_not_be_resolvable():
    """Both arms miss by as much as they differ, and the seeds agree: the difference may be one of the fits."""
    sure = [
        dataclasses.replace(
            one,
            val_loss=1.6
            + 0.9 * one.depth**-0.6
            + 0.03 * (octaves(one) - 3.3) ** 2
            + 0.002 * (octaves(one) - 3.3) ** 3
            + (0.006 if one.residual == "post_norm" else 0.0)
            + 0.0003 * noise,
        )
        for one, noise in zip(product(), np.random.default_rng(5).normal(size=210), strict=True)
    ]
    found = analyse(sweep(sure))
    for one, depth in zip(found.contrasts, DEPTHS, strict=True):
        basins = [arm(series, depth).basin for series in found.series]
        assert one.misfit == pytest.approx(sum(basin.misfit for basin in basins))
        assert isinstance(one.difference, Estimate)
        half = one.difference.high - one.difference.value
        assert half > one.misfit
        assert half - one.misfit < abs(one.difference.value) < half  # the seeds alone would have resolved it
        assert one.status == "not resolvable"
        assert one.p_holm > 0.05
    assert found.verdicts[0].status == "warn"
    assert found.verdicts[0].sentence.startswith("no ranking is resolved; nearest:")


def test_interval_p_and_phrase_of_a_contrast_agree(whole):
    for one in whole.contrasts:
        assert one.comparisons == len(DEPTHS)
        assert "Bonferroni for 5 comparisons" in one.difference.interval
        assert (one.status == "resolved") == one.difference.excludes(0.0)
        assert one.status != "resolved" or one.p_holm < 0.05
        assert one.phrase == "worse"


def test_the_answer_comes_first_and_the_rest_in_order_of_importance(whole, damaged):
    for found in (whole, damaged):
        ranks = [one.headline for one in found.verdicts]
        assert ranks == sorted(ranks)
        assert found.verdicts[0].id == "comparison"
        assert found.verdicts[-1].id == "runs"
    first = whole.verdicts[0]
    assert (first.status, first.series, first.reference) == (
        "pass",
        "residual=post_norm",
        "residual=pre_norm",
    )
    assert "worse at depth 2, 4, 8, 16, 32" in first.sentence
    assert first.estimate in [one.difference for one in whole.contrasts]
    assert "refused at depth 16, 32" in damaged.verdicts[0].sentence
    names = [one.id.partition("/")[0] for one in whole.verdicts]
    order = ["comparison", "ranking", "learning_rate_transfer", "loss_law", "regret", "stream_growth_start"]
    assert [name for name in dict.fromkeys(names) if name in order] == order


def test_counts_over_the_chosen_grid_are_notes_and_nothing_shown(whole, damaged):
    for one in (verdict(whole, "divergence/residual=pre_norm"), verdict(whole, "runs")):
        assert one.status == "note"
    assert "of the rates tried" in verdict(whole, "divergence/residual=pre_norm").sentence
    assert verdict(damaged, "divergence/residual=pre_norm").status == "warn"


def test_a_time_is_never_shown_and_names_the_load_and_bytes_may_be(whole):
    busy = dataclasses.replace(
        sweep(product()), environment={"load_average_at_start": 3.5}, plan={"sweep": {"workers": 2}}
    )
    time = verdict(analyse(busy), "time/residual=pre_norm")
    assert time.status == "warn"
    assert "load average at start 3.5" in time.sentence
    assert "workers 2" in time.sentence
    assert "workers" not in verdict(whole, "time/residual=pre_norm").sentence
    assert verdict(whole, "bytes/residual=pre_norm").status == "pass"


def test_an_evaluation_error_above_half_the_largest_difference_is_asked_about(whole):
    assert not any(one.topic == "evaluation" for one in whole.open_questions)
    loud = analyse(sweep([dataclasses.replace(one, val_error=0.6 * GAP) for one in product()]))
    sentence = next(one.sentence for one in loud.open_questions if one.topic == "evaluation")
    assert "cancels partly" in sentence
    quiet = analyse(sweep([dataclasses.replace(one, val_error=0.4 * GAP) for one in product()]))
    assert not any(one.topic == "evaluation" for one in quiet.open_questions)


def test_a_verdict_is_fields_as_well_as_a_sentence(whole, damaged):
    for found in (whole, damaged):
        values = [one.as_dict() for one in found.verdicts]
        assert json.loads(json.dumps(values, allow_nan=False)) == values
        for one in values:
            assert (one["status"] == "refused") == (one["refusal"] is not None)
            assert one["refusal"] is None or set(one["refusal"]) == {"rule", "sentence"}
            assert one["estimate"] is None or set(one["estimate"]) == {
                "value",
                "low",
                "high",
                "n",
                "interval",
            }
    one = verdict(whole, "ranking/residual=post_norm/depth=8").as_dict()
    assert (one["series"], one["reference"], one["depth"]) == ("residual=post_norm", "residual=pre_norm", 8)
    assert (one["quantity"], one["unit"]) == ("difference in loss", "nats")
    assert one["estimate"]["value"] == one["numbers"]["difference"]


def test_losses_read_from_parabolas_that_miss_leave_the_law_in_depth_open(whole):
    assert verdict(whole, "loss_law/residual=pre_norm").status == "pass"
    series = whole.series[0]
    missing = [
        dataclasses.replace(one, basin=dataclasses.replace(one.basin, misfit=0.2)) for one in series.arms
    ]
    found = loss_with_depth(dataclasses.replace(series, arms=tuple(missing)))
    assert found.status == "warn"
    assert "miss by up to 0.2 nats" in found.sentence


def test_the_program_with_the_most_lanes_speaks_for_an_arm_whose_grid_was_widened(whole):
    added = [
        dataclasses.replace(one, lanes=2, step_s=9.0, program_bytes=10**9)
        if one.learning_rate == RATES[-1] and one.depth >= 8
        else one
        for one in product()
    ]
    found, plain = analyse(sweep(added)).series[0], whole.series[0]
    assert (found.time, found.bytes) == (plain.time, plain.bytes)
    assert (arm(found, 8).lanes, arm(found, 2).lanes) == ((2, 21), (21,))
