"""What attention does, head by head, in a few numbers: sizes of scores, queries and keys, entropy, the first key.

The fused implementations never hold the scores, so these are made again, as [B, H, Q, T]: give it few rows. Growth of
the largest score at high learning rates comes before divergence (arXiv 2309.14322, section 3.1).
"""

import dataclasses
from typing import NamedTuple

import chex
import jax.numpy as jnp

from jaxblock.contracts import check_boolean
from jaxblock.functional.attention_scores import PLAIN, ScoreRule, check_attention, finish_scores, scale_of
from jaxblock.functional.masks import EVERYONE, AttentionPattern, distances, visibility, visible
from jaxblock.types import Array


class AttentionHealth(NamedTuple):
    """Numbers per head, float32 [H] ([L, H] of a stack). Only real queries and the keys they may attend to count; a
    head without any has 0."""

    largest_score: Array
    """Largest score as the softmax sees it: scaled, soft cap and linear bias applied."""
    largest_product: Array
    """Largest scale * q.k, before soft cap and linear bias: what a soft cap hides."""
    entropy: Array
    """Mean over queries of -sum_t w_t log w_t, in nats, w without dropout."""
    relative_entropy: Array
    """Mean of entropy / log(number of permitted keys), from 0 (one key) to 1 (all alike), over queries with two or
    more permitted keys."""
    first_share: Array
    """Mean over queries of the weight on the first real key of their own document, 0 where a window hides it."""
    query_norm: Array
    """sqrt(mean |q|^2), as attention gets them: after rotation, and after whatever normed them."""
    key_norm: Array
    """sqrt(mean |k|^2), [G]: one per key head."""


