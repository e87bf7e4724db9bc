"""Residual connections: the contract, the combinator that runs them, and the registry that names them."""

from jaxblock.axes import Label
from jaxblock.residual.combinator import check_same_stream, residual
from jaxblock.residual.contract import Groups, NoGradient, Topology
from jaxblock.residual.depth_rules import check_depth_rules, initializations
from jaxblock.residual.history import History, open_history, read_once
from jaxblock.residual.place import Place, place, told_ahead
from jaxblock.residual.placements import BranchNorm, NoResidual, PeriNorm, PostNorm, PreNorm
from jaxblock.residual.registry import REGISTRY, topology
from jaxblock.types import Views

__all__ = [
    "REGISTRY",
    "BranchNorm",
    "Groups",
    "History",
    "Label",
    "NoGradient",
    "NoResidual",
    "PeriNorm",
    "Place",
    "PostNorm",
    "PreNorm",
    "Topology",
    "Views",
    "check_depth_rules",
    "check_same_stream",
    "initializations",
    "open_history",
    "place",
    "read_once",
    "residual",
    "told_ahead",
    "topology",
]
