"""Hyper-connections: M residual streams; every sublayer learns what it reads, how it mixes and what it writes.

h = sum_i a_i x_i,    x_j' = sum_i R_ij x_i + b_j f(norm(h)),    closed: sum_j x_j                   (arXiv 2409.19606)

Each stream starts as the embedding; a is one-hot on stream (number of the sublayer) mod M, R = I, b = 1: pre-norm,
but for the final norm, which removes the factor M. Dynamic weights add, per token, s tanh(rms_norm(x_i) W) to row i
of the table (a | R | b): W [D, M + 2] from 0, one s from 0.01 for a and R, one for b. What is learned of the table is
its difference from the start, from zero. As in the paper, W decays and nothing else does.

Not as in the paper: the norm before W is an RMS norm without a scale, which W would absorb (the paper's counts have
none either); output kernels are not multiplied by sqrt(M) at the start. One stream is worse than pre-norm there.
"""

import dataclasses
from collections.abc import Callable
from typing import TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxblock import axes
from jaxblock.axes import Label
from jaxblock.config import ModelConfig
from jaxblock.contracts import check_choice, check_integer
from jaxblock.functional.streams import add_streams, project_each, read_streams, write_streams
from jaxblock.modules import Norm
from jaxblock.residual.contract import Topology
from jaxblock.residual.declarations import additive_mixing, norm_parameters
from jaxblock.residual.history import read_once
from jaxblock.residual.place import place
from jaxblock.types import Array, Branch, Params

MOST_STREAMS = 64
"""The program grows as its square."""
ACTIVATIONS = ("tanh", "none")
DECAYED = Label("blocks/(attention_|token_mixer_|feed_forward_)?connection/dynamic", decay=True)


Streams: TypeAlias = tuple[Array, ...]
"""M arrays [B, T, D]: one array of all would be copied apart, and together again, at every sublayer."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableOptions:
    """How the table of weights, one row per stream, is made.

    Raises:
      ValueError: an option out of range.
    """

    weights: str = "dynamic"
    """static: the same for all tokens; dynamic: and a part that each token's stream gives."""
    activation: str = "tanh"
    """Of the dynamic part, tanh or none."""

    def __post_init__(self) -> None:
        check_choice("model.residual: weights", self.weights, ("static", "dynamic"))
        check_choice("model.residual: activation", self.activation, ACTIVATIONS)
        if self.weights == "static" and self.activation != "tanh":
            raise ValueError(
                f"model.residual: activation is {self.activation!r}; it must be left out where weights are static"
            )

    @property
    def labels(self) -> tuple[Label, ...]:
        """The projection decays."""
        return (DECAYED,) if self.weights == "dynamic" else ()


def table_parameters(
    module: nn.Module, options: TableOptions, *, rows: int, columns: int, width: int
) -> Params:
    """Return a table's parameters: its difference from the start [M, C], and W [width, C] and s [2] if dynamic."""
    dtype, zeros = jnp.dtype(module.config.param_dtype), nn.initializers.zeros
    made = {"static": module.param("static", zeros, (rows, columns), dtype)}
    if options.weights == "dynamic":
        made["dynamic"] = module.param("dynamic", zeros, (width, columns), dtype)
        made["dynamic_scale"] = module.param("dynamic_scale", nn.initializers.constant(0.01), (2,), dtype)
    return made


def table_weights(
    streams: Streams, start_MC: Array, own: Params, *, activation: str, epsilon: float
) -> Array:
    """Return the table [M, C], or per token [M, C, B, T]; the last column is b, which has an s of its own."""
    static_MC = start_MC + own["static"].astype(jnp.float32)
    if "dynamic" not in own:
        return static_MC
    dynamic = project_each(streams, own["dynamic"], epsilon=epsilon)
    if activation == "tanh":
        dynamic = jnp.tanh(dynamic)
    scale = own["dynamic_scale"].astype(jnp.float32)
    scale_C = jnp.append(jnp.broadcast_to(scale[0], (start_MC.shape[1] - 1,)), scale[1])
    return static_MC[..., None, None] + scale_C[None, :, None, None] * dynamic


def table_count(options: TableOptions, *, rows: int, columns: int, width: int) -> int:
    """Return the number of parameters of one table."""
    return rows * columns + (width * columns + 2 if options.weights == "dynamic" else 0)


