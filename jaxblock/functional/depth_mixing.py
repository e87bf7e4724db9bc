"""What history topologies read: a weighted sum over depth, h = sum_i a_i v_i, the weights fixed or a softmax.

Sources are the rows of a history [N, B, T, D] and rows made since, each a chunk [n, B, T, D]; `present` [N + n]
says which of them exist yet. A source that does not exist has weight exactly 0 and gets no gradient. Chunks are
never joined (a copy of the history per read is what makes memory quadratic): only their scores are.

Weights are float32, sums too; the result has the rows' dtype.
Sources: DenseFormer arXiv 2402.02622, eq. 1; Attention Residuals arXiv 2603.15031; depth heads arXiv 2607.27230.
"""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jaxblock.contracts import check_choice
from jaxblock.types import Array

DEPTH_SCORES = ("softmax", "sigmoid")
_EXACT = jax.lax.Precision.HIGHEST  # a TPU's default would round float32 factors to bfloat16


class Sources(NamedTuple):
    """What can be read at one place in depth."""

    chunks: tuple[Array, ...]
    """Each [n, B, T, D], one dtype: the history's rows, then what was made since."""
    present: Array
    """Boolean [N], N the rows of all chunks: True = exists."""
    index: Array
    """int32 [N]: the number of each source, 0 = the embedding."""

    @property
    def newest(self) -> Array:
        """The number of the newest source that exists, int32 scalar."""
        return jnp.max(jnp.where(self.present, self.index, 0))


def mix_sources(sources: Sources, weights: Array) -> Array:
    """Return sum_i weights_i v_i, [B, T, D] in the rows' dtype.

    Args:
      sources: the rows.
      weights: float32 [N], or per token and group of channels [N, B, T, H] with H dividing D. The weight of a
        source that does not exist is taken as 0 whatever it is.
    """
    rows = sum(chunk.shape[0] for chunk in sources.chunks)
    chex.assert_rank(weights, {1, 4})
    chex.assert_axis_dimension(weights, 0, rows)
    chex.assert_shape(sources.present, (rows,))
    weights = jnp.where(_beside(sources.present, weights), weights.astype(jnp.float32), 0.0)
    groups = weights.shape[-1] if weights.ndim == 4 else 1
    total, start = jnp.zeros((), jnp.float32), 0
    for chunk in sources.chunks:
        part = weights[start : start + chunk.shape[0]]
        rows = chunk.astype(jnp.float32)
        # Groups are split only where there are any: a loop over one group of D is a quarter of the speed on CPU.
        rows = rows if groups == 1 else _grouped(rows, groups)
        total = total + jnp.sum(_beside(part, rows) * rows, axis=0)
        start += chunk.shape[0]
    return total.reshape(sources.chunks[0].shape[1:]).astype(sources.chunks[0].dtype)


def content_scores(
    sources: Sources, query: Array, key_scale: Array | None, *, heads: int, epsilon: float
) -> Array:
    """Return s_i = q . rms_norm(v_i) per group of channels, float32 [N, B, T, H]; no 1 / sqrt(D).

    Args:
      sources: the rows, keys and values at once.
      query: [D], one for all tokens, or [B, T, D].
      key_scale: the key norm's scale [D]; None = keys are the rows themselves.
      heads: H, groups of D / H channels with a softmax each (arXiv 2607.27230); 1 = one over all channels.
      epsilon: of the key norm.
    """
    chex.assert_rank(query, {1, 3})
    chex.assert_axis_dimension(query, -1, sources.chunks[0].shape[-1])
    query = query.astype(jnp.float32)
    if key_scale is not None:
        query = query * key_scale.astype(jnp.float32).reshape((1,) * (query.ndim - 1) + (-1,))
    query = _grouped(query, heads)
    letters = "hk" if query.ndim == 2 else "bthk"
    scores = []
    for chunk in sources.chunks:
        rows = chunk.astype(jnp.float32)
        # The key norm's division comes last: q . (v / r) = (q . v) / r saves a pass over the history.
        products = jnp.einsum(f"nbthk,{letters}->nbth", _grouped(rows, heads), query, precision=_EXACT)
        scores.append(products if key_scale is None else products * _inverse_size(rows, epsilon))
    return jnp.concatenate(scores)


def keyed_scores(keys_ND: Array, query_BTD: Array, *, heads: int) -> Array:
    """Return s_i = q . k_i for keys that belong to the sources' places, not their contents: [N, B, T, H]."""
    chex.assert_rank([keys_ND, query_BTD], [2, 3])
    keys_NHK = _grouped(keys_ND.astype(jnp.float32), heads)
    query_BTHK = _grouped(query_BTD.astype(jnp.float32), heads)
    return jnp.einsum("nhk,bthk->nbth", keys_NHK, query_BTHK, precision=_EXACT)


def depth_weights(scores: Array, present: Array, rule: str) -> Array:
    """Return weights of the sources that exist from their scores, same shape, float32.

    Args:
      scores: [N] or [N, B, T, H].
      present: boolean [N]; False gives weight exactly 0.
      rule: "softmax" over the sources that exist (weights sum to 1), or "sigmoid" of each score.

    Raises:
      ValueError: another rule.
    """
    check_choice("score", rule, DEPTH_SCORES)
    exists = _beside(present, scores)
    scores = scores.astype(jnp.float32)
    if rule == "sigmoid":
        return jnp.where(exists, jax.nn.sigmoid(scores), 0.0)
    return jax.nn.softmax(scores, axis=0, where=exists)


