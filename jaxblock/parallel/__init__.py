"""Data parallelism: rows of a batch on many devices, one device's numbers."""

from jaxblock.parallel.meshes import data_mesh, replicate, rows_per_device, shard_batch
from jaxblock.parallel.pmap import TargetMean, mean_and_gradient, pmap_mean_and_gradient

__all__ = [
    "TargetMean",
    "data_mesh",
    "mean_and_gradient",
    "pmap_mean_and_gradient",
    "replicate",
    "rows_per_device",
    "shard_batch",
]
