"""The pure parts of the query and key experiment: equal parameters, and its tables on losses whose truth is planted."""

import csv

import numpy as np
import pytest
from scipy import stats

from experiments import query_key_grid as grid
from experiments.query_key_grid import CELLS, CONTRASTS, MODEL, RATES, REFERENCE, SEEDS, Comparison
from jaxblock.accounting import abstract_parameters, count_parameters, decoder_parameters
from jaxblock.config import ModelConfig
from jaxblock.sweeps.results import Result, Sweep
from jaxblock.sweeps.statistics import Estimate, Paired, Refusal, holm

QUERY, KEY, INTERACTION = list(CONTRASTS)[:3]
LEVELS = {
    "pre_norm": 2.5,
    "static_layer": 2.4,
    "static_content": 2.35,
    "dynamic_layer": 2.3,
    "dynamic_content": 2.05,
}
"""Query: -0.1 under layer keys and -0.3 under content keys, so -0.2 on average and an interaction of -0.2."""
ADDITIVE = {**LEVELS, "dynamic_content": 2.25}


def swept(
    levels: dict[str, float], *, noise: float = 1e-3, edge: str = "", rough: str = ""
) -> dict[str, Sweep]:
    """Sweeps whose loss is level + offset of arm and seed + 0.05 octaves from 8e-3, squared.

    The arm `edge` falls to the last rate; the arm `rough` has noise of its own in every run, far above its curve.
    """
    draws, found = np.random.default_rng(0), {}
    for cell in CELLS:
        offset_S, best = noise * draws.normal(size=len(SEEDS)), 10.0 if cell.name == edge else 8e-3
        own_RS = (0.5 if cell.name == rough else 0.0) * draws.normal(size=(len(RATES), len(SEEDS)))
        own_RS[4] -= 1.0 if cell.name == rough else 0.0  # the lowest mean stays inside the grid
        runs = tuple(
            run(cell, rate, seed, levels[cell.name] + 0.1 * seed + offset_S[seed] + own_RS[r, seed] + curve)
            for r, rate in enumerate(RATES)
            for curve in [0.05 * np.log2(rate / best) ** 2]
            for seed in SEEDS
        )
        found[cell.name] = Sweep(
            name=cell.name,
            plan={},
            axes={},
            fixed={},
            results=runs,
            events=(),
            environment={"jaxblock": "0", "cores": 2},
            tokens_per_step=512,
            uniform_loss=np.log(256),
        )
    return found


def run(cell: grid.Cell, rate: float, seed: int, loss: float) -> Result:
    about = {"initialization": "plain", "parametrization": "standard", "warmup": 0.05, "planned_steps": 300}
    done = {"outcome": "ok", "lanes": 15, "compile_s": 10.0, "step_s": 1.0}
    return Result(
        id=f"{cell.name}{rate}{seed}",
        axes={"optimizer.learning_rate": rate, "run.seed": seed},
        depth=6,
        sublayers=12,
        width=64,
        residual=cell.residual,
        learning_rate=rate,
        seed=seed,
        val_loss=float(loss),
        last_loss=float(loss),
        **about,
        **done,
    )


def compared(sweeps: dict[str, Sweep], *, at: str = "fitted") -> dict[str, Comparison]:
    return grid.compare(grid.measure(sweeps), at=at)


def interval(one: Comparison) -> Estimate:
    assert isinstance(one.difference, Estimate)
    return one.difference


def test_all_arms_have_the_same_parameters_within_half_a_percent():
    totals = {cell.name: count_parameters(abstract_parameters(grid.model_of(cell))).total for cell in CELLS}
    assert totals == {cell.name: decoder_parameters(grid.model_of(cell)) for cell in CELLS}
    assert max(totals.values()) - min(totals.values()) < 0.005 * min(totals.values())


def test_without_a_narrower_feed_forward_a_dynamic_query_has_more():
    totals = [
        decoder_parameters(ModelConfig(**MODEL, residual=cell.residual, hidden=grid.FULL_HIDDEN))
        for cell in CELLS
    ]
    assert max(totals) - min(totals) > 0.1 * min(totals)


