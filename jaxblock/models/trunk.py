"""What every model here shares: tokens -> embedding -> open -> blocks -> close -> final norm, causal or not."""

from typing import ClassVar

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxblock import axes
from jaxblock.config import ExecutionConfig, ModelConfig
from jaxblock.functional.masks import AttentionPattern, check_pattern
from jaxblock.functional.positions import rotary_angles
from jaxblock.functional.segments import segment_positions
from jaxblock.models.block import Block, layer_inputs
from jaxblock.models.stack import StackInputs, init_blocks, run_blocks
from jaxblock.modules import AttentionInputs, Embedding, Norm, PositionTable
from jaxblock.modules.intermediates import COLLECTION as INTERMEDIATES
from jaxblock.modules.intermediates import record
from jaxblock.residual import STREAM_AXES, Topology, topology
from jaxblock.types import Array, Params


class Trunk(nn.Module):
    """The base of the models: a subclass says whether attention is causal and what it reads out of the states.

    Its `__call__`, compact, calls `states`; the parameters "embedding", "positions", "blocks", "shared", "close" and
    "final_norm" are then its own, so every model has the same names and shapes for them.

    Attributes:
      config: what the model is.
      execution: how its stack is run; changes neither values (beyond round-off) nor parameters.
      topology: a residual topology of your own; left out, the one `config.residual` names.
    """

    causal: ClassVar[bool]
    """Whether a token sees itself and earlier ones only."""

    config: ModelConfig
    execution: ExecutionConfig = ExecutionConfig()
    topology: Topology | None = None

    def states(
        self,
        tokens_BT: Array,
        *,
        valid_BT: Array | None = None,
        segments_BT: Array | None = None,
        positions_BT: Array | None = None,
    ) -> tuple[Array, Embedding]:
        """Return the last states, [B, T] -> [B, T, D] in the compute dtype, and the embedding, for a tied head.

        To be called once, inside a compact method. What stands at a place that is not real, id and position, is
        not read: 0 stands in for both.
        """
        chex.assert_rank(tokens_BT, 2)
        chex.assert_type(tokens_BT, int)
        config, connections = self.config, self.connections
        tokens_BT, positions_BT = self._real(tokens_BT, valid_BT, segments_BT, positions_BT)
        embedding = Embedding(config, name="embedding")
        x_BTD = embedding(tokens_BT)
        if config.position_choice.name in ("learned", "sinusoidal"):
            x_BTD = x_BTD + PositionTable(config, name="positions")(positions_BT)
        x_BTD = axes.constrain(x_BTD, *STREAM_AXES)
        x_BTD = self._run_stack(x_BTD, self._attention_inputs(valid_BT, segments_BT, positions_BT))
        chex.assert_shape(x_BTD, (*tokens_BT.shape, config.width))
        record(self, "resid_final", x_BTD)
        if connections.final_norm:
            x_BTD = Norm(config, name="final_norm")(x_BTD)
        return x_BTD.astype(config.dtype), embedding

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

    def _real(
        self, tokens_BT: Array, valid_BT: Array | None, segments_BT: Array | None, positions_BT: Array | None
    ) -> tuple[Array, Array]:
        """Return ids and positions, 0 where a place is not real: garbage there could be NaN, and 0 * NaN is NaN."""
        batch, length = tokens_BT.shape
        check_pattern(self._pattern(valid_BT, segments_BT), queries=length, keys=length, batch=batch)
        if valid_BT is not None:
            tokens_BT = jnp.where(valid_BT, tokens_BT, jnp.zeros_like(tokens_BT))
        if positions_BT is None:
            positions_BT = segment_positions(length, segments_BT)
        elif valid_BT is not None:
            positions_BT = jnp.where(valid_BT, positions_BT, jnp.zeros_like(positions_BT))
        return tokens_BT, positions_BT

    def _run_stack(self, x_BTD: Array, attention: AttentionInputs) -> Array:
        """Return the closed stream, [B, T, D] -> [B, T, D] in the stream's dtype."""
        config, connections = self.config, self.connections
        shared = None if connections.shared is None else connections.shared(config, name="shared")()
        groups = None if connections.groups is None else connections.groups(config)
        block = Block(config, self.execution, connections, parent=None)
        params = self.param("blocks", self._init_blocks, block, shared)
        stream, collected = run_blocks(
            block,
            params,
            connections.open(config, x_BTD),
            StackInputs(attention, layer_inputs(config), shared, groups),
            dropout_key=self.make_rng("dropout") if self.has_rng("dropout") else None,
            execution=self.execution,
            collect=(INTERMEDIATES,) if self.is_mutable_collection(INTERMEDIATES) else (),
        )
        record(self, "blocks", collected.get(INTERMEDIATES, {}))
        if connections.close is not None:
            stream = connections.close(config, name="close")(stream, shared)
        if not isinstance(stream, jax.Array):
            raise ValueError(
                f"the topology's closed stream is a {type(stream).__name__}; a stream that is not one array needs "
                "`close`, which returns one"
            )
        return stream

    def _pattern(self, valid_BT: Array | None, segments_BT: Array | None) -> AttentionPattern:
        """Return who may attend to whom; windows that differ between blocks are put in by the blocks."""
        windows = {size or None for size in self.config.window}
        return AttentionPattern(
            causal=self.causal,
            window=windows.pop() if len(windows) == 1 else None,
            key_valid_BT=valid_BT,
            query_segments_BQ=segments_BT,
            key_segments_BT=segments_BT,
        )

    def _attention_inputs(
        self, valid_BT: Array | None, segments_BT: Array | None, positions_BT: Array
    ) -> AttentionInputs:
        """Return what all blocks' attention reads."""
        angles, choice = None, self.config.position_choice
        if choice.name == "rope":
            angles = rotary_angles(positions_BT, self.config.head_dim, base=choice.options["base"])
        return AttentionInputs(self._pattern(valid_BT, segments_BT), angles)

    def _init_blocks(self, key: Array, block: Block, shared: Params) -> Params:
        """Return the stack's parameters; they depend on no length, so one token is enough to trace."""
        config = self.config
        x_BTD = jnp.zeros((1, 1, config.width), config.stream_dtype)
        attention = self._attention_inputs(None, None, jnp.zeros((1, 1), jnp.int32))
        inputs = StackInputs(attention, layer_inputs(config), shared)
        return init_blocks(block, key, block.topology.open(config, x_BTD), inputs, depth=config.depth)
