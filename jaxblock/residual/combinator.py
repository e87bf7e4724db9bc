"""The one function that runs every sublayer: what all connections share is here, so that a rule stays one line."""

import chex
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import get_opaque_trace_state

from jaxblock import axes
from jaxblock.residual.history import History
from jaxblock.types import Array, Branch, Stream, Views


def residual(connection, stream: Stream, branch: Branch, *, dtype: jax.typing.DTypeLike) -> Stream:
    """Connect a branch to the stream.

    The branch is given the array the connection reads, in the compute dtype, and its output is returned to the
    connection in the dtype it was read in, so that neither a bf16 branch nor a float32 scalar moves the stream's.

    Args:
      connection: a rule `(stream, f) -> stream`, such as `PreNorm(config)`.
      stream: the residual stream before the sublayer.
      branch: [B, T, D] (or `Views`) -> [B, T, D], attention or feed-forward, in `dtype`.
      dtype: the compute dtype.

    Returns:
      The stream after the sublayer: same structure, shapes and dtypes.

    Raises:
      ValueError: the rule called the branch twice or never, or changed the stream's structure, shape or dtype.
      AssertionError: the branch changed the shape of what it read.
    """
    name = type(connection).__name__
    calls, level = 0, get_opaque_trace_state(convention="flax")

    def f(h: Array | Views) -> Array:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise ValueError(
                f"residual connection {name} called its branch twice; it must call f exactly once"
            )
        if get_opaque_trace_state(convention="flax") != level:
            raise ValueError(
                f"residual connection {name} called its branch inside a transformation (lax.scan, cond, vmap, ...), "
                "where once in the program is not once in the run; it must call f itself"
            )
        y = branch(jax.tree.map(lambda x: axes.constrain(x.astype(dtype), *axes.STREAM_AXES), h))
        read = jax.tree.leaves(h)
        chex.assert_equal_shape([*read, y])
        return checkpoint_name(axes.constrain(y, *axes.STREAM_AXES), "branch_out").astype(read[0].dtype)

    after = connection(stream, f)
    if calls == 0:
        raise ValueError(f"residual connection {name} never called its branch; it must call f exactly once")
    check_same_stream(f"residual connection {name}", stream, after)
    return after


def check_same_stream(name: str, before: Stream, after: Stream) -> None:
    """Raise ValueError unless two streams have the same structure, shapes and dtypes, and the same histories.

    A history may have recent rows more; its filed rows and its count are the very arrays they were, or the scan
    would rebuild another view than the one that was read.
    """

    def form(stream: Stream) -> tuple:
        # A history may have grown; it still is a history of rows of that shape.
        is_history = lambda node: isinstance(node, History)  # noqa: E731
        leaves, structure = jax.tree.flatten(stream, is_leaf=is_history)
        arrays = [x.rows_NBTD if isinstance(x, History) else x for x in leaves]
        return [(jnp.shape(x), jnp.result_type(x).name) for x in arrays], str(structure)

    if form(before) != form(after):
        raise ValueError(
            f"{name} was given a stream of {form(before)} and returned {form(after)}; "
            "it keeps the stream's structure, shapes and dtypes (.astype(x.dtype) casts back what a "
            "float32 factor has lifted)"
        )
    for old, new in zip(histories(before), histories(after), strict=True):
        grown = len(new.recent) >= len(old.recent) and all(
            a is b for a, b in zip(old.recent, new.recent, strict=False)
        )
        if not grown or new.rows_NBTD is not old.rows_NBTD or new.count is not old.count:
            raise ValueError(
                f"{name} changed a history other than by push; its rows and its count are filed by the stack alone"
            )


def histories(stream: Stream) -> list[History]:
    """Return the histories of a stream."""
    nodes = jax.tree.leaves(stream, is_leaf=lambda node: isinstance(node, History))
    return [node for node in nodes if isinstance(node, History)]