def test_the_arms_differ_in_residual_and_hidden_alone():
    plans = [grid.plan_of(cell) for cell in CELLS]
    assert len({repr(plan.axes) for plan in plans}) == 1
    for plan in plans:
        shared = {section: dict(entries) for section, entries in plan.shared.items()}
        del shared["model"]["residual"], shared["model"]["hidden"]
        assert shared == {
            "run": {"steps": grid.STEPS},
            "model": MODEL,
            "execution": {"remat": "none"},
            "data": {"batch": 8, "validation_tokens": 32768},
        }
    assert len(RATES) >= 5
    np.testing.assert_allclose(np.divide(RATES[1:], RATES[:-1]), 2.0)


def test_the_grid_has_each_cell_once_and_contrasts_sum_to_zero():
    assert {(cell.query, cell.key) for cell in CELLS if cell.query} == {
        ("static", "layer"),
        ("static", "content"),
        ("dynamic", "layer"),
        ("dynamic", "content"),
    }
    for weights in CONTRASTS.values():
        assert sum(weights.values()) == 0
    table = np.array(
        [[CONTRASTS[name][cell.name] for cell in CELLS[1:]] for name in (QUERY, KEY, INTERACTION)]
    )
    np.testing.assert_array_equal(table @ table.T, np.diag([1.0, 1.0, 4.0]))  # orthogonal


@pytest.mark.parametrize("at", ["fitted", "measured"])
def test_planted_effects_are_found(at):
    found = compared(swept(LEVELS), at=at)
    truth = {QUERY: -0.2, KEY: -0.15, INTERACTION: -0.2} | {
        f"{name} less {REFERENCE}": level - LEVELS[REFERENCE]
        for name, level in LEVELS.items()
        if name != REFERENCE
    }
    assert set(found) == set(truth)
    for name, value in truth.items():
        one = found[name]
        assert not interval(one).excludes(value)
        assert interval(one).value == pytest.approx(value, abs=5e-3)
        assert one.verdict == "resolved, lower"


def test_an_additive_truth_has_no_interaction_and_the_table_says_not_resolved():
    found = compared(swept(ADDITIVE))
    assert found[INTERACTION].verdict == "not resolved"
    assert interval(found[INTERACTION]).value == pytest.approx(0.0, abs=5e-3)
    assert found[QUERY].verdict == "resolved, lower"
    row = next(line for line in grid.effect_rows(found) if INTERACTION in line)
    assert "not resolved" in row


def test_exchanging_two_cells_turns_the_interaction_round():
    turned = {
        **LEVELS,
        "static_layer": LEVELS["dynamic_layer"],
        "dynamic_layer": LEVELS["static_layer"],
        "static_content": LEVELS["dynamic_content"],
        "dynamic_content": LEVELS["static_content"],
    }
    assert interval(compared(swept(turned))[INTERACTION]).value == pytest.approx(0.2, abs=5e-3)
    assert compared(swept(turned))[QUERY].verdict == "resolved, higher"


def test_noise_resolves_nothing_and_the_detectable_effect_grows_with_it():
    small, large = (compared(swept(LEVELS, noise=noise)) for noise in (1e-3, 0.3))
    assert all(one.verdict == "not resolved" for one in large.values())
    for name in small:
        assert (large[name].detectable or 0) > 100 * (small[name].detectable or np.inf)


def test_differences_are_those_of_a_paired_t_test_with_bonferroni_intervals_and_holm_p():
    sweeps = swept(LEVELS, noise=0.05)
    found = compared(sweeps)
    # The parabola is exact, so the loss at its vertex is what was planted: 8e-3 is one of the rates.
    at = {name: at_rate(one, 8e-3) for name, one in sweeps.items()}
    n, raw = len(SEEDS), []
    for name, weights in CONTRASTS.items():
        difference_S = sum((weight * at[arm] for arm, weight in weights.items()), np.zeros(n))
        mean, error = difference_S.mean(), difference_S.std(ddof=1) / n**0.5
        half = stats.t.isf(0.025 / len(CONTRASTS), n - 1) * error
        ours = interval(found[name])
        assert (ours.value, ours.low, ours.high) == pytest.approx((mean, mean - half, mean + half), abs=1e-9)
        raw.append(2 * stats.t.sf(abs(mean) / error, n - 1))
    adjusted = [one.p for one in found.values()]
    assert adjusted == pytest.approx(list(holm(raw)), rel=1e-6)
    assert adjusted != pytest.approx(raw, rel=1e-2)


