"""The analysis of a made-up sweep: it recovers what the sweep was made of, names every failure, and refuses aloud."""

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from jaxblock.sweeps.analysis import Analysis, analyse
from jaxblock.sweeps.findings.records import STATUSES, Arm, Series, Verdict
from jaxblock.sweeps.results import Event, Profile, Result, Sweep
from jaxblock.sweeps.statistics import RULES, Basin, Decay, Estimate, Law, Line, Power, Refusal, Transfer

DEPTHS, SEEDS = (2, 4, 8, 16, 32), (0, 1, 2)
RATES = tuple(5e-4 * 2.0**i for i in range(7))
UNIFORM = math.log(256)
GAP = 0.1
"""By how much post_norm is worse."""


def run(residual: str, depth: int, rate: float, seed: int, **changes: Any) -> Result:
    """A run whose basin has its minimum 3.3 octaves up, and whose loss there is 1.6 + 0.9 N^-0.6."""
    draw = np.random.default_rng([depth, seed, round(rate * 1e6), len(residual)])
    loss = 1.6 + 0.9 * depth**-0.6 + (GAP if residual == "post_norm" else 0.0) + 0.02 * seed
    loss += 0.03 * (math.log2(rate / RATES[0]) - 3.3) ** 2 + 0.002 * float(draw.normal())
    sizes = tuple((1 + 0.5 * block) ** 0.5 * (1 + 0.01 * float(draw.normal())) for block in range(depth + 1))
    axes = {
        "model.residual": residual,
        "model.depth": depth,
        "optimizer.learning_rate": rate,
        "run.seed": seed,
    }
    found = Result(
        id=f"{residual}-{depth}-{rate:g}-{seed}",
        axes=axes,
        depth=depth,
        sublayers=2 * depth,
        width=64,
        residual=residual,
        initialization="scaled",
        parametrization="standard",
        learning_rate=rate,
        warmup=0.1,
        seed=seed,
        planned_steps=300,
        outcome="ok",
        steps=300,
        val_loss=loss,
        val_error=0.003,
        first_loss=UNIFORM,
        last_loss=loss + 0.5,
        still_falling=-0.5 + 0.01 * seed,
        first_gradient_norm=depth**-0.5 * (1 + 0.01 * seed),
        last_gradient_norm=1.0 + 0.01 * seed,
        start=Profile(stream=sizes, branches=(0.3,) * (2 * depth), logits=1.0),
        end=Profile(stream=sizes, branches=(0.3,) * (2 * depth), logits=1.0),
        lanes=21,
        compile_s=3.0,
        step_s=21 * (0.002 + 0.001 * depth),
        program_bytes=21 * (1000 + 500 * depth),
    )
    return dataclasses.replace(found, **changes)


def lost(found: Result, outcome: str, reason: str) -> Result:
    """Return a run that has nothing to show."""
    names = ("val_loss", "val_error", "last_loss", "still_falling", "last_gradient_norm", "end")
    if outcome != "non_finite":
        names += ("first_loss", "first_gradient_norm", "start", "compile_s", "step_s", "program_bytes")
    return dataclasses.replace(found, outcome=outcome, reason=reason, **dict.fromkeys(names))


def sweep(results: Sequence[Result]) -> Sweep:
    axes = {path: tuple(dict.fromkeys(one.axes[path] for one in results)) for path in results[0].axes}
    return Sweep(
        name="made up",
        plan={},
        axes=axes,
        fixed={"optimizer.weight_decay": 0.1, "model.norm": "rms_norm", "run.dir": "x"},
        results=tuple(results),
        events=(Event(time="2026-01-01T00:00:00Z", kind="worker_killed", sentence="worker 1 died"),),
        environment={},
        tokens_per_step=2048,
        uniform_loss=UNIFORM,
    )


def product(
    residuals: Sequence[str] = ("pre_norm", "post_norm"),
    rates: Sequence[float] = RATES,
    seeds: Sequence[int] = SEEDS,
) -> list[Result]:
    return [
        run(residual, depth, rate, seed)
        for residual in residuals
        for depth in DEPTHS
        for rate in rates
        for seed in seeds
    ]


