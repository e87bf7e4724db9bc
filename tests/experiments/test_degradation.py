"""The pure parts of the degradation study, on losses that are made up: best rates, verdicts, sentences, table."""

import csv
import math

import numpy as np
import pytest

from experiments.degradation import (
    DEPTHS,
    MIXERS,
    PLAIN,
    RATES,
    SEEDS,
    SKIP,
    UNIFORM,
    Arm,
    Best,
    best_of,
    compare,
    conclusions,
    draw,
    page,
    pairs,
    plan_of,
    write_runs,
)
from jaxblock.sweeps.results import Result, Sweep
from jaxblock.sweeps.statistics import Refusal

NOISE = np.random.default_rng(0).normal(size=(100, len(SEEDS))) * 0.01


def arms(
    plain: tuple[float, ...], skip: tuple[float, ...] = (1.3, 1.2, 1.1, 1.1, 1.1), **other
) -> dict[Arm, Best | Refusal]:
    """Both mixers with these losses by depth, and noise of 0.01 over seeds."""
    found = {}
    for mixer in MIXERS:
        for residual, losses in ((SKIP, skip), (PLAIN, plain)):
            for depth, loss in zip(DEPTHS, losses, strict=True):
                found[Arm(mixer, residual, depth)] = Best(1e-2, False, loss + NOISE[len(found)])
    return found


DEGRADED = (1.3, 1.4, 1.7, 2.2, UNIFORM)


def test_degradation_is_found_from_the_depth_it_was_planted_at():
    lines = conclusions(compare(arms(DEGRADED)))
    assert len(lines) == 4
    for mixer, (across, along) in zip(MIXERS, (lines[:2], lines[2:]), strict=True):
        assert (
            across == f"{mixer}: without a skip the training loss is worse from 4 blocks on (2: not resolved)"
        )
        assert along.startswith(f"{mixer}: 32 blocks against 2: none worse (+")
        assert "; pre_norm better (-0.19" in along


def test_equal_arms_are_not_resolved():
    equal = (1.3, 1.2, 1.1, 1.1, 1.1)
    found = compare(arms(equal))
    assert [one.verdict for one in found[: 2 * len(DEPTHS)]] == ["not resolved"] * 2 * len(DEPTHS)
    assert "not shown to be worse at the end (2: not resolved; 4: not" in conclusions(found)[0]


def test_a_gap_in_between_is_not_passed_over():
    """Worse at 4, then not, then worse again: it is worse from 16 on, and the gap is named."""
    lines = conclusions(compare(arms((1.3, 1.6, 1.1, 2.2, UNIFORM))))
    assert lines[0].endswith("worse from 16 blocks on (2: not resolved; 8: not resolved)")


def test_a_plain_net_that_is_better_is_said_to_be():
    lines = conclusions(compare(arms((1.0, 1.4, 1.7, 2.2, UNIFORM))))
    assert lines[0].endswith("from 4 blocks on (2: better)")


def test_noise_as_large_as_the_difference_resolves_nothing():
    noisy = {
        arm: best._replace(losses_R=best.losses_R + 100 * (best.losses_R - best.losses_R.mean()))
        for arm, best in arms(DEGRADED).items()
    }
    assert {one.verdict for one in compare(noisy)} == {"not resolved"}


def test_seeds_are_paired():
    """What a seed adds to both sides, however much, is no noise of their difference."""
    shifted = {
        arm: best._replace(losses_R=best.losses_R + 3.0 * np.arange(len(SEEDS)))
        for arm, best in arms(DEGRADED).items()
    }
    for one, other in zip(compare(shifted), compare(arms(DEGRADED)), strict=True):
        assert one.verdict == other.verdict
        assert one.difference.value == pytest.approx(other.difference.value)


def test_all_comparisons_are_adjusted_together():
    """14 of them; p is Holm's, so the smallest is 14 times its own, and never decreases in order."""
    found = compare(arms(DEGRADED))
    assert len(found) == len(pairs(list(MIXERS))) == 14
    p = np.array([one.p for one in found])
    t = [abs(one.difference.value) / (one.difference.high - one.difference.value) for one in found]
    assert (np.diff(p[np.argsort(t)]) <= 1e-12).all()
    for one in found:
        assert "Bonferroni for 14 comparisons" in one.difference.interval
        excludes = not one.difference.low <= 0 <= one.difference.high
        assert (one.verdict != "not resolved") == excludes
        assert one.p < 0.05 or not excludes  # Holm's test resolves all that Bonferroni's interval does


