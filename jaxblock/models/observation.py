"""What a stack shows of each sublayer to who wants to measure it: reduced on the spot, so that depth costs [L] numbers.

An observer is a pure function from what a sublayer did to a few small arrays. The block calls it, the scan over depth
stacks what it returns, `model.apply(..., mutable=["observed"])` hands it out, every leaf [L, ...] under "blocks" and
the branch's name. Nothing else is kept: a leaf of the size of the stream is the observer's own doing. Without an
observer, or without that collection, the program is the one without this file.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxblock.types import Array, Stream

OBSERVED = "observed"
"""The collection of what an observer returns, where the caller made it mutable."""
GIVEN = "given"
"""The collection of what an observer reads besides, {"observer": any arrays}: a head's kernel, targets."""
TAPS = "taps"
"""The collection of gradient taps, {"blocks": {name of a branch: float32 [L]}, "closed": float32 scalar}: a "gradient"
with respect to it is the squared norm of the gradient of the stream before each sublayer, and of the closed stream."""


class Sublayer(NamedTuple):
    """What one sublayer did; gradients do not flow into it."""

    before: Stream
    """The stream it was given: one array [B, T, D], or whatever the topology carries."""
    read: Any
    """What the branch read, [B, T, D] (after the norm), or `Views` of three."""
    output: Array
    """What the branch wrote, [B, T, D], before the connection did anything with it."""
    after: Stream
    """The stream it returned."""
    valid_BT: Array | None
    """Which tokens are real; None = all."""
    given: Any
    """What the caller gave to the observer, the same for every sublayer (see `GIVEN`); None = nothing."""


Observer = Callable[[Sublayer], Mapping[str, Array]]
"""Hashable, as a compiled program depends on it: a module-level function, or a frozen dataclass with __call__."""
