"""Residual connections: the contract, the combinator that runs them, and the registry that names them."""

from jaxblock.residual.combinator import STREAM_AXES, residual
from jaxblock.residual.placements import BranchNorm, NoResidual, PeriNorm, PostNorm, PreNorm
from jaxblock.residual.registry import REGISTRY, topology
from jaxblock.residual.topology import Topology

__all__ = [
    "REGISTRY",
    "STREAM_AXES",
    "BranchNorm",
    "NoResidual",
    "PeriNorm",
    "PostNorm",
    "PreNorm",
    "Topology",
    "residual",
    "topology",
]
