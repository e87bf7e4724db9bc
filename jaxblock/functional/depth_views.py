"""Several weighted sums over depth at once: X^c = sum_j a_c[j] X_j, one for each view c of the same sources.

The views share one pass over the sources: one product for all of them, not one sum each. Letter C counts views.

Weights are float32, sums too; the result has the rows' dtype. A source that does not exist has weight exactly 0.
Sources: MUDDFormer arXiv 2502.12170, eqs. 5-8; LIMe arXiv 2502.09245.
"""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from jaxblock.functional.depth_mixing import Sources
from jaxblock.functional.norms import rms_norm
from jaxblock.types import Array

_EXACT = jax.lax.Precision.HIGHEST  # a TPU's default would round the stream to bfloat16


def mix_views(sources: Sources, weights: Array) -> Array:
    """Return sum_i weights_ci v_i for each view, [C, B, T, D] in the rows' dtype.

    Args:
      sources: the rows.
      weights: [C, N], or per token [C, N, B, T]. The weight of a source that does not exist is taken as 0 whatever
        it is.
    """
    rows = sum(chunk.shape[0] for chunk in sources.chunks)
    chex.assert_rank(weights, {2, 4})
    chex.assert_axis_dimension(weights, 1, rows)
    chex.assert_shape(sources.present, (rows,))
    weights = jnp.where(_per_source(sources.present, weights), weights.astype(jnp.float32), 0.0)
    letters = "cn" if weights.ndim == 2 else "cnbt"
    total, start = jnp.zeros((), jnp.float32), 0
    for chunk in sources.chunks:
        part = weights[:, start : start + chunk.shape[0]]
        rows = chunk.astype(jnp.float32)
        total = total + jnp.einsum(f"{letters},nbtd->cbtd", part, rows, precision=_EXACT)
        start += chunk.shape[0]
    return total.astype(sources.chunks[0].dtype)


def newest_weights(sources: Sources, deltas_CN: Array) -> Array:
    """Return 1 at the newest source, 0 at the others, plus a delta per view and place: float32 [C, N].

    Args:
      sources: the rows.
      deltas_CN: one number per view and place in depth; a place whose source does not exist is never read.
    """
    chex.assert_rank(deltas_CN, 2)
    return newest_source(sources)[None] + deltas_CN.astype(jnp.float32)[:, sources.index]


def newest_source(sources: Sources) -> Array:
    """Return 1 at the newest source and 0 at the others, float32 [N]."""
    return (sources.present & (sources.index == sources.newest)).astype(jnp.float32)


class HiddenWeights(NamedTuple):
    """The two layers that make MUDD's weights of a token."""

    hidden_DF: Array
    """W1, shared by the views."""
    output_CNF: Array
    """W2 of each view, a row per place in depth; a place whose source does not exist is never read."""


def dynamic_weights(sources: Sources, x_BTD: Array, weights: HiddenWeights, *, epsilon: float) -> Array:
    """Return W2_c gelu(W1 rms(x)) for every source that can be read, float32 [C, N, B, T]; the gelu is exact.

    Args:
      sources: the rows.
      x_BTD: the newest state.
      weights: W1 and W2.
      epsilon: of the norm, which has no scale: W1 could absorb it.
    """
    chex.assert_rank([x_BTD, weights.hidden_DF, weights.output_CNF], [3, 2, 3])
    x_BTD = rms_norm(x_BTD.astype(jnp.float32), epsilon=epsilon)
    hidden_DF, output_CNF = (w.astype(jnp.float32) for w in weights)
    hidden_BTF = jnp.einsum("btd,df->btf", x_BTD, hidden_DF, precision=_EXACT)
    hidden_BTF = jax.nn.gelu(hidden_BTF, approximate=False)
    return jnp.einsum("btf,cnf->cnbt", hidden_BTF, output_CNF[:, sources.index], precision=_EXACT)


class LinearScores(NamedTuple):
    """The layer that makes a token's scores over depth."""

    kernel_CND: Array
    """Of each view, a row per place in depth."""
    bias_CN: Array


def softmax_weights(
    sources: Sources, x_BTD: Array, scores: LinearScores, *, newest: float, epsilon: float
) -> Array:
    """Return softmax_n(w_cn . rms(x) + b_cn + newest where n is the newest source), float32 [C, N, B, T].

    Args:
      sources: the rows; the softmax is over those that exist.
      x_BTD: the newest state.
      scores: w and b; a place whose source does not exist is never read.
      newest: what the newest source's score has more than the others'.
      epsilon: of the norm, which has no scale: w could absorb it.
    """
    chex.assert_rank([x_BTD, scores.kernel_CND, scores.bias_CN], [3, 3, 2])
    x_BTD = rms_norm(x_BTD.astype(jnp.float32), epsilon=epsilon)
    kernel_CND, bias_CN = (w.astype(jnp.float32)[:, sources.index] for w in scores)
    bias_CN = bias_CN + newest * newest_source(sources)[None]
    scores_CNBT = jnp.einsum("btd,cnd->cnbt", x_BTD, kernel_CND, precision=_EXACT)
    scores_CNBT = scores_CNBT + bias_CN[..., None, None]
    return jax.nn.softmax(scores_CNBT, axis=1, where=_per_source(sources.present, scores_CNBT))


def _per_source(x_N: Array, wide: Array) -> Array:
    """Give [N] an axis of views before and as many of tokens behind as `wide` has."""
    return x_N.reshape((1, -1) + (1,) * (wide.ndim - 2))
