"""The position-wise feed-forward's parameters, D -> F -> D, plain or gated, around `functional.feed_forward`."""

import functools
from collections.abc import Callable

import flax.linen as nn

from jaxblock.config import ModelConfig
from jaxblock.functional.feed_forward import (
    FeedForwardWeights,
    GatedWeights,
    feed_forward,
    gated_feed_forward,
)
from jaxblock.modules.dropout import Dropout
from jaxblock.modules.kernel import Kernel, unit_gain
from jaxblock.modules.norm import Norm
from jaxblock.types import Array, Views


class FeedForward(nn.Module):
    """down(activation(up(x))), or down(activation(gate(x)) * up(x)) where the config's choice is gated."""

    config: ModelConfig
    gain: Callable[[str], float] = unit_gain
    """Factor on a kernel's initial values, by role."""
    inner_norm: bool = False
    """Whether the hidden activations have a norm before the down kernel (Sub-LN, arXiv 2210.06423)."""

    @nn.compact
    def __call__(self, x_BTD: Array) -> Array:
        """Return the branch's output, [B, T, D] -> [B, T, D] in x's dtype."""
        if isinstance(x_BTD, Views):
            raise ValueError(
                "the feed-forward reads one array and its connection gave it Views(query, key, value); only "
                'attention reads views, and only with wiring = "serial"'
            )
        config, kernel = self.config, functools.partial(Kernel, self.config, gain=self.gain)
        wide, narrow = (config.width, config.num_hidden), (config.num_hidden, config.width)
        dropout = Dropout(config.hidden_dropout, name="hidden_dropout")
        norm = Norm(config, name="inner_norm") if self.inner_norm else lambda hidden: hidden
        before_down = lambda hidden: dropout(norm(hidden))  # noqa: E731
        up, up_bias = kernel("up", wide, name="up")()
        down, down_bias = kernel("down", narrow, name="down")()
        if not config.gated:
            weights = FeedForwardWeights(up, down, up_bias, down_bias)
            return feed_forward(x_BTD, weights, config.feed_forward, hidden_dropout=before_down)
        gate, gate_bias = kernel("gate", wide, name="gate")()
        weights = GatedWeights(gate, up, down, gate_bias, up_bias, down_bias)
        return gated_feed_forward(x_BTD, weights, config.feed_forward, hidden_dropout=before_down)
