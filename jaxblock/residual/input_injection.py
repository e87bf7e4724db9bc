"""Input injection: before each block the stream is mixed with the embedding, two learned scalars per block.

x <- l0 x + l1 x0,  then the block;  (l0, l1) starts at (decay, 0)                     (modded-nanogpt, f411b3d)

There x0 is the normalized embedding, and so is the stream at its start; here both are the embedding as it is, so
that (1, 0) is pre-norm. Blocks are counted: the second sublayer of a block injects nothing.

For its backward pass a scan keeps one array [B, T, D] per block more than pre-norm's, the state before the mixing, and
the embedding once.
"""

from typing import NamedTuple

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from jaxblock.config import ModelConfig
from jaxblock.contracts import check_number
from jaxblock.functional.residual import pre_norm
from jaxblock.modules import Norm
from jaxblock.residual.contract import Topology
from jaxblock.residual.declarations import norm_parameters
from jaxblock.residual.place import is_first
from jaxblock.types import Array, Branch


class InjectedStream(NamedTuple):
    """The state, and the embedding, which no layer may change: a scan then keeps it once."""

    x_BTD: Array
    input_BTD: Array


class InputInjection(nn.Module):
    """x + f(norm(x)) of x = l0 x + l1 x0 in the first sublayer of a block, of x itself in the second."""

    config: ModelConfig
    decay: float

    @nn.compact
    def __call__(self, stream: InjectedStream, f: Branch) -> InjectedStream:
        """Return the state after the sublayer, and the embedding as it was."""
        norm = Norm(self.config, name="norm")
        x, x0 = stream
        if is_first(self):
            dtype = jnp.dtype(self.config.param_dtype)
            keep = self.param("state_factor", nn.initializers.constant(self.decay), (), dtype)
            inject = self.param("input_factor", nn.initializers.zeros, (), dtype)
            x = (keep * x.astype(jnp.float32) + inject * x0.astype(jnp.float32)).astype(x.dtype)
        return InjectedStream(pre_norm(x, f, norm), x0)


class LastState(nn.Module):
    """x, without the embedding."""

    config: ModelConfig

    @nn.compact
    def __call__(self, stream: InjectedStream, shared: None) -> Array:
        """Return what the final norm reads."""
        return stream.x_BTD


def input_injection(decay: float = 1.0) -> Topology:
    """Return input injection.

    Args:
      decay: where l0, the factor on the stream, starts; above 0. modded-nanogpt has used 1 and 1.1.
    """
    check_number("model.residual: decay", decay, above=0.0)

    def connection(config: ModelConfig, *, name: str) -> nn.Module:
        return InputInjection(config, decay, name=name)

    def mixing(config: ModelConfig) -> np.ndarray:
        blocks = config.depth
        made = np.repeat(np.arange(blocks), config.sublayers // blocks)  # block of each sublayer
        written, read = np.append(-1, made), np.append(made, blocks - 1)
        return np.tri(len(read)) * decay ** (np.maximum(read[:, None] - written, 0.0))

    return Topology(
        connection,
        "x + f(norm(x)); before each block: x = l0 x + l1 embedding",
        "modded-nanogpt",
        open=lambda config, x: InjectedStream(x, x),
        close=LastState,
        parameters=lambda config: norm_parameters(config, config.sublayers + 1) + 2 * config.depth,
        reduces_to="pre_norm" if decay == 1 else None,
        mixing=mixing,
        zero_branch=lambda config, x: x * decay**config.depth,
        flops=lambda config: 4 * config.width * config.depth,
        traffic=lambda config: config.width * (4 * config.sublayers + config.depth),
        advice="pre-norm's learning rate; trained factors there: l0 from 0.4 to 1.2, l1 from 1.5 to 6.5; a decay "
        "of 1.1 grows the stream as 1.1^blocks",
    )