def depth_window(sources: Sources, window: int) -> Array:
    """Return which sources a reader with this window sees: the newest `window` and the embedding; 0 = all."""
    if window == 0:
        return sources.present
    near = sources.index > sources.newest - window
    return sources.present & (near | (sources.index == 0))


class FinishedPart(NamedTuple):
    """Phase 1 of a two-phase read: what a query gets from finished sources alone."""

    value: Array
    """Their softmax-weighted mean, float32 [R, B, T, D], or of one reader [B, T, D]."""
    log_weight: Array
    """log sum exp of their scores, float32 [R, B, T, H], or of one reader [B, T, H]."""


def read_finished(
    sources: Sources, queries_RD: Array, key_scales_RD: Array | None, *, heads: int, epsilon: float
) -> FinishedPart:
    """Return phase 1 of R readers at once: the history is read once for all of them, as two matrix products.

    Args:
      sources: finished sources; one chunk.
      queries_RD: one static query per reader.
      key_scales_RD: the scale of each reader's key norm; None = keys are the rows themselves.
      heads, epsilon: as in `content_scores`.

    Returns:
      What each reader gets, leading axis R.
    """
    (rows_NBTD,) = sources.chunks
    chex.assert_rank([rows_NBTD, queries_RD], [4, 2])
    rows = rows_NBTD.astype(jnp.float32)
    queries_RD = queries_RD.astype(jnp.float32)
    if key_scales_RD is not None:
        queries_RD = queries_RD * key_scales_RD.astype(jnp.float32)
    grouped, queries_RHK = _grouped(rows, heads), _grouped(queries_RD, heads)
    scores_RNBTH = jnp.einsum("nbthk,rhk->rnbth", grouped, queries_RHK, precision=_EXACT)
    if key_scales_RD is not None:
        scores_RNBTH = scores_RNBTH * _inverse_size(rows, epsilon)[None]
    exists, in_float32 = _beside(sources.present, grouped[..., 0])[None], sources._replace(chunks=(rows,))
    weights_RNBTH = jax.nn.softmax(scores_RNBTH, axis=1, where=exists)
    # Reader by reader: one product, batched over tokens, is thousands of tiny ones, which are slower on CPU.
    value = jax.lax.map(lambda weights: mix_sources(in_float32, weights), weights_RNBTH)
    log_weight = jax.nn.logsumexp(scores_RNBTH, axis=1, where=exists)
    return FinishedPart(value, log_weight)


def read_partial(finished: FinishedPart, partial_BTD: Array, score_BTH: Array, present: Array) -> Array:
    """Return phase 2: the softmax over finished sources and one more, exactly as one softmax over all gives.

    Args:
      finished: phase 1.
      partial_BTD: the one more source.
      score_BTH: its score.
      present: boolean scalar, whether it exists.
    """
    score = jnp.where(present, score_BTH, -jnp.inf)
    top = jnp.maximum(finished.log_weight, score)
    old, new = jnp.exp(finished.log_weight - top), jnp.exp(score - top)
    share = (new / (old + new))[..., None]
    grouped = _grouped(partial_BTD.astype(jnp.float32), score.shape[-1])
    h = (1.0 - share) * finished.value.reshape(grouped.shape) + share * grouped
    return h.reshape(partial_BTD.shape).astype(partial_BTD.dtype)


def dense_terms(depth: int, *, dilation: int, period: int) -> np.ndarray:
    """Return which states each DenseFormer average holds, boolean [L + 1, L + 1] (row i: after block i).

    Row i has j <= i with j = i modulo `dilation`, and only where `period` divides i; row 0 has none.
    """
    i, j = np.arange(depth + 1)[:, None], np.arange(depth + 1)
    return (j <= i) & ((i - j) % dilation == 0) & (i % period == 0) & (i > 0)


def kept_states(terms: np.ndarray) -> np.ndarray:
    """Return the numbers of the states that an average after a later block reads, in order; the embedding always."""
    later = np.tril(terms, -1).any(axis=0)
    return np.flatnonzero(later | (np.arange(len(terms)) == 0))


def dense_table(weights: Array, terms: np.ndarray) -> Array:
    """Spread the weights that exist, [count], over a table [L + 1, L + 1] of zeros, row by row, float32."""
    chex.assert_shape(weights, (int(terms.sum()),))
    return jnp.zeros(terms.shape, jnp.float32).at[np.nonzero(terms)].set(weights.astype(jnp.float32))


def _grouped(x: Array, groups: int) -> Array:
    """Split the last axis: [..., D] -> [..., H, K]."""
    return x.reshape(*x.shape[:-1], groups, -1)


def _inverse_size(rows: Array, epsilon: float) -> Array:
    """Return 1 / rms of each row, float32, [n, B, T, D] -> [n, B, T, 1]."""
    return jax.lax.rsqrt(jnp.mean(jnp.square(rows), axis=-1, keepdims=True) + epsilon)


def _beside(x: Array, wide: Array) -> Array:
    """Give x as many axes as `wide` has, new ones of size 1 at the end."""
    return x.reshape(x.shape + (1,) * (wide.ndim - x.ndim))
