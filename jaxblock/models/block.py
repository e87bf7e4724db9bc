"""A block: what mixes positions and what does not, each written to the stream by a residual connection.

serial      x = connect(x, attention);  x = connect(x, feed_forward)
parallel    x = connect(x, attention + feed_forward)

In attention's place may stand another token mixer, in the feed-forward's a mixture of experts.

Where the config's parametrization scales by depth, each branch is so many times attention or feed-forward.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxblock.config import ExecutionConfig, ModelConfig
from jaxblock.functional.gradient_tap import gradient_tap
from jaxblock.functional.masks import AttentionPattern
from jaxblock.functional.parametrization import scaled
from jaxblock.models.observation import GIVEN, OBSERVED, TAPS, Observer, Sublayer
from jaxblock.modules import (
    Attention,
    AttentionInputs,
    Dropout,
    DropRows,
    Experts,
    FeedForward,
    TokenMixer,
    scaling,
)
from jaxblock.modules.intermediates import BRANCHES, record
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
    drop_rates: Array | None = None
    """Rate at which each of the block's branches is dropped whole, float32 [2]; None where none is."""


def layer_inputs(config: ModelConfig) -> LayerInputs:
    """Return the per-layer constants of a whole stack, every leaf [L]."""
    block = jnp.arange(config.depth, dtype=jnp.int32)
    window = None
    if len({size or None for size in config.window}) > 1:
        window = jnp.resize(jnp.asarray(config.window, jnp.int32), (config.depth,))
    return LayerInputs(window, block, block * (config.sublayers // config.depth), drop_rates(config))


def drop_rates(config: ModelConfig) -> Array | None:
    """Return the rates of stochastic depth, float32 [L, 2] (attention, feed-forward); None without it.

    Linear: rate * s / S for sublayer s of S (arXiv 1603.09382, eq. 4); both branches of a parallel block are one.
    """
    name, options = config.stochastic_depth_choice
    if name == "none":
        return None
    rates_S = jnp.full((config.sublayers,), options["rate"], jnp.float32)
    if name == "linear":
        rates_S = rates_S * jnp.arange(1, config.sublayers + 1) / config.sublayers
    return jnp.broadcast_to(rates_S.reshape(config.depth, -1), (config.depth, 2))


class Block(nn.Module):
    """One transformer block: stream to stream. It never asks whether it is scanned, trained or decoded.

    With the collection "intermediates" mutable it gives what each branch read and wrote (`attention_in`,
    `attention_out`, ...) and, where the stream is one array, the stream before, between and after
    (`resid_pre`, `resid_mid`, `resid_post`).
    """

    config: ModelConfig
    execution: ExecutionConfig
    topology: Topology
    observe: Observer | None = None
    """What measures each sublayer (see `models.observation`)."""
    only: str | None = None
    """The one branch that is run, for what looks at sublayers one by one: the block is then the sublayers in order,
    `after_block` with the last. None = all."""

    @nn.compact
    def __call__(self, stream: Stream, inputs: AttentionInputs, layer: LayerInputs) -> Stream:
        """Return the stream after the block: same structure, shapes and dtypes."""
        config = self.config
        if layer.window is not None:
            inputs = inputs._replace(pattern=dataclasses.replace(inputs.pattern, window=layer.window))
        mix, mixing = self._token_mixing(inputs)
        feed = self._feed_forward(inputs.pattern)
        rates = (None, None) if layer.drop_rates is None else tuple(layer.drop_rates)
        connect = functools.partial(self._connect, valid_BT=inputs.pattern.key_valid_BT)

        runs = self._runs("parallel" if config.wiring == "parallel" else mixing)
        self._record_stream("resid_pre", stream)
        if config.wiring == "parallel":
            both = self._dropped("parallel", lambda h: mix(h) + feed(h), rates[0])
            stream = connect(stream, "connection", "parallel", both)
        else:
            mix, feed = self._dropped(mixing, mix, rates[0]), self._dropped("feed_forward", feed, rates[1])
            if runs[0]:
                stream = connect(stream, f"{mixing}_connection", mixing, mix)
            self._record_stream("resid_mid", stream)
            if runs[1]:
                stream = connect(stream, "feed_forward_connection", "feed_forward", feed)
        if runs[-1] and self.topology.after_block is not None:
            before, stream = stream, self.topology.after_block(config, name="after_block")(stream)
            check_same_stream("after_block", before, stream)
        self._record_stream("resid_post", stream)
        return stream

    def _runs(self, first: str) -> tuple[bool, ...]:
        """Return which of the block's branches, the first of that name, are run."""
        branches = next(names for names in BRANCHES if names[0] == first)
        if self.only is not None and self.only not in branches:
            raise ValueError(f"Block.only is {self.only!r}; the branches of this block are {branches}")
        return tuple(self.only in (None, name) for name in branches)

    def _token_mixing(self, inputs: AttentionInputs) -> tuple[Branch, str]:
        """Return the branch that mixes positions, and its name."""
        config, gain, inner_norm = self.config, self._gain, self.topology.inner_norm
        if config.token_mixer_choice.name == "attention":
            attention = Attention(config, self.execution, gain, inner_norm, name="attention")
            return self._with_dropout("attention", lambda h: attention(h, inputs)), "attention"
        mixer = TokenMixer(config, gain, inner_norm, name="token_mixer")
        return self._with_dropout("token_mixer", lambda h: mixer(h, inputs.pattern)), "token_mixer"

    def _feed_forward(self, pattern: AttentionPattern) -> Branch:
        """Return the branch that reads each position alone."""
        config = self.config
        if config.experts_choice.name == "none":
            feed_forward = FeedForward(config, self._gain, self.topology.inner_norm, name="feed_forward")
            return self._with_dropout("feed_forward", feed_forward)
        if self.topology.inner_norm:
            raise ValueError(
                f"model.experts is {config.experts!r} and the residual connection is {self.topology.equation!r}, which "
                'has a norm inside the feed-forward; with it experts must be "none"'
            )
        if config.experts_choice.name == "capacity" and pattern.key_segments_BT is not None:
            raise ValueError(
                f"model.experts is {config.experts!r} and rows hold several documents (segments_BT), which would "
                "compete for the same places; take dropless experts, or one document a row"
            )
        experts = Experts(config, self._gain, name="experts")
        return self._with_dropout("feed_forward", lambda h: experts(h, pattern.key_valid_BT))

    @property
    def _gain(self) -> Callable[[str], float]:
        return functools.partial(self.topology.gain, self.config)

    def _with_dropout(self, name: str, branch: Branch) -> Branch:
        """Return the branch with dropout of its output's entries."""
        return lambda h: Dropout(self.config.branch_dropout, name=f"{name}_dropout")(branch(h))

    def _dropped(self, name: str, branch: Branch, rate: Array | None) -> Branch:
        """Return the branch with rows of its output dropped whole."""
        return lambda h: DropRows(name=f"{name}_rows")(branch(h), rate)

    def _connect(
        self, stream: Stream, name: str, branch_name: str, branch: Branch, *, valid_BT: Array | None
    ) -> Stream:
        """Run one sublayer."""
        factor, calls = scaling(self.config).branch, []
        if self.has_variable(TAPS, branch_name) and isinstance(stream, jax.Array):
            stream = gradient_tap(stream, self.get_variable(TAPS, branch_name))

        def recorded(h: Array) -> Array:
            y = scaled(branch(h), factor)
            record(self, f"{branch_name}_in", h)
            record(self, f"{branch_name}_out", y)
            calls.append((h, y))
            return y

        connection = self.topology.connection(self.config, name=name)
        after = residual(connection, stream, recorded, dtype=self.config.dtype)
        if self.observe is not None and self.is_mutable_collection(OBSERVED):
            ((read, output),) = calls
            given = self.get_variable(GIVEN, "observer") if self.has_variable(GIVEN, "observer") else None
            seen = jax.lax.stop_gradient(Sublayer(stream, read, output, after, valid_BT, given))
            self.put_variable(OBSERVED, branch_name, dict(self.observe(seen)))
        return after

    def _record_stream(self, name: str, stream: Stream) -> None:
        if isinstance(stream, jax.Array):
            record(self, name, stream)
