"""Frac-connections: hyper-connections between M parts of one stream's channels; nothing is copied.

x = (x_1 .. x_M), parts of D / M channels,    h_k = sum_i A_ik x_i,    u = f(norm(h_1 .. h_M)),
x_j' = sum_i R_ij x_i + b_j u_j                                                                      (arXiv 2503.14125)

A = R = I and b = 1 at the start, which is pre-norm. The table (A | R | b) is made as in `hyper_connections`, W
[D / M, 2 M + 1] reading each part's RMS norm. One part is hyper-connections with one stream.
"""

import flax.linen as nn
import jax.numpy as jnp

from jaxblock.config import ModelConfig
from jaxblock.contracts import check_integer
from jaxblock.functional.streams import read_streams, write_streams
from jaxblock.modules import Norm
from jaxblock.residual.contract import Topology
from jaxblock.residual.declarations import additive_mixing, norm_parameters
from jaxblock.residual.history import read_once
from jaxblock.residual.hyper_connections import TableOptions, table_count, table_parameters, table_weights
from jaxblock.types import Array, Branch, Params


class FracConnection(nn.Module):
    """h_k = sum_i A_ik x_i,  x_j' = sum_i R_ij x_i + b_j f(norm(h))_j,  over parts of the channels."""

    config: ModelConfig
    fractions: int
    options: TableOptions

    @nn.compact
    def __call__(self, x: Array, f: Branch) -> Array:
        """Return the stream after the sublayer."""
        config, count = self.config, self.fractions
        width = part_width(config, count)
        norm = Norm(config, name="norm")
        own = table_parameters(self, self.options, rows=count, columns=2 * count + 1, width=width)

        def read(x: Array, own: Params) -> tuple[Array, Array]:
            parts = tuple(jnp.split(x, count, axis=-1))
            start_MC = jnp.column_stack([jnp.eye(count), jnp.eye(count), jnp.ones(count)])
            table = table_weights(
                parts, start_MC, own, activation=self.options.activation, epsilon=config.norm_epsilon
            )
            return jnp.concatenate([read_streams(parts, table[:, k]) for k in range(count)], -1), table

        def write(x: Array, u: Array, table: Array) -> Array:
            parts, updates = jnp.split(x, count, axis=-1), jnp.split(u, count, axis=-1)
            return jnp.concatenate(write_streams(parts, updates, table[:, count:-1], table[:, -1]), -1)

        h, table = read_once(read, x, own)
        return read_once(write, x, f(norm(h)), table)


def part_width(config: ModelConfig, fractions: int) -> int:
    """Return D / M.

    Raises:
      ValueError: M does not divide D.
    """
    if config.width % fractions:
        raise ValueError(
            f"model.residual: fractions is {fractions}; it must divide model.width, which is {config.width}"
        )
    return config.width // fractions


def frac_connections(fractions: int = 2, weights: str = "dynamic", activation: str = "tanh") -> Topology:
    """Return frac-connections.

    Args:
      fractions: M, parts that the channels are split into; divides the width.
      weights: "static" (SFC), or "dynamic" (DFC), where each token's parts add to them.
      activation: of the dynamic part, "tanh" or "none".
    """
    check_integer("model.residual: fractions", fractions, least=1)
    options = TableOptions(weights=weights, activation=activation)
    dynamic, columns = weights == "dynamic", 2 * fractions + 1

    def connection(config: ModelConfig, *, name: str) -> nn.Module:
        return FracConnection(config, fractions, options, name=name)

    def parameters(config: ModelConfig) -> int:
        table = table_count(options, rows=fractions, columns=columns, width=part_width(config, fractions))
        return norm_parameters(config, config.sublayers + 1) + config.sublayers * table

    def flops(config: ModelConfig) -> int:
        """A, R and b are sums of so many parts of D / M; each of M parts has a product with W."""
        return 2 * config.width * config.sublayers * (columns + (columns if dynamic else 0))

    def traffic(config: ModelConfig) -> int:
        weights = 2 * fractions * (fractions + 1) if dynamic else 0
        return config.sublayers * (4 * config.width + weights)

    return Topology(
        connection,
        "h_k = sum_i A_ik x_i; x_j = sum_i R_ij x_i + b_j f(norm(h))_j, i, j, k parts of the channels",
        "arXiv 2503.14125",
        labels=options.labels,
        parameters=parameters,
        reduces_to="pre_norm",
        mixing=additive_mixing,
        sums_width=dynamic,
        flops=flops,
        traffic=traffic,
        advice="pre-norm's learning rate",
    )
