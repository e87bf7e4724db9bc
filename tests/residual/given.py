"""A topology's connections around branches that the caller gives: what a stack does, without attention or weights."""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxblock import ExecutionConfig, ModelConfig
from jaxblock.models import LayerInputs, StackInputs, init_blocks, layer_inputs, run_blocks
from jaxblock.modules.intermediates import record
from jaxblock.residual import History, Topology, residual


@dataclasses.dataclass(frozen=True)
class Entry:
    """A topology under test."""

    name: str
    topology: Topology

    def __str__(self) -> str:
        return self.name


class GivenBranches(nn.Module):
    """A block with a topology's connections around branches that the caller chooses."""

    config: ModelConfig
    topology: Topology
    branch: Callable[[jax.Array, Any, jax.Array], jax.Array]
    """(what is read [B, T, D], what the caller gave, number of the sublayer) -> [B, T, D]."""

    @nn.compact
    def __call__(self, stream: Any, given: Any, layer: LayerInputs) -> Any:
        serial = ("attention_connection", "feed_forward_connection")
        for j, name in enumerate(serial if self.config.wiring == "serial" else ("connection",)):

            def f(h, j=j):
                h = jax.tree.leaves(h)[-1]  # of named views, the value
                record(self, f"read_{j}", h)
                return self.branch(h, given, layer.sublayer + j)

            connection = self.topology.connection(self.config, name=name)
            stream = residual(connection, stream, f, dtype="float32")
        after = self.topology.after_block
        return stream if after is None else after(self.config, name="after_block")(stream)


class GivenModel(nn.Module):
    """Embedding given, branches given, everything the topology declares as in a decoder; returns (closed, reads)."""

    config: ModelConfig
    topology: Topology
    branch: Callable
    execution: ExecutionConfig = ExecutionConfig()

    @nn.compact
    def __call__(self, x: jax.Array, given: Any) -> tuple[jax.Array, dict]:
        config, topology = self.config, self.topology
        shared = None if topology.shared is None else topology.shared(config, name="shared")()
        block = GivenBranches(config, topology, self.branch, parent=None)
        groups = None if topology.groups is None else topology.groups(config)
        inputs = StackInputs(given, layer_inputs(config), shared, groups)
        stream = topology.open(config, x)
        params = self.param("blocks", lambda key: init_blocks(block, key, stream, inputs, depth=config.depth))
        stream, collected = run_blocks(
            block,
            params or {"none": jnp.zeros((config.depth, 1))},
            stream,
            inputs,
            dropout_key=None,
            execution=self.execution,
            collect=("intermediates",),
        )
        closed = stream
        if topology.close is not None:
            closed = topology.close(config, name="close")(stream, shared)
        return closed, collected["intermediates"]


def run_given(entry: Entry, model_config: ModelConfig, branch: Callable, x: jax.Array, given: Any) -> tuple:
    """Return (closed, reads) at the topology's own initial values."""
    model = GivenModel(model_config, entry.topology, branch)
    (closed, reads), _ = jax.jit(model.init_with_output)(jax.random.key(0), x, given)
    return closed, reads


def given_branch(h: jax.Array, given: jax.Array, sublayer: jax.Array) -> jax.Array:
    """Return the caller's array for this sublayer, whatever was read."""
    return jnp.broadcast_to(given[sublayer], h.shape)


def added(h: jax.Array, given: jax.Array, sublayer: jax.Array) -> jax.Array:
    """Return what was read plus the caller's array for this sublayer: nothing read is without use."""
    return h + jnp.broadcast_to(given[sublayer], h.shape)


def position_wise(h: jax.Array, given: jax.Array, sublayer: jax.Array) -> jax.Array:
    """A branch that reads each position alone."""
    return jnp.tanh(h @ given[sublayer])


def draw(*shape: int, seed: int = 0, scale: float = 1.0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(scale=scale, size=shape), jnp.float32)


def unrolled_flops(topology: Topology, model_config: ModelConfig) -> float:
    """Return the FLOPs per token of all connections, as XLA counts the traced program, nothing compiled.

    A Python loop over the blocks whose histories hold the rows that exist and no others; a branch costs D.
    """
    x, given = (
        jnp.zeros((1, 1, model_config.width)),
        jnp.zeros((model_config.sublayers, model_config.width)),
    )
    model = GivenModel(model_config, topology, given_branch)
    variables = jax.eval_shape(model.init, jax.random.key(0), x, given)
    run = jax.jit(
        lambda variables, x, given: _unrolled(topology, model_config, variables["params"], x, given)
    )
    return run.lower(variables, x, given).cost_analysis()["flops"]


def _unrolled(topology: Topology, model_config: ModelConfig, params: Any, x: jax.Array, given: Any) -> Any:
    def of(module: Callable | None, name: str, *arguments: Any) -> Any:
        return module(model_config, name=name).apply({"params": params.get(name, {})}, *arguments)

    shared = None if topology.shared is None else of(topology.shared, "shared")
    groups = None if topology.groups is None else topology.groups(model_config)
    size = 1 if groups is None else groups.blocks
    block = GivenBranches(model_config, topology, added, parent=None)
    layers, stream, ahead = (
        layer_inputs(model_config),
        _existing(topology.open(model_config, x), opened=True),
        None,
    )
    for number in range(model_config.depth):
        if groups is not None and number % size == 0:
            part = jax.tree.map(lambda leaf, i=number: leaf[i : i + size], params["blocks"])
            ahead = groups.before(stream, part)
        layer, own = jax.tree.map(lambda leaf, i=number: leaf[i], (layers, params["blocks"]))
        place = {"block": layer.block, "sublayer": layer.sublayer, "shared": shared}
        if ahead is not None:
            place["ahead"] = jax.tree.map(lambda leaf, i=number % size: leaf[i], ahead)
        place = {name: value for name, value in place.items() if value is not None}
        stream = _existing(block.apply({"params": own, "place": place}, stream, given, layer))
        if groups is not None and ((number + 1) % size == 0 or number + 1 == model_config.depth):
            stream = _existing(groups.after(stream))
    return stream if topology.close is None else of(topology.close, "close", stream, shared)


def _existing(stream: Any, *, opened: bool = False) -> Any:
    """Return the stream with histories of exactly the rows that exist; every row that was pushed counts."""

    def trim(node: Any) -> Any:
        if not isinstance(node, History):
            return node
        rows = [node.rows_NBTD[:1] if opened else node.rows_NBTD, *(x.row_BTD[None] for x in node.recent)]
        rows = jnp.concatenate(rows)
        return History(rows, jnp.asarray(len(rows), jnp.int32))

    return jax.tree.map(trim, stream, is_leaf=lambda node: isinstance(node, History))
