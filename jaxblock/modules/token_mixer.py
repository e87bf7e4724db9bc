"""What may stand in attention's place, around `functional.token_mixing`: an MLP over positions, or convolutions.

They read the stream and padding, and nothing else of attention's pattern; `config.heads` is not read.
"""

import functools
from collections.abc import Callable

import flax.linen as nn
import jax.numpy as jnp

from jaxblock.config import ModelConfig
from jaxblock.functional.feed_forward import FeedForwardWeights
from jaxblock.functional.masks import AttentionPattern, check_pattern
from jaxblock.functional.token_mixing import (
    ConvolutionWeights,
    Grid,
    convolution_mixing,
    mlp_mixing,
    tap_count,
    zero_padding,
)
from jaxblock.modules.dropout import Dropout
from jaxblock.modules.kernel import Kernel, unit_gain
from jaxblock.modules.norm import Norm
from jaxblock.types import Array, Views


class TokenMixer(nn.Module):
    """The branch that `config.token_mixer` names; the activation is the one of `config.feed_forward`.

    mlp            down(act(up(h))) over T = context positions: of any other length it has no weights
    convolution    out(act(in(h))) over a grid of positions; of a causal model over one row, padded on the left

    A gated feed-forward's activation is that of its gate: silu for swiglu. Padding is read as zeros, by both
    convolutions; what comes out at padded places is finite and means nothing.
    """

    config: ModelConfig
    gain: Callable[[str], float] = unit_gain
    """Factor on a kernel's initial values, by role."""
    inner_norm: bool = False
    """Whether the hidden activations have a norm before the last kernel (Sub-LN, arXiv 2210.06423)."""

    @nn.compact
    def __call__(self, x_BTD: Array, pattern: AttentionPattern) -> Array:
        """Return the branch's output, [B, T, D] -> [B, T, D] in x's dtype.

        Raises:
          ValueError: `Views`; a causal pattern with an MLP or with more than one row; packed documents or a mask of
            pairs; an MLP and another length than the context; rows that do not divide the length.
        """
        if isinstance(x_BTD, Views):
            raise ValueError(
                f"model.token_mixer is {self.config.token_mixer!r}, which reads one array, and its connection gave it "
                "Views(query, key, value); only attention reads views"
            )
        self._check_pattern(pattern)
        if self.is_mutable_collection("params"):  # they depend on no length: made from one token
            zeros_BTD = jnp.zeros((1, self.config.context, self.config.width), x_BTD.dtype)
            self._mix(zeros_BTD, AttentionPattern(causal=pattern.causal))
            return jnp.zeros_like(x_BTD)
        check_pattern(pattern, queries=x_BTD.shape[1], keys=x_BTD.shape[1], batch=x_BTD.shape[0])
        return self._mix(x_BTD, pattern)

    def _mix(self, x_BTD: Array, pattern: AttentionPattern) -> Array:
        zeroed = functools.partial(zero_padding, valid_BT=pattern.key_valid_BT)
        if self.config.token_mixer_choice.name == "mlp":
            return self._mlp(zeroed(x_BTD))
        return self._convolution(zeroed(x_BTD), zeroed, causal=pattern.causal)

    def _mlp(self, x_BTD: Array) -> Array:
        config, hidden = self.config, self.config.token_mixer_choice.options["hidden"]
        if x_BTD.shape[1] != config.context:
            raise ValueError(
                f"{x_BTD.shape[1]} tokens came; model.token_mixer is {config.token_mixer!r}, an MLP over exactly "
                f"model.context = {config.context} positions: pad shorter sequences"
            )
        up, up_bias = Kernel(config, "up", (config.context, hidden), gain=self.gain, name="mlp_up")()
        down, down_bias = Kernel(config, "down", (hidden, config.context), gain=self.gain, name="mlp_down")()
        weights = FeedForwardWeights(up, down, up_bias, down_bias)
        return mlp_mixing(x_BTD, weights, config.feed_forward, before_down=self._before_last())

    def _convolution(self, x_BTD: Array, zeroed: Callable[[Array], Array], *, causal: bool) -> Array:
        config, options = self.config, self.config.token_mixer_choice.options
        shape = (*tap_count(options["size"], options["rows"]), config.width, config.width)
        kernel = functools.partial(Kernel, config, shape=shape, axes=3, gain=self.gain)
        inner, inner_bias = kernel(role="up", name="convolution_in")()
        outer, outer_bias = kernel(role="down", name="convolution_out")()
        before_last = self._before_last()
        return convolution_mixing(
            x_BTD,
            ConvolutionWeights(inner, outer, inner_bias, outer_bias),
            config.feed_forward,
            Grid(options["rows"], causal),
            before_outer=lambda hidden: zeroed(before_last(hidden)),
        )

    def _before_last(self) -> Callable[[Array], Array]:
        """Return what the hidden activations go through: a norm, where there is one, and dropout."""
        dropout = Dropout(self.config.hidden_dropout, name="hidden_dropout")
        norm = Norm(self.config, name="inner_norm") if self.inner_norm else lambda hidden: hidden
        return lambda hidden: dropout(norm(hidden))

    def _check_pattern(self, pattern: AttentionPattern) -> None:
        """Raise ValueError for what attention's pattern asks and this mixer cannot do."""
        mixer, (name, options) = self.config.token_mixer, self.config.token_mixer_choice
        if pattern.causal and name == "mlp":
            raise ValueError(
                f"model.token_mixer is {mixer!r}, and the model is causal: an MLP over positions reads them all; use "
                "attention or convolution, or a classifier or an encoder"
            )
        if pattern.causal and options["rows"] > 1:
            raise ValueError(
                f"model.token_mixer is {mixer!r}, and the model is causal: a grid has no order from left to right; "
                "rows must be 1, or the model a classifier or an encoder"
            )
        if pattern.query_segments_BQ is not None or pattern.mask is not None:
            asked = "mask" if pattern.query_segments_BQ is None else "segments_BT"
            raise ValueError(
                f"model.token_mixer is {mixer!r}, which mixes every position of a row, and {asked} was given; only "
                'attention keeps packed documents apart (data.seams = "joined" packs none)'
            )
