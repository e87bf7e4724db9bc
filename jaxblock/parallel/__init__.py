"""Many devices, many processes: meshes, the rules table, pmap; one device's numbers."""

from jaxblock.parallel.meshes import (
    MeshShape,
    data_mesh,
    make_mesh,
    mesh_shape,
    replicate,
    rows_per_device,
    shard_batch,
)
from jaxblock.parallel.placement import Mapped, OneDevice, OnMesh, Placement
from jaxblock.parallel.pmap import TargetMean, mean_and_gradient, pmap_mean_and_gradient
from jaxblock.parallel.processes import Group
from jaxblock.parallel.rules import (
    PARAMETER_AXES,
    bytes_per_device,
    parameter_shardings,
    state_shardings,
    use_mesh,
)

__all__ = [
    "PARAMETER_AXES",
    "Group",
    "Mapped",
    "MeshShape",
    "OnMesh",
    "OneDevice",
    "Placement",
    "TargetMean",
    "bytes_per_device",
    "data_mesh",
    "make_mesh",
    "mean_and_gradient",
    "mesh_shape",
    "parameter_shardings",
    "pmap_mean_and_gradient",
    "replicate",
    "rows_per_device",
    "shard_batch",
    "state_shardings",
    "use_mesh",
]
