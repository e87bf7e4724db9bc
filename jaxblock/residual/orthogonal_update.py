"""Orthogonal update: of the branch's output only what is orthogonal to the stream is added, token by token.

x + u - (<u, x> / (<x, x> + 1e-6)) x,  u = f(norm(x))                                          (arXiv 2505.11881)

This is the paper's feature-wise form, inner products over the channels of one token; its global form, over all
positions, would show a token what comes after it. The inner products are taken in float32.
"""

import flax.linen as nn
import jax.numpy as jnp

from jaxblock.config import ModelConfig
from jaxblock.functional.residual_updates import orthogonal_part
from jaxblock.modules import Norm
from jaxblock.residual.contract import Topology
from jaxblock.residual.declarations import no_flops, norm_parameters, passes
from jaxblock.types import Array, Branch


class OrthogonalUpdate(nn.Module):
    """x + (f(norm(x)) without what of it is parallel to x)."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: Array, f: Branch) -> Array:
        """Return the stream with the orthogonal part of the branch added."""
        norm = Norm(self.config, name="norm")
        return (x.astype(jnp.float32) + orthogonal_part(f(norm(x)), x)).astype(x.dtype)


def orthogonal_update() -> Topology:
    """Return the orthogonal update; it has no options and no parameters beside the norms."""
    return Topology(
        OrthogonalUpdate,
        "x + u - (<u, x> / <x, x>) x, u = f(norm(x))",
        "arXiv 2505.11881",
        parameters=lambda config: norm_parameters(config, config.sublayers + 1),
        flops=no_flops,
        traffic=passes(4),
        advice="pre-norm's learning rate; no update shortens the stream, |x'|^2 = |x|^2 + |update|^2",
    )
