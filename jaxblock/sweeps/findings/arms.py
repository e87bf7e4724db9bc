"""One depth of a series: its runs, its grid of losses, and every statistic that needs no other depth."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxblock.sweeps.findings.records import Arm, RateRow
from jaxblock.sweeps.results import FAILED, OUTCOMES, Profile, Result, Sweep
from jaxblock.sweeps.statistics.basin import Basin, fit_basin
from jaxblock.sweeps.statistics.estimate import Estimate, Refusal
from jaxblock.sweeps.statistics.fits import Law, growth_law
from jaxblock.sweeps.statistics.grid import Grid
from jaxblock.sweeps.statistics.means import mean_interval, proportion_interval
from jaxblock.sweeps.statistics.transfer import sensitivity, stable_rate

TRAINED = ("ok", "plateau")
"""Outcomes whose loss counts."""


@dataclass(frozen=True, kw_only=True)
class Losses:
    """Which loss of a run is compared in this sweep, and what a failed run counts where it has to count."""

    validation: bool
    """Validation loss; else the mean training loss over the last tenth of the steps."""
    cap: float

    @classmethod
    def of(cls, sweep: Sweep) -> "Losses":
        """Return validation losses where any run has one."""
        return cls(validation=any(run.val_loss is not None for run in sweep.results), cap=sweep.uniform_loss)

    def read(self, run: Result) -> float | None:
        """Return the loss of a run that trained to the end."""
        return None if run.outcome not in TRAINED else run.val_loss if self.validation else run.last_loss


@dataclass(frozen=True, kw_only=True)
class Measured:
    """An arm with what fits over depths need: numbers by seed."""

    arm: Arm
    grid: Grid
    seeds: tuple[int, ...]
    """Columns of the grid."""
    growth_start: Mapping[int, float]
    growth_end: Mapping[int, float]
    gradient_start: Mapping[int, float]
    gradient_end: Mapping[int, float]

    @property
    def optimum_losses(self) -> dict[int, float]:
        """Seed -> loss at the fitted optimum."""
        if isinstance(self.arm.basin, Refusal):
            return {}
        pairs = zip(self.seeds, self.arm.basin.seed_losses, strict=True)
        return {seed: loss for seed, loss in pairs if loss is not None}


def grid_of(runs: Sequence[Result], losses: Losses) -> tuple[Grid, tuple[int, ...]]:
    """Return the losses of an arm and the seeds of its columns."""
    rates = sorted({run.learning_rate for run in runs})
    seeds = tuple(sorted({run.seed for run in runs}))
    losses_RS = np.full((len(rates), len(seeds)), np.nan)
    absent_RS = np.ones((len(rates), len(seeds)), dtype=bool)
    for run in runs:
        place = rates.index(run.learning_rate), seeds.index(run.seed)
        loss = losses.read(run)
        absent_RS[place] = loss is None and run.outcome not in FAILED
        losses_RS[place] = np.nan if loss is None else loss
    return Grid(rates_R=np.array(rates), losses_RS=losses_RS, absent_RS=absent_RS), seeds


def rate_rows(grid: Grid, runs: Sequence[Result], *, seeds: Sequence[int], cap: float) -> list[RateRow]:
    """Return what is known of each learning rate."""
    planned = Counter(run.learning_rate for run in runs)
    return [
        rate_row(grid, index, seeds=seeds, total=planned[rate], cap=cap)
        for index, rate in enumerate(grid.rates_R.tolist())
    ]


def rate_row(grid: Grid, index: int, *, seeds: Sequence[int], total: int, cap: float) -> RateRow:
    """Return what is known of one learning rate."""
    measured_S = grid.measured[index]
    losses = tuple(float(loss) for loss in grid.losses_RS[index][measured_S])
    failed, evidence = int(grid.failed[index]), int(grid.evidence[index])
    return RateRow(
        rate=float(grid.rates_R[index]),
        total=total,
        evidence=evidence,
        failed=failed,
        seeds=tuple(seed for seed, measured in zip(seeds, measured_S, strict=True) if measured),
        losses=losses,
        mean=mean_interval(losses),
        capped_mean=mean_interval([*losses, *[cap] * failed]),
        divergence=proportion_interval(failed, evidence),
        wall=bool(grid.wall[index]),
    )


def basin_of(grid: Grid) -> Basin | Refusal:
    """Return the basin; a single learning rate is not tuned, whatever its losses are."""
    if len(grid.rates_R) == 1:
        return Refusal(rule="not_tuned", sentence=f"only the learning rate {grid.rates_R[0]:.3g} was run")
    return fit_basin(grid)


def best_note(basin: Basin | Refusal) -> str:
    """Return how the loss at the grid's best rate must be read."""
    if isinstance(basin, Refusal) and basin.rule == "not_tuned":
        return "at the only learning rate that was run: not tuned"
    chosen = "optimistic: the rate was chosen on the same seeds"
    if isinstance(basin, Refusal) and basin.side == "finer":
        return f"{chosen}; an upper bound of the tuned loss: the rates are too far apart to fit its minimum"
    if isinstance(basin, Refusal) and basin.side:
        return f"{chosen}; an upper bound of the tuned loss: the grid does not enclose the minimum"
    return chosen


