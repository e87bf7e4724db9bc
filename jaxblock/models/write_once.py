"""The scan over depth for streams that hold a `History`: linear memory, no replay.

A history in the carry of an ordinary scan is saved at every step, O(L^2) memory, and rematerialising the body does
not help because the history is its input. But its rows are written once, so the final history holds every view.
The derivative here takes each step's own vjp while going forward, keeps of its residuals only what is neither the
history nor an input that is at hand anyway, and going backward puts the view "rows < count" of the final history
in its place. Rematerialisation of the step is left to the caller, exactly as in an ordinary scan.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxblock.residual.history import History, Recent
from jaxblock.types import Array, Stream

Tree = Any
Step = Callable[[Stream, Tree, Tree], tuple[Stream, Tree]]
"""(stream, scanned, closed) -> (stream, what the layer gives out besides)."""


def holds_history(stream: Stream) -> bool:
    """Return whether a stream has a history among its nodes."""
    return any(isinstance(node, History) for node in _nodes(stream)[0])


def file_histories(stream: Stream) -> Stream:
    """Return the stream with the rows of the last block written to its histories."""
    nodes, structure = _nodes(stream)
    return structure.unflatten([x.filed() if isinstance(x, History) else x for x in nodes])


def check_capacity(stream: Stream, steps: int) -> None:
    """Raise ValueError if a stream's recent rows, made once per step, do not fit its histories."""
    for node in _nodes(stream)[0]:
        if isinstance(node, History):
            pushed = steps * sum(recent.certain for recent in node.recent)
            capacity = node.rows_NBTD.shape[0]
            if pushed >= capacity:
                raise ValueError(
                    f"a history was opened with a capacity of {capacity} rows; it starts with one and "
                    f"{steps} steps push {pushed} more: open_history(x, {pushed + 1})"
                )


def scan_plain(
    step: Step, stream: Stream, scanned: Tree, closed: Tree, *, unroll: int
) -> tuple[Stream, Tree]:
    """Run an ordinary scan: any order of derivative, a history costs O(L^2) memory in the backward pass.

    Raises:
      ValueError: a history has fewer rows than the steps push.
    """
    scanned_all = scanned

    def body(stream: Stream, scanned: Tree) -> tuple[Stream, Tree]:
        stream, outputs = step(stream, scanned, closed)
        check_capacity(stream, jax.tree.leaves(scanned_all)[0].shape[0])
        return file_histories(stream), outputs

    return jax.lax.scan(body, stream, scanned, unroll=unroll)


def scan_group(
    step: Step, stream: Stream, scanned: Tree, closed: Tree, *, unroll: int
) -> tuple[Stream, Tree]:
    """Run a scan over blocks that leave every history as it is: histories are its constants, not its carry.

    Raises:
      ValueError: a block pushed to a history.
    """
    form = _Form.of(stream)
    start = form.split(stream)

    def body(state: tuple, scanned: Tree) -> tuple[tuple, Tree]:
        floats, others = state
        after, outputs = step(form.join(start._replace(floats=floats, others=others)), scanned, closed)
        if any(isinstance(node, History) and node.recent for node in _nodes(after)[0]):
            raise ValueError("a topology with groups pushed to its history inside one; push in Groups.after")
        after = form.split(after)
        return (after.floats, after.others), outputs

    (floats, others), outputs = jax.lax.scan(body, (start.floats, start.others), scanned, unroll=unroll)
    return form.join(start._replace(floats=floats, others=others)), outputs


