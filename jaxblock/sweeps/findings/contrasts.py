"""Every series against the reference, depth by depth: paired by seed, each side at its own fitted optimum.

One decision: a difference is resolved where its interval leaves 0 out. The interval is adjusted for the number of
contrasts that can be made (Bonferroni) and widened by the misfits of both parabolas. Holm's p is never above the
Bonferroni p, so a resolved difference has p_holm < .05; where Holm's p alone is below it, the phrase says so.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxblock.sweeps.findings.arms import Measured
from jaxblock.sweeps.findings.records import Contrast
from jaxblock.sweeps.statistics.basin import Basin
from jaxblock.sweeps.statistics.estimate import Estimate, Refusal
from jaxblock.sweeps.statistics.paired import Paired, holm, paired_difference

LEVEL = 0.05


def contrasts_of(measured: Mapping[str, Sequence[Measured]]) -> tuple[Contrast, ...]:
    """Return the contrasts of all series against the first, adjusted together."""
    labels = list(measured)
    sides = []
    for label in labels[1:]:
        references = {one.arm.depth: one for one in measured[labels[0]]}
        sides += [
            Sides(label, one, labels[0], references[one.arm.depth])
            for one in measured[label]
            if one.arm.depth in references
        ]
    comparisons = max(1, sum(not isinstance(compared(both, 1), Refusal) for both in sides))
    found = [contrast(both, comparisons) for both in sides]
    adjusted = iter(holm([one.p for one in found if one.p is not None]))
    return tuple(one if one.p is None else judged(one, next(adjusted)) for one in found)


class Sides(NamedTuple):
    """What is compared: a series and the reference at one depth."""

    label: str
    one: Measured
    reference: str
    other: Measured


def compared(both: Sides, comparisons: int) -> Paired | Refusal:
    """Return the paired difference at both optima, its interval adjusted for so many comparisons."""
    one, other = both.one.arm.basin, both.other.arm.basin
    if isinstance(one, Refusal) or isinstance(other, Refusal):
        return untuned(both)
    first, second = both.one.optimum_losses, both.other.optimum_losses
    seeds = sorted({*both.one.seeds, *both.other.seeds})
    return paired_difference(
        np.array([first.get(seed, np.nan) for seed in seeds]),
        np.array([second.get(seed, np.nan) for seed in seeds]),
        comparisons=comparisons,
        misfit=one.misfit + other.misfit,
    )


def contrast(both: Sides, comparisons: int) -> Contrast:
    """Return one contrast; its p is not yet adjusted."""
    found = compared(both, comparisons)
    pairs = len(set(both.one.optimum_losses) & set(both.other.optimum_losses))
    refused = isinstance(found, Refusal)
    basins = (both.one.arm.basin, both.other.arm.basin)
    return Contrast(
        series=both.label,
        reference=both.reference,
        depth=both.one.arm.depth,
        detectable=found if refused else found.detectable,
        difference=found if refused else found.difference,
        comparisons=0 if refused else comparisons,
        misfit=None if refused else sum(basin.misfit for basin in basins if isinstance(basin, Basin)),
        p=None if refused else found.p,
        p_holm=None,
        pairs=pairs,
        excluded=len({*both.one.seeds, *both.other.seeds}) - pairs,
        status="refused",
        phrase=f"refused: {found.sentence}" if refused else "",
    )


def untuned(both: Sides) -> Refusal:
    """Return why the two sides cannot be compared: each needs a learning-rate optimum of its own."""
    for name, side in ((both.label, both.one), (both.reference, both.other)):
        basin = side.arm.basin
        if isinstance(basin, Refusal):
            rule = "not_tuned" if basin.rule == "not_tuned" else "no_optimum"
            return Refusal(rule=rule, sentence=f"{name} at depth {side.arm.depth}: {basin.sentence}")
    raise ValueError("both sides have an optimum: the comparison is not refused")


def judged(found: Contrast, p_holm: float) -> Contrast:
    """Return a contrast with its adjusted p, its status and the phrase for it."""
    assert isinstance(found.difference, Estimate)
    if found.difference.excludes(0.0):
        phrase = "better" if found.difference.value < 0 else "worse"
        return dataclasses.replace(found, p_holm=p_holm, status="resolved", phrase=phrase)
    # Holm rejects more than the interval shows: the interval decides, so that no two numbers disagree.
    phrase = (
        "not resolvable"
        if p_holm >= LEVEL
        else "not resolvable: its interval, for all contrasts at once, holds 0"
    )
    return dataclasses.replace(found, p_holm=p_holm, status="not resolvable", phrase=phrase)