def by_seed(runs: Sequence[Result], read: Callable[[Result], float | None]) -> dict[int, float]:
    """Return seed -> the first value that a run of the seed has."""
    found: dict[int, float] = {}
    for run in runs:
        value = read(run)
        if value is not None:
            found.setdefault(run.seed, value)
    return found


def over_seeds(found: Mapping[int, float]) -> Estimate | Refusal:
    """Return the mean over seeds."""
    return mean_interval(list(found.values()))


def growth(profile: Profile | None) -> float | None:
    """Return rms after the last block over rms before the first; None where the stream is not one array or zero."""
    if profile is None or len(profile.stream) < 2 or profile.stream[0] <= 0:
        return None
    return profile.stream[-1] / profile.stream[0]


def laws_of(profiles: Sequence[Profile | None]) -> Law | Refusal:
    """Return the growth law of the profiles that have a stream."""
    return growth_law([profile.stream for profile in profiles if profile is not None and profile.stream])


def first_runs(runs: Sequence[Result]) -> list[Result]:
    """Return one run per seed that has a profile at initialisation: it is the same at every learning rate."""
    found: dict[int, Result] = {}
    for run in runs:
        if run.start is not None:
            found.setdefault(run.seed, run)
    return list(found.values())


def costs_of(runs: Sequence[Result]) -> dict[str, Any]:
    """Return lanes, seconds and bytes of one run's share, and compile seconds, as fields of an `Arm`.

    A widened grid adds programs of few lanes, whose share per run is another: the program with the most lanes speaks.
    """
    programs = {(run.lanes, run.compile_s, run.step_s, run.program_bytes) for run in runs if run.lanes > 0}
    most = max((lanes for lanes, *_ in programs), default=0)
    steps = [step / lanes for lanes, _, step, _ in programs if step is not None and lanes == most]
    sizes = [size / lanes for lanes, _, _, size in programs if size is not None and lanes == most]
    compiles = [compile_s for _, compile_s, _, _ in programs if compile_s is not None]
    return {
        "lanes": tuple(sorted({lanes for lanes, *_ in programs})),
        "step_s": float(np.median(steps)) if steps else None,
        "run_bytes": max(sizes, default=None),
        "compile_s": sum(compiles) if compiles else None,
    }


