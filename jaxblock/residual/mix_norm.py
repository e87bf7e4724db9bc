"""Mix-LN: the first blocks are post-norm, the others pre-norm.

norm(x + f(x)) in the first floor(post L) of L blocks,  x + f(norm(x)) in the rest               (arXiv 2412.13795)

One block is compiled for both: what is read and what is returned are chosen by the block's number, and there is one
norm's parameters. The price is a second evaluation of the norm, a few D of the block's 24 D^2 FLOPs. The final norm
is kept, also with post = 1, where it follows another one.
"""

import functools
import math

import flax.linen as nn

from jaxblock.config import ModelConfig
from jaxblock.contracts import check_number
from jaxblock.functional import residual
from jaxblock.modules.norm import Norm
from jaxblock.residual.contract import Topology
from jaxblock.residual.declarations import additive_mixing, no_flops, norm_parameters, passes
from jaxblock.residual.place import place
from jaxblock.residual.post_scaled import repeated_norm
from jaxblock.types import Array, Branch


class MixNorm(nn.Module):
    """norm(x + f(x)) where the block's number is below `post_blocks`, x + f(norm(x)) elsewhere."""

    config: ModelConfig
    post: float

    @nn.compact
    def __call__(self, x: Array, f: Branch) -> Array:
        """Return the stream by the rule of the block."""
        norm = Norm(self.config, name="norm")
        return residual.mix_norm(x, f, norm, place(self).block < post_blocks(self.config, self.post))


def post_blocks(config: ModelConfig, post: float) -> int:
    """Return floor(post * L), the number of post-norm blocks; a product one round-off below a whole number is it."""
    return math.floor(post * config.depth + 1e-9)


def mix_norm(post: float = 0.25) -> Topology:
    """Return Mix-LN.

    Args:
      post: the part of the blocks, from the first on, that is post-norm: from 0 to 1.
    """
    check_number("model.residual: post", post, least=0.0, most=1.0)

    def post_sublayers(config: ModelConfig) -> int:
        return post_blocks(config, post) * config.sublayers // config.depth

    return Topology(
        functools.partial(MixNorm, post=post),
        f"norm(x + f(x)) in the first {post:g} L blocks, then x + f(norm(x))",
        "arXiv 2412.13795",
        parameters=lambda config: norm_parameters(config, config.sublayers + 1),
        reduces_to="pre_norm" if post == 0 else None,
        mixing=additive_mixing,
        zero_branch=lambda config, x: repeated_norm(config, x, post_sublayers(config)),
        flops=no_flops,
        traffic=passes(4),  # post-norm's blocks too: they share the program of the others
        advice="post 0.25 up to about 1B parameters, less beyond (0.06 at 7B); its post-norm blocks need warm-up, and "
        "it diverged at 350M and 1B in the comparison of arXiv 2502.05795",
    )
