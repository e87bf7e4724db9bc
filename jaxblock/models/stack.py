"""A stack of L blocks with stacked parameters: initialised by vmap, run by one scan over the block's pure `apply`.

Parameters carry a leading depth axis whether the stack is scanned, partly unrolled or a plain loop, so
checkpoints, imports and probes never convert. Layers are rematerialised here and nowhere else.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxblock.config import ExecutionConfig
from jaxblock.contracts import check_integer
from jaxblock.models.block import LayerInputs
from jaxblock.models.observation import GIVEN, TAPS
from jaxblock.models.write_once import Step, holds_history, scan_group, scan_plain, scan_write_once
from jaxblock.modules import AttentionInputs
from jaxblock.modules.attention import CACHE, VALUES, FirstValues
from jaxblock.residual.combinator import check_same_stream
from jaxblock.residual.contract import Groups
from jaxblock.residual.place import COLLECTION as PLACE
from jaxblock.types import Array, Params, Stream

_POLICIES: Mapping[str, Callable | None] = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "branch_out": jax.checkpoint_policies.save_only_these_names("branch_out"),
}


class StackInputs(NamedTuple):
    """What the blocks of a stack read besides the stream."""

    attention: AttentionInputs | None
    """The same for every block: closed over, never carried."""
    layers: LayerInputs
    """Per-layer constants, every leaf [L]."""
    shared: Params = None
    """Parameters that belong to no layer; closed over, never carried."""
    groups: Groups | None = None
    """How blocks are grouped; None = each may add to a history."""
    cache: Any = None
    """The blocks' collection "cache", every leaf [L, ...]: scanned, and only read; None = no decoding."""
    first_values: Array | None = None
    """Zeros of the shape of attention's values, [B, T, G, K], where blocks read the first one's; else None."""
    taps: Params = None
    """The blocks' collection "taps", every leaf [L]; None = no gradient is measured."""
    given: Any = None
    """The blocks' collection "given", the same for all; None = an observer reads nothing besides."""


class Carried(NamedTuple):
    """What goes from block to block."""

    stream: Stream
    values: Array | None
    """The first block's values of attention, once it has run; None where no block reads them."""


def init_blocks(block: nn.Module, key: Array, stream: Stream, inputs: StackInputs, *, depth: int) -> Params:
    """Return stacked parameters, every leaf [L, ...]: layer i is what the block alone would get from key i.

    Initialising under vmap keeps the depth axis out of every fan-in.
    """

    def init(key: Array, layer: LayerInputs) -> Params:
        variables = {PLACE: _place(layer, inputs.shared)}
        rngs = {"params": key}
        _, made = block.apply(variables, stream, inputs.attention, layer, rngs=rngs, mutable=["params"])
        return made.get("params", {})

    return jax.vmap(init)(jax.random.split(key, depth), inputs.layers)


