"""A residual stack as probes take it, jaxblock's or your own: sublayers, stacked parameters, the stream they are given.

    stack = Stack(steps=(attend, feed), params=params, stream=x_BTD)        # plain JAX: attend(params_l, x) -> x
    stack = stack_of(model, params, tokens_BT)                              # a Decoder, Encoder or Classifier

A Flax module of your own is a step, too: `lambda p, x: layer.apply({"params": p}, x)`. S = L * len(steps) sublayers;
everything scans over L and loops over the steps of one block, so that one block is compiled. A sublayer takes x to
x + u, and u = step(x) - x is the update, whatever the rule made it of. Wrap what you call in one `jax.jit`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, cast

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxblock.config import ExecutionConfig
from jaxblock.models.block import Block, layer_inputs
from jaxblock.models.trunk import Trunk
from jaxblock.models.write_once import holds_history
from jaxblock.modules import AttentionInputs
from jaxblock.modules.intermediates import BRANCHES
from jaxblock.residual import check_same_stream
from jaxblock.residual.place import COLLECTION as PLACE
from jaxblock.types import Array, Params, Stream

Step = Callable[[Any, Any], Any]
"""(one block's parameters, the stream) -> the stream after one sublayer: same structure, shapes and dtypes."""
Visit = Callable[[Callable[[Any], Any], Any, Any], tuple[Any, Any]]
"""(sublayer x -> x, carry, what is given for this sublayer) -> (carry, what is kept of it)."""
EXIT = "exit"
"""The collection that holds the stream a model's exit is to read."""


@functools.partial(jax.tree_util.register_dataclass, data_fields=["params", "stream"], meta_fields=["steps"])
@dataclasses.dataclass(frozen=True, eq=False)
class Stack:
    """A residual stack: a pytree of its arrays, to be passed to a jitted function or made inside one."""

    steps: tuple[Step, ...]
    """The sublayers of one block, in order."""
    params: Params
    """What blocks differ in: every leaf [L, ...]."""
    stream: Stream
    """What the first sublayer is given: [B, T, D], or any pytree of floating arrays, float32 or wider, which is then
    one long vector. Similarities and token shares need [B, T, D]."""

    @property
    def depth(self) -> int:
        """L, the number of blocks."""
        _check(self)
        return jax.tree.leaves(self.params)[0].shape[0]

    @property
    def sublayers(self) -> int:
        """S = L * (steps of one block)."""
        return self.depth * len(self.steps)

    @property
    def size(self) -> int:
        """Number of entries of the stream: the dimension that Jacobians act on."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.stream))


def whole_blocks(stack: Stack) -> Stack:
    """Return the same stack with blocks for sublayers: what is measured by sublayer is then measured by block."""

    def block(params: Params, stream: Stream) -> Stream:
        for step in stack.steps:
            stream = step(params, stream)
        return stream

    return dataclasses.replace(stack, steps=(block,))


def scan_steps(
    stack: Stack, visit: Visit, carry: Any, *, given: Any = None, reverse: bool = False
) -> tuple[Any, Any]:
    """Visit every sublayer in order, or in `reverse`; return the last carry and what was kept, [S, ...].

    `lambda f, x, _: (f(x), statistic(x))` with carry `stack.stream` measures the stream before every sublayer.

    Args:
      stack: the stack.
      visit: what is done at one sublayer; it is traced once per step of a block.
      carry: what goes from sublayer to sublayer; the stream, where it is wanted, is part of it.
      given: leaves [S, ...], of which each sublayer is given its own.
      reverse: from the last sublayer to the first; what is kept is in the sublayers' order all the same.

    Raises:
      ValueError: no steps, parameters without one leading axis [L, ...], a stream that is not floating, a step that
        changes the stream's structure, shapes or dtypes.
    """
    _check(stack)
    count = len(stack.steps)
    order = range(count)[::-1] if reverse else range(count)
    given = jax.tree.map(lambda x: x.reshape(stack.depth, count, *x.shape[1:]), given)

    def block(carry: Any, scanned: tuple) -> tuple[Any, Any]:
        params, own = scanned
        kept: dict[int, Any] = {}
        for i in order:
            f = functools.partial(_checked, stack.steps[i], i, params)
            carry, kept[i] = visit(f, carry, jax.tree.map(lambda x, i=i: x[i], own))
        return carry, jax.tree.map(lambda *x: jnp.stack(x), *(kept[i] for i in range(count)))

    carry, kept = jax.lax.scan(block, carry, (stack.params, given), reverse=reverse)
    return carry, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), kept)


def run_stack(stack: Stack) -> Stream:
    """Return the stream after the last sublayer."""
    return scan_steps(stack, lambda f, x, _: (f(x), None), stack.stream)[0]


def update_of(before: Any, after: Any) -> Any:
    """Return after - before, leaf by leaf."""
    return jax.tree.map(jnp.subtract, after, before)


def inner_product(a: Any, b: Any, *, axes: int = 0) -> Array:
    """Return <a, b> over all leaves in float32 or wider, one number for each place in the first `axes` axes."""

    def leaf(x: Array, y: Array) -> Array:
        wide = jnp.promote_types(x.dtype, jnp.float32)
        return jnp.sum(x.astype(wide) * y.astype(wide), axis=tuple(range(axes, x.ndim)))

    return functools.reduce(jnp.add, jax.tree.leaves(jax.tree.map(leaf, a, b)))


def norm(a: Any, *, axes: int = 0) -> Array:
    """Return |a|, as `inner_product` does."""
    return jnp.sqrt(inner_product(a, a, axes=axes))


def one_by_one(pull: Callable[[Any], tuple[Any]], cotangents_K: Any) -> Any:
    """Return what a vjp makes of several cotangents, every leaf [K, ...], one after the other.

    Not by vmap: jaxlib 0.10's compiler for CPUs gets a norm's vmapped vjp wrong, without a word, where cotangents are
    many (16 of [4, 64, 64]) and the point is one. jvps, vjps alone and vmaps of both are right.
    """
    return jax.lax.map(lambda cotangent: pull(cotangent)[0], cotangents_K)


def stack_of(
    model: Trunk,
    params: Params,
    tokens_BT: Array,
    *,
    valid_BT: Array | None = None,
    segments_BT: Array | None = None,
    positions_BT: Array | None = None,
) -> Stack | None:
    """Return a model's stack on these tokens, computed in float32 at least, without dropout.

    None where a sublayer reads more than the stream it is given: a history of earlier ones (dense_former, unet,
    attention_residual, block_attention_residual, muddformer, lime), or the first block's values. Where the stream is
    several arrays (hyper_connections, manifold_hyper_connections, resi_dual, input_injection) they are one vector,
    with what a connection only carries along. `after_block` belongs to the block's last sublayer.

    Args:
      model: a Decoder, Encoder or Classifier.
      params: its parameters.
      tokens_BT: as the model takes them, like the rest. Padded places are part of the stream and of what is measured.
    """
    wide, topology = _widened(model), model.connections
    config = wide.config
    opening = _Opening(config, topology=topology)
    made: Any = opening.apply(
        {"params": params}, tokens_BT, valid_BT=valid_BT, segments_BT=segments_BT, positions_BT=positions_BT
    )
    stream, attention, shared = made
    grouped = topology.groups is not None and topology.groups(config) is not None
    if config.value_residual_choice.name != "none" or grouped or holds_history(stream):
        return None
    # A mask is the model's own; the opening stands for all of them.
    attention = attention._replace(pattern=dataclasses.replace(attention.pattern, causal=model.causal))
    first = "parallel" if config.wiring == "parallel" else config.token_mixer_choice.name
    first = first if first in ("parallel", "attention") else "token_mixer"
    (names,) = (names for names in BRANCHES if names[0] == first)

    def run(only: str, scanned: tuple, stream: Stream) -> Stream:
        own, layer = scanned
        place = {"block": layer.block, "sublayer": layer.sublayer}
        if shared is not None:
            place["shared"] = shared
        block = Block(config, ExecutionConfig(), topology, only=only, parent=None)
        return block.apply({"params": own, PLACE: place}, stream, attention, layer)

    steps = tuple(functools.partial(run, name) for name in names)
    return Stack(steps, (params["blocks"], layer_inputs(config)), stream)


def exit_of(
    model: Trunk, params: Params, tokens_BT: Array, *, valid_BT: Array | None = None
) -> Callable[[Stream], Array]:
    """Return what a model makes of the stream after its last sublayer, (stream) -> logits or states.

    `exit_of(...)(run_stack(stack_of(...)))` is the model. It runs the model with that stream in the place of its own:
    under `jax.jit` the stack, whose result nobody reads, is not computed. Its arguments are those of `stack_of`.
    """
    wide, topology = _widened(model), model.connections
    close = functools.partial(_Exit, topology.close)
    reading = wide.clone(topology=dataclasses.replace(topology, close=close), observe=None)
    own = {**params, "close": {"inner": params["close"]}} if "close" in params else params

    def exit(stream: Stream) -> Array:
        variables = {"params": own, EXIT: {"close": {"stream": stream}}}
        return cast(Array, reading.apply(variables, tokens_BT, valid_BT=valid_BT))

    return exit


class _Opening(Trunk):
    """A model up to its stack: the opened stream, what attention reads besides, and the shared parameters."""

    causal: ClassVar[bool] = False

    @nn.compact
    def __call__(
        self,
        tokens_BT: Array,
        *,
        valid_BT: Array | None = None,
        segments_BT: Array | None = None,
        positions_BT: Array | None = None,
    ) -> Any:
        """Return (stream, AttentionInputs, shared)."""
        return self.states(tokens_BT, valid_BT=valid_BT, segments_BT=segments_BT, positions_BT=positions_BT)[
            0
        ]

    def _stack(
        self, x_BTD: Array, attention: AttentionInputs, *, cached: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Return what a stack would be given, in the place of what it would return."""
        config, connections = self.config, self.connections
        shared = None if connections.shared is None else connections.shared(config, name="shared")()
        return (connections.open(config, x_BTD), attention, shared), {}


class _Exit(nn.Module):
    """The close of a topology, of the stream in the collection "exit"."""

    inner: Callable[..., nn.Module] | None
    config: Any

    @nn.compact
    def __call__(self, stream: Stream, shared: Params) -> Array:
        """Return the closed stream."""
        stream = self.get_variable(EXIT, "stream")
        return stream if self.inner is None else self.inner(self.config, name="inner")(stream, shared)


def _widened(model: Trunk) -> Trunk:
    """Return the model with a stream and branches of float32 at least: what rounds has no Jacobian."""
    wide = {
        name: jnp.promote_types(getattr(model.config, name), jnp.float32).name
        for name in ("dtype", "stream_dtype")
    }
    return model.clone(config=dataclasses.replace(model.config, **wide))


def _checked(step: Step, i: int, params: Params, stream: Stream) -> Stream:
    after = step(params, stream)
    check_same_stream(f"step {i} of the stack", stream, after)
    return after


def _check(stack: Stack) -> None:
    """Raise ValueError for a stack that cannot be scanned."""
    if not stack.steps:
        raise ValueError("Stack.steps is empty; it must be the sublayers of one block, (params_l, x) -> x")
    leading = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(stack.params)}
    if len(leading) != 1 or () in leading:
        raise ValueError(
            f"Stack.params has leaves with leading axes {sorted(leading)}; every leaf must be [L, ...], L blocks"
        )
    leaves = jax.tree.leaves(stack.stream)
    if not leaves or not all(jnp.issubdtype(jnp.result_type(leaf), jnp.floating) for leaf in leaves):
        raise ValueError("Stack.stream must be a floating array, or a pytree of such")
    narrow = {str(jnp.result_type(leaf)) for leaf in leaves if jnp.finfo(jnp.result_type(leaf)).bits < 32}
    if narrow:
        raise ValueError(
            f"Stack.stream is {', '.join(sorted(narrow))}; an update, step(x) - x, cancels in it: cast stream and "
            "parameters to float32"
        )
