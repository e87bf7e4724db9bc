"""LayerNorm Scaling: the deeper the block, the less of its normalized input its branches read.

x + f(norm(x) / sqrt(l)),  l the number of the block, from 1                                     (arXiv 2502.05795)

Both sublayers of a block divide by the same number, as in the authors' code; the first block is pre-norm's. The
division comes after the norm's own scale and bias. The factor does not depend on how many blocks there are.
"""

import flax.linen as nn
import numpy as np

from jaxblock.config import ModelConfig
from jaxblock.functional import residual
from jaxblock.modules.norm import Norm
from jaxblock.residual.contract import Topology
from jaxblock.residual.declarations import additive_mixing, no_flops, norm_parameters, passes
from jaxblock.residual.place import place
from jaxblock.types import Array, Branch


class LayerNormScaling(nn.Module):
    """x + f(norm(x) / sqrt(l))."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: Array, f: Branch) -> Array:
        """Return the stream with the branch of its norm, divided by the root of the block's number, added."""
        norm = Norm(self.config, name="norm")
        return residual.layer_norm_scaling(x, f, norm, place(self).block + 1)


def layer_norm_scaling() -> Topology:
    """Return LayerNorm Scaling."""

    def mixing(config: ModelConfig) -> np.ndarray:
        """Return a running sum's, each row divided as its sublayer divides what it reads."""
        table = additive_mixing(config)
        blocks_S = np.arange(config.sublayers) * config.depth // config.sublayers
        table[:-1] /= np.sqrt(blocks_S + 1.0)[:, None]
        return table

    return Topology(
        LayerNormScaling,
        "x + f(norm(x) / sqrt(l)), l = the block's number from 1",
        "arXiv 2502.05795",
        parameters=lambda config: norm_parameters(config, config.sublayers + 1),
        mixing=mixing,
        flops=no_flops,
        traffic=passes(4),
        advice="sweep its learning rate by itself before judging it: the best one in DepthBench was 1e-2, against 2e-3 "
        "for other placements (arXiv 2609.32534); not with the gpt2 initialization, which weakens it",
    )
