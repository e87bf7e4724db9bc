"""Sub-LN (Magneto): pre-norm with one more norm inside each branch, before the kernel that writes to the stream.

x + f(norm(x)),  f = W_out norm(g(x))                                                           (arXiv 2210.06423)
kernels of values, attention's output and the feed-forward start sqrt(ln(2 L)) times as large, L blocks

The form for a decoder (or encoder) alone, as in torchscale. Its argument counts branches, two per block also where
they are added in parallel, hence 2 L whatever the wiring. Against torchscale: the gain is on this library's
1 / sqrt(fan_in), theirs on Xavier's values; and a gated feed-forward's gate starts with it too.
"""

import math

from jaxblock.config import ModelConfig
from jaxblock.residual.contract import Topology
from jaxblock.residual.declarations import GAIN_OF_ZERO, additive_mixing, no_flops, norm_parameters, passes
from jaxblock.residual.placements import PreNorm
from jaxblock.residual.post_scaled import GAIN_ROLES


def sub_norm() -> Topology:
    """Return Sub-LN, as for a decoder alone."""

    def gain(config: ModelConfig, role: str) -> float:
        return math.sqrt(math.log(2 * config.depth)) if role in GAIN_ROLES else 1.0

    def parameters(config: ModelConfig) -> int:
        """Count the connections' norms, and of each block the inner ones: width in attention, hidden beside it."""
        per_feature = norm_parameters(config, 1) // config.width
        mixing = config.token_mixer_choice.options.get("hidden", config.width)
        inner = config.depth * (mixing + config.num_hidden) * per_feature
        return norm_parameters(config, config.sublayers + 1) + inner

    return Topology(
        PreNorm,
        "x + f(norm(x)), f = W norm(g(x))",
        "arXiv 2210.06423",
        gain=gain,
        refuses_zero_output=GAIN_OF_ZERO,
        inner_norm=True,
        parameters=parameters,
        mixing=additive_mixing,
        flops=no_flops,
        traffic=passes(4),
        advice="pre-norm's learning rate; the inner norms' traffic is the branches', not counted here",
    )