def broken() -> list[Result]:
    """The same with a diverging rate, an arm out of memory, a killed run and one not made yet."""
    found = []
    for one in product():
        place = one.residual, one.depth
        if one.learning_rate == RATES[-1] and one.depth >= 8:
            one = lost(one, "non_finite", "the loss was not finite at step 12")
        if place == ("post_norm", 32):
            one = lost(one, "out_of_memory", "needs 9.1 GiB of 8.0")
        if one.id == f"pre_norm-8-{RATES[1]:g}-0":
            one = lost(one, "killed", "its worker died twice")
        if one.id == f"post_norm-2-{RATES[1]:g}-1":
            one = lost(one, "missing", "")
        if place == ("post_norm", 16) and one.learning_rate >= RATES[2]:
            one = dataclasses.replace(
                one, outcome="diverged", reason="ended above where it began", val_loss=9.25
            )
        found.append(one)
    return found


@pytest.fixture(scope="module")
def whole() -> Analysis:
    return analyse(sweep(product()))


@pytest.fixture(scope="module")
def damaged() -> Analysis:
    return analyse(sweep(broken()))


def arm(series: Series, depth: int) -> Arm:
    return next(one for one in series.arms if one.depth == depth)


def verdict(analysis: Analysis, name: str) -> Verdict:
    return next(one for one in analysis.verdicts if one.id == name)


def walk(value: Any) -> Iterator[Any]:
    yield value
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    for one in inner:
        yield from walk(one)


def test_a_whole_sweep_gives_back_what_it_was_made_of(whole):
    pre, post = whole.series
    assert (pre.label, post.label) == ("residual=pre_norm", "residual=post_norm")
    assert (pre.reference, post.reference) == (True, False)
    for one in pre.arms:
        assert isinstance(one.basin, Basin)
        assert one.basin.optimum.value == pytest.approx(RATES[0] * 2**3.3, rel=0.03)
        assert one.outcomes == {"ok": 21}
    assert isinstance(pre.transfer, Transfer)
    assert pre.transfer.equivalence.equivalent
    assert isinstance(pre.loss_law, Decay)
    assert pre.loss_law.exponent.value == pytest.approx(0.6, abs=0.05)
    assert isinstance(pre.gradient_start, Power)
    assert pre.gradient_start.exponent.value == pytest.approx(-0.5)
    assert isinstance(pre.time, Line)
    assert (pre.time.slope.value, pre.time.intercept.value) == pytest.approx((0.001, 0.002))
    assert isinstance(pre.bytes, Line)
    assert pre.bytes.slope.value == pytest.approx(500)
    law = arm(pre, 32).law_start
    assert isinstance(law, Law)
    assert law.name == "additive"
    assert arm(pre, 8).evaluation_error == pytest.approx(0.003)


def test_the_contrasts_are_paired_and_find_the_gap(whole):
    assert [one.depth for one in whole.contrasts] == list(DEPTHS)
    for one in whole.contrasts:
        assert isinstance(one.difference, Estimate)
        assert one.difference.value == pytest.approx(GAP, abs=0.01)
        assert one.status == "resolved"
        assert one.p is not None
        assert one.p_holm is not None
        assert one.p <= one.p_holm <= 0.05
        assert (one.pairs, one.excluded) == (3, 0)
    assert verdict(whole, "ranking/residual=post_norm/depth=8").status == "pass"


def test_a_difference_below_what_can_be_detected_is_not_resolvable():
    draw = np.random.default_rng(1)
    close = [
        dataclasses.replace(one, val_loss=one.val_loss - (GAP if one.residual == "post_norm" else 0) + shift)
        for one, shift in zip(product(), 0.01 * draw.normal(size=210), strict=True)
    ]
    found = analyse(sweep(close))
    assert {one.status for one in found.contrasts} <= {"not resolvable", "refused"}
    for one in found.contrasts:
        if isinstance(one.difference, Estimate):
            assert abs(one.difference.value) < one.detectable
            assert not one.difference.excludes(0.0)
            assert verdict(found, f"ranking/{one.series}/depth={one.depth}").status == "warn"