def run_blocks(
    block: nn.Module,
    params: Params,
    stream: Stream,
    inputs: StackInputs,
    *,
    dropout_key: Array | None,
    execution: ExecutionConfig,
    collect: tuple[str, ...] = (),
) -> tuple[Stream, dict[str, Any]]:
    """Run the stream through all blocks.

    Args:
      block: an unbound block; its `apply` is called once per layer.
      params: stacked parameters, every leaf [L, ...].
      stream: the stream from `open`.
      inputs: what the blocks read besides.
      dropout_key: split into one key per layer; None = no dropout.
      execution: scan_unroll, remat and history; the result is the same, to round-off, for all of them.
      collect: collections the blocks may write to, such as "intermediates" ("written" is where new keys go).

    Returns:
      The stream after the last block, and what was collected, every leaf [L, ...].
    """
    depth = jax.tree.leaves(params)[0].shape[0]
    unroll = min(execution.scan_unroll, depth)
    keys = None if dropout_key is None else jax.random.split(dropout_key, depth)

    def step(carried: Carried, scanned: tuple, closed: tuple) -> tuple[Carried, dict[str, Any]]:
        (layer_params, layer, key, ahead, cache, taps), (attention, shared, given) = scanned, closed
        if carried.values is not None:
            attention = attention._replace(first=FirstValues(carried.values, layer.block > 0))
        variables = {"params": layer_params, PLACE: _place(layer, shared, ahead)}
        if cache is not None:
            variables[CACHE] = cache
        if taps is not None:
            variables[TAPS] = taps
        if given is not None:
            variables[GIVEN] = {"observer": given}
        rngs = {} if key is None else {"dropout": key}
        mutable = list(collect) if carried.values is None else [*collect, VALUES]
        made = block.apply(variables, carried.stream, attention, layer, rngs=rngs, mutable=mutable)
        after, collected = cast(tuple[Stream, dict[str, Any]], made)
        if carried.values is None:
            return Carried(after, None), collected
        own = collected[VALUES]["attention"]["own"]
        values = jnp.where(layer.block > 0, carried.values, own)
        return Carried(after, values), {name: x for name, x in collected.items() if name != VALUES}

    if execution.remat != "none":
        # A loop that stays a loop keeps forward and backward apart; only straight-line code could be merged again.
        step = jax.checkpoint(step, policy=_POLICIES[execution.remat], prevent_cse=unroll == depth)
    write_once = execution.history == "reverse" and holds_history(stream)
    # Op by op, for debugging, every step's derivative is a new object that no scan can stack.
    op_by_op = jax.config.jax_disable_jit  # pyright: ignore[reportAttributeAccessIssue]
    scan = scan_write_once if write_once and not op_by_op else scan_plain
    scanned = (params, inputs.layers, keys, None, inputs.cache, inputs.taps)
    closed = (inputs.attention, inputs.shared, inputs.given)
    carried = Carried(stream, inputs.first_values)
    if inputs.groups is None:
        carried, collected = scan(step, carried, scanned, closed, unroll=unroll)
    else:
        carried, collected = _run_groups(
            scan, step, carried, scanned, closed, groups=inputs.groups, unroll=unroll
        )
    return carried.stream, collected


def _run_groups(
    scan: Callable,
    step: Step,
    carried: Carried,
    scanned: tuple,
    closed: tuple,
    *,
    groups: Groups,
    unroll: int,
) -> tuple[Carried, dict[str, Any]]:
    """Run whole groups by a scan of scans, then the ragged rest as one more group."""
    check_integer("Groups.blocks", groups.blocks, least=1)
    depth = jax.tree.leaves(scanned)[0].shape[0]
    whole = depth // groups.blocks * groups.blocks

    def run_group(carried: Carried, scanned: tuple, closed: tuple) -> tuple[Carried, dict[str, Any]]:
        params, layers, keys, _, cache, taps = scanned
        told = (params, layers, keys, groups.before(carried.stream, params), cache, taps)
        size = jax.tree.leaves(params)[0].shape[0]
        carried, outputs = scan_group(step, carried, told, closed, unroll=min(unroll, size))
        after = groups.after(carried.stream)
        check_same_stream("Groups.after", carried.stream, after)
        return carried._replace(stream=after), outputs

    collected = []
    for first, last, size in ((0, whole, groups.blocks), (whole, depth, depth - whole)):
        if first == last:
            continue
        part = jax.tree.map(lambda x, a=first, b=last, n=size: x[a:b].reshape(-1, n, *x.shape[1:]), scanned)
        carried, outputs = scan(run_group, carried, part, closed, unroll=max(1, unroll // size))
        collected.append(jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), outputs))
    return carried, jax.tree.map(lambda *parts: jnp.concatenate(parts), *collected)


def _place(layer: LayerInputs, shared: Params, ahead: Any = None) -> dict[str, Any]:
    """Return the collection that `residual.place` reads."""
    place = {"block": layer.block, "sublayer": layer.sublayer, "shared": shared, "ahead": ahead}
    return {name: value for name, value in place.items() if value is not None}
