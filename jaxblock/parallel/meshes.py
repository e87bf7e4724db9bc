"""Meshes of devices, and batches placed on them by rows.

A mesh has four axes: "replica" (copies across a slow network), "data" (rows of the batch), "fsdp" (rows of the batch,
and parameters by their width) and "tensor" (heads, hidden units and vocabulary); an axis of size 1 does nothing. All
are `Auto`: a jitted function of arrays placed on the mesh is parallel without a word of it in its code, since the
compiler propagates shardings and adds partial sums (GSPMD, arXiv 2105.04663). The one module that makes meshes.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxblock.contracts import check_integer
from jaxblock.types import Params

REPLICA, DATA, FSDP, TENSOR = "replica", "data", "fsdp", "tensor"
AXES = (REPLICA, DATA, FSDP, TENSOR)
ROWS = (REPLICA, DATA, FSDP)
"""The axes over which the rows of a batch are split."""


class MeshShape(NamedTuple):
    """Devices along each axis of a mesh."""

    replica: int = 1
    data: int = 1
    fsdp: int = 1
    tensor: int = 1

    @property
    def devices(self) -> int:
        """How many devices the mesh has."""
        return self.replica * self.data * self.fsdp * self.tensor

    @property
    def rows(self) -> int:
        """Over how many devices the rows of a batch are split."""
        return self.replica * self.data * self.fsdp


def mesh_shape(
    *, replica: int, data: int | None, fsdp: int, tensor: int, devices: int, processes: int = 1
) -> MeshShape:
    """Return the shape of a mesh of at most `devices`; `data` None = all that the other axes leave.

    Raises:
      ValueError: a size below 1, or a product that does not fit the devices: of several processes all are used.
    """
    sizes = {"replica": replica, "fsdp": fsdp, "tensor": tensor}
    for name, size in (sizes | ({} if data is None else {"data": data})).items():
        check_integer(f"parallel.{name}", size, least=1)
    words = ", ".join(f"parallel.{name} = {size}" for name, size in sizes.items())
    others = replica * fsdp * tensor
    if data is None:
        if others > devices or devices % others:
            raise ValueError(
                f"{words} take {others} devices, and there are {devices}: their product must divide the devices "
                "(a run's own sizes stand in its config.toml; a flag such as --parallel.fsdp 1 changes them)"
            )
        data = devices // others
    shape = MeshShape(replica, data, fsdp, tensor)
    if shape.devices > devices or (processes > 1 and shape.devices != devices):
        most = "at most" if processes == 1 else "with several processes"
        raise ValueError(
            f"{words} and parallel.data = {data} take {shape.devices} devices, and there are {devices}: the product "
            f"must be {most} the number of devices; parallel.data left out takes what the others leave"
        )
    return shape


def make_mesh(shape: MeshShape, devices: Sequence[Any] | None = None) -> Mesh:
    """Return a mesh of the devices (left out: all, in an order that suits their network) with all four axes.

    Raises:
      ValueError: another number of devices than the shape's product.
    """
    devices = jax.devices() if devices is None else devices
    if len(devices) != shape.devices:
        raise ValueError(f"a mesh of shape {shape} has {shape.devices} devices; there are {len(devices)}")
    return jax.make_mesh(tuple(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def data_mesh(devices: Sequence[Any] | None = None) -> Mesh:
    """Return a mesh of the devices (left out: all of them) along the one axis "data"."""
    devices = jax.devices() if devices is None else devices
    return jax.make_mesh((len(devices),), (DATA,), axis_types=(AxisType.Auto,), devices=devices)


def row_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding of an array [B, ...] by rows, over all axes of the mesh that split rows."""
    return NamedSharding(mesh, PartitionSpec(tuple(name for name in ROWS if name in mesh.axis_names)))


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding of an array that is whole on every device."""
    return NamedSharding(mesh, PartitionSpec())


def shard_batch(batch: Any, mesh: Mesh) -> Any:
    """Place a batch, a pytree of arrays [B, ...], with an equal part of the rows on each device that splits them.

    Raises ValueError where the rows do not divide by the devices.
    """
    rows_per_device(batch, row_devices(mesh))
    return jax.device_put(batch, row_sharding(mesh))


def replicate(params: Params, mesh: Mesh) -> Params:
    """Place every leaf of a pytree whole on each device of the mesh."""
    return jax.device_put(params, replicated(mesh))


def row_devices(mesh: Mesh) -> int:
    """Return over how many devices of the mesh the rows of a batch are split."""
    count = 1
    for name in ROWS:
        count *= mesh.shape.get(name, 1)
    return count


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
