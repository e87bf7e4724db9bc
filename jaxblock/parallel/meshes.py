"""A mesh with one axis, "data", and what is placed on it: a batch by rows, parameters whole on every device.

A jitted function of arrays placed like this is data parallel without a word of it in its code: the compiler splits
the work by rows and adds the partial gradients (GSPMD, arXiv 2105.04663).
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxblock.types import Params

DATA = "data"
"""Name of the mesh axis over which the rows of a batch are split."""


def data_mesh(devices: Sequence[Any] | None = None) -> Mesh:
    """Return a mesh of the devices (left out: all of them) along "data".

    Its axis is `Auto`: the compiler propagates shardings, and functions need to know of none.
    """
    devices = jax.devices() if devices is None else devices
    return jax.make_mesh((len(devices),), (DATA,), axis_types=(AxisType.Auto,), devices=devices)


def shard_batch(batch: Any, mesh: Mesh) -> Any:
    """Place a batch, a pytree of arrays [B, ...], with B / devices rows on each device along "data".

    Raises ValueError where the rows do not divide by the devices.
    """
    rows_per_device(batch, mesh.shape[DATA])
    return jax.device_put(batch, NamedSharding(mesh, PartitionSpec(DATA)))


def replicate(params: Params, mesh: Mesh) -> Params:
    """Place every leaf of a pytree whole on each device of the mesh."""
    return jax.device_put(params, NamedSharding(mesh, PartitionSpec()))


def rows_per_device(batch: Any, devices: int) -> int:
    """Return B / devices for a batch, a pytree of arrays [B, ...].

    Raises ValueError, naming both numbers, where B is 0 or not a multiple of the devices.
    """
    counts = {leaf.shape[:1] for leaf in jax.tree.leaves(batch)}
    if len(counts) != 1 or () in counts:
        shapes = ", ".join(str(leaf.shape) for leaf in jax.tree.leaves(batch)) or "none"
        raise ValueError(f"the batch has arrays of shapes {shapes}; all must have the same number of rows")
    (rows,) = counts.pop()
    if rows == 0 or rows % devices:
        raise ValueError(
            f"the batch has {rows} rows and there are {devices} devices; the rows must be a multiple of the "
            "devices: change the batch size, or pad it with rows that have no real target"
        )
    return rows // devices
