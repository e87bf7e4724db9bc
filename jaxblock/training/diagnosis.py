"""What went wrong at a bad step: the first tensor that is not finite, or the one that makes up most of a spike.

The state is frozen at a bad step, so its parameters, batch and dropout key are at hand, and the step is computed
again with everything it makes on the way. Tensors are gone through in the order they are computed in:

    parameters
    forward     embedding -> block 0 ... block L-1 (resid_pre, attention_in, attention_out, resid_mid, ...) -> logits
    loss
    backward    gradients of the head -> final norm -> block L-1 ... block 0 -> embedding -> their global norm

What is broken makes all that follows it broken, so the first one in this order is where to look.
"""

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxblock.axes import path_name
from jaxblock.contracts import check_choice
from jaxblock.training.objectives import Loss
from jaxblock.types import Array, Params

Forward = Callable[[Params, Any, Array | None], tuple[Array, dict[str, Any]]]
"""(params, batch, dropout key) -> (logits, what was recorded on the way, leaves under "blocks" stacked [L, ...])."""

KINDS = ("non_finite", "spike")
STAGES = ("embedding", "positions", "shared", "blocks", "close", "resid_final", "final_norm")
"""Parts of a model in the order they are computed in; any other part, a head, comes after them."""
IN_BLOCK = (
    "resid_pre",
    *("attention_connection", "token_mixer_connection", "connection"),
    *("attention_in", "token_mixer_in", "parallel_in", "attention", "token_mixer"),
    *("attention_out", "token_mixer_out"),
    "resid_mid",
    *("feed_forward_connection", "feed_forward_in", "feed_forward", "feed_forward_out", "parallel_out"),
    *("after_block", "resid_post"),
)
"""What a block computes, in order."""
IN_BRANCH = (
    *("query", "key", "value", "output"),
    *("mlp_up", "mlp_down", "convolution_in", "convolution_out"),
    *("gate", "up", "down"),
)
"""Kernels of a branch, in order."""
PLACES = {
    "resid": "residual stream",
    "attention": "attention",
    "token": "token_mixer",
    "feed": "feed_forward",
    "parallel": "parallel",
    "connection": "parallel",
    "after": "after_block",
}
"""The place in a block by the first word of a tensor's name."""
LARGEST_SQUARE = float(np.finfo(np.float32).max)


class Searchable(Protocol):
    """What is searched: a `Task`, or anything else that has these two."""

    @property
    def loss(self) -> Loss:
        """The objective of the step."""
        ...

    @property
    def forward(self) -> Forward:
        """The same computation up to the logits, with what the blocks recorded."""
        ...


class Fault(NamedTuple):
    """What a bad step is put down to; plain values, for a row of metrics.jsonl."""

    kind: str
    """non_finite or spike."""
    quantity: str
    """parameter, activation, loss, gradient or update."""
    place: str
    """Part of the model, as "block 3, attention"."""
    tensor: str
    """Name of the parameter or activation, without its layer, as "blocks/attention/query/kernel"."""
    layer: int | None
    """Block it belongs to, from 0; None outside the stack."""
    value: float | None
    """non_finite: the tensor's largest finite magnitude, None where it has none; spike: its gradient's norm."""
    sentence: str
    """All of it in words."""


def find_fault(
    task: Searchable, params: Params, batch: Any, dropout_key: Array | None, *, kind: str
) -> Fault:
    """Return what made a step bad: the first thing that is not finite, or else what its kind is put down to.

    A spike is put down to the parameter of one layer with the largest gradient norm, and the sentence says what the
    branches wrote. A non-finite step whose parameters, loss and gradients are all finite is put down to its update.

    Args:
      task: its `loss` and `forward` are searched; for the same two functions nothing is compiled twice.
      params: the parameters before the step.
      batch: the step's.
      dropout_key: the step's; None = no dropout.
      kind: "non_finite" or "spike".

    Raises:
      ValueError: another kind.
    """
    check_choice("kind", kind, KINDS)
    given = (params, batch, dropout_key)
    fault = first_not_finite(task, *given)
    if fault is not None:
        return fault
    if kind == "spike":
        return _spike(task, given)
    words = "parameters, loss and gradients are finite: the update made of them is not"
    return Fault(kind, "update", "optimizer", "update", None, None, words)