def scan_write_once(
    step: Step, stream: Stream, scanned: Tree, closed: Tree, *, unroll: int
) -> tuple[Stream, Tree]:
    """Run the same scan with memory linear in depth; reverse mode only.

    Args:
      step: one layer; it may close over nothing that is differentiated or traced.
      stream: any pytree, with one or more histories whose rows are all filed.
      scanned: leaves [L, ...]: parameters, per-layer constants, dropout keys.
      closed: what every layer sees: shared parameters, masks.
      unroll: layers compiled into one step.

    Returns:
      What `scan_plain` returns, equal to round-off in values and gradients.
    """
    streams, layers, common = _Form.of(stream), _Form.of(scanned), _Form.of(closed)

    @jax.custom_vjp
    def run(stream: _Parts, scanned: _Parts, closed: _Parts) -> tuple[_Parts, _Parts]:
        after, outputs = scan_plain(
            step, streams.join(stream), layers.join(scanned), common.join(closed), unroll=unroll
        )
        return _Form.of(after).split(after), _Form.of(outputs).split(outputs)

    def forward(stream: _Parts, scanned: _Parts, closed: _Parts) -> tuple:
        def body(state: _Parts, layer: _Parts) -> tuple[_Parts, tuple[_Parts, _Kept]]:
            made, vjp, aux = jax.vjp(
                lambda floats, rows, layer_floats, closed_floats: _split_step(
                    step(
                        streams.join(state._replace(floats=floats, rows=rows)),
                        layers.join(layer._replace(floats=layer_floats)),
                        common.join(closed._replace(floats=closed_floats)),
                    )
                ),
                state.floats,
                state.rows,
                layer.floats,
                closed.floats,
                has_aux=True,
            )
            kept = _Kept.of(vjp, (state.rows, layer, closed), state.counts, aux.present)
            rows, counts = _file(state.rows, made.recent, state.counts, aux.present)
            after = _Parts(made.floats, aux.others, rows, counts)
            return after, (_Parts(made.outputs, aux.outputs, (), ()), kept)

        after, (outputs, kept) = jax.lax.scan(body, stream, scanned, unroll=unroll)
        return (after, outputs), (after.rows, scanned, closed, kept)

    def backward(saved: tuple, cotangents: tuple[_Parts, _Parts]) -> tuple:
        final_rows, scanned, closed, kept = saved
        after, outputs = cotangents

        def body(state: tuple, at: tuple) -> tuple[tuple, tuple]:
            floats, rows, closed_sum = state
            layer, kept, outputs = at
            views = tuple(_view(x, count) for x, count in zip(final_rows, kept.counts, strict=True))
            rows, recent = _file_transposed(rows, views, kept)
            vjp = kept.rebuild((views, layer, closed))
            floats, read, layer_floats, closed_floats = vjp(_Made(floats, recent, outputs))
            add = lambda a, b: a + b  # noqa: E731
            return (
                floats,
                jax.tree.map(add, rows, read),
                jax.tree.map(add, closed_sum, closed_floats),
            ), layer_floats

        start = (after.floats, after.rows, jax.tree.map(jnp.zeros_like, closed.floats))
        (floats, rows, closed_floats), layer_floats = jax.lax.scan(
            body, start, (scanned, kept, outputs.floats), reverse=True, unroll=unroll
        )
        return (
            _Parts(floats, None, rows, None),
            _Parts(layer_floats, None, (), ()),
            _Parts(closed_floats, None, (), ()),
        )

    run.defvjp(forward, backward)
    try:
        after, outputs = run(streams.split(stream), layers.split(scanned), common.split(closed))
    except TypeError as error:
        if "forward-mode" not in str(error):
            raise
        raise TypeError(
            "the loop over a history has no forward-mode derivative with execution.history = 'reverse'; run the "
            "same parameters with ExecutionConfig(history='plain')"
        ) from error
    shape = jax.eval_shape(lambda *arguments: scan_plain(step, *arguments, unroll=1), stream, scanned, closed)
    return _Form.of(shape[0]).join(after), _Form.of(shape[1]).join(outputs)


# ------------------------------------------------------------------ a pytree, apart by what is differentiated


class _Parts(NamedTuple):
    """Leaves of a pytree. `None` in a cotangent: not differentiable."""

    floats: Any
    others: Any
    """Integers, booleans, keys."""
    rows: Any
    """Of each history."""
    counts: Any
    """Of each history."""


def _nodes(tree: Tree) -> tuple[list, Any]:
    return jax.tree.flatten(tree, is_leaf=lambda node: isinstance(node, History))


def _kind(node: Any) -> str:
    if isinstance(node, History):
        return "history"
    return "float" if jnp.issubdtype(node.dtype, jnp.inexact) else "other"


