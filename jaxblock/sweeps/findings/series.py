"""From runs to series: what varies names them, and every fit against depth is made here."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxblock.sweeps.findings.arms import Losses, Measured, measure_arm
from jaxblock.sweeps.findings.records import Regret, Series
from jaxblock.sweeps.results import Result, Sweep
from jaxblock.sweeps.statistics.basin import Basin
from jaxblock.sweeps.statistics.decay import Decay, loss_decay
from jaxblock.sweeps.statistics.estimate import Refusal
from jaxblock.sweeps.statistics.fits import Line, Power, power_law, straight_line
from jaxblock.sweeps.statistics.transfer import Transfer, regret, transfer_slope

INNER_AXES = ("model.depth", "optimizer.learning_rate", "run.seed")
"""Axes inside a series; every other one tells series apart."""
NOT_TUNED = Refusal(rule="not_tuned", sentence="every depth of the series ran one learning rate only")


def outer_axes(sweep: Sweep) -> dict[str, str]:
    """Return config path -> short name of the axes that tell series apart: the last word where it is unique."""
    paths = [
        path
        for path, values in sweep.axes.items()
        if path not in INNER_AXES and len(set(map(repr, values))) > 1
    ]
    last = [path.rsplit(".", 1)[-1] for path in paths]
    return {path: name if last.count(name) == 1 else path for path, name in zip(paths, last, strict=True)}


def split_series(sweep: Sweep) -> dict[str, list[Result]]:
    """Return label -> runs, in the plan's order: the first one is the reference."""
    names = outer_axes(sweep)
    found: dict[str, list[Result]] = {}
    for run in sweep.results:
        label = ", ".join(f"{name}={run.axes[path]}" for path, name in names.items()) or "all"
        found.setdefault(label, []).append(run)
    return found


def measure_series(runs: Sequence[Result], losses: Losses) -> tuple[Measured, ...]:
    """Return the arms of one series, by depth."""
    by_depth: dict[int, list[Result]] = {}
    for run in runs:
        by_depth.setdefault(run.depth, []).append(run)
    common = set.intersection(*({run.learning_rate for run in some} for some in by_depth.values()))
    return tuple(
        measure_arm(by_depth[depth], losses=losses, common=sorted(common)) for depth in sorted(by_depth)
    )


def describe_series(
    label: str,
    runs: Sequence[Result],
    measured: Sequence[Measured],
    *,
    axes: Mapping[str, Any],
    reference: bool,
) -> Series:
    """Return the record of one series."""
    first = runs[0]
    base, regrets = regrets_of(measured)
    return Series(
        label=label,
        axes=dict(axes),
        reference=reference,
        residual=first.residual,
        initialization=first.initialization,
        parametrization=first.parametrization,
        warmup=first.warmup,
        arms=tuple(one.arm for one in measured),
        transfer=transfer_of(measured),
        regret_depth=base,
        regrets=regrets,
        growth_start=power_of(measured, [one.growth_start for one in measured]),
        growth_end=power_of(measured, [one.growth_end for one in measured]),
        gradient_start=power_of(measured, [one.gradient_start for one in measured]),
        gradient_end=power_of(measured, [one.gradient_end for one in measured]),
        time=line_of(measured, [one.arm.step_s for one in measured]),
        bytes=line_of(measured, [one.arm.run_bytes for one in measured]),
        loss_law=loss_law_of(measured),
    )


def tuned(measured: Sequence[Measured]) -> bool:
    """Whether some depth ran more than one learning rate."""
    return any(len(one.grid.rates_R) > 1 for one in measured)


def transfer_of(measured: Sequence[Measured]) -> Transfer | Refusal:
    """Return the slope of the optimum against depth."""
    return (
        transfer_slope({one.arm.depth: one.arm.basin for one in measured}) if tuned(measured) else NOT_TUNED
    )


def regrets_of(measured: Sequence[Measured]) -> tuple[int | None, tuple[Regret, ...]]:
    """Return the shallowest depth with an optimum, and what its rate costs at every other depth."""
    base = next((one.arm for one in measured if isinstance(one.arm.basin, Basin)), None)
    if base is None or isinstance(base.basin, Refusal):
        return None, ()
    rate = base.basin.optimum
    return base.depth, tuple(
        Regret(depth=one.arm.depth, regret=regret(one.grid, one.arm.basin, rate))
        for one in measured
        if one.arm.depth != base.depth
    )


def seed_table(by_depth: Sequence[Mapping[int, float]]) -> np.ndarray:
    """Return values [depth, seed] of every seed that occurs, NaN where a depth has none."""
    seeds = sorted({seed for found in by_depth for seed in found})
    table = [[found.get(seed, np.nan) for seed in seeds] for found in by_depth]
    return np.array(table, np.float64).reshape(len(by_depth), len(seeds))


def power_of(measured: Sequence[Measured], values: Sequence[Mapping[int, float]]) -> Power | Refusal:
    """Return the exponent of a quantity against depth."""
    return power_law(np.array([one.arm.depth for one in measured]), seed_table(values))


def line_of(measured: Sequence[Measured], values: Sequence[float | None]) -> Line | Refusal:
    """Return a cost per run against depth; refused where the depths' largest programs trained different numbers."""
    found = [(one.arm, value) for one, value in zip(measured, values, strict=True) if value is not None]
    lanes = sorted({max(arm.lanes) for arm, _ in found})
    if len(lanes) > 1:
        words = ", ".join(map(str, lanes))
        return Refusal(
            rule="lanes_differ",
            sentence=f"the largest programs of the depths have {words} lanes: one run's share is not the same",
        )
    return straight_line([float(arm.depth) for arm, _ in found], [value for _, value in found])


def loss_law_of(measured: Sequence[Measured]) -> Decay | Refusal:
    """Return L(N) = E + A N^-p of the losses at each depth's own optimum; a depth without one is left out."""
    if not tuned(measured):
        return NOT_TUNED
    fitted = [one for one in measured if one.optimum_losses]
    return loss_decay(
        np.array([one.arm.depth for one in fitted]), seed_table([one.optimum_losses for one in fitted])
    )
