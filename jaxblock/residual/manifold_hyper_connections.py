"""Manifold-constrained hyper-connections: M streams mixed by a doubly stochastic matrix, read and written by gates.

z = rms_norm(x_1 .. x_M),  a = sigmoid(s_1 z W_a + c_a),  b = 2 sigmoid(s_2 z W_b + c_b),  R = S(s_3 z W_R + C_R)
h = sum_i a_i x_i,    x_j' = sum_i R_ij x_i + b_j f(norm(h)),    closed: sum_j x_j                   (arXiv 2512.24880)

S is Sinkhorn's iteration of exp(.), or the mean of all M! permutation matrices under softmax(.) (arXiv 2601.05732).
No product of such matrices is larger than 1, and R keeps the mean of the streams: exactly with permutations, to what
the iterations leave with Sinkhorn (a few 1e-3 after 20), as the axis that is normalized last is the one of its sums.

The papers do not say how c, C and W start. Here W = 0, s = 0.01, c_b = 0 (b = 1), C_R such that R has the diagonal
0.948 for M = 4, and c_a = 2 on stream (number of the sublayer) mod M, -2 on the others, without which streams would
stay equal. That is pre-norm, but for the final norm, which removes the factor M (streams are summed, as in
hyper-connections). W starts at 0, where others draw it; what is learned of c and C is the difference from the start.
The norm of z has no scale, which W absorbs (as in the paper's kernels). Nothing is decayed.

Streams are equal before the first sublayer and summed after the last: R of these two changes nothing, and what their
C_R gets as gradient is round-off.
"""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxblock.config import ModelConfig
from jaxblock.contracts import check_choice, check_integer
from jaxblock.functional.streams import (
    mix_permutations,
    project_all,
    read_streams,
    sinkhorn,
    write_streams,
)
from jaxblock.modules import Norm
from jaxblock.residual.contract import Topology
from jaxblock.residual.declarations import additive_mixing, norm_parameters
from jaxblock.residual.history import read_once
from jaxblock.residual.hyper_connections import (
    MOST_STREAMS,
    Streams,
    SumStreams,
    constrain_streams,
    open_streams,
    stream_flops,
    stream_traffic,
)
from jaxblock.residual.place import place
from jaxblock.types import Array, Branch, Params

ITERATIONS = 20
READ_START = 2.0
MIX_START = 4.0


class ManifoldConnection(nn.Module):
    """h = sum_i a_i x_i,  x_j' = sum_i R_ij x_i + b_j f(norm(h)),  R doubly stochastic."""

    config: ModelConfig
    streams: int
    mixing: str
    iterations: int

    @nn.compact
    def __call__(self, stream: Streams, f: Branch) -> Streams:
        """Return the streams after the sublayer."""
        config, count = self.config, self.streams
        norm = Norm(config, name="norm")
        own = self._own()
        # Another stream first at every sublayer: with the same read everywhere streams would stay equal.
        first_M = jax.nn.one_hot(place(self).sublayer % count, count)

        def read(x: Streams, first_M: Array, own: Params) -> tuple[Array, Array, Array]:
            products_CBT = project_all(x, own["dynamic"], epsilon=config.norm_epsilon)
            logits_CBT = self._logits(products_CBT, first_M, own)
            a_MBT = jax.nn.sigmoid(logits_CBT[:count])
            b_MBT = 2.0 * jax.nn.sigmoid(logits_CBT[count : 2 * count])
            return read_streams(x, a_MBT), self._matrix(logits_CBT[2 * count :]), b_MBT

        def write(x: Streams, u: Array, r_MMBT: Array, b_MBT: Array) -> Streams:
            return write_streams(x, [u] * count, r_MMBT, b_MBT)

        h, r_MMBT, b_MBT = read_once(read, stream, first_M, own)
        return constrain_streams(read_once(write, stream, f(norm(h)), r_MMBT, b_MBT))

    def _own(self) -> Params:
        """Return W [M, D, C], the difference of c and C from their start [C], and s [3]."""
        dtype, zeros = jnp.dtype(self.config.param_dtype), nn.initializers.zeros
        columns = logit_count(self.streams, self.mixing)
        return {
            "static": self.param("static", zeros, (columns,), dtype),
            "dynamic": self.param("dynamic", zeros, (self.streams, self.config.width, columns), dtype),
            "dynamic_scale": self.param("dynamic_scale", nn.initializers.constant(0.01), (3,), dtype),
        }

    def _logits(self, products_CBT: Array, first_M: Array, own: Params) -> Array:
        """Return the logits of a, b and R, in this order, [C, B, T]."""
        count = self.streams
        matrix_start = mix_start(count, self.mixing)
        start_C = jnp.concatenate(
            [READ_START * (2.0 * first_M - 1.0), jnp.zeros(count), jnp.asarray(matrix_start, jnp.float32)]
        )
        static_C = start_C + own["static"].astype(jnp.float32)
        sizes = np.array([count, count, len(matrix_start)])
        scale_C = jnp.repeat(
            own["dynamic_scale"].astype(jnp.float32), sizes, total_repeat_length=int(sizes.sum())
        )
        return static_C[:, None, None] + scale_C[:, None, None] * products_CBT

    def _matrix(self, logits: Array) -> Array:
        """Return R, [M, M, B, T]."""
        if self.mixing == "permutations":
            return mix_permutations(logits, self.streams)
        return sinkhorn(
            logits.reshape(self.streams, self.streams, *logits.shape[1:]), iterations=self.iterations
        )