def at_rate(sweep: Sweep, rate: float) -> np.ndarray:
    return np.array([run.val_loss for run in sweep.results if run.learning_rate == rate], np.float64)


@pytest.mark.parametrize("at", ["fitted", "measured"])
def test_an_arm_whose_optimum_is_not_inside_the_grid_is_refused_and_not_ranked(at):
    found = compared(swept(LEVELS, edge="dynamic_layer"), at=at)
    refused = {name for name, one in found.items() if isinstance(one.difference, Refusal)}
    assert refused == {QUERY, KEY, INTERACTION, f"dynamic_layer less {REFERENCE}"}
    assert all("dynamic_layer" in found[name].verdict for name in refused)
    rest = [one for name, one in found.items() if name not in refused]
    assert all("for 7 comparisons" in interval(one).interval for one in rest)  # refused ones are counted
    smallest = min(one.p for one in rest if one.p is not None)
    names, arms = [one.name for one in rest], grid.measure(swept(LEVELS, edge="dynamic_layer"))
    alone = [grid.paired(arms, CONTRASTS[name], at=at, comparisons=1) for name in names]
    assert smallest == pytest.approx(7 * min(one.p for one in alone if isinstance(one, Paired)))


def test_an_arm_without_a_fitted_optimum_is_compared_at_its_best_measured_rate_alone():
    sweeps = swept(LEVELS, rough="dynamic_content")
    fitted, measured = (compared(sweeps, at=at)[INTERACTION] for at in ("fitted", "measured"))
    assert isinstance(fitted.difference, Refusal)
    assert fitted.verdict.startswith("refused, dynamic_content is not tuned")
    assert isinstance(measured.difference, Estimate)
    arms = grid.measure(sweeps)
    rows = grid.arm_rows(arms, grid.compare(arms, at="measured"))
    assert next(line for line in rows if "| dynamic_content |" in line).count("refused") == 2


def test_table_page_and_figure(tmp_path):
    sweeps = swept(LEVELS)
    arms = grid.measure(sweeps)
    text = grid.page(sweeps, arms)
    for cell in CELLS:
        model = grid.model_of(cell)
        line = next(line for line in text.splitlines() if line.startswith(f"| {cell.name} |"))
        assert f"| {model.num_hidden} | {decoder_parameters(model):,} " in line
    assert text.count("resolved, lower") == 2 * len(CONTRASTS) + 4
    assert "python -m experiments.query_key_grid" in text
    grid.write_runs(tmp_path / "runs.csv", sweeps)
    with (tmp_path / "runs.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(CELLS) * len(RATES) * len(SEEDS)
    written = [float(row["val_loss"]) for row in rows if row["arm"] == REFERENCE]
    assert written == pytest.approx([run.val_loss for run in sweeps[REFERENCE].results], abs=1e-6)
    grid.draw(tmp_path / "figure.png", arms)
    assert (tmp_path / "figure.png").stat().st_size > 10_000


def test_a_program_is_counted_once_whatever_its_lanes():
    runs = swept(LEVELS)[REFERENCE].results
    assert grid.seconds_of(runs, steps=300) == 10.0 + 300.0


def test_an_interrupted_sweep_ends_the_whole(tmp_path, monkeypatch):
    begun: list[str] = []

    def run_sweep(plan: grid.Plan, folder) -> int:
        begun.append(folder.name)
        return 130 if len(begun) == 2 else 0

    monkeypatch.setattr(grid, "prepare_sweep", lambda plan: plan)
    monkeypatch.setattr(grid, "run_sweep", run_sweep)
    assert grid.train(tmp_path) == 130
    assert begun == [cell.name for cell in CELLS[:2]]
