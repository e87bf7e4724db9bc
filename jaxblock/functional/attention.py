"""Attention: softmax(scores) v over the permitted keys, with one key head per group of query heads.

Sources: arXiv 1706.03762, eq. 1; one key head (MQA) arXiv 1911.02150; groups (GQA) arXiv 2305.13245.
"""

from jaxblock.contracts import check_choice
from jaxblock.functional.attention_blocked import attention_blocked
from jaxblock.functional.attention_cudnn import attention_cudnn
from jaxblock.functional.attention_scores import PLAIN, ScoreRule
from jaxblock.functional.attention_xla import attention_xla
from jaxblock.functional.masks import EVERYONE, AttentionPattern
from jaxblock.types import Array

__all__ = ["IMPLEMENTATIONS", "AttentionPattern", "ScoreRule", "attention"]

IMPLEMENTATIONS = ("xla", "blocked", "cudnn")
"""'xla' keeps the weights, [B, H, Q, T] but for what causal and a window hide in chunks of queries; 'blocked' does not
and has no forward mode; 'cudnn': NVIDIA GPUs."""


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
    return attention_xla(q_BQHK, k_BTGK, v_BTGK, pattern, scores=scores)