def attention_health(
    q_BQHK: Array,
    k_BTGK: Array,
    pattern: AttentionPattern = EVERYONE,
    *,
    scores: ScoreRule = PLAIN,
    query_valid_BQ: Array | None = None,
) -> AttentionHealth:
    """Return the health of w = softmax(scores), without the values: w[q, t] as in `attention`.

    Args:
      q_BQHK: queries, [B, Q, H, K].
      k_BTGK: keys, [B, T, G, K], in the queries' dtype; query head h reads key head h // (H / G).
      pattern: who may attend to whom.
      scores: how scores are made; its dropout is not read.
      query_valid_BQ: boolean [B or 1, Q], which queries are real; None = all.

    Raises:
      ValueError, AssertionError: as `attention` does; a query_valid_BQ that is not boolean or does not fit.
    """
    check_attention(q_BQHK, k_BTGK, k_BTGK, pattern, scores)
    (batch, queries, heads, width), (keys, groups) = q_BQHK.shape, k_BTGK.shape[1:3]
    shape = (batch, groups, heads // groups, queries, keys)
    seen_BHQT = visibility(pattern, queries, keys)
    seen_BGRQT = _counted_pairs(seen_BHQT, query_valid_BQ, shape)
    q_BQGRK = q_BQHK.astype(jnp.float32).reshape(batch, queries, *shape[1:3], width)
    k_BTGK, scale = k_BTGK.astype(jnp.float32), scale_of(scores, width)
    dots_BGRQT = jnp.einsum("bqgrk,btgk->bgrqt", q_BQGRK, k_BTGK)
    s_BGRQT = finish_scores(
        dots_BGRQT, scores, scale=scale, distance=distances(pattern, queries, keys), visible_BHQT=seen_BHQT
    )
    w_BGRQT, entropy_BGRQ = _weights(s_BGRQT, seen_BGRQT)
    count_BGRQ = seen_BGRQT.sum(-1)
    any_BGRQ, several_BGRQ = count_BGRQ > 0, count_BGRQ > 1
    possible_BGRQ = jnp.log(jnp.where(several_BGRQ, count_BGRQ, 2).astype(jnp.float32))
    first_BGRQ = jnp.sum(jnp.where(_first_keys(pattern, shape), w_BGRQT, 0.0), axis=-1)
    q2_BGRQ = jnp.square(q_BQGRK).sum(-1).transpose(0, 2, 3, 1)
    k2_BGT = jnp.square(k_BTGK).sum(-1).swapaxes(1, 2)
    return AttentionHealth(
        largest_score=_largest(s_BGRQT, seen_BGRQT),
        largest_product=_largest(scale * dots_BGRQT, seen_BGRQT),
        entropy=_mean(entropy_BGRQ, any_BGRQ),
        relative_entropy=_mean(entropy_BGRQ / possible_BGRQ, several_BGRQ),
        first_share=_mean(first_BGRQ, any_BGRQ),
        query_norm=jnp.sqrt(_mean(q2_BGRQ, any_BGRQ)),
        key_norm=jnp.sqrt(_mean(k2_BGT, seen_BGRQT.any((2, 3)))),
    )


def first_rows(pattern: AttentionPattern, rows: int) -> AttentionPattern:
    """Return the pattern of a batch's first rows."""
    names = (
        "key_valid_BT",
        "query_segments_BQ",
        "key_segments_BT",
        "mask",
        "query_positions_BQ",
        "key_positions_BT",
    )
    cut = {name: getattr(pattern, name) for name in names}
    return dataclasses.replace(pattern, **{name: x if x is None else x[:rows] for name, x in cut.items()})


def _counted_pairs(seen_BHQT: Array | None, query_valid_BQ: Array | None, shape: tuple[int, ...]) -> Array:
    """Return which pairs are permitted and of a real query, [B, G, R, Q, T]."""
    seen_BGRQT = _all_pairs(seen_BHQT, shape)
    if query_valid_BQ is None:
        return seen_BGRQT
    chex.assert_shape(query_valid_BQ, (query_valid_BQ.shape[0], shape[3]))
    check_boolean("query_valid_BQ", query_valid_BQ)
    return seen_BGRQT & query_valid_BQ[:, None, None, :, None]


def _weights(s_BGRQT: Array, seen_BGRQT: Array) -> tuple[Array, Array]:
    """Return softmax over the permitted keys, and its entropy log Z - sum_t w_t s_t; 0 where none is permitted."""
    top_BGRQ1 = jnp.max(s_BGRQT, axis=-1, keepdims=True, where=seen_BGRQT, initial=-jnp.inf)
    shifted = jnp.where(seen_BGRQT, s_BGRQT - jnp.where(jnp.isneginf(top_BGRQ1), 0.0, top_BGRQ1), 0.0)
    parts = jnp.where(seen_BGRQT, jnp.exp(shifted), 0.0)
    total = jnp.maximum(parts.sum(-1, keepdims=True), 1.0)  # the largest part is 1
    w_BGRQT = parts / total
    return w_BGRQT, jnp.log(total[..., 0]) - jnp.sum(w_BGRQT * shifted, axis=-1)


def _first_keys(pattern: AttentionPattern, shape: tuple[int, ...]) -> Array:
    """Return which key is the first real one of each query's document, in order of position: one-hot, boolean."""
    queries, keys = shape[-2:]
    own = visible(
        dataclasses.replace(pattern, causal=False, window=None), jnp.arange(queries), jnp.arange(keys)
    )
    given_BT = pattern.key_positions_BT
    order_BT = jnp.arange(keys)[None] if given_BT is None else given_BT
    order = jnp.where(_all_pairs(own, shape), order_BT[:, None, None, None], jnp.iinfo(jnp.int32).max)
    return jnp.arange(keys).reshape(1, 1, 1, 1, -1) == jnp.argmin(order, axis=-1, keepdims=True)


def _all_pairs(seen_BHQT: Array | None, shape: tuple[int, ...]) -> Array:
    """Return a mask over [B, G, R, Q, T]."""
    if seen_BHQT is None:
        return jnp.ones(shape, jnp.bool_)
    batch, heads, queries, keys = seen_BHQT.shape
    by_group = (1, 1) if heads == 1 else shape[1:3]
    return jnp.broadcast_to(seen_BHQT.reshape(batch, *by_group, queries, keys), shape)


def _largest(x_BGRQT: Array, seen_BGRQT: Array) -> Array:
    """Return the largest permitted entry of each head, [H]; 0 where there is none."""
    top_GR = jnp.max(x_BGRQT, axis=(0, 3, 4), where=seen_BGRQT, initial=-jnp.inf)
    return jnp.where(seen_BGRQT.any((0, 3, 4)), top_GR, 0.0).reshape(-1)


def _mean(x: Array, counts: Array) -> Array:
    """Return the mean over rows and tokens (first and last axis) of what counts, by head; 0 where nothing does."""
    total = jnp.sum(jnp.where(counts, x, 0.0), axis=(0, -1))
    return (total / jnp.maximum(counts.sum((0, -1)), 1)).reshape(-1)
