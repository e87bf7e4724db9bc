"""What a block is, from how it behaves: pre-norm, post-norm, and the wrong wirings that have the right shapes.

The block is called with gains on its two branches and with its input scaled; nothing is read from its parameters
or its code. What it answers is compared with what the blocks of `wirings` answer to the same calls.

zero branches    x -> x: identity path;  a function of x / |x|: a norm on the path;  no function of x: no skip
gain             update proportional to the gain: nothing normalizes it;  bounded: a norm behind the branch, or
                 behind the sum where the skip is forgotten at large gain
scale of x       update unchanged by x -> 16 x: the branch reads a normalized stream
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxblock.invariants.measures import BlockMeasures, View, measure_block
from jaxblock.invariants.wirings import Hypothesis, hypotheses
from jaxblock.types import Array

_HOLDS, _FAILS = 5e-4, 1e-2
_UNCLEAR = "unclear"
_IDENTITY = 1e-5


class BlockStructure(NamedTuple):
    """What a block is, and why."""

    name: str
    """A name of `wirings.WIRINGS`; "only the attention (feed-forward) sublayer has a skip"; "attention: ...,
    feed-forward: ..." where they differ; several joined by " or "; "unknown"."""
    order: str
    """serial, parallel (both branches read the same stream), or unknown."""
    candidates: tuple[Hypothesis, ...]
    """Every hypothesis that answers as the block does: the one that gave the name, and those that compute the same
    function for some branch."""
    measures: BlockMeasures
    """What was measured: relative errors of the laws, 0 = the law holds."""


def describe_block(
    apply: Callable[[Array, Array, Array], Array], x_BTD: np.ndarray | Array
) -> BlockStructure:
    """Name the wiring of a block by calling it, 50 times: pass a jitted function.

    What it needs, and says "unknown" without: float32 arithmetic; an attention branch that is not positively
    homogeneous (softmax over two or more tokens is not); norms with an epsilon well below 1; branches that at gain 1
    return between 1e-2 and 50 times the stream's size (else pass an `apply` that multiplies the gains). Scales and
    biases of norms may be anything.

    What no behaviour can tell, it settles for one wiring of both sublayers where there is one, and lists the rest in
    `candidates`: after a norm on the path a further norm before the branch changes nothing that another branch could
    not; behind a norm, a ReLU branch without biases hides a norm before it; and with a bias of a norm behind the
    attention branch (peri_norm, branch_norm) the feed-forward reads a stream shifted by an unknown vector, so that
    its own scale law is not asked.

    Args:
      apply: (x [B, T, D], attention gain, feed-forward gain) -> x [B, T, D]; float32 scalars that multiply what each
        branch returns, before any norm behind it. See `switch_block`.
      x_BTD: a random stream, B T >= 4, T >= 2, D >= 8; only its directions are used.

    Raises:
      ValueError: an x too small to tell, or an `apply` that returns another shape or dtype, or is not finite.
    """
    x_BTD = np.asarray(x_BTD, np.float64)
    if x_BTD.ndim != 3 or x_BTD.shape[0] * x_BTD.shape[1] < 4 or x_BTD.shape[1] < 2 or x_BTD.shape[2] < 8:
        raise ValueError(
            f"x_BTD has shape {x_BTD.shape}; it must be [B, T, D] with B T >= 4, T >= 2 and D >= 8"
        )
    if not np.isfinite(x_BTD).all() or not x_BTD.any():
        raise ValueError("x_BTD must be finite and not all 0: pass random numbers")

    def respond(x_NBTD: np.ndarray, attention_N: np.ndarray, feed_forward_N: np.ndarray) -> np.ndarray:
        calls = zip(x_NBTD, attention_N, feed_forward_N, strict=True)
        return np.stack([_call(apply, *call) for call in calls])

    measures = measure_block(respond, x_BTD)
    answer = _signature(measures)
    known = _known_signatures()
    candidates = tuple(dict.fromkeys(h for h, reference in known if _agree(answer, reference)))
    orders = {hypothesis.order for hypothesis in candidates}
    order = orders.pop() if len(orders) == 1 else "unknown"
    return BlockStructure(_name(candidates), order, candidates, measures)


