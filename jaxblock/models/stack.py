"""A stack of L blocks with stacked parameters: initialised by vmap, run by one scan over the block's pure `apply`.

Parameters carry a leading depth axis whether the stack is scanned, partly unrolled or a plain loop, so
checkpoints, imports and probes never convert. Layers are rematerialised here and nowhere else.
"""

from collections.abc import Callable, Mapping

import flax.linen as nn
import jax

from jaxblock.config import ExecutionConfig
from jaxblock.models.block import LayerInputs
from jaxblock.modules import AttentionInputs
from jaxblock.types import Array, Params, Stream

_POLICIES: Mapping[str, Callable | None] = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "branch_out": jax.checkpoint_policies.save_only_these_names("branch_out"),
}


def init_blocks(
    block: nn.Module, key: Array, stream: Stream, inputs: AttentionInputs, layers: LayerInputs, *, depth: int
) -> Params:
    """Return stacked parameters, every leaf [L, ...]: layer i is what the block alone would get from key i.

    Initialising under vmap keeps the depth axis out of every fan-in.
    """

    def init(key: Array, layer: LayerInputs) -> Params:
        return block.init(key, stream, inputs, layer)["params"]

    return jax.vmap(init)(jax.random.split(key, depth), layers)


def run_blocks(
    block: nn.Module,
    params: Params,
    stream: Stream,
    inputs: AttentionInputs,
    layers: LayerInputs,
    *,
    dropout_key: Array | None,
    execution: ExecutionConfig,
) -> Stream:
    """Run the stream through all blocks.

    Args:
      block: an unbound block; its `apply` is called once per layer.
      params: stacked parameters, every leaf [L, ...].
      stream: the stream from `open`.
      inputs: what every block's attention reads; closed over, never carried.
      layers: per-layer constants, every leaf [L].
      dropout_key: split into one key per layer; None = no dropout.
      execution: scan_unroll and remat; the result is the same, to round-off, for all of them.

    Returns:
      The stream after the last block.
    """
    depth = jax.tree.leaves(params)[0].shape[0]
    unroll = min(execution.scan_unroll, depth)
    keys = None if dropout_key is None else jax.random.split(dropout_key, depth)

    def step(stream: Stream, scanned: tuple) -> tuple[Stream, None]:
        layer_params, layer, key = scanned
        rngs = {} if key is None else {"dropout": key}
        return block.apply({"params": layer_params}, stream, inputs, layer, rngs=rngs), None

    if execution.remat != "none":
        # A loop that stays a loop keeps forward and backward apart; only straight-line code could be merged again.
        step = jax.checkpoint(step, policy=_POLICIES[execution.remat], prevent_cse=unroll == depth)
    stream, _ = jax.lax.scan(step, stream, (params, layers, keys), unroll=unroll)
    return stream
