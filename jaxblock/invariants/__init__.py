"""Value checks of the residual stream, and what a block is from how it behaves."""

from jaxblock.invariants.branches import (
    ZeroBranchReport,
    probe_zero_branches,
    scale_branches,
    switch_block,
    switch_exit,
    zero_branches,
)
from jaxblock.invariants.final_norm import ExitStructure, describe_exit
from jaxblock.invariants.measures import BlockMeasures, View
from jaxblock.invariants.shared_norm import NormSites, find_shared_norms
from jaxblock.invariants.stream import (
    StreamReport,
    TelescopeReport,
    explain_stream,
    inspect_stream,
    name_sublayer,
    require_finite,
    require_telescoping,
    telescope,
)
from jaxblock.invariants.structure import BlockStructure, describe_block, require_structure
from jaxblock.invariants.tokens import CausalityReport, PaddingReport, probe_causality, probe_padding
from jaxblock.invariants.wirings import WIRINGS, Hypothesis

__all__ = [
    "WIRINGS",
    "BlockMeasures",
    "BlockStructure",
    "CausalityReport",
    "ExitStructure",
    "Hypothesis",
    "NormSites",
    "PaddingReport",
    "StreamReport",
    "TelescopeReport",
    "View",
    "ZeroBranchReport",
    "describe_block",
    "describe_exit",
    "explain_stream",
    "find_shared_norms",
    "inspect_stream",
    "name_sublayer",
    "probe_causality",
    "probe_padding",
    "probe_zero_branches",
    "require_finite",
    "require_structure",
    "require_telescoping",
    "scale_branches",
    "switch_block",
    "switch_exit",
    "telescope",
    "zero_branches",
]