def measure_arm(runs: Sequence[Result], *, losses: Losses, common: Sequence[float]) -> Measured:
    """Return one arm of a series from all its runs.

    Args:
      runs: at least one; one depth, every learning rate and seed.
      losses: which loss is compared.
      common: learning rates that every depth of the series has, for the sensitivity.
    """
    grid, seeds = grid_of(runs, losses)
    basin = basin_of(grid)
    chosen = [run for run in runs if grid.best is not None and run.learning_rate == grid.rates_R[grid.best]]
    ended = [run for run in chosen if run.outcome in TRAINED]
    values = {
        "growth_start": by_seed(first_runs(runs), lambda run: growth(run.start)),
        "growth_end": by_seed(ended, lambda run: growth(run.end)),
        "gradient_start": by_seed(runs, lambda run: run.first_gradient_norm),
        "gradient_end": by_seed(ended, lambda run: run.last_gradient_norm),
    }
    falling = [run.still_falling for run in ended if run.still_falling is not None]
    rows = rate_rows(grid, runs, seeds=seeds, cap=losses.cap)
    arm = Arm(
        **about(runs),
        **best_of(grid, rows, ended, losses),
        **costs_of(runs),
        growth_start=over_seeds(values["growth_start"]),
        growth_end=over_seeds(values["growth_end"]),
        gradient_start=over_seeds(values["gradient_start"]),
        gradient_end=over_seeds(values["gradient_end"]),
        rates=tuple(rows),
        basin=basin,
        best_loss_note=best_note(basin),
        divergence=proportion_interval(int(grid.failed.sum()), int(grid.evidence.sum())),
        stable_rate=stable_rate(grid),
        sensitivity=sensitivity_of(grid, basin, common=common, first=first_loss(runs, losses.cap)),
        law_start=laws_of([run.start for run in first_runs(runs)]),
        law_end=laws_of([run.end for run in ended]),
        still_falling=mean_interval(falling),
    )
    return Measured(arm=arm, grid=grid, seeds=seeds, **values)


def about(runs: Sequence[Result]) -> dict[str, Any]:
    """Return what all runs of an arm share, and how they ended."""
    counts = Counter(run.outcome for run in runs)
    return {
        "depth": runs[0].depth,
        "sublayers": runs[0].sublayers,
        "width": runs[0].width,
        "parameters": dict(runs[0].parameters),
        "flops_per_token": dict(runs[0].flops_per_token),
        "run_ids": tuple(run.id for run in runs),
        "outcomes": {outcome: counts[outcome] for outcome in OUTCOMES if counts[outcome]},
    }


def best_of(grid: Grid, rows: Sequence[RateRow], ended: Sequence[Result], losses: Losses) -> dict[str, Any]:
    """Return the fields of an `Arm` about its best measured learning rate."""
    if grid.best is None:
        rule = "all_failed" if grid.evidence.any() else "no_values"
        nothing = Refusal(rule=rule, sentence="no learning rate has runs that hold")
        values = {"best_rate": None, "best_loss": nothing, "capped_loss": nothing, "best_losses": {}}
        return {**values, "best_run": "", "worst_run": "", "evaluation_error": None}
    row = rows[grid.best]
    ranked = sorted((loss, run.id) for run in ended if (loss := losses.read(run)) is not None)
    errors = [run.val_error for run in ended if run.val_error is not None]
    return {
        "best_rate": row.rate,
        "best_loss": row.mean,
        "capped_loss": row.capped_mean,
        "best_losses": dict(zip(row.seeds, row.losses, strict=True)),
        "best_run": ranked[0][1],
        "worst_run": ranked[-1][1],
        "evaluation_error": float(np.sqrt(np.square(errors).mean())) if errors else None,
    }


def first_loss(runs: Sequence[Result], uniform: float) -> float:
    """Return the mean loss before any update; that of a uniform guess where no run has one."""
    found = [run.first_loss for run in runs if run.first_loss is not None]
    return float(np.mean(found)) if found else uniform


def sensitivity_of(
    grid: Grid, basin: Basin | Refusal, *, common: Sequence[float], first: float
) -> Estimate | Refusal:
    """Return the learning-rate sensitivity over the common rates."""
    kept_R = np.isin(grid.rates_R, common)
    if kept_R.sum() < 2:
        return Refusal(
            rule="few_rates", sentence="the depths of the series share fewer than 2 learning rates"
        )
    shared = Grid(
        rates_R=grid.rates_R[kept_R], losses_RS=grid.losses_RS[kept_R], absent_RS=grid.absent_RS[kept_R]
    )
    return sensitivity(shared, basin, first_loss=first)
