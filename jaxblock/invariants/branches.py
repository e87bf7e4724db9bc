"""Switches for the branches of a model: scale what attention and feed-forward return, down to nothing.

A branch ends in a linear map, so its output is scaled exactly by scaling that map's kernel and bias: no second
forward pass has to be written, and what is measured is the model itself.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxblock.axes import path_name
from jaxblock.contracts import check_integer
from jaxblock.functional.masks import AttentionPattern
from jaxblock.models import Block, Decoder, layer_inputs
from jaxblock.modules import AttentionInputs, Embedding, PositionTable
from jaxblock.residual.contract import open_array
from jaxblock.residual.place import COLLECTION as PLACE
from jaxblock.types import Array, Params

_LAST_MAPS = {
    "attention/output": "attention",
    "token_mixer/mlp_down": "attention",
    "token_mixer/convolution_out": "attention",
    "feed_forward/down": "feed_forward",
    "experts/down": "feed_forward",
}


class ZeroBranchReport(NamedTuple):
    """The closed stream without branches against what the topology declares."""

    equal: Array
    """bool: the same in every bit; to be asked of rules that give the embedding itself. Where something is computed
    (the norms of post_norm), two places of a compiled program may round it differently: there the error says it."""
    error: Array
    """float32: max |closed - declared|."""


def scale_branches(params: Params, *, attention: float | Array, feed_forward: float | Array) -> Params:
    """Return parameters whose branches return that many times what they did.

    Args:
      params: a model's, or one block's, parameters.
      attention: factor on the output kernel and bias of attention, or of the token mixer in its place: a number, or
        one per block [L]; may be traced.
      feed_forward: the same of the feed-forward's, or the experts', down kernel and bias.

    Raises:
      ValueError: the tree has no such kernels.
    """
    gains = {"attention": attention, "feed_forward": feed_forward}
    found = set()

    def leaf(path: tuple, x: Array) -> Array:
        branch = _LAST_MAPS.get("/".join(path_name(path).split("/")[-3:-1]))
        if branch is None:
            return x
        found.add(branch)
        gain = jnp.asarray(gains[branch], x.dtype)
        return x * (gain.reshape(-1, *(1,) * (x.ndim - 1)) if gain.ndim else gain)

    scaled = jax.tree_util.tree_map_with_path(leaf, params)
    if found != set(gains):
        raise ValueError(
            "params hold no attention/output and feed_forward/down kernels: pass a Decoder's or a Block's parameters"
        )
    return scaled


def zero_branches(params: Params) -> Params:
    """Return parameters whose branches return exactly 0, whatever they read (inf and NaN parameters aside).

    A norm behind the branch still adds its bias: `peri_norm` and `branch_norm` are then x + bias, not x.
    """
    return scale_branches(params, attention=0.0, feed_forward=0.0)


def probe_zero_branches(model: Decoder, params: Params, tokens_BT: Array) -> ZeroBranchReport:
    """Zero every branch and compare the closed stream with the topology's `zero_branch` of the embedding.

    What a topology declares is declared at its own initial values: pass connections' parameters as they start (the
    rest may be anything).

    Raises:
      ValueError: the topology declares nothing.
    """
    topology = model.connections
    if topology.zero_branch is None:
        raise ValueError(
            f"the topology {topology.equation!r} declares no zero_branch to compare its stream with"
        )
    variables: Any
    _, variables = model.apply(
        {"params": zero_branches(params)},
        tokens_BT,
        mutable=["intermediates"],
        capture_intermediates=lambda module, _: isinstance(module, Embedding | PositionTable),
    )
    collected = variables["intermediates"]
    x_BTD = collected["embedding"]["__call__"][0]
    if "positions" in collected:
        x_BTD = x_BTD + collected["positions"]["__call__"][0]
    want_BTD, got_BTD = topology.zero_branch(model.config, x_BTD), collected["resid_final"]
    error = jnp.max(jnp.abs(got_BTD.astype(jnp.float32) - want_BTD.astype(jnp.float32)))
    return ZeroBranchReport(jnp.all(got_BTD == want_BTD), error)


def switch_block(model: Decoder, *, block: int = 0) -> Callable[[Params, Array, Array, Array], Array]:
    """Return one block of a model as `(params, x_BTD, attention gain, feed-forward gain) -> x_BTD`.

    `params` are the model's; `functools.partial(switch_block(model), params)` is what `describe_block` takes.
    Attention is causal, without rotary angles, padding or windows here: none of them touches the stream.

    Raises:
      ValueError: the stream of this topology is not one array, or there is no such block.
    """
    topology, config = model.connections, model.config
    if (
        topology.open is not open_array
        or topology.shared is not None
        or topology.close is not None
        or topology.groups is not None
    ):
        raise ValueError(
            f"the stream of {topology.equation!r} is not one array that a block alone carries on: "
            "a block of it cannot be described by itself"
        )
    check_integer("block", block, least=0, most=config.depth - 1)
    module = Block(config, model.execution, topology, parent=None)
    layer = jax.tree.map(lambda leaf: leaf[block], layer_inputs(config))._replace(window=None)
    place = {"block": layer.block, "sublayer": layer.sublayer}
    inputs = AttentionInputs(AttentionPattern(causal=True))

    def apply(params: Params, x_BTD: Array, attention: Array, feed_forward: Array) -> Array:
        own = jax.tree.map(lambda leaf: leaf[block], params["blocks"])
        scaled = scale_branches(own, attention=attention, feed_forward=feed_forward)
        after: Any = module.apply({"params": scaled, PLACE: place}, x_BTD, inputs, layer)
        return after

    return apply


def switch_exit(model: Decoder, tokens_BT: Array) -> Callable[[Params, Array], Array]:
    """Return a model's exit as `(params, scale) -> logits` of `scale` times its embedding, with every branch at 0 and
    no positions.

    `functools.partial(switch_exit(model, tokens_BT), params)` is what `describe_exit` takes. A tied head keeps the
    table it had while the embedding is scaled.
    """
    untied = model.clone(config=dataclasses.replace(model.config, head="untied", positions="none"))

    def apply(params: Params, scale: Array) -> Array:
        table = params["embedding"]["table"]
        changed = {name: tree for name, tree in zero_branches(params).items() if name != "positions"}
        if model.config.head == "tied":
            changed["head"] = {"kernel": table.T}
        changed["embedding"] = {"table": table * jnp.asarray(scale, table.dtype)}
        logits_BTV: Any = untied.apply({"params": changed}, tokens_BT)
        return logits_BTV[..., : model.config.vocab_size]

    return apply
