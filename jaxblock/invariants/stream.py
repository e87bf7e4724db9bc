"""Value checks of the residual stream: finite at every sublayer, and x_S = x_0 + u_1 + ... + u_S to the last bit.

Both read what `model.apply(..., mutable=["intermediates"])` collects, are pure functions of arrays (jit, vmap), and
leave the sentences, and the errors, to a function that runs on the host.
"""

import dataclasses
from typing import Any

import chex
import jax
import jax.numpy as jnp

from jaxblock.modules.intermediates import recorded_branches
from jaxblock.types import Array

ADDITIVE_RULES = ("pre_norm",)
"""Registry names whose connection is x + f(...), so that the branch's output is the update itself."""
_SPOKEN = {
    "attention": "attention",
    "token_mixer": "token mixer",
    "feed_forward": "feed-forward",
    "parallel": "parallel branch",
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StreamReport:
    """Where a forward pass is finite; S sublayers, what mixes positions before the feed-forward in each block."""

    branches: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    """Names of a block's sublayers, in order."""
    opened: Array | None
    """bool: the stream before the first sublayer; None where the stream is not one array."""
    inputs_S: Array
    """bool [S]: what each branch read."""
    outputs_S: Array
    """bool [S]: what each branch returned, before the connection."""
    streams_S: Array | None
    """bool [S]: the stream after each sublayer; None where the stream is not one array."""
    closed: Array
    """bool: the closed stream, before the final norm."""
    first_bad: Array
    """int32: the first sublayer with anything not finite, S where only the closed stream is bad, -1 = none."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TelescopeReport:
    """How far the closed stream is from the sum of the branch outputs."""

    branches: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    """Names of a block's sublayers, in order."""
    equal: Array
    """bool: x_S == ((x_0 + u_1) + u_2) + ... in every bit, summed in the order of the sublayers."""
    error: Array
    """float32: max |x_S - sum|."""
    relative: Array
    """float32: error / max |x_S|."""
    first_bad: Array
    """int32: the first sublayer whose stream is not (stream before) + (branch output); -1 = none."""


def inspect_stream(collected: Any) -> StreamReport:
    """Return where the values of a forward pass are finite.

    Args:
      collected: the collection "intermediates" of a `Decoder`, leaves [L, B, T, D].

    Raises:
      ValueError: it holds no branch inputs and outputs.
    """
    inputs_S = _per_sublayer(collected, "in", _all_finite)
    outputs_S = _per_sublayer(collected, "out", _all_finite)
    opened, streams_S = None, None
    good_S = inputs_S & outputs_S
    if "resid_post" in collected["blocks"]:
        opened = jnp.all(jnp.isfinite(collected["blocks"]["resid_pre"][0]))
        streams_S = _all_finite(_streams(collected))
        good_S = good_S & streams_S
        good_S = good_S.at[0].set(good_S[0] & opened)
    closed = jnp.all(jnp.isfinite(collected["resid_final"]))
    first_bad, branches = _first_bad(jnp.append(good_S, closed)), recorded_branches(collected)
    return StreamReport(branches, opened, inputs_S, outputs_S, streams_S, closed, first_bad)


def explain_stream(report: StreamReport) -> str:
    """Return one sentence: that all is finite, or which tensor of which sublayer is the first that is not.

    Args:
      report: from `inspect_stream`, not traced.
    """
    s, sublayers = int(report.first_bad), report.inputs_S.shape[0]
    if s < 0:
        return "finite: every branch input, branch output and stream"
    if s == sublayers:
        return "closed stream: not finite while every sublayer was"
    if s == 0 and report.opened is not None and not report.opened:
        return "embedding: the stream is not finite before the first sublayer"
    place = name_sublayer(s, report.branches)
    if not report.inputs_S[s]:
        before = "every branch output" if report.streams_S is None else "the stream"
        return f"{place}: input not finite while {before} before it was"
    if not report.outputs_S[s]:
        return f"{place}: output not finite while its input was"
    return f"{place}: stream not finite after it while the branch's input and output were"


def require_finite(report: StreamReport) -> None:
    """Raise ValueError with `explain_stream`'s sentence unless everything is finite."""
    if report.first_bad >= 0:
        raise ValueError(explain_stream(report))


def telescope(collected: Any) -> TelescopeReport:
    """Sum the branch outputs onto the first stream, in order, and compare with the closed stream.

    u_s is the branch's output cast to the stream's dtype, as the combinator casts it. The identity holds for rules
    of the form x + f(...) (`ADDITIVE_RULES`) and for no other: norm(x + f(x)) misses by O(1), and where a norm or a
    scale stands behind the branch the branch's output is not the update. On a device whose compiler fuses a product
    into the sum, or keeps bfloat16 sums in excess precision, collect first and check the arrays afterwards.

    Args:
      collected: the collection "intermediates" of a `Decoder`, leaves [L, B, T, D].

    Raises:
      ValueError: the stream was not collected, because it is not one array.
    """
    if "resid_post" not in collected["blocks"]:
        raise ValueError(
            "the stream was not collected: telescoping is about a stream that is one [B, T, D] array, "
            "and this topology's is not"
        )
    opened_BTD, closed_BTD = collected["blocks"]["resid_pre"][0], collected["resid_final"]
    streams_SBTD = _streams(collected)
    updates_SBTD = _per_sublayer(collected, "out", lambda u: u).astype(opened_BTD.dtype)
    before_SBTD = jnp.concatenate([opened_BTD[None], streams_SBTD[:-1]])
    added_S = jnp.all(streams_SBTD == before_SBTD + updates_SBTD, axis=(1, 2, 3))
    # One addition after the other: cumsum and sum take another order, and round otherwise.
    summed_BTD, _ = jax.lax.scan(lambda x, u: (x + u, None), opened_BTD, updates_SBTD)
    error = jnp.max(jnp.abs((closed_BTD - summed_BTD).astype(jnp.float32)))
    relative = error / jnp.max(jnp.abs(closed_BTD.astype(jnp.float32)))
    equal, branches = jnp.all(closed_BTD == summed_BTD), recorded_branches(collected)
    return TelescopeReport(branches, equal, error, relative, _first_bad(added_S))


def require_telescoping(report: TelescopeReport, *, residual: str) -> None:
    """Raise ValueError unless the closed stream is the sum of the branch outputs, bit for bit.

    Raises:
      ValueError: `residual` is not of the form x + f(...), so that the identity does not apply; or it does not hold,
        with the first sublayer where it breaks.
    """
    if residual not in ADDITIVE_RULES:
        raise ValueError(
            f"residual is {residual!r}; x_S = x_0 + sum of branch outputs does not apply to it, only to rules of the "
            f"form x + f(...): {', '.join(ADDITIVE_RULES)}"
        )
    if report.first_bad >= 0:
        place = name_sublayer(int(report.first_bad), report.branches)
        raise ValueError(f"{place}: the stream after it is not the stream before it plus the branch's output")
    if not report.equal:
        raise ValueError(
            f"the closed stream differs by {float(report.error):.3g} from the sum of the branch outputs "
            "though every sublayer added its own: the stream is changed between or after the blocks"
        )


def name_sublayer(sublayer: int, branches: tuple[str, ...]) -> str:
    """Return "block 3, feed-forward (sublayer 7)" for sublayer 7 of blocks of attention and feed-forward.

    Args:
      sublayer: its number in the whole stack.
      branches: the names of a block's sublayers, as a report has them.
    """
    block, place = divmod(sublayer, len(branches))
    return f"block {block}, {_SPOKEN[branches[place]]} (sublayer {sublayer})"


def _per_sublayer(collected: Any, end: str, reduce) -> Array:
    """Return what `reduce` makes of each branch's [L, B, T, D], interleaved to a leading axis [S]."""
    values = [reduce(collected["blocks"][f"{branch}_{end}"]) for branch in recorded_branches(collected)]
    return jnp.stack(values, axis=1).reshape(-1, *values[0].shape[1:])


def _streams(collected: Any) -> Array:
    """Return the stream after each sublayer, [S, B, T, D]."""
    blocks = collected["blocks"]
    ends = [blocks[name] for name in ("resid_mid", "resid_post") if name in blocks]
    return jnp.stack(ends, axis=1).reshape(-1, *ends[0].shape[1:])


def _all_finite(x: Any) -> Array:
    """Return bool [L] of an array, or several (named views), of [L, B, T, D]."""
    arrays = jax.tree.leaves(x)
    chex.assert_rank(arrays, 4)
    finite = [jnp.all(jnp.isfinite(x_LBTD), axis=(1, 2, 3)) for x_LBTD in arrays]
    return jnp.all(jnp.stack(finite), axis=0)


def _first_bad(good_N: Array) -> Array:
    return jnp.where(jnp.all(good_N), -1, jnp.argmin(good_N)).astype(jnp.int32)
