"""Attention: softmax(scores) v over the permitted keys, with one key head per group of query heads.

Sources: arXiv 1706.03762, eq. 1; one key head (MQA) arXiv 1911.02150; groups (GQA) arXiv 2305.13245.
"""

import jax
import jax.numpy as jnp

from jaxblock.contracts import check_choice
from jaxblock.functional.attention_blocked import attention_blocked
from jaxblock.functional.attention_cudnn import attention_cudnn
from jaxblock.functional.attention_scores import (
    PLAIN,
    ScoreRule,
    check_attention,
    finish_scores,
    scale_of,
    score_dtype,
)
from jaxblock.functional.dropout import dropout
from jaxblock.functional.masks import EVERYONE, AttentionPattern, distances, visibility
from jaxblock.types import Array

__all__ = ["IMPLEMENTATIONS", "AttentionPattern", "ScoreRule", "attention"]

IMPLEMENTATIONS = ("xla", "blocked", "cudnn")
"""'xla' keeps [B, H, Q, T] weights; 'blocked' does not and has no forward mode; 'cudnn': NVIDIA GPUs."""


def attention(
    q_BQHK: Array,
    k_BTGK: Array,
    v_BTGK: Array,
    pattern: AttentionPattern = EVERYONE,
    *,
    scores: ScoreRule = PLAIN,
    implementation: str = "xla",
) -> Array:
    """Return sum_t w[q, t] v[t], w = softmax over permitted t of the scores, [B, Q, H, K] in the dtype of q.

    q: [B, Q, H, K]; k, v: [B, T, G, K], G = H (MHA), 1 (MQA) or a divisor of H (GQA: query head h reads
    key head h // (H / G)). In this order: scale * q.k accumulated in float32 whatever the input dtype
    (float64 for float64); soft cap; linear bias; mask; softmax in float32; dropout of weights; weighted sum,
    accumulated in float32. Query i sits at position i + T - Q, or where the pattern's positions say.

    A query with no permitted key gets exactly 0, with zero gradients. Finite numbers in hidden keys and
    values change nothing, bit for bit. NaN or infinity there is not guarded against: a hidden value still
    meets a weight of 0, and 0 * NaN is NaN; overwrite padding with finite numbers if it may hold them.

    Raises ValueError for head counts that do not divide, dtypes that differ, masks that are not boolean or
    do not fit, an unknown implementation, positions where it is not 'xla', and what 'cudnn' cannot do;
    AssertionError (chex) for ranks and shapes.
    """
    check_choice("implementation", implementation, IMPLEMENTATIONS)
    if implementation == "blocked":
        return attention_blocked(q_BQHK, k_BTGK, v_BTGK, pattern, scores=scores)
    if implementation == "cudnn":
        return attention_cudnn(q_BQHK, k_BTGK, v_BTGK, pattern, scores=scores)
    return _attention_xla(q_BQHK, k_BTGK, v_BTGK, pattern, scores)


def _attention_xla(
    q_BQHK: Array,
    k_BTGK: Array,
    v_BTGK: Array,
    pattern: AttentionPattern,
    rule: ScoreRule,
) -> Array:
    check_attention(q_BQHK, k_BTGK, v_BTGK, pattern, rule)
    batch, queries, heads, width = q_BQHK.shape
    keys, groups = k_BTGK.shape[1:3]
    repeats, wide = heads // groups, score_dtype(q_BQHK)
    # J = R * Q: with the query heads of a group laid end to end, both products are batched matrix products
    # and nothing is repeated; on CPU a third faster, forward and backward, than einsums over five axes.
    q_BGJK = q_BQHK.reshape(batch, queries, groups, repeats, width).transpose(0, 2, 3, 1, 4)
    q_BGJK = q_BGJK.reshape(batch, groups, repeats * queries, width)
    k_BGTK, v_BGTK = k_BTGK.swapaxes(1, 2), v_BTGK.swapaxes(1, 2)
    dots_BGJT = jnp.einsum("bgjk,bgtk->bgjt", q_BGJK, k_BGTK, preferred_element_type=wide)
    s_BGRQT = finish_scores(
        dots_BGJT.reshape(batch, groups, repeats, queries, keys),
        rule,
        scale=scale_of(rule, width),
        distance=distances(pattern, queries, keys),
        visible_BHQT=visibility(pattern, queries, keys),
    )
    # The maximum cancels in the quotient below, so it carries no gradient; -inf (an empty row) must not be
    # subtracted from itself.
    top_BGRQ1 = jax.lax.stop_gradient(s_BGRQT.max(axis=-1, keepdims=True))
    p_BGRQT = jnp.exp(s_BGRQT - jnp.where(top_BGRQ1 > -jnp.inf, top_BGRQ1, 0))
    total_BGRQ = p_BGRQT.sum(axis=-1)
    p_BGJT = dropout(p_BGRQT, rule.dropout_rate, rule.dropout_key).reshape(dots_BGJT.shape)
    # Dividing after the product touches [Q, K] numbers instead of [Q, T].
    y_BGJK = jnp.einsum("bgjt,bgtk->bgjk", p_BGJT.astype(v_BTGK.dtype), v_BGTK, preferred_element_type=wide)
    y_BGRQK = y_BGJK.reshape(batch, groups, repeats, queries, width)
    y_BGRQK = y_BGRQK / jnp.where(total_BGRQ > 0, total_BGRQ, 1)[..., None]
    return y_BGRQK.transpose(0, 3, 1, 2, 4).reshape(q_BQHK.shape).astype(q_BQHK.dtype)
