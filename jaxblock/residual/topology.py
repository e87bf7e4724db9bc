"""The contract of a residual connection: everything a topology may say, and all it must.

A connection is a Linen module `(stream, f) -> stream`. It is given the residual stream and a branch `f` (attention
or feed-forward) and returns the stream; this is a whole one:

    class PreNorm(nn.Module):
        config: ModelConfig

        @nn.compact
        def __call__(self, x, f):
            norm = Norm(self.config, name="norm")
            return x + f(norm(x))

    pre_norm = Topology(PreNorm, "x + f(norm(x))", "arXiv 2002.04745")

What it must keep:

- It calls `f` exactly once, with one array [B, T, D], or with `Views(query, key, value)` where attention's three
  projections are to read different arrays. `f` returns [B, T, D] in the dtype it was given.
- It returns a stream of the structure, shapes and dtypes it was given (cast what float32 scalars have lifted).
- It mixes depth and streams, never positions and never rows of a batch. Causality and decoding rest on it.
- It has no dropout and no remat of its own, and does not ask whether it is scanned, trained or decoded.

The rest of the record has defaults that say "nothing":

- The stream may be any pytree with static shapes. `open` makes it from the embedding, `close` (a module
  `(stream, shared) -> x`) makes one array of it, `final_norm` says whether that array still needs a norm.
- A topology that reads earlier layers keeps a `History` in its stream: `history.push(row)` adds a row,
  `history.sources()` is what can be read, `read_once(read, ...)` wraps the reading, and memory stays linear in
  depth. Say which history it is: of sublayer outputs, or of states.
- `shared` makes parameters once for the whole stack. They, and the numbers of block and sublayer, are read
  inside a connection with `place(self)`. `after_block`, a module `(stream) -> stream`, runs between blocks.
- `groups` is for topologies whose history grows only every few blocks: a nested scan, and a place to compute
  for all blocks of a group at once what they read of it.
- A start that depends on the layer is a constant plus a parameter that starts at zero, because all layers of a
  stack are initialised by one function.

What it declares is tested by running it: see `tests/residual/battery.py`, which takes any topology.
`jaxblock.residual.registry` gives a topology the name, and the options, by which a config asks for it.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import numpy as np

from jaxblock.axes import Label
from jaxblock.config import ModelConfig
from jaxblock.types import Array, Params, Stream


class Groups(NamedTuple):
    """Runs of blocks within which no history grows: a nested scan, the history a constant of the inner one."""

    blocks: int
    """Blocks in a group; the last group of a stack may have fewer."""
    before: Callable[[Stream, Params], Any]
    """(stream, the group's block parameters, stacked) -> what each block's connections are told ahead, by name of
    connection and with a leading axis of blocks (`told_ahead`); None = nothing."""
    after: Callable[[Stream], Stream]
    """What happens to the stream after a group: here, and only here, a history grows."""


class NoGradient(NamedTuple):
    """Parameters that get exactly no gradient, whatever the data."""

    pattern: str
    """Regular expression that matches the whole path, such as "blocks/attention_connection/reader/query"."""
    block: int | None
    """The block it holds for; None = the whole leaf."""
    reason: str


def open_array(config: ModelConfig, x: Array) -> Stream:
    """Return the embedding itself: the stream is one array."""
    return x


def unit_gain(config: ModelConfig, role: str) -> float:
    """Return 1: kernels start as their initialization says."""
    return 1.0


@dataclasses.dataclass(frozen=True)
class Topology:
    """One residual topology. Only the first three fields are required."""

    connection: Callable[..., nn.Module]
    """(config, name=...) -> the module `(stream, f) -> stream` of one sublayer."""
    equation: str
    """The rule in one line."""
    source: str
    """Where it was published."""
    _: dataclasses.KW_ONLY
    final_norm: bool = True
    """Whether the closed stream still needs a norm: exactly when the rule leaves it unnormalized."""
    open: Callable[[ModelConfig, Array], Stream] = open_array
    """(config, embedding [B, T, D] in the stream's dtype) -> the stream before the first block."""
    after_block: Callable[..., nn.Module] | None = None
    """(config, name=...) -> a module `(stream) -> stream` that runs after each block."""
    groups: Callable[[ModelConfig], Groups | None] | None = None
    """config -> how blocks are grouped; None where every block may add to a history."""
    shared: Callable[..., nn.Module] | None = None
    """(config, name=...) -> a module `() -> arrays`: parameters made once for the whole stack."""
    close: Callable[..., nn.Module] | None = None
    """(config, name=...) -> a module `(stream, shared) -> x`; None where the stream is the array."""
    gain: Callable[[ModelConfig, str], float] = unit_gain
    """(config, role) -> the factor on a kernel's initial values; roles are those of `jaxblock.axes`."""
    labels: tuple[Label, ...] = ()
    """What the optimizer does differently with some of its parameters: decay, own learning rate."""
    project: Callable[[ModelConfig, Params], Params] | None = None
    """(config, params) -> params: a projection of the whole model's parameters after each optimizer step."""
    parameters: Callable[[ModelConfig], int] | None = None
    """Declared: parameters of all connections, `shared`, `close` and the final norm, norms included."""
    reduces_to: str | None = None
    """Declared: the topology ("pre_norm") it equals at its own initial values, with a norm of tiny epsilon."""
    mixing: Callable[[ModelConfig], np.ndarray] | None = None
    """Declared: the depth-mixing matrix at its initial values, [S + 1, S + 1]: row l - 1 is what sublayer l reads
    as a sum over sources (0 = embedding, i = branch output i), the last row what is closed; norms taken as 1."""
    zero_branch: Callable[[ModelConfig, Array], Array] = open_array
    """Declared: (config, embedding) -> the closed stream, at initial values, when every branch returns 0; left
    out, the embedding itself."""
    no_gradient: tuple[NoGradient, ...] = ()
    """Declared: which of its parameters legitimately never get a gradient, and why."""
