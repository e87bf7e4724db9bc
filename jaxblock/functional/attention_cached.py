"""Attention to keys and values that lie in two places: the slots of a cache, and the tokens that were just read.

    softmax([q k_cached, q k_new]) [v_cached, v_new]

Scores are joined, never keys and values: what a token reads of a cache goes through the products once and is not
copied. The cache's layout has the axes of a batched product in front, so that it is not transposed either.

Axes of this file: S slots, J = R * Q the queries of all heads of a group, end to end.
"""

from typing import NamedTuple, cast

import chex
import jax
import jax.numpy as jnp

from jaxblock.functional.attention_scores import (
    PLAIN,
    ScoreRule,
    check_attention,
    finish_scores,
    finish_values,
    group_queries,
    scale_of,
    score_dtype,
    weigh,
)
from jaxblock.functional.dropout import dropout
from jaxblock.functional.masks import EVERYONE, AttentionPattern, distances, visibility
from jaxblock.types import Array


class CachedKeys(NamedTuple):
    """Keys and values of tokens read before."""

    keys_BGSK: Array
    values_BGSK: Array

    def followed_by(self, k_BTGK: Array, v_BTGK: Array) -> tuple[Array, Array]:
        """Return the keys and values of all tokens in one array each, [B, S + T, G, K]: a copy."""
        pairs = zip(self, (k_BTGK, v_BTGK), strict=True)
        keys, values = (jnp.concatenate([old.swapaxes(1, 2), new], axis=1) for old, new in pairs)
        return keys, values


def attention_cached(
    q_BQHK: Array,
    k_BTGK: Array,
    v_BTGK: Array,
    cached: CachedKeys,
    pattern: AttentionPattern = EVERYONE,
    *,
    scores: ScoreRule = PLAIN,
) -> Array:
    """Return `attention` over the cache's slots followed by the new tokens, [B, Q, H, K] in the dtype of q.

    q: [B, Q, H, K]; k, v: [B, T, G, K], of the new tokens; cached: [B, G, S, K]. Keys of the pattern are the S slots,
    then the T new tokens; a slot that holds nothing is to be hidden by it, and to be finite. Order of operations,
    dtypes, dropout and queries without a key are as in `attention`, and so is what it does not guard against.

    Raises:
      ValueError: as `attention` does. AssertionError (chex): ranks and shapes.
    """
    chex.assert_rank([q_BQHK, k_BTGK, *cached], 4)
    batch, queries, heads, width = q_BQHK.shape
    groups, slots = cached.keys_BGSK.shape[1:3]
    chex.assert_shape([*cached], (batch, groups, slots, width))
    keys = slots + k_BTGK.shape[1]
    whole = [jax.ShapeDtypeStruct((batch, keys, groups, width), x.dtype) for x in cached]
    check_attention(q_BQHK, cast(Array, whole[0]), cast(Array, whole[1]), pattern, scores)
    for x in (k_BTGK, v_BTGK):
        chex.assert_shape(x, (batch, keys - slots, groups, width))
        chex.assert_type(x, q_BQHK.dtype)
    repeats, wide = heads // groups, score_dtype(q_BQHK)
    q_BGJK = group_queries(q_BQHK, groups)
    parts = ((cached.keys_BGSK, cached.values_BGSK), (k_BTGK.swapaxes(1, 2), v_BTGK.swapaxes(1, 2)))
    dots = [jnp.einsum("bgjk,bgtk->bgjt", q_BGJK, k, preferred_element_type=wide) for k, _ in parts]
    s_BGRQT = finish_scores(
        jnp.concatenate(dots, axis=-1).reshape(batch, groups, repeats, queries, keys),
        scores,
        scale=scale_of(scores, width),
        distance=distances(pattern, queries, keys),
        visible_BHQT=visibility(pattern, queries, keys),
    )
    p_BGRQT, total_BGRQ = weigh(s_BGRQT)
    p_BGJT = dropout(p_BGRQT, scores.dropout_rate, scores.dropout_key)
    p_BGJT = p_BGJT.reshape(batch, groups, repeats * queries, keys).astype(q_BQHK.dtype)
    weights = (p_BGJT[..., :slots], p_BGJT[..., slots:])
    y_BGJK = sum(
        jnp.einsum("bgjt,bgtk->bgjk", p, v, preferred_element_type=wide)
        for p, (_, v) in zip(weights, parts, strict=True)
    )
    return finish_values(jnp.asarray(y_BGJK), total_BGRQ, q_BQHK)