def test_every_failure_is_named_and_counted(damaged):
    failures = damaged.failures
    assert failures.counts == {
        "ok": 160,
        "diverged": 15,
        "non_finite": 12,
        "out_of_memory": 21,
        "killed": 1,
        "missing": 1,
    }
    assert {one.outcome for one in failures.runs} == {
        "diverged",
        "non_finite",
        "out_of_memory",
        "killed",
        "missing",
    }
    assert len(failures.runs) == 210 - failures.counts["ok"]
    assert all(one.reason for one in failures.runs)
    assert [one.kind for one in failures.events] == ["worker_killed"]
    assert verdict(damaged, "runs").status == "warn"
    words = verdict(damaged, "runs").sentence
    assert all(outcome in words for outcome in failures.counts)
    topics = {one.topic for one in damaged.open_questions}
    assert topics == {"fixed", "horizon", "seeds", "rates", "misfit", "refused", "runs", "start"}


def test_failures_lie_where_they_happened(damaged):
    pre, post = damaged.series
    row = arm(pre, 32).rates[-1]
    assert (row.rate, row.failed, row.evidence, row.wall) == (RATES[-1], 3, 3, True)
    assert isinstance(row.mean, Refusal)
    assert isinstance(row.capped_mean, Estimate)
    assert row.capped_mean.value == pytest.approx(UNIFORM)
    killed = arm(pre, 8).rates[1]
    assert (killed.failed, killed.evidence, killed.total, killed.seeds) == (0, 2, 3, (1, 2))
    assert isinstance(arm(pre, 8).basin, Basin)
    gone = arm(post, 32)
    assert isinstance(gone.basin, Refusal)
    assert gone.basin.rule == "no_values"
    assert gone.best_rate is None
    assert isinstance(gone.divergence, Refusal)  # out of memory is no evidence of divergence
    assert gone.outcomes == {"out_of_memory": 21}
    walled = arm(post, 16)
    assert isinstance(walled.basin, Refusal)
    assert 9.25 not in walk(damaged.as_dict())  # the loss of a diverged run is no loss of the arm


def test_nothing_refused_is_a_number_anywhere(damaged):
    values = damaged.as_dict()
    text = json.dumps(values, allow_nan=False)
    assert json.loads(text) == values
    refusals = [one for one in walk(values) if isinstance(one, Mapping) and "refused" in one]
    assert len(refusals) > 20
    assert {one["refused"] for one in refusals} <= set(RULES)
    assert all(set(one) == {"refused", "sentence", "side"} for one in refusals)
    assert all(isinstance(entry, str) for one in refusals for entry in one.values())
    for one in values["verdicts"]:
        assert one["status"] in STATUSES
        assert (one["status"] == "refused") == (not one["numbers"]) == bool(one["rule"])
    refused = [one for one in values["contrasts"] if "refused" in one["difference"]]
    assert [one["depth"] for one in refused] == [16, 32]
    for one in refused:
        assert one["p"] is None
        assert one["p_holm"] is None
        assert "refused" in one["detectable"]
        assert one["status"] == "refused"


def test_what_is_refused_for_one_series_stands_for_the_other(damaged):
    pre, post = damaged.series
    assert isinstance(pre.transfer, Transfer)
    assert isinstance(post.transfer, Refusal)
    assert "depth 16, 32" in post.transfer.sentence
    assert isinstance(post.loss_law, Refusal)
    assert isinstance(pre.loss_law, Decay)


def test_s1_50_one_learning_rate_for_all_is_no_comparison():
    untuned = analyse(sweep(product(rates=(RATES[3],))))
    ranking = verdict(untuned, "ranking")
    assert (ranking.status, ranking.rule, ranking.numbers) == ("refused", "not_tuned", {})
    assert "not ranked" in ranking.sentence
    assert not any(one.id.startswith("ranking/") for one in untuned.verdicts)
    for one in untuned.contrasts:
        assert isinstance(one.difference, Refusal)
        assert isinstance(one.detectable, Refusal)
        assert one.difference.rule == "not_tuned"
    for series in untuned.series:
        assert isinstance(series.transfer, Refusal)
        assert {series.transfer.rule, series.loss_law.rule} == {"not_tuned"}
        assert all(
            one.basin.rule == "not_tuned" and isinstance(one.best_loss, Estimate) for one in series.arms
        )
        assert "not tuned" in series.arms[0].best_loss_note
    starts = [one.sentence for one in untuned.open_questions if one.topic == "start"]
    assert "warm-up 0.1" in starts[0]
    assert "initialization scaled" in starts[0]


