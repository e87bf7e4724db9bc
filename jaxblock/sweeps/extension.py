"""Wider learning-rate grids: where an arm's lowest loss lies at the edge of its grid, the next rate is measured too."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxblock.sweeps.plan import Plan, Run
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
    their geometric mean. An arm whose runs are not all there, or that has one rate, is left as it is.
    """
    arms: dict[str, list[Result]] = {}
    for result in results:
        rest = {path: value for path, value in result.axes.items() if path not in (RATE, SEED)}
        arms.setdefault(repr(sorted(rest.items())), []).append(result)
    found = []
    for runs in arms.values():
        rate = _next_rate(runs)
        if rate is not None:
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
        holds = [rate for rate, wall in zip(grid.rates_R, grid.wall, strict=True) if not wall]
        fails = [rate for rate in grid.rates_R if rate > max(holds)]
        return _rounded(math.sqrt(max(holds) * min(fails))) if fails else None
    return None


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
    arm = ", ".join(_words(runs[0].axes))
    return Wider(tuple(new), f"the learning rates of {arm or 'the only arm'} are widened by {rate:g}")


def _words(axes: Mapping[str, Any]) -> Iterable[str]:
    return (f"{path} = {value}" for path, value in axes.items() if path not in (RATE, SEED))


def _rounded(rate: float) -> float:
    """Return the rate to 6 digits, so that the next one down or up is written as a person would."""
    return float(np.format_float_positional(rate, precision=6, fractional=False))
