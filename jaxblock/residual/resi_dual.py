"""ResiDual: a post-norm stream, which the branches read, and beside it a plain sum of their outputs.

u = f(x),  d <- d + scale u,  x <- norm(x + u),  d = x = embedding at first;  closed: x + norm(d)   (arXiv 2304.14802)

Nothing normalizes the closed sum of two normalized streams in the paper, so there is no final norm here either.
"""

from typing import NamedTuple

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from jaxblock.config import ModelConfig
from jaxblock.contracts import check_number
from jaxblock.functional.norms import layer_norm, rms_norm
from jaxblock.functional.residual import post_norm
from jaxblock.modules import Norm
from jaxblock.residual.contract import Topology
from jaxblock.residual.declarations import additive_mixing, no_flops, norm_parameters, passes
from jaxblock.types import Array, Branch


class DualStream(NamedTuple):
    """The post-norm stream, and the sum of the embedding and all branch outputs."""

    x_BTD: Array
    d_BTD: Array


class DualConnection(nn.Module):
    """norm(x + u) and d + scale u, u = f(x)."""

    config: ModelConfig
    scale: float

    @nn.compact
    def __call__(self, stream: DualStream, f: Branch) -> DualStream:
        """Return both streams with the branch added."""
        norm = Norm(self.config, name="norm")
        x, d = stream
        update = f(x)
        added = d.astype(jnp.float32) + self.scale * update.astype(jnp.float32)
        return DualStream(post_norm(x, lambda _: update, norm), added.astype(d.dtype))


class SumOfBoth(nn.Module):
    """x + norm(d)."""

    config: ModelConfig

    @nn.compact
    def __call__(self, stream: DualStream, shared: None) -> Array:
        """Return what the head reads."""
        norm = Norm(self.config, name="norm")
        return stream.x_BTD + norm(stream.d_BTD)


def resi_dual(scale: float = 1.0) -> Topology:
    """Return ResiDual.

    Args:
      scale: factor on what is added to the sum d, above 0; below 1 it keeps float16 from overflowing in deep stacks.
    """
    check_number("model.residual: scale", scale, above=0.0)

    def connection(config: ModelConfig, *, name: str) -> nn.Module:
        return DualConnection(config, scale, name=name)

    def mixing(config: ModelConfig) -> np.ndarray:
        table = additive_mixing(config)
        table[-1] += np.where(np.arange(len(table)) == 0, 1.0, scale)  # norm(d), beside x
        return table

    def zero_branch(config: ModelConfig, x: Array) -> Array:
        norm, d = rms_norm if config.norm == "rms_norm" else layer_norm, x
        for _ in range(config.sublayers):
            x = norm(x, epsilon=config.norm_epsilon)
        return x + norm(d, epsilon=config.norm_epsilon)

    return Topology(
        connection,
        "x = norm(x + f(x)), d = d + scale f(x); closed: x + norm(d)",
        "arXiv 2304.14802",
        final_norm=False,
        open=lambda config, x: DualStream(x, x),
        close=SumOfBoth,
        parameters=lambda config: norm_parameters(config, config.sublayers + 1),
        mixing=mixing,
        zero_branch=zero_branch,
        flops=no_flops,
        traffic=passes(5),
        advice="post-norm's learning rate; deep stacks in float16 need scale below 1, the authors' code has 0.1",
    )
