"""The contract of a residual connection: everything a topology may say, and all it must.

A connection is a Linen module `(stream, f) -> stream`. It is given the residual stream and a branch `f` (attention
or feed-forward) and returns the stream. This is a whole topology:

    import flax.linen as nn
    from jaxblock import Decoder, ModelConfig
    from jaxblock.modules import Norm
    from jaxblock.residual import Topology

    class Gated(nn.Module):
        config: ModelConfig

        @nn.compact
        def __call__(self, x, f):
            norm = Norm(self.config, name="norm")
            gate = self.param("gate", nn.initializers.ones, (self.config.width,))
            return x + gate.reshape(1, 1, -1).astype(x.dtype) * f(norm(x))

    gated = Topology(Gated, "x + gate * f(norm(x))", "mine", reduces_to="pre_norm")
    model = Decoder(ModelConfig(vocab_size=64, context=32, depth=8, width=32, heads=4), topology=gated)

What it must keep:

- It calls `f` exactly once, with one array [B, T, D], or with `Views(query, key, value)` where attention's three
  projections are to read different arrays (`jaxblock.residual.Views`). `f` returns [B, T, D] in the dtype it was given.
- It returns a stream of the structure, shapes and dtypes it was given; cast back what a float32 factor has lifted.
- It mixes depth and streams, never positions and never rows of a batch. Causality and decoding rest on it.
- It has no dropout and no remat of its own, and does not ask whether it is scanned, trained or decoded.

The other fields of the record have defaults that say "nothing". One that reads what earlier sublayers wrote keeps a
`History` in its stream, and here is most of what there is:

    from typing import NamedTuple
    import jax.numpy as jnp
    from jaxblock.functional.depth_mixing import mix_sources
    from jaxblock.residual import History, open_history, place, read_once

    class Stream(NamedTuple):
        x: jnp.ndarray
        outputs: History

    class LooksBack(nn.Module):                     # x + f(norm(x + gate_s * mean of all rows before))
        config: ModelConfig

        @nn.compact
        def __call__(self, stream, f):
            norm = Norm(self.config, name="norm")
            here = place(self)                      # numbers of block and sublayer, shared parameters
            gate = here.shared[here.sublayer]

            def read(x, outputs, gate):
                sources = outputs.sources()         # rows, which of them exist, and their numbers
                mean = mix_sources(sources, sources.present / jnp.sum(sources.present))
                return x + (gate * mean).astype(x.dtype)

            update = f(norm(read_once(read, stream.x, stream.outputs, gate)))
            return Stream(stream.x + update, stream.outputs.push(update))

    class Gates(nn.Module):                         # made once for the whole stack
        config: ModelConfig

        @nn.compact
        def __call__(self):
            return self.param("gate", nn.initializers.zeros, (self.config.sublayers,))

    class TakeX(nn.Module):                         # the stream becomes one array again
        config: ModelConfig

        @nn.compact
        def __call__(self, stream, shared):
            return stream.x

    looks_back = Topology(
        LooksBack,
        "x + f(norm(x + gate * mean(outputs)))",
        "mine",
        open=lambda config, x: Stream(x, open_history(x, config.sublayers + 1)),
        shared=Gates,
        close=TakeX,
        reduces_to="pre_norm",
    )

- Row 0 of a history is what it was opened with, here the embedding; then come the pushed rows, so its capacity is
  one more than the pushes. A history that is too short is refused.
- A row of a history is written once; memory is linear in depth because of it, also when every sublayer reads all
  rows. `read_once` around the reading is what keeps it so. Say which history it is: of outputs, or of states.
- `after_block` is a module `(stream) -> stream` that runs between blocks. `groups` is for histories that grow only
  every few blocks: a nested scan, and a place to compute for all its blocks at once what they read.
- A factor that starts at 0 needs branches that do not: with initialization = "zero_output" (train.py's default) the
  product of the two zeros never moves. Say so in `refuses_zero_output`; such a model starts with "plain".
- A start that depends on the layer is a constant plus a parameter that starts at zero, because all layers of a
  stack are initialised by one function.

The fields, the first three required:

  connection, equation, source      the rule, in one line, and where it was published
  final_norm = True                 False where the rule leaves the closed stream normalized
  open(config, x) -> stream         from the embedding; left out, the embedding itself
  close(config, name=...)           a module (stream, shared) -> x; needed where the stream is not one array
  after_block(config, name=...)     a module (stream) -> stream, between blocks
  shared(config, name=...)          a module () -> arrays, parameters of the whole stack
  groups(config) -> Groups          nested scans, see `Groups`
  gain(config, role) -> float       factor on the initial values of kernels with that role ("value", "output", ...)
  inner_norm = False                True where branches have a norm before their last kernel, too (Sub-LN)
  labels                            tuple of `Label(pattern, decay, learning_rate)` for the optimizer
  project(config, params) -> params before the first optimizer step, and after each
  declared, and tested:
  parameters(config) -> int         of all connections, shared, close and the final norm
  reduces_to                        the topology it equals at its own initial values, norm epsilon tiny
  mixing(config) -> [S + 1, S + 1]  the depth-mixing matrix at initial values
  zero_branch(config, x) -> x       the closed stream when branches return 0; left out, the embedding
  no_gradient                       tuple of `NoGradient(pattern, block, reason)`
  scale_free = False                True where it normalizes the branch's output: a factor on f changes nothing
  refuses_zero_output = ""          why branches must not start at 0, as its factor does: "zero_output" is refused
  depth_scaled = False              True where the first block's rule already depends on the number of blocks
  sums_width = False                True where parameters of its own are summed over the width, such as a gate's kernel
  flops(config) -> int              forward FLOPs per token of all connections' sums and matrix products
  traffic(config) -> int            numbers per token that all connections move, read or written
  advice                            learning rates and traps, a sentence or two

What a topology declares is tested by running it: `tests/residual/battery` takes any topology, and says in a
sentence what is wrong. A line in `jaxblock.residual.registry` gives it the name by which a config asks for it.
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
    """The block it holds for, from the end where negative; None = the whole leaf."""
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
    inner_norm: bool = False
    """Whether branches have one more norm, before the kernel that writes to the stream."""
    labels: tuple[Label, ...] = ()
    """What the optimizer does differently with some of its parameters: decay, own learning rate."""
    project: Callable[[ModelConfig, Params], Params] | None = None
    """(config, params) -> params: a projection of the whole model's parameters, at the start and after each step."""
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
    scale_free: bool = False
    """Declared: whether what it writes is the same for f and for 2 f, because it normalizes the branch's output."""
    refuses_zero_output: str = ""
    """Declared: why branches must not start at 0, in words that follow a colon; the initialization "zero_output" is
    refused with them. "" = they may."""
    depth_scaled: bool = False
    """Declared: whether the factors of the first block depend on the number of blocks: a parametrization or an
    initialization that also divides by the depth would count it twice."""
    sums_width: bool = False
    """Declared: whether parameters of its own are summed over the width (a gate's kernel, a query): no published rule
    says how their learning rates scale with it, so a model wider than its parametrization's base is refused."""
    flops: Callable[[ModelConfig], int] | None = None
    """Declared: forward FLOPs per token of all connections and `close`, beside branches and norms: 2 for each
    multiply-add of a matrix product or of a sum over sources or streams; sources that exist are counted, no others."""
    traffic: Callable[[ModelConfig], int] | None = None
    """Declared: numbers per token that all connections of a forward pass read and write, each pass between two
    branches reading what it needs once and writing what it makes once; times the stream's itemsize, bytes. Pre-norm
    reads x and f's output and writes x and what the next branch reads: 4 D a sublayer."""
    advice: str = ""
    """Learning rate, warm-up and traps, as far as published; a sentence or two for people."""
