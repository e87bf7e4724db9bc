"""Every series against the reference, depth by depth: paired by seed, each side at its own fitted optimum."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from jaxblock.sweeps.findings.arms import Measured
from jaxblock.sweeps.findings.records import Contrast
from jaxblock.sweeps.statistics.estimate import Refusal
from jaxblock.sweeps.statistics.paired import holm, paired_difference

LEVEL = 0.05


def contrasts_of(measured: Mapping[str, Sequence[Measured]]) -> tuple[Contrast, ...]:
    """Return the contrasts of all series against the first, their p values adjusted together (Holm)."""
    labels = list(measured)
    found = []
    for label in labels[1:]:
        references = {one.arm.depth: one for one in measured[labels[0]]}
        found += [
            contrast(label, one, labels[0], references[one.arm.depth])
            for one in measured[label]
            if one.arm.depth in references
        ]
    tested = [one for one in found if one.p is not None]
    adjusted = iter(holm([one.p for one in tested if one.p is not None]))
    return tuple(one if one.p is None else judged(one, next(adjusted)) for one in found)


def contrast(label: str, one: Measured, reference: str, other: Measured) -> Contrast:
    """Return one contrast, not yet adjusted."""
    first, second = one.optimum_losses, other.optimum_losses
    seeds = sorted({*one.seeds, *other.seeds})
    compared = untuned(label, one, reference, other) or paired_difference(
        np.array([first.get(seed, np.nan) for seed in seeds]),
        np.array([second.get(seed, np.nan) for seed in seeds]),
    )
    pairs = len(set(first) & set(second))
    refused = isinstance(compared, Refusal)
    return Contrast(
        series=label,
        reference=reference,
        depth=one.arm.depth,
        detectable=compared if refused else compared.detectable,
        difference=compared if refused else compared.difference,
        p=None if refused else compared.p,
        p_holm=None,
        pairs=pairs,
        excluded=len(seeds) - pairs,
        status="refused",
    )


def untuned(label: str, one: Measured, reference: str, other: Measured) -> Refusal | None:
    """Return why the two sides cannot be compared: each needs a learning-rate optimum of its own."""
    for name, side in ((label, one), (reference, other)):
        basin = side.arm.basin
        if isinstance(basin, Refusal):
            rule = "not_tuned" if basin.rule == "not_tuned" else "no_optimum"
            return Refusal(rule=rule, sentence=f"{name} at depth {side.arm.depth}: {basin.sentence}")
    return None


def judged(found: Contrast, p_holm: float) -> Contrast:
    """Return a contrast with its adjusted p and its status."""
    assert not isinstance(found.difference, Refusal)
    assert not isinstance(found.detectable, Refusal)
    if abs(found.difference.value) < found.detectable:
        status = "not resolvable"
    else:
        status = "resolved" if p_holm < LEVEL else "not significant"
    return dataclasses.replace(found, p_holm=p_holm, status=status)
