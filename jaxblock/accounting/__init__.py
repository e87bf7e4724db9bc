"""What a model costs before it is run: exact parameters, FLOPs per token, bytes, and the peak of known chips."""

from jaxblock.accounting.chips import CHIPS, Chip, model_flops_utilisation, peak_flops
from jaxblock.accounting.depth_mixing import depth_mixing_flops
from jaxblock.accounting.flops import (
    Convention,
    FlopParts,
    block_windows,
    flop_conventions,
    flop_parts,
    training_flops_per_token,
    visible_keys,
)
from jaxblock.accounting.memory import KeptBytes, kept_bytes, kv_cache_bytes, tree_bytes
from jaxblock.accounting.parameters import (
    ParameterCount,
    abstract_parameters,
    branch_parameters,
    count_parameters,
    decoder_parameters,
    pre_norm_parameters,
    table_parameters,
)
from jaxblock.accounting.topologies import TopologyFacts, topology_facts

__all__ = [
    "CHIPS",
    "Chip",
    "Convention",
    "FlopParts",
    "KeptBytes",
    "ParameterCount",
    "TopologyFacts",
    "abstract_parameters",
    "block_windows",
    "branch_parameters",
    "count_parameters",
    "decoder_parameters",
    "depth_mixing_flops",
    "flop_conventions",
    "flop_parts",
    "kept_bytes",
    "kv_cache_bytes",
    "model_flops_utilisation",
    "peak_flops",
    "pre_norm_parameters",
    "table_parameters",
    "topology_facts",
    "training_flops_per_token",
    "tree_bytes",
    "visible_keys",
]
