"""A decoder-only language model: embedding, stack of blocks, final norm where the topology needs one, head."""

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
from jaxblock.models.stack import StackInputs, init_blocks, run_blocks
from jaxblock.modules import AttentionInputs, Embedding, Norm, PositionTable
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
    ) -> Array:
        """Return float32 logits, [B, T] -> [B, T, padded V].

        Args:
          tokens_BT: token ids, any integer dtype; an id >= V gives NaN logits, never another token's.
          valid_BT: boolean, True = real token; padding is never attended to, but its ids must be below V too.
          segments_BT: integer document ids of packed rows; attention stays within a document.
          positions_BT: position of each token. Left out: its index, counted from its document's start.

        Raises:
          AssertionError: ranks, shapes or dtypes other than these.
          ValueError: more tokens than the learned position table has rows, a mask that is not boolean.
        """
        chex.assert_rank(tokens_BT, 2)
        chex.assert_type(tokens_BT, int)
        config, connections = self.config, self.connections
        if positions_BT is None:
            positions_BT = segment_positions(tokens_BT.shape[1], segments_BT)

        embedding = Embedding(config, name="embedding")
        x_BTD = embedding(tokens_BT)
        if config.position_choice.name in ("learned", "sinusoidal"):
            x_BTD = x_BTD + PositionTable(config, name="positions")(positions_BT)
        x_BTD = axes.constrain(x_BTD, *STREAM_AXES)

        shared = None if connections.shared is None else connections.shared(config, name="shared")()
        groups = None if connections.groups is None else connections.groups(config)
        attention = self._attention_inputs(valid_BT, segments_BT, positions_BT)
        inputs = StackInputs(attention, layer_inputs(config), shared, groups)
        block = Block(config, self.execution, connections, parent=None)
        params = self.param("blocks", self._init_blocks, block, shared)
        dropout_key = self.make_rng("dropout") if self.has_rng("dropout") else None
        stream, collected = run_blocks(
            block,
            params,
            connections.open(config, x_BTD),
            inputs,
            dropout_key=dropout_key,
            execution=self.execution,
            collect=(INTERMEDIATES,) if self.is_mutable_collection(INTERMEDIATES) else (),
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
        chex.assert_shape(x_BTD, (*tokens_BT.shape, config.width))
        record(self, "resid_final", x_BTD)
        if connections.final_norm:
            x_BTD = Norm(config, name="final_norm")(x_BTD)
        x_BTD = x_BTD.astype(config.dtype)
        return embedding.attend(x_BTD) if config.head == "tied" else Head(config, name="head")(x_BTD)

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

    def _attention_inputs(
        self, valid_BT: Array | None, segments_BT: Array | None, positions_BT: Array
    ) -> AttentionInputs:
        """Return what all blocks' attention reads."""
        config = self.config
        windows = {size or None for size in config.window}
        pattern = AttentionPattern(
            causal=True,
            window=windows.pop() if len(windows) == 1 else None,
            key_valid_BT=valid_BT,
            query_segments_BQ=segments_BT,
            key_segments_BT=segments_BT,
        )
        angles = None
        choice = config.position_choice
        if choice.name == "rope":
            angles = rotary_angles(positions_BT, config.head_dim, base=choice.options["base"])
        return AttentionInputs(pattern, angles)

    def _init_blocks(self, key: Array, block: Block, shared: Params) -> Params:
        """Return the stack's parameters; they depend on no length, so one token is enough to trace."""
        config = self.config
        x_BTD = jnp.zeros((1, 1, config.width), config.stream_dtype)
        attention = self._attention_inputs(None, None, jnp.zeros((1, 1), jnp.int32))
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
