"""What the axes of a plan can never show, said before the hours are spent: pure words of the axes' values."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from jaxblock.sweeps.statistics.basin import LEAST_RATES, LEAST_SEEDS
from jaxblock.sweeps.statistics.fits import LEAST_DEPTHS

WIDEST = 2.5
"""Largest factor between neighbouring learning rates; a little above 2, so that rounded octaves pass."""


def warnings_of(axes: Mapping[str, Sequence[Any]]) -> tuple[str, ...]:
    """Return one sentence per thing that the report of these axes will refuse or widen; () where there is none.

    Args:
      axes: config path -> values, as `Plan.axes`; an axis that is not there has one value.

    Raises:
      ValueError: a learning rate is not above zero.
    """
    rates = sorted({float(rate) for rate in axes.get("optimizer.learning_rate", ())})
    if rates and rates[0] <= 0:
        raise ValueError(f"optimizer.learning_rate is above zero; got {rates[0]:g}")
    seeds, depths = _count(axes, "run.seed"), _count(axes, "model.depth")
    found = []
    if len(rates) < LEAST_RATES:
        found.append(
            f"{_words(max(1, len(rates)), 'learning rate')}: no optimum can be fitted, so no ranking will be given; "
            f"give {LEAST_RATES} or more, neighbours a factor 2 apart, expecting that the highest may fail"
        )
    pairs = list(itertools.pairwise(rates))
    low, high = max(pairs, key=lambda pair: pair[1] / pair[0], default=(1.0, 1.0))
    if high / low > WIDEST:
        found.append(
            f"learning rates {low:g} and {high:g} are a factor {high / low:.3g} apart: the fit may miss the loss "
            "between, which widens every interval or refuses the optimum; give neighbours a factor 2 apart"
        )
    if seeds < LEAST_SEEDS:
        found.append(f"{_words(seeds, 'seed')}: no optimum has an interval; give {LEAST_SEEDS} or more")
    if depths < LEAST_DEPTHS:
        found.append(
            f"{_words(depths, 'depth')}: no law in depth will be given; it needs {LEAST_DEPTHS} or more"
        )
    return tuple(found)


def _count(axes: Mapping[str, Sequence[Any]], path: str) -> int:
    return max(1, len(set(axes.get(path, ()))))


def _words(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")