def logit_count(streams: int, mixing: str) -> int:
    """Return the number of logits of one sublayer."""
    return 2 * streams + (math.factorial(streams) if mixing == "permutations" else streams**2)


def mix_start(streams: int, mixing: str) -> np.ndarray:
    """Return where the logits of R start, flat: 4 I, or the identity's logit for which R is the same matrix."""
    if mixing == "sinkhorn":
        return MIX_START * np.eye(streams).ravel()
    # ((e^k - 1) I + J) / (e^k - 1 + M) is Sinkhorn's fixed point for k I; with the identity's logit l, the mean of the
    # permutations is ((e^l - 1) I + (M - 1)! J) / (e^l - 1 + M!).
    identity = math.log1p(math.factorial(streams - 1) * math.expm1(MIX_START))
    return np.eye(1, math.factorial(streams))[0] * identity


def manifold_hyper_connections(
    streams: int = 4, mixing: str = "sinkhorn", iterations: int = ITERATIONS
) -> Topology:
    """Return mHC, or mHC-lite.

    Args:
      streams: M, at least 2; at most 4 with permutations.
      mixing: "sinkhorn" (mHC), or "permutations" (mHC-lite), exactly doubly stochastic, M! logits.
      iterations: of Sinkhorn.
    """
    check_choice("model.residual: mixing", mixing, ("sinkhorn", "permutations"))
    check_integer(
        "model.residual: streams", streams, least=2, most=4 if mixing == "permutations" else MOST_STREAMS
    )
    check_integer("model.residual: iterations", iterations, least=1, most=1000)
    if mixing == "permutations" and iterations != ITERATIONS:
        raise ValueError(
            f"model.residual: iterations is {iterations}; it must be left out with mixing = 'permutations'"
        )
    columns = logit_count(streams, mixing)

    def connection(config: ModelConfig, *, name: str) -> nn.Module:
        return ManifoldConnection(config, streams, mixing, iterations, name=name)

    def parameters(config: ModelConfig) -> int:
        own = columns * (streams * config.width + 1) + 3
        return norm_parameters(config, config.sublayers + 1) + config.sublayers * own

    def mixing_table(config: ModelConfig) -> np.ndarray:
        gate = 1.0 / (1.0 + np.exp([-READ_START, READ_START]))
        table = additive_mixing(config) * (gate[0] + (streams - 1) * gate[1])
        table[-1] = streams
        return table

    def flops(config: ModelConfig) -> int:
        made = 2 * streams * config.width * columns
        if mixing == "permutations":
            made += 2 * math.factorial(streams) * streams**2
        return stream_flops(config, streams) + config.sublayers * made

    return Topology(
        connection,
        "h = sum_i a_i x_i; x_j = sum_i R_ij x_i + b_j f(norm(h)), R doubly stochastic; sum_j x_j",
        "arXiv 2512.24880" if mixing == "sinkhorn" else "arXiv 2601.05732",
        open=open_streams(streams),
        close=SumStreams,
        parameters=parameters,
        reduces_to="pre_norm",
        mixing=mixing_table,
        zero_branch=lambda config, x: streams * x,
        sums_width=True,
        flops=flops,
        traffic=lambda config: stream_traffic(config, streams, per_token=True),
        advice="pre-norm's learning rate; many products of R tend to the uniform matrix, which makes streams equal",
    )