def first_not_finite(task: Searchable, params: Params, batch: Any, dropout_key: Array | None) -> Fault | None:
    """Return the first thing that is not finite in a step, in the order of computation; None where all is finite.

    Arguments as in `find_fault`. The activations are computed (a second compilation) only when the loss or a
    gradient is not finite; they take the memory of a step without remat.
    """
    broken = _first_broken(_tensors(_measure(params)))
    if broken is not None:
        return _not_finite("parameter", broken, "it was so before this step")
    loss, gradients = _differentiate(task, params, batch, dropout_key)
    broken = _first_broken(reversed(gradients))
    top, square = _largest(gradients)
    if math.isfinite(loss) and broken is None and square <= LARGEST_SQUARE:
        return None
    activations = _run_forward(task, params, batch, dropout_key)
    at = _first_broken(activations)
    if at is not None:
        return _broken_activation(at, first=at is activations[0])
    if not math.isfinite(loss):
        words = (
            "the loss is not finite, though the logits and all before them are: look for a target that is no "
            "token or class, or for logits too large for the loss"
        )
        return Fault("non_finite", "loss", "loss", "loss", None, None, words)
    if broken is not None:
        return _not_finite(
            "gradient", broken, "it is the first on the way back; loss and activations are finite"
        )
    words = (
        f"the global gradient norm overflows float32, though every gradient is finite; the largest is that of "
        f"{top.name}{_of_block(top)}, norm {math.sqrt(top.square):.4g}"
    )
    return Fault("non_finite", "gradient", top.place, top.name, top.layer, math.sqrt(top.square), words)


def _spike(task: Searchable, given: tuple) -> Fault:
    """Return the fault of a spike in a step that is finite."""
    loss, gradients = _differentiate(task, *given)
    top, total = _largest(gradients)
    share = top.square / total if total else 0.0
    words = (
        f"loss {loss:.4g}, gradient norm {math.sqrt(total):.4g}; the largest part is the gradient of "
        f"{top.name}{_of_block(top)}, norm {math.sqrt(top.square):.4g}, {share:.0%} of the square"
    )
    branches = _largest_branches(_run_forward(task, *given))
    if branches:
        words += f"; largest branch outputs: {branches}"
    return Fault("spike", "gradient", top.place, top.name, top.layer, math.sqrt(top.square), words)


class _Facts(NamedTuple):
    """What is measured of a tensor, one entry per layer."""

    broken: Array
    """Entries that are not finite."""
    first: Array
    """Index of the first of them, [rows, rank]."""
    largest: Array
    """Largest finite magnitude."""
    scaled: Array
    """Sum of squares over largest**2, which cannot overflow."""


class _Tensor(NamedTuple):
    """One parameter, gradient or activation of one layer."""

    name: str
    layer: int | None
    size: int
    broken: int
    first: tuple[int, ...]
    largest: float
    square: float

    @property
    def place(self) -> str:
        """Part of the model it belongs to."""
        if self.layer is None:
            return "residual stream" if self.name == "resid_final" else self.name.split("/")[0]
        part = self.name.split("/")[1]
        return f"block {self.layer}, {PLACES.get(part.split('_')[0], part)}"

    @property
    def order(self) -> tuple:
        """Its place in the order of computation."""
        stage, *rest = self.name.split("/")
        part = rest[0] if rest else ""
        return (
            _place_in(STAGES, stage),
            -1 if self.layer is None else self.layer,
            _place_in(IN_BLOCK, part),
            _place_in(IN_BRANCH, rest[1] if len(rest) > 1 else ""),
            self.name,
        )


def _place_in(names: tuple[str, ...], name: str) -> int:
    return names.index(name) if name in names else len(names)


@jax.jit
def _measure(tree: Any) -> dict[str, tuple[_Facts, int | Array]]:
    """Return the facts of every floating leaf by its path, and the number of entries per layer."""
    found = {}
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        name = path_name(path)
        x = jnp.asarray(x)
        if jnp.issubdtype(x.dtype, jnp.floating) and x.size:
            rows = x if name.startswith("blocks/") else x[None]
            found[name] = (_facts(rows), rows[0].size)
    return found


def _facts(x: Array) -> _Facts:
    """Measure every row of x, [rows, ...]."""
    flat = x.reshape(x.shape[0], -1)
    finite = jnp.isfinite(flat)
    sizes = jnp.where(finite, jnp.abs(flat).astype(jnp.promote_types(x.dtype, jnp.float32)), 0.0)
    largest = sizes.max(axis=1)
    scaled = jnp.square(sizes / jnp.where(largest > 0, largest, 1.0)[:, None]).sum(axis=1)
    index = jnp.unravel_index(jnp.argmax(~finite, axis=1), x.shape[1:] or (1,))
    return _Facts((~finite).sum(axis=1), jnp.stack(index, axis=1), largest, scaled)


