"""A block: attention and feed-forward, each written to the stream by a residual connection.

serial      x = connect(x, attention);  x = connect(x, feed_forward)
parallel    x = connect(x, attention + feed_forward)

Where the config's parametrization scales by depth, each branch is so many times attention or feed-forward.
"""

import dataclasses
import functools
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxblock.config import ExecutionConfig, ModelConfig
from jaxblock.functional.parametrization import scaled
from jaxblock.modules import Attention, AttentionInputs, Dropout, FeedForward, scaling
from jaxblock.modules.intermediates import record
from jaxblock.residual import Topology, check_same_stream, residual
from jaxblock.types import Array, Branch, Stream


class LayerInputs(NamedTuple):
    """What differs from block to block besides parameters and keys: arrays [L] in a stack, scalars in a block."""

    window: Array | None = None
    """Sliding window in tokens, int32, 0 = unlimited; None where all blocks share the pattern's."""
    block: Array | None = None
    """Number of the block, from 0, int32; None where no connection asks for its place."""
    sublayer: Array | None = None
    """Number of the block's first sublayer, from 0, int32."""


def layer_inputs(config: ModelConfig) -> LayerInputs:
    """Return the per-layer constants of a whole stack, every leaf [L]."""
    block = jnp.arange(config.depth, dtype=jnp.int32)
    window = None
    if len({size or None for size in config.window}) > 1:
        window = jnp.resize(jnp.asarray(config.window, jnp.int32), (config.depth,))
    return LayerInputs(window, block, block * (config.sublayers // config.depth))


class Block(nn.Module):
    """One transformer block: stream to stream. It never asks whether it is scanned, trained or decoded.

    With the collection "intermediates" mutable it gives what each branch read and wrote (`attention_in`,
    `attention_out`, ...) and, where the stream is one array, the stream before, between and after
    (`resid_pre`, `resid_mid`, `resid_post`).
    """

    config: ModelConfig
    execution: ExecutionConfig
    topology: Topology

    @nn.compact
    def __call__(self, stream: Stream, inputs: AttentionInputs, layer: LayerInputs) -> Stream:
        """Return the stream after the block: same structure, shapes and dtypes."""
        config = self.config
        if layer.window is not None:
            inputs = inputs._replace(pattern=dataclasses.replace(inputs.pattern, window=layer.window))
        gain = functools.partial(self.topology.gain, config)
        attention = Attention(config, self.execution, gain, name="attention")
        feed_forward = FeedForward(config, gain, name="feed_forward")

        def attend(h: Array) -> Array:
            return Dropout(config.branch_dropout, name="attention_dropout")(attention(h, inputs))

        def feed(h: Array) -> Array:
            return Dropout(config.branch_dropout, name="feed_forward_dropout")(feed_forward(h))

        self._record_stream("resid_pre", stream)
        if config.wiring == "parallel":
            stream = self._connect(stream, "connection", "parallel", lambda h: attend(h) + feed(h))
        else:
            stream = self._connect(stream, "attention_connection", "attention", attend)
            self._record_stream("resid_mid", stream)
            stream = self._connect(stream, "feed_forward_connection", "feed_forward", feed)
        if self.topology.after_block is not None:
            before, stream = stream, self.topology.after_block(config, name="after_block")(stream)
            check_same_stream("after_block", before, stream)
        self._record_stream("resid_post", stream)
        return stream

    def _connect(self, stream: Stream, name: str, branch_name: str, branch: Branch) -> Stream:
        """Run one sublayer."""
        factor = scaling(self.config).branch

        def recorded(h: Array) -> Array:
            y = scaled(branch(h), factor)
            record(self, f"{branch_name}_in", h)
            record(self, f"{branch_name}_out", y)
            return y

        connection = self.topology.connection(self.config, name=name)
        return residual(connection, stream, recorded, dtype=self.config.dtype)

    def _record_stream(self, name: str, stream: Stream) -> None:
        if isinstance(stream, jax.Array):
            record(self, name, stream)