def require_structure(structure: BlockStructure, expected: str) -> None:
    """Raise ValueError, with the measurements, unless the block is what was expected ("pre_norm")."""
    if structure.name != expected:
        raise ValueError(
            f"the block is {structure.name!r} and was expected to be {expected!r}; measured: {structure.measures}"
        )


def _call(apply: Callable, x_BTD: np.ndarray, attention: float, feed_forward: float) -> np.ndarray:
    y = apply(jnp.asarray(x_BTD, jnp.float32), jnp.float32(attention), jnp.float32(feed_forward))
    if y.shape != x_BTD.shape or y.dtype not in (np.float32, np.float64):
        raise ValueError(
            f"the block was given float32 {x_BTD.shape} and returned {y.dtype} {y.shape}; "
            "it must keep the shape, and be float32: describe a half-precision block by its float32 twin"
        )
    y_BTD = np.asarray(y, np.float64)
    if not np.isfinite(y_BTD).all():
        raise ValueError(
            f"the block is not finite at attention gain {attention:g} and feed-forward gain {feed_forward:g}; "
            "its structure cannot be measured"
        )
    return y_BTD


def _name(candidates: tuple[Hypothesis, ...]) -> str:
    """Return the one wiring that both sublayers can share, or every name that is left."""
    uniform = {h.name for h in candidates if h.attention == h.feed_forward}
    names = uniform if len(uniform) == 1 else {h.name for h in candidates}
    return " or ".join(sorted(names)) or "unknown"


@functools.cache
def _known_signatures() -> tuple[tuple[Hypothesis, tuple], ...]:
    """Return every hypothesis with the signature its own block gives."""
    x_BTD = np.random.default_rng(0).normal(size=(2, 4, 16))

    def signature(block: Callable) -> tuple:
        def respond(x_NBTD: np.ndarray, *gains_N: np.ndarray) -> np.ndarray:
            return block(x_NBTD, *(gain_N.reshape(-1, 1, 1, 1) for gain_N in gains_N))

        return _signature(measure_block(respond, x_BTD))

    return tuple((hypothesis, signature(block)) for hypothesis, block in hypotheses())


def _agree(answer: tuple, reference: tuple) -> bool:
    """Return whether all laws that were measured on both hold, or fail, on both; an unclear one agrees with none."""
    if answer[0] != reference[0]:
        return False
    return all(a is None or b is None or a == b for a, b in zip(answer[1:], reference[1:], strict=True))


def _signature(measures: BlockMeasures) -> tuple:
    """Return the zero response, then one entry per law: True, False, "unclear", or None where it says nothing."""
    views = (measures.attention, measures.feed_forward)
    if measures.identity <= _IDENTITY:
        # A constant added by the attention sublayer moves what the feed-forward reads by an unknown amount.
        shifted = measures.shift > _IDENTITY
        laws = [_gain_laws(view, flat=view.flat_from_16, sign=True) for view in views]
        reads = [_law(views[0].update_scale), None if shifted else _law(views[1].update_scale)]
        return ("identity", _law(measures.parallel), *laws[0], reads[0], *laws[1], reads[1])
    if _law(measures.constant) is True:
        return ("no skip", *(_law(view.constant) for view in views))
    if _law(measures.normalized) is True:
        # A norm with a bias on the path, before another norm: then the sign of the gain proves nothing.
        odd = _law(measures.odd) is True
        laws = [
            _gain_laws(view, flat=view.flat_from_1, sign=sign)
            for view, sign in zip(views, (odd, True), strict=True)
        ]
        scale = [(_law(view.output_scale), _law(view.traded_scale)) for view in views]
        return ("norm", _law(measures.parallel), *laws[0], *scale[0], *laws[1], *scale[1])
    return ("something else",)


def _gain_laws(view: View, *, flat: float, sign: bool) -> tuple:
    """Return (linear, bounded, and for a bounded one: flat, forgets the skip)."""
    bounded = _law(view.bounded)
    if bounded is not True:
        return _law(view.linear), bounded, None, None
    return _law(view.linear), bounded, _law(flat), _law(view.skipless) if sign else None


def _law(error: float) -> bool | str:
    return True if error <= _HOLDS else False if error >= _FAILS else _UNCLEAR
