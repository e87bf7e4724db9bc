"""U-net skips: a block of the second half first adds the output of its mirror in the first half, last in first out.

before block L - 1 - i:  x <- x + w_i x_i,   x_i the output of block i < L // 2                    (modded-nanogpt)

Blocks are counted from 0; with an odd L the middle one has no mirror. One learned scalar w_i per pair; at 0, the
default start, this is pre-norm. modded-nanogpt starts at 1.
"""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxblock.config import ModelConfig
from jaxblock.contracts import check_number
from jaxblock.functional.residual import pre_norm
from jaxblock.modules import Norm
from jaxblock.residual.contract import Topology
from jaxblock.residual.declarations import norm_parameters
from jaxblock.residual.history import History, open_history, read_once
from jaxblock.residual.place import is_first, place
from jaxblock.types import Array, Branch


class UnetStream(NamedTuple):
    """The state, and a history of states: the embedding, then the outputs of the first half's blocks."""

    x_BTD: Array
    states: History


class UnetConnection(nn.Module):
    """x + f(norm(x)), in the first sublayer of a block of x = x + w_i x_i."""

    config: ModelConfig

    @nn.compact
    def __call__(self, stream: UnetStream, f: Branch) -> UnetStream:
        """Return the stream after the sublayer; the history is not touched."""
        norm, here = Norm(self.config, name="norm"), place(self)
        x, states = stream

        def add_skip(x: Array, states: History, weight: Array, row: Array) -> Array:
            skip = jax.lax.dynamic_index_in_dim(states.rows_NBTD, row, keepdims=False)
            return (x.astype(jnp.float32) + weight * skip.astype(jnp.float32)).astype(x.dtype)

        if is_first(self):
            # Block b reads x_i, i = L - 1 - b, which is row i + 1; in the first half the weight is 0.
            x = read_once(add_skip, x, states, here.shared[here.block], self.config.depth - here.block)
        return UnetStream(pre_norm(x, f, norm), states)


class SkipWeights(nn.Module):
    """w, made once for the whole stack."""

    config: ModelConfig
    start: float

    @nn.compact
    def __call__(self) -> Array:
        """Return what each block multiplies its skip by, float32 [L]: 0 for blocks without one."""
        depth, pairs = self.config.depth, self.config.depth // 2
        if pairs == 0:  # one block has no mirror: nothing is added, nothing is learned
            return jnp.zeros(depth, jnp.float32)
        dtype = jnp.dtype(self.config.param_dtype)
        weight = self.param("weight", nn.initializers.constant(self.start), (pairs,), dtype)
        return jnp.concatenate([jnp.zeros(depth - pairs, jnp.float32), weight[::-1].astype(jnp.float32)])


class KeepFirstHalf(nn.Module):
    """The outputs of the first half's blocks go to the history."""

    config: ModelConfig

    @nn.compact
    def __call__(self, stream: UnetStream) -> UnetStream:
        """Return the stream with the block's output kept, where a later block reads it."""
        kept = place(self).block < self.config.depth // 2
        return stream._replace(states=stream.states.push(stream.x_BTD, when=kept))


class LastState(nn.Module):
    """x, without its history."""

    config: ModelConfig

    @nn.compact
    def __call__(self, stream: UnetStream, shared: Array) -> Array:
        """Return what the final norm reads."""
        return stream.x_BTD


def unet(start: float = 0.0) -> Topology:
    """Return U-net skips.

    Args:
      start: where every w_i starts; 0 is pre-norm, modded-nanogpt has 1.
    """
    check_number("model.residual: start", start)

    def weights(config: ModelConfig, *, name: str) -> nn.Module:
        return SkipWeights(config, start, name=name)

    def mixing(config: ModelConfig) -> np.ndarray:
        sources, reads, states = np.eye(config.sublayers + 1), [], []
        x = sources[0]
        for block in range(config.depth):
            if block >= config.depth - config.depth // 2:
                x = x + start * states[config.depth - 1 - block]
            for _ in range(config.sublayers // config.depth):
                reads.append(x)
                x = x + sources[len(reads)]
            states.append(x)
        return np.stack([*reads, x])

    return Topology(
        UnetConnection,
        "x + f(norm(x)); before block L - 1 - i: x = x + w_i x_i",
        "modded-nanogpt",
        open=lambda config, x: UnetStream(x, open_history(x, 1 + config.depth // 2)),
        shared=weights,
        after_block=KeepFirstHalf,
        close=LastState,
        parameters=lambda config: norm_parameters(config, config.sublayers + 1) + config.depth // 2,
        reduces_to="pre_norm" if start == 0 else None,
        mixing=mixing,
        zero_branch=lambda config, x: x * mixing(config)[-1, 0].astype(np.float32),
        flops=lambda config: 2 * config.width * (config.depth // 2),
        traffic=lambda config: config.width * (4 * config.sublayers + 2 * (config.depth // 2)),
        advice="pre-norm's learning rate; with start = 1 the embedding's part of the stream grows with each skip",
    )