def _tensors(measured: dict[str, tuple[_Facts, int | Array]]) -> list[_Tensor]:
    """Return what was measured, tensor by tensor and layer by layer, in the order of computation."""
    found = []
    for name, (facts, size) in jax.device_get(measured).items():
        for row in range(len(facts.broken)):
            largest = float(facts.largest[row])
            tensor = _Tensor(
                name=name,
                layer=row if name.startswith("blocks/") else None,
                size=int(size),
                broken=int(facts.broken[row]),
                first=tuple(int(i) for i in facts.first[row]),
                largest=largest,
                square=largest**2 * float(facts.scaled[row]),
            )
            found.append(tensor)
    return sorted(found, key=lambda tensor: tensor.order)


@functools.partial(jax.jit, static_argnames=("loss",))
def _loss_and_gradients(loss: Loss, params: Params, batch: Any, key: Array | None) -> tuple[Array, Params]:
    return jax.value_and_grad(lambda params: loss(params, batch, key).loss)(params)


@functools.partial(jax.jit, static_argnames=("forward",))
def _forward_facts(forward: Forward, params: Params, batch: Any, key: Array | None) -> Any:
    logits, recorded = forward(params, batch, key)
    return _measure({**recorded, "logits": logits})


def _differentiate(
    task: Searchable, params: Params, batch: Any, key: Array | None
) -> tuple[float, list[_Tensor]]:
    """Return the loss, and the gradients in the order of the forward computation."""
    value, gradients = _loss_and_gradients(task.loss, params, batch, key)
    return float(value), _tensors(_measure(gradients))


def _run_forward(task: Searchable, params: Params, batch: Any, key: Array | None) -> list[_Tensor]:
    return _tensors(_forward_facts(task.forward, params, batch, key))


def _first_broken(tensors: Iterable[_Tensor]) -> _Tensor | None:
    return next((tensor for tensor in tensors if tensor.broken), None)


def _largest(gradients: list[_Tensor]) -> tuple[_Tensor, float]:
    """Return the gradient with the largest norm, and the square of the global norm."""
    return max(gradients, key=lambda tensor: tensor.square), sum(tensor.square for tensor in gradients)


def _broken_activation(tensor: _Tensor, *, first: bool) -> Fault:
    """Return the fault of an activation; the first one there is, is what the embedding made of the batch."""
    if not first:
        return _not_finite("activation", tensor, "the parameters and all activations before it are finite")
    at = f", row {tensor.first[0]}, position {tensor.first[1]}" if len(tensor.first) == 3 else ""
    why = f"the parameters are finite: look for an id that is no token in the batch{at}"
    fault = _not_finite("activation", tensor, why)
    if tensor.name != "blocks/resid_pre":
        return fault
    words = fault.sentence.partition("resid_pre ")[2]
    sentence = f"embedding: its output, resid_pre of block 0, {words}"
    return fault._replace(place="embedding", sentence=sentence)


def _not_finite(quantity: str, tensor: _Tensor, why: str) -> Fault:
    name = tensor.name.split("/", 1)[1] if tensor.layer is not None else tensor.name
    known = f"; the largest finite magnitude is {tensor.largest:.4g}" if tensor.broken < tensor.size else ""
    words = (
        f"{tensor.place}: {'' if quantity == 'activation' else f'{quantity} '}{name} is not finite first "
        f"({tensor.broken:,} of {tensor.size:,} entries, the first at {list(tensor.first)}{known}); {why}"
    )
    value = tensor.largest if tensor.broken < tensor.size else None
    return Fault("non_finite", quantity, tensor.place, tensor.name, tensor.layer, value, words)


def _of_block(tensor: _Tensor) -> str:
    return "" if tensor.layer is None else f" in block {tensor.layer}"


def _largest_branches(activations: list[_Tensor]) -> str:
    """Return "attention 3.1 in block 0, ..." for every kind of sublayer."""
    largest: dict[str, _Tensor] = {}
    for tensor in activations:
        if tensor.layer is not None and tensor.name.endswith("_out"):
            name = tensor.name.removeprefix("blocks/").removesuffix("_out")
            if name not in largest or tensor.largest > largest[name].largest:
                largest[name] = tensor
    return ", ".join(f"{name} {t.largest:.4g} in block {t.layer}" for name, t in largest.items())
