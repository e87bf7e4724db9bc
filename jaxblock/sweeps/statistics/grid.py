"""The measured grid of one arm: learning rates times seeds, with failed and absent runs told apart."""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

WALL = 0.2
"""A rate where more than this fraction of the runs failed is a wall: no part of a fit."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Grid:
    """Losses of one depth of one series. Shapes: R learning rates, S seeds, the same seed in a column."""

    rates_R: np.ndarray
    """Ascending, above zero."""
    losses_RS: np.ndarray
    """NaN where there is no loss: the run failed, or it is absent."""
    absent_RS: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), dtype=bool))
    """True where the missing loss says nothing about the rate (not run, out of memory, killed); none by default."""

    def __post_init__(self) -> None:
        """Bring the arrays to their types; ValueError where shapes, order or values are wrong."""
        rates_R, losses_RS = np.asarray(self.rates_R, np.float64), np.asarray(self.losses_RS, np.float64)
        absent_RS = np.asarray(self.absent_RS, dtype=bool)
        if absent_RS.size == 0:
            absent_RS = np.zeros(losses_RS.shape, dtype=bool)
        if rates_R.ndim != 1 or losses_RS.ndim != 2 or len(rates_R) != len(losses_RS):
            raise ValueError(
                f"rates_R is [R] and losses_RS [R, S]; got {rates_R.shape} and {losses_RS.shape}"
            )
        if absent_RS.shape != losses_RS.shape:
            raise ValueError(f"absent_RS is {losses_RS.shape} as losses_RS; got {absent_RS.shape}")
        if not (np.isfinite(rates_R).all() and (rates_R > 0).all() and (np.diff(rates_R) > 0).all()):
            raise ValueError(f"rates_R is above zero and ascending; got {rates_R.tolist()}")
        if np.isinf(losses_RS).any() or (absent_RS & ~np.isnan(losses_RS)).any():
            raise ValueError("losses_RS is finite or NaN, and NaN where absent_RS is True")
        for name, array in (("rates_R", rates_R), ("losses_RS", losses_RS), ("absent_RS", absent_RS)):
            object.__setattr__(self, name, array)

    @cached_property
    def measured(self) -> np.ndarray:
        """Whether there is a loss."""
        return np.isfinite(self.losses_RS)

    @cached_property
    def failed(self) -> np.ndarray:
        """Number of runs that failed."""
        return (~self.measured & ~self.absent_RS).sum(axis=1)

    @cached_property
    def evidence(self) -> np.ndarray:
        """Number of runs that are not absent."""
        return (~self.absent_RS).sum(axis=1)

    @cached_property
    def wall(self) -> np.ndarray:
        """Whether more than 20 % of the runs failed."""
        return self.failed > WALL * self.evidence

    @cached_property
    def usable(self) -> np.ndarray:
        """Whether a rate may enter a fit: it is no wall and at least one run has a loss."""
        return ~self.wall & self.measured.any(axis=1)

    @cached_property
    def effects(self) -> np.ndarray:
        """Mean loss of each rate as if every seed had run at every rate; NaN where none has a loss.

        Least squares of loss = rate effect + seed offset: the plain means where nothing is missing. A seed that
        fails only at high rates does not tilt the others.
        """
        row_K, column_K = np.nonzero(self.measured)
        effects_R = np.full(len(self.rates_R), np.nan)
        if len(row_K) == 0:
            return effects_R
        rows, row_K = np.unique(row_K, return_inverse=True)
        columns, column_K = np.unique(column_K, return_inverse=True)
        offsets_KS = np.eye(len(columns))[column_K] - 1 / len(columns)  # offsets sum to zero
        design_KP = np.concatenate([np.eye(len(rows))[row_K], offsets_KS[:, 1:]], axis=1)
        effects_R[rows] = np.linalg.lstsq(design_KP, self.losses_RS[self.measured], rcond=None)[0][
            : len(rows)
        ]
        return effects_R

    @cached_property
    def best(self) -> int | None:
        """Position of the lowest mean loss among the usable rates."""
        usable = np.flatnonzero(self.usable)
        return int(usable[np.argmin(self.effects[usable])]) if len(usable) else None