def test_s1_50_tuned_series_are_ranked(whole):
    assert not any(one.id == "ranking" for one in whole.verdicts)
    assert sum(one.id.startswith("ranking/") for one in whole.verdicts) == len(DEPTHS)


def test_one_seed_gives_points_and_no_interval():
    found = analyse(sweep(product(seeds=(0,))))
    for one in found.series[0].arms:
        assert isinstance(one.best_loss, Refusal)
        assert one.best_loss.rule == "one_value"
        assert len(one.rates[3].losses) == 1  # the point stays to be seen
        assert isinstance(one.basin, Refusal)
    assert not any(one.status == "pass" and one.id.startswith("ranking") for one in found.verdicts)


def test_a_minimum_at_the_edge_asks_for_a_rate_and_says_upper_bound():
    found = analyse(sweep(product(rates=RATES[:3])))
    for one in found.series[0].arms:
        assert isinstance(one.basin, Refusal)
        assert (one.basin.rule, one.basin.side) == ("edge_right", "right")
        assert "upper bound" in one.best_loss_note
    assert any(
        one.topic == "rates" and "a higher learning rate" in one.sentence for one in found.open_questions
    )


def test_a_label_is_made_of_what_varies():
    alone = analyse(sweep(product(residuals=("pre_norm",))))
    assert [one.label for one in alone.series] == ["all"]
    assert alone.contrasts == ()
    two = [
        dataclasses.replace(
            one, warmup=warmup, axes={**one.axes, "optimizer.warmup": warmup}, id=f"{one.id}-{warmup}"
        )
        for one in product()
        for warmup in (0.0, 0.1)
    ]
    labels = [one.label for one in analyse(sweep(two)).series]
    assert labels[0] == "residual=pre_norm, warmup=0.0"
    assert len(labels) == len(set(labels)) == 4


def test_programs_with_other_numbers_of_lanes_are_not_compared():
    halved = [dataclasses.replace(one, lanes=10) if one.depth == 32 else one for one in product()]
    found = analyse(sweep(halved)).series[0]
    assert isinstance(found.time, Refusal)
    assert isinstance(found.bytes, Refusal)
    assert found.time.rule == "lanes_differ"
    assert arm(found, 32).lanes == (10,)


def test_training_losses_stand_in_only_where_no_run_was_validated():
    unvalidated = [dataclasses.replace(one, val_loss=None) for one in product()]
    found = analyse(sweep(unvalidated))
    assert found.conventions["loss"].startswith("training loss")
    one_left = [*product()[:1], *unvalidated[1:]]
    assert analyse(sweep(one_left)).series[0].arms[0].rates[0].evidence == 1


def test_a_seed_that_misses_a_depth_is_left_out_of_the_laws_and_counted(whole):
    holed = [
        lost(one, "killed", "its worker died twice") if (one.depth, one.seed) == (8, 1) else one
        for one in product()
    ]
    found, full = analyse(sweep(holed)).series[0].gradient_start, whole.series[0].gradient_start
    assert isinstance(found, Power)
    assert isinstance(full, Power)
    assert (found.excluded, full.excluded) == (1, 0)
    assert found.exponent.value == pytest.approx(full.exponent.value, abs=1e-9)


def test_as_dict_never_holds_a_number_that_is_not_finite(whole):
    broken_numbers = Verdict(id="x", status="pass", sentence="", numbers={"slope": math.nan})
    with pytest.raises(ValueError, match="finite"):
        dataclasses.replace(whole, verdicts=(broken_numbers,)).as_dict()


def test_falling_curves_are_named(whole):
    assert verdict(whole, "horizon").status == "warn"
    flat = [dataclasses.replace(one, still_falling=0.01 * (one.seed - 1)) for one in product()]
    assert verdict(analyse(sweep(flat)), "horizon").status == "pass"


def test_a_sweep_that_has_not_begun_says_so():
    nothing = [lost(one, "missing", "") for one in product()]
    found = analyse(sweep(nothing))
    json.dumps(found.as_dict(), allow_nan=False)
    assert found.failures.counts == {"missing": 210}
    assert not any(one.status in ("pass", "fail") for one in found.verdicts)
    with pytest.raises(ValueError, match="no runs"):
        analyse(dataclasses.replace(sweep(product()), results=()))