@dataclasses.dataclass(frozen=True)
class _Form:
    """The structure of a pytree, and the kind of each of its nodes."""

    structure: Any
    kinds: tuple[str, ...]

    @classmethod
    def of(cls, tree: Tree) -> "_Form":
        nodes, structure = _nodes(tree)
        return cls(structure, tuple(_kind(node) for node in nodes))

    def split(self, tree: Tree) -> _Parts:
        nodes = self.structure.flatten_up_to(tree)
        of = lambda kind: tuple(x for x, k in zip(nodes, self.kinds, strict=True) if k == kind)  # noqa: E731
        histories = of("history")
        return _Parts(
            of("float"),
            of("other"),
            tuple(x.rows_NBTD for x in histories),
            tuple(x.count for x in histories),
        )

    def join(self, parts: _Parts) -> Tree:
        histories = [History(*pair) for pair in zip(parts.rows, parts.counts, strict=True)]
        sources = {"float": iter(parts.floats), "other": iter(parts.others), "history": iter(histories)}
        return self.structure.unflatten([next(sources[kind]) for kind in self.kinds])


# ------------------------------------------------------------------ one step, and what is kept of its derivative


class _Made(NamedTuple):
    """What a step makes that is differentiated."""

    floats: tuple
    recent: tuple
    """For each history, the rows the step pushed."""
    outputs: tuple


class _Aux(NamedTuple):
    """What a step makes that is not."""

    others: tuple
    present: tuple
    """For each history, whether each pushed row counts."""
    outputs: tuple


def _split_step(made: tuple[Stream, Tree]) -> tuple[_Made, _Aux]:
    stream, outputs = made
    after, given = _Form.of(stream).split(stream), _Form.of(outputs).split(outputs)
    histories = [node for node in _nodes(stream)[0] if isinstance(node, History)]
    recent = tuple(tuple(x.row_BTD for x in history.recent) for history in histories)
    present = tuple(tuple(x.present for x in history.recent) for history in histories)
    return _Made(after.floats, recent, given.floats), _Aux(after.others, present, given.others)


def _file(rows: tuple, recent: tuple, counts: tuple, present: tuple) -> tuple[tuple, tuple]:
    """Write each history's new rows; linear in (rows, recent)."""
    filed = [
        History(old, count, tuple(Recent(*pair) for pair in zip(new, there, strict=True))).filed()
        for old, new, count, there in zip(rows, recent, counts, present, strict=True)
    ]
    return tuple(x.rows_NBTD for x in filed), tuple(x.count for x in filed)


def _file_transposed(cotangents: tuple, views: tuple, kept: "_Kept") -> tuple[tuple, tuple]:
    """Return the cotangents of the rows before filing, and of the rows filed."""
    zeros = tuple(
        tuple(jnp.zeros_like(view[0]) for _ in there) for view, there in zip(views, kept.present, strict=True)
    )
    _, transposed = jax.vjp(
        lambda rows, recent: _file(rows, recent, kept.counts, kept.present)[0], views, zeros
    )
    return transposed(cotangents)


def _view(rows_NBTD: Array, count: Array) -> Array:
    """Return the rows a step saw: those written before it, then zeros."""
    written = jnp.arange(rows_NBTD.shape[0]) < count
    return jnp.where(written[:, None, None, None], rows_NBTD, jnp.zeros((), rows_NBTD.dtype))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Kept:
    """A step's vjp without the residuals that are at hand anyway: history, parameters, masks."""

    residuals: tuple
    counts: tuple
    present: tuple
    structure: Any = dataclasses.field(metadata={"static": True})
    origins: tuple[int | None, ...] = dataclasses.field(metadata={"static": True})
    """For each residual of the vjp: its number among the inputs at hand; None = it is kept."""

    @classmethod
    def of(cls, vjp: Callable, at_hand: Tree, counts: tuple, present: tuple) -> "_Kept":
        residuals, structure = jax.tree.flatten(vjp)
        # An input that a derivative needs is kept by JAX as the very same array.
        numbers = {id(x): number for number, x in enumerate(jax.tree.leaves(at_hand))}
        origins = tuple(numbers.get(id(x)) for x in residuals)
        own = tuple(x for x, origin in zip(residuals, origins, strict=True) if origin is None)
        return cls(own, counts, present, structure, origins)

    def rebuild(self, at_hand: Tree) -> Callable:
        inputs, own = jax.tree.leaves(at_hand), iter(self.residuals)
        return self.structure.unflatten(
            [next(own) if origin is None else inputs[origin] for origin in self.origins]
        )
