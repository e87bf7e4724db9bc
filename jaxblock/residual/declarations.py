"""What several topologies declare in the same words: norm counts, mixing matrices, FLOPs, memory traffic.

FLOPs: a multiply-add of a mixing sum or of a matrix product counts as 2; norms, gates' activations and single factors
are not counted. Traffic: what lies between two branches is taken as one pass over memory, which reads once what it
needs and writes once what it makes.
"""

from collections.abc import Callable

import numpy as np

from jaxblock.config import ModelConfig

GAIN_OF_ZERO = "its gain on the kernels that write to the stream would be lost on zeros"
"""Why a rule with a gain on initial values refuses it."""
ZERO_TIMES_ZERO = "its own factor starts at 0, and of a product of two zeros neither ever moves"
"""Why a rule with a factor that starts at 0 refuses the initialization "zero_output"."""


def norm_parameters(config: ModelConfig, norms: int) -> int:
    """Return the number of parameters of this many norms."""
    per_feature = 2 if config.norm == "layer_norm" and config.bias else 1
    return norms * per_feature * config.width


def additive_mixing(config: ModelConfig) -> np.ndarray:
    """Return the mixing matrix of a running sum, [S + 1, S + 1]: every sublayer reads all before it, weight 1."""
    return np.tri(config.sublayers + 1)


def no_flops(config: ModelConfig) -> int:
    """Return 0: the rule has no sum over sources or streams and no matrix product."""
    return 0


def passes(arrays: int) -> Callable[[ModelConfig], int]:
    """Return the traffic of a rule that moves so many arrays [B, T, D] per sublayer: numbers per token."""
    return lambda config: arrays * config.width * config.sublayers