def test_an_arm_without_a_loss_is_refused_and_stops_the_run_of_depths():
    broken = arms(DEGRADED)
    broken[Arm("mlp", PLAIN, 32)] = best_of([result(rate, seed, None) for rate in RATES for seed in SEEDS])
    found = compare(broken)
    refused = [one for one in found if isinstance(one.difference, Refusal)]
    assert [(one.first.depth, one.p) for one in refused] == [(32, None)] * 2
    lines = conclusions(found)
    assert "not shown to be worse at the end" in lines[2]
    assert "32: refused: no learning rate has a finite loss for every seed" in lines[2]


# The best rate -------------------------------------------------------------------------------------------------------


def result(rate: float, seed: int, loss: float | None, **changes) -> Result:
    given = {"depth": 2, "residual": SKIP, "outcome": "ok" if loss is not None else "non_finite", **changes}
    return Result(
        id=f"{rate}{seed}{given['depth']}{given['residual']}",
        axes={},
        sublayers=4,
        width=16,
        initialization="plain",
        parametrization="standard",
        learning_rate=rate,
        warmup=0.1,
        seed=seed,
        planned_steps=120,
        last_loss=loss,
        val_loss=loss,
        **given,
    )


def test_the_best_rate_has_the_lowest_mean_and_keeps_its_seeds():
    losses = {1e-3: 2.0, 3e-3: 1.0, 1e-2: 1.5}
    best = best_of(
        [result(rate, seed, loss + 0.1 * seed) for rate, loss in losses.items() for seed in (2, 0, 1)]
    )
    assert isinstance(best, Best)
    assert (best.rate, best.at_edge) == (3e-3, False)
    np.testing.assert_allclose(best.losses_R, [1.0, 1.1, 1.2])


def test_a_rate_where_one_seed_failed_is_not_the_best():
    runs = [result(rate, seed, rate) for rate in (1e-3, 3e-3, 1e-2) for seed in SEEDS]
    best = best_of(
        [run if (run.learning_rate, run.seed) != (1e-3, 4) else result(1e-3, 4, None) for run in runs]
    )
    assert isinstance(best, Best)
    assert best.rate == 3e-3


def test_the_edges_of_the_grid_are_said():
    for slope in (1, -1):
        best = best_of([result(rate, seed, slope * rate) for rate in RATES for seed in SEEDS])
        assert isinstance(best, Best)
        assert best.at_edge


# What is run and written ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mixer", MIXERS)
def test_arms_differ_in_skip_depth_and_rate_alone(mixer):
    runs = plan_of(mixer).runs()
    assert len(runs) == 2 * len(DEPTHS) * len(RATES) * len(SEEDS)
    assert len(RATES) >= 4
    assert {run.config.model.residual for run in runs} == {SKIP, PLAIN}
    assert {run.config.model.depth for run in runs} == set(DEPTHS)
    rest = {
        (run.config.model.token_mixer, run.config.data, run.config.optimizer.schedule, run.config.run.task)
        for run in runs
    }
    assert len(rest) == 1
    assert runs[0].config.model.token_mixer_choice.name == mixer


def sweeps() -> dict[str, Sweep]:
    found = {}
    for mixer in MIXERS:
        results = tuple(
            result(
                rate, seed, loss + abs(math.log(rate / 3e-3)) + 0.01 * seed**2, depth=depth, residual=residual
            )
            for residual, losses in ((SKIP, (1.3, 1.2, 1.1, 1.1, 1.1)), (PLAIN, DEGRADED))
            for depth, loss in zip(DEPTHS, losses, strict=True)
            for rate in RATES
            for seed in SEEDS
        )
        found[mixer] = Sweep(
            name=mixer,
            plan={},
            axes={},
            fixed={},
            results=results,
            events=(),
            environment={"device": "a CPU"},
            tokens_per_step=512,
            uniform_loss=UNIFORM,
        )
    return found


def test_the_table_has_a_row_for_each_run(tmp_path):
    write_runs(tmp_path / "t.csv", sweeps())
    with (tmp_path / "t.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 2 * len(DEPTHS) * len(RATES) * len(SEEDS)
    (one,) = (
        row
        for row in rows
        if (row["mixer"], row["residual"], row["depth"], row["learning_rate"], row["seed"])
        == ("mlp", PLAIN, "8", "0.003", "1")
    )
    assert float(one["train_loss"]) == pytest.approx(1.71)


def test_the_page_and_the_figure_say_what_was_found(tmp_path):
    best = {
        Arm(mixer, residual, depth): best_of(
            [run for run in sweep.results if (run.residual, run.depth) == (residual, depth)]
        )
        for mixer, sweep in sweeps().items()
        for residual in (SKIP, PLAIN)
        for depth in DEPTHS
    }
    text = page(sweeps(), best, compare(best))
    assert "| mlp | none | 1.360 at 0.003 |" in text
    assert "refused: all 5 differences are the same number" in text
    draw(tmp_path / "f.png", best)
    assert (tmp_path / "f.png").stat().st_size > 10_000
