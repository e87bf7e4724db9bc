"""Bytes: of trees, of a key/value cache, and of what a training step keeps for its backward pass.

What is kept is read off the derivative itself, traced and never run. The loop over depth is one program forward and
another backward, so what it keeps is an array that no compiler can undo: compiled memory grows per block by exactly
`KeptBytes.per_block` where the stream is one array. Outside the loop only the logits and their gradient are counted,
or what a loss in blocks has in their place.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from jaxblock.config import ExecutionConfig, ModelConfig
from jaxblock.contracts import check_integer
from jaxblock.functional.cross_entropy_blocked import block_positions
from jaxblock.models.decoder import Decoder
from jaxblock.residual import History, topology
from jaxblock.types import Array, Params


class KeptBytes(NamedTuple):
    """Bytes that the forward pass leaves for the backward pass, parameters and their gradients not among them."""

    blocks: int
    """Of all blocks: what the scan over depth stacks up."""
    history: int
    """Rows of histories, written once; 0 where the stream is one array. Reading them backward needs a few times as
    much again, as working memory."""
    logits: int
    """Float32 logits and their gradient, [B, T, padded V] each; of one block, [B, C, padded V], where the loss is
    blocked, and float32 copies of head and states, which are summed up while the next block's are made."""
    depth: int

    @property
    def per_block(self) -> float:
        """Bytes of one block, the mean over the depth, rows of histories included."""
        return (self.blocks + self.history) / self.depth

    @property
    def total(self) -> int:
        """Bytes of all."""
        return self.blocks + self.history + self.logits


def tree_bytes(tree: object) -> int:
    """Return the bytes of a tree's leaves, arrays or abstract: parameters, gradients, an optimizer's state."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def kv_cache_bytes(config: ModelConfig, batch: int, length: int) -> int:
    """Return the bytes of keys and values of all blocks, 2 L B S G K itemsize, in the compute dtype.

    S is `length`; where every block has a window, a rolling cache needs no more than the longest of them. A model
    that cannot go on from a cache (`models.check_cacheable`) has none: 0.
    """
    check_integer("batch", batch, least=1)
    check_integer("length", length, least=1)
    if config.token_mixer_choice.name != "attention" or config.experts_choice.name == "capacity":
        return 0
    limited = bool(config.window) and all(config.window)
    slots = min(length, max(config.window)) if limited else length
    entries = 2 * config.depth * batch * slots * config.num_kv_heads * config.head_dim
    return entries * jnp.dtype(config.dtype).itemsize


def kept_bytes(
    config: ModelConfig, execution: ExecutionConfig, params: Params, *, batch: int, length: int
) -> KeptBytes:
    """Return what a forward pass over [batch, length] tokens keeps for the backward pass.

    Dropout is on where the config has any. "cudnn" is counted as "blocked", which keeps the same arrays.

    Args:
      config: the model.
      execution: how its stack is run: the remat policy above all.
      params: its parameters, abstract (`abstract_parameters`) or real.
      batch, length: B and T.
    """
    check_integer("batch", batch, least=1)
    check_integer("length", length, least=1)
    closed = _closed_derivative(config, execution, params, jax.ShapeDtypeStruct((batch, length), jnp.int32))
    blocks = history = 0
    rows = _history_shapes(config, batch, length)
    made_by = {var: equation for equation in closed.eqns for var in equation.outvars}
    for var in {var for var in closed.outvars if not isinstance(var, Literal)}:
        equation = made_by.get(var)
        if equation is None or equation.primitive.name != "scan":
            continue
        # What a step returns is carried as it is, or stacked along a new first axis.
        of_step = equation.params["jaxpr"].out_avals[equation.outvars.index(var)]
        if var.aval.shape != of_step.shape:
            blocks += tree_bytes(var.aval)
        elif var.aval.shape in rows:
            history += tree_bytes(var.aval)
    return KeptBytes(blocks, history, _logits_bytes(config, execution, batch, length), config.depth)


def _logits_bytes(config: ModelConfig, execution: ExecutionConfig, batch: int, length: int) -> int:
    if execution.loss == "whole":
        return 2 * 4 * batch * length * config.padded_vocab_size
    positions = block_positions(batch, length, config.padded_vocab_size)
    gradients = 4 * config.width * (config.padded_vocab_size + batch * length)
    return 2 * 4 * batch * positions * config.padded_vocab_size + gradients


def _closed_derivative(config: ModelConfig, execution: ExecutionConfig, params: Params, tokens_BT):
    """Return the jaxpr of (parameters, tokens) -> what the derivative by the parameters keeps."""
    if execution.attention == "cudnn":  # it cannot be traced without an NVIDIA GPU
        execution = dataclasses.replace(execution, attention="blocked")
    model = Decoder(config, execution)
    stochastic = config.stochastic_depth_choice.name != "none"
    drops = stochastic or config.attention_dropout or config.hidden_dropout or config.branch_dropout

    def kept(params: Params, tokens_BT: Array, key: Array) -> list:
        rngs = {"dropout": key} if drops else {}
        _, transposed = jax.vjp(lambda params: model.apply({"params": params}, tokens_BT, rngs=rngs), params)
        return jax.tree.leaves(transposed)

    key = jax.eval_shape(lambda: jax.random.key(0))
    return jax.make_jaxpr(kept)(params, tokens_BT, key).jaxpr


def _history_shapes(config: ModelConfig, batch: int, length: int) -> set[tuple[int, ...]]:
    """Return the shapes of the rows of a topology's histories."""
    x_BTD = jax.ShapeDtypeStruct((batch, length, config.width), jnp.dtype(config.stream_dtype))
    stream = jax.eval_shape(lambda x: topology(config.residual).open(config, x), x_BTD)
    nodes = jax.tree.leaves(stream, is_leaf=lambda node: isinstance(node, History))
    return {node.rows_NBTD.shape for node in nodes if isinstance(node, History)}
