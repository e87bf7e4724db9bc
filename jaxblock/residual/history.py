"""A write-once history of [B, T, D] rows: what history topologies keep in their stream.

Rows are written once and never change, so the final history holds every earlier view of it ("rows < count").
The scan over depth (`models.write_once`) uses that: it saves no view, and rebuilds each in the backward pass.
Within a block new rows wait in `recent`, so that reading them needs no copy of the history; the scan files them.

Two histories must never be mixed: of sublayer outputs (attention residuals), of states (DenseFormer). A topology
says which it keeps by what it pushes.
"""

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import chex
import jax
import jax.numpy as jnp

from jaxblock import axes
from jaxblock.contracts import check_integer
from jaxblock.functional.depth_mixing import Sources
from jaxblock.types import Array

T = TypeVar("T")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Recent:
    """A row made in the current block."""

    row_BTD: Array
    present: Array
    """Boolean scalar: False = nothing was made after all, the place stays free."""
    certain: bool = dataclasses.field(default=False, metadata={"static": True})
    """Whether it is known, before anything runs, that the row counts."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class History:
    """Rows so far. Make one with `open_history`."""

    rows_NBTD: Array
    """Capacity N; rows from `count` on are zero."""
    count: Array
    """Rows written, int32 scalar."""
    recent: tuple[Recent, ...] = ()
    """Rows of the current block, not filed yet."""

    def push(self, row_BTD: Array, *, when: Array | None = None) -> "History":
        """Return the history with one more row; `when`, a boolean scalar, says whether it counts.

        Raises AssertionError for a row of another shape, or not floating, or a `when` that is no boolean scalar.
        """
        chex.assert_shape(row_BTD, self.rows_NBTD.shape[1:])
        chex.assert_type(row_BTD, float)
        present = jnp.ones((), jnp.bool_) if when is None else jnp.asarray(when)
        chex.assert_shape(present, ())
        chex.assert_type(present, bool)
        row = Recent(row_BTD.astype(self.rows_NBTD.dtype), present, certain=when is None)
        return dataclasses.replace(self, recent=(*self.recent, row))

    def sources(self) -> Sources:
        """Return every row, as what can be read."""
        capacity = self.rows_NBTD.shape[0]
        present, index, total = [], [], self.count
        for recent in self.recent:
            index.append(total)
            present.append(recent.present)
            total = total + recent.present.astype(jnp.int32)
        chunks = (self.rows_NBTD, *(recent.row_BTD[None] for recent in self.recent))
        filed = jnp.arange(capacity, dtype=jnp.int32)
        return Sources(
            chunks,
            jnp.concatenate([filed < self.count, *(x.reshape(1) for x in present)]),
            jnp.concatenate([filed, *(x.reshape(1) for x in index)]),
        )

    def newest(self) -> Array:
        """Return the newest row, [B, T, D]."""
        row = jax.lax.dynamic_index_in_dim(self.rows_NBTD, self.count - 1, keepdims=False)
        for recent in self.recent:
            row = jnp.where(recent.present, recent.row_BTD, row)
        return row

    def filed(self) -> "History":
        """Return the history with its recent rows written behind the others."""
        rows, count = self.rows_NBTD, self.count
        for recent in self.recent:
            place = jnp.minimum(count, rows.shape[0] - 1)
            old = jax.lax.dynamic_index_in_dim(rows, place, keepdims=False)
            row = jnp.where(recent.present, recent.row_BTD, old)
            rows = jax.lax.dynamic_update_index_in_dim(rows, row, place, axis=0)
            count = count + recent.present.astype(jnp.int32)
        return History(axes.constrain(rows, None, *axes.STREAM_AXES), count)


def open_history(first_BTD: Array, capacity: int) -> History:
    """Return a history of `capacity` rows that holds one.

    Raises ValueError for a capacity below 1, AssertionError unless the row is [B, T, D] and floating.
    """
    check_integer("history: capacity", capacity, least=1)
    chex.assert_rank(first_BTD, 3)
    chex.assert_type(first_BTD, float)
    rows = jnp.zeros((capacity, *first_BTD.shape), first_BTD.dtype)
    rows = axes.constrain(rows.at[0].set(first_BTD), None, *axes.STREAM_AXES)
    return History(rows, jnp.ones((), jnp.int32))


def read_once(read: Callable[..., T], *arguments: object) -> T:
    """Call `read(*arguments)` so that the backward pass keeps the arguments and recomputes what lies between.

    What a read makes on its way (normalized keys, products) has a row for every row of the history; kept for each
    sublayer it would make memory quadratic in depth.
    """
    return jax.checkpoint(read, prevent_cse=False)(*arguments)
