"""ReZero: the branch times a learned number that starts at 0, so that the whole stack starts as the identity.

x + alpha f(x),  alpha = 0 at the start                                                          (arXiv 2003.04887)

SkipInit (arXiv 2002.10444) is the same rule, found for networks without batch normalization. Against the paper: the
final norm stays, because nothing here bounds the stream that the head reads (at the start it is the embedding itself,
later a sum of branches of it). The paper's transformer has one alpha per block, share = "block"; one per sublayer is
the default, as in its equation. norm = "pre" keeps pre-norm's norm beside alpha.
"""

import functools

import flax.linen as nn
import jax.numpy as jnp

from jaxblock.config import ModelConfig
from jaxblock.contracts import check_choice
from jaxblock.functional import residual
from jaxblock.modules.norm import Norm
from jaxblock.residual.contract import Topology
from jaxblock.residual.declarations import ZERO_TIMES_ZERO, no_flops, norm_parameters, passes
from jaxblock.residual.place import place
from jaxblock.residual.scaled import scaled_mixing
from jaxblock.types import Array, Branch


class ReZero(nn.Module):
    """x + alpha * f(x), or x + alpha * f(norm(x)); alpha is this sublayer's, or its block's."""

    config: ModelConfig
    placement: str
    share: str

    @nn.compact
    def __call__(self, x: Array, f: Branch) -> Array:
        """Return the stream with alpha times the branch added."""
        if self.share == "block":
            here = place(self)
            alpha = here.shared[here.block]
        else:
            alpha = self.param("alpha", nn.initializers.zeros, (), jnp.dtype(self.config.param_dtype))
        if self.placement == "none":
            return residual.rezero(x, f, alpha)
        norm = Norm(self.config, name="norm")
        return residual.scaled_branch(x, f, norm, alpha)


class BlockAlphas(nn.Module):
    """One alpha per block, made once for the whole stack."""

    config: ModelConfig

    @nn.compact
    def __call__(self) -> Array:
        """Return them, [L]."""
        dtype = jnp.dtype(self.config.param_dtype)
        return self.param("alpha", nn.initializers.zeros, (self.config.depth,), dtype)


def rezero(norm: str = "none", share: str = "sublayer") -> Topology:
    """Return ReZero.

    Args:
      norm: none, the paper's, or pre, a norm before the branch.
      share: sublayer, an alpha for each, or block, one for both sublayers of a block.
    """
    check_choice("model.residual: norm", norm, ("none", "pre"))
    check_choice("model.residual: share", share, ("block", "sublayer"))

    def parameters(config: ModelConfig) -> int:
        alphas = config.depth if share == "block" else config.sublayers
        return alphas + norm_parameters(config, 1 + (config.sublayers if norm == "pre" else 0))

    return Topology(
        functools.partial(ReZero, placement=norm, share=share),
        "x + alpha f(x), alpha from 0" if norm == "none" else "x + alpha f(norm(x)), alpha from 0",
        "arXiv 2003.04887",
        shared=BlockAlphas if share == "block" else None,
        parameters=parameters,
        mixing=functools.partial(scaled_mixing, scale=0.0),
        refuses_zero_output=ZERO_TIMES_ZERO,
        flops=no_flops,
        traffic=passes(3 if norm == "none" else 4),
        advice="alpha wants a learning rate of its own, smaller than the model's (runs diverged with one for all): "
        'dataclasses.replace(rezero(), labels=(Label(".*/alpha", learning_rate=0.1),)); or, for every '
        "parameter of a connection, optimizer.role_rates = { connection = 0.1 }",
    )
