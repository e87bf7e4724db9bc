"""What every model here shares: tokens -> embedding -> open -> blocks -> close -> final norm, causal or not."""

from typing import Any, ClassVar

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxblock import axes
from jaxblock.config import ExecutionConfig, ModelConfig
from jaxblock.functional.gradient_tap import gradient_tap
from jaxblock.functional.masks import AttentionPattern, check_pattern
from jaxblock.functional.parametrization import Scaling
from jaxblock.functional.positions import rotary_angles
from jaxblock.functional.segments import segment_positions
from jaxblock.models.block import Block, layer_inputs
from jaxblock.models.observation import GIVEN, OBSERVED, TAPS, Observer
from jaxblock.models.stack import StackInputs, init_blocks, run_blocks
from jaxblock.modules import AttentionInputs, Embedding, Norm, PositionTable, scaling
from jaxblock.modules.attention import WRITTEN
from jaxblock.modules.experts import ROUTING
from jaxblock.modules.intermediates import COLLECTION as INTERMEDIATES
from jaxblock.modules.intermediates import HEALTH, asked_for, record
from jaxblock.residual import Topology, check_depth_rules, topology
from jaxblock.types import Array, Params


class Trunk(nn.Module):
    """The base of the models: a subclass says whether attention is causal and what it reads out of the states.

    Its `__call__`, compact, calls `states`; the parameters "embedding", "positions", "blocks", "shared", "close" and
    "final_norm" are then its own, so every model has the same names and shapes for them.

    Attributes:
      config: what the model is.
      execution: how its stack is run; changes neither values (beyond round-off) nor parameters.
      topology: a residual topology of your own; left out, the one `config.residual` names.
      observe: what measures each sublayer, given out with `mutable=["observed"]` (see `models.observation`).
    """

    causal: ClassVar[bool]
    """Whether a token sees itself and earlier ones only."""

    config: ModelConfig
    execution: ExecutionConfig = ExecutionConfig()
    topology: Topology | None = None
    observe: Observer | None = None

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
        pattern = self._pattern(valid_BT=valid_BT, segments_BT=segments_BT)
        batch, length = tokens_BT.shape
        check_pattern(pattern, queries=length, keys=length, batch=batch)
        if positions_BT is None:
            positions_BT = segment_positions(length, segments_BT)
        elif valid_BT is not None:
            positions_BT = jnp.where(valid_BT, positions_BT, jnp.zeros_like(positions_BT))
        # What lies out of its table is NaN, and a hidden NaN still meets a weight of 0 in attention.
        if valid_BT is not None:
            tokens_BT = jnp.where(valid_BT, tokens_BT, jnp.zeros_like(tokens_BT))
        x_BTD, embedding = self._embed(tokens_BT, positions_BT)
        x_BTD, _ = self._stack(x_BTD, AttentionInputs(pattern, self._angles(positions_BT)))
        return x_BTD, embedding

    @property
    def connections(self) -> Topology:
        """The residual topology of the stack."""
        found = topology(self.config.residual) if self.topology is None else self.topology
        if not isinstance(found, Topology):
            raise TypeError(
                f"topology is {found!r}; it must be a jaxblock.residual.Topology (a function that makes one is to be "
                "called, a connection to be put into one)"
            )
        check_depth_rules(self.config, found)
        return found

    @property
    def labels(self) -> tuple[axes.Label, ...]:
        """What an optimizer should do differently with some of the parameters."""
        return self.connections.labels

    @property
    def scaling(self) -> Scaling:
        """Factors that depth and width put on learning rates, weight decay and Adam's epsilon, by kind of parameter."""
        return scaling(self.config)

    def project(self, params: Params) -> Params:
        """Return the parameters as the topology wants them after an optimizer step; most want nothing."""
        project = self.connections.project
        if project is None:
            return params
        projected = project(self.config, params)
        chex.assert_trees_all_equal_structs(params, projected)
        chex.assert_trees_all_equal_shapes_and_dtypes(params, projected)
        return projected

    def _embed(
        self, tokens_BT: Array, positions_BT: Array, *, limit: int | None = None
    ) -> tuple[Array, Embedding]:
        """Return the embedded tokens, positions added where they are a table, and the embedding."""
        embedding = Embedding(self.config, name="embedding")
        x_BTD = embedding(tokens_BT)
        if self.config.position_choice.name in ("learned", "sinusoidal"):
            x_BTD = x_BTD + PositionTable(self.config, name="positions")(positions_BT, limit=limit)
        return axes.constrain(x_BTD, *axes.STREAM_AXES), embedding

    def _stack(
        self, x_BTD: Array, attention: AttentionInputs, *, cached: dict[str, Any] | None = None
    ) -> tuple[Array, dict[str, Any]]:
        """Return the last states, [B, T, D], and, where keys and values were given, the collection of new ones."""
        config, connections, shape = self.config, self.connections, x_BTD.shape
        shared = None if connections.shared is None else connections.shared(config, name="shared")()
        groups = None if connections.groups is None else connections.groups(config)
        taps, given = (
            self.get_variable(collection, name) if self.has_variable(collection, name) else None
            for collection, name in ((TAPS, "blocks"), (GIVEN, "observer"))
        )
        first = self._first_values(x_BTD)
        inputs = StackInputs(attention, layer_inputs(config), shared, groups, cached, first, taps, given)
        block = Block(config, self.execution, connections, self.observe, parent=None)
        collect = tuple(
            name for name in (INTERMEDIATES, ROUTING, OBSERVED) if self.is_mutable_collection(name)
        )
        collect = (*collect, HEALTH) if asked_for(self, HEALTH) else collect
        stream, collected = run_blocks(
            block,
            self.param("blocks", self._init_blocks, block, shared),
            connections.open(config, x_BTD),
            inputs,
            dropout_key=self.make_rng("dropout") if self.has_rng("dropout") else None,
            execution=self.execution,
            collect=collect if cached is None else (*collect, WRITTEN),
        )
        record(self, "blocks", collected.get(INTERMEDIATES, {}))
        if collected.get(OBSERVED):
            self.put_variable(OBSERVED, "blocks", collected[OBSERVED])
        if collected.get(HEALTH):
            self.put_variable(HEALTH, "blocks", collected[HEALTH])
        if collected.get(ROUTING):
            self.put_variable(ROUTING, "blocks", collected[ROUTING])
        if connections.close is not None:
            stream = connections.close(config, name="close")(stream, shared)
        if not isinstance(stream, jax.Array):
            raise ValueError(
                f"the topology's closed stream is a {type(stream).__name__}; a stream that is not one array needs "
                "`close`, which returns one"
            )
        chex.assert_shape(stream, shape)
        if self.has_variable(TAPS, "closed"):
            stream = gradient_tap(stream, self.get_variable(TAPS, "closed"))
        record(self, "resid_final", stream)
        if connections.final_norm:
            stream = Norm(config, name="final_norm")(stream)
        return stream.astype(config.dtype), collected.get(WRITTEN, {})

    def _first_values(self, x_BTD: Array) -> Array | None:
        """Return zeros in the place of the first block's values, [B, T, G, K]; None where no block reads them."""
        config = self.config
        if config.value_residual_choice.name == "none":
            return None
        return jnp.zeros((*x_BTD.shape[:2], config.num_kv_heads, config.head_dim), config.dtype)

    def _pattern(
        self, *, valid_BT: Array | None = None, segments_BT: Array | None = None
    ) -> AttentionPattern:
        """Return who may attend to whom; windows that differ between blocks are put in by the blocks."""
        windows = {size or None for size in self.config.window}
        return AttentionPattern(
            causal=self.causal,
            window=windows.pop() if len(windows) == 1 else None,
            key_valid_BT=valid_BT,
            query_segments_BQ=segments_BT,
            key_segments_BT=segments_BT,
        )

    def _angles(self, positions_BT: Array) -> Array | None:
        """Return rotary angles, [B or 1, T, K/2]; None where positions are not rotary."""
        choice = self.config.position_choice
        if choice.name != "rope":
            return None
        return rotary_angles(positions_BT, self.config.head_dim, base=choice.options["base"])

    def _init_blocks(self, key: Array, block: Block, shared: Params) -> Params:
        """Return the stack's parameters; they depend on no length, so one token is enough to trace.

        Nor do they depend on how it is run: a config for another device has the same ones here.
        """
        config = self.config
        block = block.clone(execution=ExecutionConfig())
        x_BTD = jnp.zeros((1, 1, config.width), config.stream_dtype)
        attention = AttentionInputs(self._pattern(), self._angles(jnp.zeros((1, 1), jnp.int32)))
        inputs = StackInputs(attention, layer_inputs(config), shared)
        return init_blocks(block, key, block.topology.open(config, x_BTD), inputs, depth=config.depth)
