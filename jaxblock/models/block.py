"""A block: attention and feed-forward, each written to the stream by a residual connection.

serial      x = connect(x, attention);  x = connect(x, feed_forward)
parallel    x = connect(x, attention + feed_forward)
"""

import dataclasses
from typing import NamedTuple

import flax.linen as nn

from jaxblock.config import ExecutionConfig, ModelConfig
from jaxblock.modules import Attention, AttentionInputs, Dropout, FeedForward
from jaxblock.residual import Topology, residual
from jaxblock.types import Array, Stream


class LayerInputs(NamedTuple):
    """What differs from block to block besides parameters and keys: arrays [L] in a stack, scalars in a block."""

    window: Array | None = None
    """Sliding window in tokens, int32, 0 = unlimited; None where all blocks share the pattern's."""


class Block(nn.Module):
    """One transformer block: stream to stream. It never asks whether it is scanned, trained or decoded."""

    config: ModelConfig
    execution: ExecutionConfig
    topology: Topology

    @nn.compact
    def __call__(self, stream: Stream, inputs: AttentionInputs, layer: LayerInputs) -> Stream:
        """Return the stream after the block: same structure, shapes and dtypes."""
        config = self.config
        if layer.window is not None:
            inputs = inputs._replace(pattern=dataclasses.replace(inputs.pattern, window=layer.window))
        attention = Attention(config, self.execution, name="attention")
        feed_forward = FeedForward(config, name="feed_forward")

        def attend(h: Array) -> Array:
            return Dropout(config.branch_dropout, name="attention_dropout")(attention(h, inputs))

        def feed(h: Array) -> Array:
            return Dropout(config.branch_dropout, name="feed_forward_dropout")(feed_forward(h))

        def connect(stream: Stream, name: str, branch) -> Stream:
            connection = self.topology.connection(config, name=name)
            return residual(connection, stream, branch, dtype=config.dtype)

        if config.wiring == "parallel":
            return connect(stream, "connection", lambda h: attend(h) + feed(h))
        stream = connect(stream, "attention_connection", attend)
        return connect(stream, "feed_forward_connection", feed)
