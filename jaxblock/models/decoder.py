"""A decoder-only language model: embedding, stack of blocks, final norm where the topology needs one, head."""

from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxblock import axes
from jaxblock.config import ExecutionConfig, ModelConfig
from jaxblock.functional.dense import logits
from jaxblock.functional.masks import AttentionPattern
from jaxblock.functional.positions import rotary_angles
from jaxblock.functional.segments import segment_positions
from jaxblock.models.block import Block, layer_inputs
from jaxblock.models.cache import Cache, CachedCall, plan_call, read_cache, write_cache
from jaxblock.models.stack import StackInputs, init_blocks, run_blocks
from jaxblock.modules import AttentionInputs, Embedding, Norm, PositionTable
from jaxblock.modules.attention import WRITTEN
from jaxblock.modules.intermediates import COLLECTION as INTERMEDIATES
from jaxblock.modules.intermediates import record
from jaxblock.modules.kernel import kernel_init
from jaxblock.residual import STREAM_AXES, Topology, topology
from jaxblock.types import Array, Params


class Decoder(nn.Module):
    """A causal language model over token ids.

    A pure function once its parameters are given: `model.apply({"params": params}, tokens_BT)`; pass
    `rngs={"dropout": key}` and dropout is on, leave it out and it is off. With `mutable=["intermediates"]` it also
    returns what its branches read and wrote, every leaf stacked [L, ...] under "blocks" (see `Block`).
    Pass `cache=init_cache(config, batch)`, and the tokens go on where those read before end.

    Attributes:
      config: what the model is.
      execution: how its stack is run; changes neither values (beyond round-off) nor parameters.
      topology: a residual topology of your own; left out, the one `config.residual` names.
    """

    config: ModelConfig
    execution: ExecutionConfig = ExecutionConfig()
    topology: Topology | None = None

    @nn.compact
    def __call__(
        self,
        tokens_BT: Array,
        *,
        valid_BT: Array | None = None,
        segments_BT: Array | None = None,
        positions_BT: Array | None = None,
        cache: Cache | None = None,
    ) -> Array | tuple[Array, Cache]:
        """Return float32 logits, [B, T] -> [B, T, padded V]; with a cache, (logits, the cache after these tokens).

        Args:
          tokens_BT: token ids, any integer dtype; an id >= V gives NaN logits, never another token's.
          valid_BT: boolean, True = real token; padding is never attended to, but its ids must be below V too.
          segments_BT: integer document ids of packed rows; attention stays within a document.
          positions_BT: position of each token. Left out: its index, counted from its document's start.
          cache: what was read before, from `init_cache` or the call before; T may then be a prompt, a chunk of one
            or a single token, whose position is the number of real ones before it in its row.

        A token that a full cache has no room for (see `cache_limit`) is refused: with a ValueError where that can
        be known; under jit, where it cannot, it is not written, what the cache holds stays, and its logits are NaN.

        Raises:
          AssertionError: ranks, shapes or dtypes other than these.
          ValueError: more tokens than the learned position table has rows, a mask that is not boolean; with a cache:
            one of another model or batch, a full one, segments_BT or positions_BT.
        """
        chex.assert_rank(tokens_BT, 2)
        chex.assert_type(tokens_BT, int)
        config, call = self.config, None
        if cache is not None:
            if segments_BT is not None or positions_BT is not None:
                raise ValueError(
                    "segments_BT and positions_BT do not go with a cache: each row is one document, read in order"
                )
            call = plan_call(config, cache, tokens_BT, valid_BT)
            positions_BT = call.positions_BT
        elif positions_BT is None:
            positions_BT = segment_positions(tokens_BT.shape[1], segments_BT)
        embedding = Embedding(config, name="embedding")
        x_BTD = embedding(tokens_BT)
        if config.position_choice.name in ("learned", "sinusoidal"):
            table = PositionTable(config, name="positions")
            x_BTD = x_BTD + table(positions_BT, limit=None if call is None else call.limit)
        pattern = self._pattern(valid_BT, segments_BT, call)
        x_BTD, written = self._stack(x_BTD, AttentionInputs(pattern, self._angles(positions_BT)), cache)
        logits_BTV = embedding.attend(x_BTD) if config.head == "tied" else Head(config, name="head")(x_BTD)
        if cache is None or call is None:
            return logits_BTV
        return call.mark_refused(logits_BTV), write_cache(cache, call, written)

    @property
    def connections(self) -> Topology:
        """The residual topology of the stack."""
        if self.topology is None:
            return topology(self.config.residual)
        if not isinstance(self.topology, Topology):
            raise TypeError(
                f"topology is {self.topology!r}; it must be a jaxblock.residual.Topology (a function that makes one "
                "is to be called, a connection to be put into one)"
            )
        return self.topology

    @property
    def labels(self) -> tuple[axes.Label, ...]:
        """What an optimizer should do differently with some of the parameters."""
        return self.connections.labels

    def project(self, params: Params) -> Params:
        """Return the parameters as the topology wants them after an optimizer step; most want nothing."""
        project = self.connections.project
        if project is None:
            return params
        projected = project(self.config, params)
        chex.assert_trees_all_equal_structs(params, projected)
        chex.assert_trees_all_equal_shapes_and_dtypes(params, projected)
        return projected

    def _stack(
        self, x_BTD: Array, attention: AttentionInputs, cache: Cache | None
    ) -> tuple[Array, dict[str, Any]]:
        """Return what the head reads, [B, T, D], and with a cache the collection of new keys and values."""
        config, connections, shape = self.config, self.connections, x_BTD.shape
        x_BTD = axes.constrain(x_BTD, *STREAM_AXES)
        shared = None if connections.shared is None else connections.shared(config, name="shared")()
        groups = None if connections.groups is None else connections.groups(config)
        cached = None if cache is None else read_cache(cache)
        inputs = StackInputs(attention, layer_inputs(config), shared, groups, cached)
        block = Block(config, self.execution, connections, parent=None)
        collect = (INTERMEDIATES,) if self.is_mutable_collection(INTERMEDIATES) else ()
        stream, collected = run_blocks(
            block,
            self.param("blocks", self._init_blocks, block, shared),
            connections.open(config, x_BTD),
            inputs,
            dropout_key=self.make_rng("dropout") if self.has_rng("dropout") else None,
            execution=self.execution,
            collect=collect if cache is None else (*collect, WRITTEN),
        )
        record(self, "blocks", collected.get(INTERMEDIATES, {}))
        x_BTD = (
            stream if connections.close is None else connections.close(config, name="close")(stream, shared)
        )
        if not isinstance(x_BTD, jax.Array):
            raise ValueError(
                f"the topology's closed stream is a {type(x_BTD).__name__}; a stream that is not one array needs "
                "`close`, which returns one"
            )
        chex.assert_shape(x_BTD, shape)
        record(self, "resid_final", x_BTD)
        if connections.final_norm:
            x_BTD = Norm(config, name="final_norm")(x_BTD)
        return x_BTD.astype(config.dtype), collected.get(WRITTEN, {})

    def _pattern(
        self, valid_BT: Array | None = None, segments_BT: Array | None = None, call: CachedCall | None = None
    ) -> AttentionPattern:
        """Return who may attend to whom; with a cache, the keys are its slots and then the new tokens."""
        windows = {size or None for size in self.config.window}
        return AttentionPattern(
            causal=True,
            window=windows.pop() if len(windows) == 1 else None,
            key_valid_BT=valid_BT if call is None else call.key_valid_BT,
            query_segments_BQ=segments_BT,
            key_segments_BT=segments_BT,
            query_positions_BQ=None if call is None else call.positions_BT,
            key_positions_BT=None if call is None else call.key_positions_BT,
        )

    def _angles(self, positions_BT: Array) -> Array | None:
        """Return rotary angles, [B or 1, T, K/2]; None where positions are not rotary."""
        config, choice = self.config, self.config.position_choice
        if choice.name != "rope":
            return None
        return rotary_angles(positions_BT, config.head_dim, base=choice.options["base"])

    def _init_blocks(self, key: Array, block: Block, shared: Params) -> Params:
        """Return the stack's parameters; they depend on no length, so one token is enough to trace."""
        config = self.config
        x_BTD = jnp.zeros((1, 1, config.width), config.stream_dtype)
        attention = AttentionInputs(self._pattern(), self._angles(jnp.zeros((1, 1), jnp.int32)))
        inputs = StackInputs(attention, layer_inputs(config), shared)
        return init_blocks(block, key, block.topology.open(config, x_BTD), inputs, depth=config.depth)


class Head(nn.Module):
    """An untied head: a kernel [D, V] of its own, no bias."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x_BTD: Array) -> Array:
        """Return float32 logits, [B, T, D] -> [B, T, V]."""
        config = self.config
        shape = (config.width, config.padded_vocab_size)
        init = kernel_init(config, "head", fan_in=config.width)
        return logits(x_BTD, self.param("kernel", init, shape, jnp.dtype(config.param_dtype)))
