"""Several residual streams: each sublayer reads a weighted sum of them, mixes them, and writes to all.

    h = sum_i a_i x_i,    x_j' = sum_i R_ij x_i + b_j u        (R_ij: from stream i to stream j, mHC's R transposed)

Streams are M arrays [B, T, D]; a weight is one number, or one per token [B, T]. All sums are multiply-adds over whole
streams, which a compiler fuses; a product of an M x M with an M x D matrix per token is slower, forward and backward.
Weights and sums are float32 (float64 stays float64); results have the streams' dtype.
Sources: hyper-connections arXiv 2409.19606, fractions of one stream arXiv 2503.14125, doubly stochastic R
arXiv 2512.24880 (Sinkhorn) and 2601.05732 (permutations).
"""

import functools
import itertools
from collections.abc import Sequence

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jaxblock.contracts import check_integer
from jaxblock.types import Array

_EXACT = jax.lax.Precision.HIGHEST  # a TPU's default would round float32 factors to bfloat16


def read_streams(streams: Sequence[Array], read: Array) -> Array:
    """Return sum_i a_i x_i, [B, T, D] in the streams' dtype; `read` is a, [M] or [M, B, T]."""
    chex.assert_equal_shape(streams)
    chex.assert_axis_dimension(read, 0, len(streams))
    return _weighted_sum(streams, read).astype(streams[0].dtype)


def write_streams(
    streams: Sequence[Array], updates: Sequence[Array], mix: Array, write: Array
) -> tuple[Array, ...]:
    """Return the M streams x_j' = sum_i R_ij x_i + b_j u_j.

    Args:
      streams: x_i, each [B, T, D].
      updates: u_j, what is written to each; M times the same array where all are written the same.
      mix: R, [M, M] or [M, M, B, T].
      write: b, [M] or [M, B, T].
    """
    chex.assert_equal_shape([*streams, *updates])
    chex.assert_axis_dimension(mix, 0, len(streams))
    chex.assert_axis_dimension(mix, 1, len(updates))
    chex.assert_axis_dimension(write, 0, len(updates))
    written = (_weighted_sum([*streams, update], [*mix[:, j], write[j]]) for j, update in enumerate(updates))
    return tuple(x.astype(streams[0].dtype) for x in written)


def add_streams(streams: Sequence[Array]) -> Array:
    """Return sum_i x_i, [B, T, D] in the streams' dtype."""
    chex.assert_equal_shape(streams)
    return _added(_in_float32(streams)).astype(streams[0].dtype)


def project_each(streams: Sequence[Array], kernel_DC: Array, *, epsilon: float) -> Array:
    """Return rms_norm(x_i) W of each stream, float32 [M, C, B, T]; the norm has no scale: W absorbs it."""
    projected = [
        _product(x, kernel_DC) * jax.lax.rsqrt(_mean_square(x) + epsilon)[None] for x in _in_float32(streams)
    ]
    return jnp.stack(projected)


def project_all(streams: Sequence[Array], kernel_MDC: Array, *, epsilon: float) -> Array:
    """Return rms_norm(x) W of all streams side by side, x [M D], W [M D, C], float32 [C, B, T]; no scale, as above."""
    chex.assert_axis_dimension(kernel_MDC, 0, len(streams))
    wide = _in_float32(streams)
    products_CBT = _added([_product(x, kernel_DC) for x, kernel_DC in zip(wide, kernel_MDC, strict=True)])
    mean_square_BT = _added([_mean_square(x) for x in wide]) / len(wide)
    # The norm's division comes last: (x / r) W = (x W) / r saves a pass over the streams.
    return products_CBT * jax.lax.rsqrt(mean_square_BT + epsilon)[None]


def sinkhorn(logits: Array, *, iterations: int) -> Array:
    """Return exp(logits) with rows and columns scaled, in turn and so often, to sum to 1, float32 [M, M, ...].

    A scan over the logarithms: any finite logits, however far apart, give finite values and gradients. Axis 0, which
    `write_streams` contracts, is normalized last and exactly; axis 1 as well as the iterations have converged, which
    takes the longer the closer the result is to a permutation.
    """
    check_integer("iterations", iterations, least=1)
    chex.assert_axis_dimension(logits, 1, logits.shape[0])

    def normalize(log_MM: Array, _: None) -> tuple[Array, None]:
        log_MM = log_MM - jax.nn.logsumexp(log_MM, axis=1, keepdims=True)
        return log_MM - jax.nn.logsumexp(log_MM, axis=0, keepdims=True), None

    wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    log_MM, _ = jax.lax.scan(normalize, wide, None, length=iterations)
    return jax.nn.softmax(log_MM, axis=0)  # divides by the sum once more, for the last digit


def mix_permutations(logits: Array, streams: int) -> Array:
    """Return the permutation matrices' mean under softmax(logits): [M!, ...] -> float32 [M, M, ...].

    Doubly stochastic whatever the logits, and every doubly stochastic matrix is one (Birkhoff, von Neumann).
    """
    table_PMM = permutation_matrices(streams)
    chex.assert_axis_dimension(logits, 0, len(table_PMM))
    weights = jax.nn.softmax(logits.astype(jnp.promote_types(logits.dtype, jnp.float32)), axis=0)
    return jnp.einsum("pij,p...->ij...", jnp.asarray(table_PMM, weights.dtype), weights, precision=_EXACT)


def permutation_matrices(streams: int) -> np.ndarray:
    """Return all M! permutation matrices, [M!, M, M], the identity first."""
    orders = np.array(list(itertools.permutations(range(streams))))
    return np.eye(streams)[orders]


def _weighted_sum(streams: Sequence[Array], weights: Sequence[Array] | Array) -> Array:
    terms = [
        (weight if weight.ndim == 0 else weight[..., None]) * x
        for x, weight in zip(_in_float32(streams), weights, strict=True)
    ]
    return _added(terms)


def _product(x_BTD: Array, kernel_DC: Array) -> Array:
    product_BTC = jnp.einsum("btd,dc->btc", x_BTD, kernel_DC.astype(x_BTD.dtype), precision=_EXACT)
    return jnp.moveaxis(product_BTC, -1, 0)  # asked for in this order, the product would first transpose x


def _mean_square(x_BTD: Array) -> Array:
    return jnp.mean(jnp.square(x_BTD), axis=-1)


def _added(terms: Sequence[Array]) -> Array:
    return functools.reduce(jnp.add, terms)


def _in_float32(streams: Sequence[Array]) -> list[Array]:
    chex.assert_type(streams, float)
    return [x.astype(jnp.promote_types(x.dtype, jnp.float32)) for x in streams]