class HyperConnection(nn.Module):
    """h = sum_i a_i x_i,  x_j' = sum_i R_ij x_i + b_j f(norm(h))."""

    config: ModelConfig
    streams: int
    options: TableOptions

    @nn.compact
    def __call__(self, stream: Streams, f: Branch) -> Streams:
        """Return the streams after the sublayer."""
        config, count = self.config, self.streams
        norm = Norm(config, name="norm")
        own = table_parameters(self, self.options, rows=count, columns=count + 2, width=config.width)
        # Another stream first at every sublayer: with the same read everywhere streams would stay equal.
        first_M = jax.nn.one_hot(place(self).sublayer % count, count)

        def read(x: Streams, first_M: Array, own: Params) -> tuple[Array, Array]:
            start_MC = jnp.column_stack([first_M, jnp.eye(count), jnp.ones(count)])
            table = table_weights(
                x, start_MC, own, activation=self.options.activation, epsilon=config.norm_epsilon
            )
            return read_streams(x, table[:, 0]), table

        def write(x: Streams, u: Array, table: Array) -> Streams:
            return write_streams(x, [u] * count, table[:, 1:-1], table[:, -1])

        h, table = read_once(read, stream, first_M, own)
        return constrain_streams(read_once(write, stream, f(norm(h)), table))


class SumStreams(nn.Module):
    """sum_j x_j."""

    config: ModelConfig

    @nn.compact
    def __call__(self, stream: Streams, shared: Params) -> Array:
        """Return what the final norm reads."""
        return add_streams(stream)


def open_streams(streams: int) -> Callable[[ModelConfig, Array], Streams]:
    """Return the function that copies the embedding to every stream."""
    return lambda config, x: (x,) * streams


def constrain_streams(streams: Streams) -> Streams:
    """Return the streams, each sharded as a stream is."""
    return tuple(axes.constrain(x, *axes.STREAM_AXES) for x in streams)


def stream_flops(config: ModelConfig, streams: int) -> int:
    """Return what the weighted sums over M streams cost: M (M + 2) multiply-adds per channel; `close` only adds."""
    return 2 * config.width * config.sublayers * streams * (streams + 2)


def stream_traffic(config: ModelConfig, streams: int, *, per_token: bool) -> int:
    """Return the numbers moved: M streams in and out, u and h, and the weights per token that wait for the branch."""
    weights = 2 * streams * (streams + 1) if per_token else 0
    return config.sublayers * ((2 * streams + 2) * config.width + weights)


def hyper_connections(streams: int = 4, weights: str = "dynamic", activation: str = "tanh") -> Topology:
    """Return hyper-connections.

    Args:
      streams: M, the paper's expansion rate n.
      weights: "static" (SHC), or "dynamic" (DHC), where each token's streams add to them.
      activation: of the dynamic part, "tanh" or "none".
    """
    check_integer("model.residual: streams", streams, least=1, most=MOST_STREAMS)
    options = TableOptions(weights=weights, activation=activation)
    dynamic = weights == "dynamic"

    def connection(config: ModelConfig, *, name: str) -> nn.Module:
        return HyperConnection(config, streams, options, name=name)

    def parameters(config: ModelConfig) -> int:
        table = table_count(options, rows=streams, columns=streams + 2, width=config.width)
        return norm_parameters(config, config.sublayers + 1) + config.sublayers * table

    def mixing(config: ModelConfig):
        table = additive_mixing(config)
        table[-1] *= streams
        return table

    def flops(config: ModelConfig) -> int:
        projections = 2 * streams * config.width * (streams + 2) * config.sublayers if dynamic else 0
        return stream_flops(config, streams) + projections

    return Topology(
        connection,
        "h = sum_i a_i x_i; x_j = sum_i R_ij x_i + b_j f(norm(h)); sum_j x_j",
        "arXiv 2409.19606",
        open=open_streams(streams),
        close=SumStreams,
        labels=options.labels,
        parameters=parameters,
        reduces_to="pre_norm",
        mixing=mixing,
        zero_branch=lambda config, x: streams * x,
        sums_width=dynamic,
        flops=flops,
        traffic=lambda config: stream_traffic(config, streams, per_token=dynamic),
        advice="pre-norm's learning rate; R is unbounded, and its products over depth were seen to grow at 27B (see "
        "manifold_hyper_connections); the paper also starts output kernels sqrt(streams) times larger",
    )
