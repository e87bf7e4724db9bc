"""Wider learning-rate grids: where an arm's lowest loss lies at the edge of its grid, the next rate is measured too."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxblock.sweeps.plan import LARGEST, SMALLEST, Plan, Run, check_run
from jaxblock.sweeps.results import FAILED, Result
from jaxblock.sweeps.statistics.basin import fit_basin
from jaxblock.sweeps.statistics.estimate import Refusal
from jaxblock.sweeps.statistics.grid import Grid

RATE, SEED = "optimizer.learning_rate", "run.seed"


class Wider(NamedTuple):
    """The runs that one arm's grid is widened by."""

    runs: tuple[Run, ...]
    sentence: str


def wider_runs(plan: Plan, results: Sequence[Result]) -> list[Wider]:
    """Return one more learning rate, with every seed, for each arm whose basin asks for it.

    Left or right of the grid by the grid's own last ratio; between the last rate that holds and the first that fails,
    by that ratio too, but at most half-way; beside the best rate, half-way, where no parabola fits. At most
    `sweep.extend` rates an arm, however often a sweep is started. An arm whose runs are not all there, or that has one
    rate, is left as it is.
    """
    arms: dict[str, list[Result]] = {}
    for result in results:
        rest = {path: value for path, value in result.axes.items() if path not in (RATE, SEED)}
        arms.setdefault(repr(sorted(rest.items())), []).append(result)
    found = []
    for runs in arms.values():
        rates = {run.learning_rate for run in runs}
        if len(rates - set(plan.axes.get(RATE, rates))) >= plan.sweep.extend:
            continue
        rate = _next_rate(runs)
        # In float32, as it is applied: a rate that is there already is no wider grid.
        if (
            rate is not None
            and SMALLEST <= rate <= LARGEST
            and np.float32(rate) not in {np.float32(other) for other in rates}
        ):
            found.append(_wider(plan, runs, rate))
    return found


def _next_rate(runs: Sequence[Result]) -> float | None:
    """Return the rate an arm asks for; None where it asks for none."""
    rates, seeds = sorted({run.learning_rate for run in runs}), sorted({run.seed for run in runs})
    if len(rates) < 2 or any(run.outcome not in ("ok", "plateau", *FAILED) for run in runs):
        return None
    grid = _grid(runs, rates, seeds)
    refusal = fit_basin(grid)
    if not isinstance(refusal, Refusal):
        return None
    if refusal.side == "left":
        return _rounded(rates[0] * rates[0] / rates[1])
    if refusal.side == "right":
        return _rounded(rates[-1] * rates[-1] / rates[-2])
    if refusal.side == "between" or (refusal.rule == "few_rates" and grid.wall.any()):
        return _below_the_wall(grid)
    return _beside_the_best(grid) if refusal.side == "finer" else None


def _beside_the_best(grid: Grid) -> float | None:
    """Return a rate half-way between the best one and the better of its neighbours."""
    usable = np.flatnonzero(grid.usable)
    place = int(np.flatnonzero(usable == grid.best)[0])
    neighbours = usable[[place - 1, place + 1]] if 0 < place < len(usable) - 1 else usable[[place - 1]]
    better = min(neighbours, key=lambda index: grid.effects[index])
    return _rounded(math.sqrt(float(grid.rates_R[grid.best] * grid.rates_R[better])))


def _below_the_wall(grid: Grid) -> float | None:
    """Return a rate between the last that holds and the first that fails: a step of the grid up, or half-way."""
    holds = grid.rates_R[~grid.wall]
    fails = grid.rates_R[grid.wall & (grid.rates_R > holds.max())] if len(holds) else holds
    if not len(fails):
        return None
    step = holds[-1] / holds[-2] if len(holds) > 1 else 2.0
    return _rounded(min(float(holds[-1] * step), math.sqrt(float(holds[-1] * fails[0]))))


def _grid(runs: Sequence[Result], rates: Sequence[float], seeds: Sequence[int]) -> Grid:
    losses_RS = np.full((len(rates), len(seeds)), np.nan)
    absent_RS = np.ones(losses_RS.shape, bool)
    for run in runs:
        place = rates.index(run.learning_rate), seeds.index(run.seed)
        absent_RS[place] = False
        if run.outcome not in FAILED and run.val_loss is not None:
            losses_RS[place] = run.val_loss
    return Grid(rates_R=np.asarray(rates), losses_RS=losses_RS, absent_RS=absent_RS)


def _wider(plan: Plan, runs: Sequence[Result], rate: float) -> Wider:
    seeds = sorted({run.seed for run in runs})
    new = []
    for seed in seeds:
        axes: dict[str, Any] = {**runs[0].axes, RATE: rate}
        if SEED in axes:
            axes[SEED] = seed
        new.append(Run(axes, plan.config(axes)))
        check_run(new[-1])
    arm = ", ".join(_words(runs[0].axes))
    sentence = f"the learning rates of {arm or 'the only arm'} show no optimum yet: {rate:g} is measured too"
    return Wider(tuple(new), sentence)


def _words(axes: Mapping[str, Any]) -> Iterable[str]:
    return (f"{path} = {value}" for path, value in axes.items() if path not in (RATE, SEED))


def _rounded(rate: float) -> float:
    """Return the rate to 6 digits, so that the next one down or up is written as a person would."""
    return float(np.format_float_positional(rate, precision=6, fractional=False))


def widened_again(plan: Plan, axes_of_widened: Iterable[Mapping[str, Any]]) -> list[Run]:
    """Return the runs of this plan at the learning rates that an earlier start widened its arms by.

    An arm that is still in the plan keeps its wider grid, with every seed the plan has now.
    """
    found: dict[str, Run] = {}
    for axes in axes_of_widened:
        rest = {path: value for path, value in axes.items() if path not in (RATE, SEED)}
        if set(axes) != set(plan.axes) or any(value not in plan.axes[path] for path, value in rest.items()):
            continue
        for seed in plan.axes.get(SEED, (None,)):
            new = {path: {RATE: axes[RATE], SEED: seed}.get(path, axes[path]) for path in plan.axes}
            if new[RATE] not in plan.axes[RATE]:
                found[repr(new)] = Run(new, plan.config(new))
    return list(found.values())
