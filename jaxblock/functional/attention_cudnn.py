"""Attention by cuDNN's fused kernel, through `jax.nn.dot_product_attention`; refused where it cannot run."""

from typing import Literal

import jax
import jax.numpy as jnp

from jaxblock.functional.attention_scores import PLAIN, ScoreRule, check_attention, scale_of
from jaxblock.functional.masks import EVERYONE, AttentionPattern, check_no_positions, visibility
from jaxblock.types import Array


def attention_cudnn(
    q_BQHK: Array,
    k_BTGK: Array,
    v_BTGK: Array,
    pattern: AttentionPattern = EVERYONE,
    *,
    scores: ScoreRule = PLAIN,
) -> Array:
    """Return what `attention` returns, by cuDNN: bfloat16 or float16 on an NVIDIA GPU, no forward mode.

    The causal flag alone, with as many queries as keys, reaches the kernel as a flag; every other pattern
    goes in as a [.., Q, T] mask. Raises ValueError, as `attention` does and for what the kernel cannot do.
    """
    check_no_positions(pattern, "cudnn")
    check_attention(q_BQHK, k_BTGK, v_BTGK, pattern, scores)
    reason = refusal(q_BQHK, k_BTGK, pattern, scores)
    if reason:
        raise ValueError(
            f"execution.attention: implementation 'cudnn' {reason}; use implementation='xla' or 'blocked'"
        )
    return fused_attention(q_BQHK, k_BTGK, v_BTGK, pattern, scores, backend="cudnn")


def refusal(q_BQHK: Array, k_BTGK: Array, pattern: AttentionPattern, rule: ScoreRule) -> str | None:
    """Return why cuDNN cannot compute this, or None."""
    queries, keys = q_BQHK.shape[1], k_BTGK.shape[1]
    if rule.soft_cap is not None:
        return f"has no soft cap (soft_cap={rule.soft_cap})"
    if rule.alibi_slopes_H is not None:
        return "has no linear bias here (alibi_slopes_H is given)"
    if rule.drops:
        return f"has no dropout of weights here (dropout_rate={rule.dropout_rate})"
    if q_BQHK.dtype not in (jnp.bfloat16, jnp.float16):
        return f"needs bfloat16 or float16, not {q_BQHK.dtype}"
    if q_BQHK.dtype == jnp.float16 and not _is_flag(pattern, queries, keys):
        # The kernel adds -32768 to hidden scores, which large hidden keys could outweigh.
        return "takes no mask in float16, only the causal flag with as many queries as keys"
    if jax.default_backend() != "gpu":
        return f"needs an NVIDIA GPU, and the backend is {jax.default_backend()}"
    return None


def fused_attention(
    q_BQHK: Array,
    k_BTGK: Array,
    v_BTGK: Array,
    pattern: AttentionPattern,
    rule: ScoreRule,
    *,
    backend: Literal["cudnn", "xla"],
) -> Array:
    """Call `jax.nn.dot_product_attention` for a pattern; rows without a permitted key are set to 0."""
    queries, keys = q_BQHK.shape[1], k_BTGK.shape[1]
    is_flag = _is_flag(pattern, queries, keys)
    mask_BHQT = None if is_flag else visibility(pattern, queries, keys)
    if mask_BHQT is not None:  # the kernel wants the Q axis spelled out
        mask_BHQT = jnp.broadcast_to(mask_BHQT, (*mask_BHQT.shape[:2], queries, keys))
    y_BQHK = jax.nn.dot_product_attention(
        q_BQHK,
        k_BTGK,
        v_BTGK,
        mask=mask_BHQT,
        scale=scale_of(rule, q_BQHK.shape[-1]),
        is_causal=is_flag and pattern.causal,
        implementation=backend,
    )
    if mask_BHQT is None:
        return y_BQHK
    some_BQH1 = mask_BHQT.any(axis=-1).swapaxes(1, 2)[..., None]
    return jnp.where(some_BQH1, y_BQHK, 0)


def _is_flag(pattern: AttentionPattern, queries: int, keys: int) -> bool:
    """Whether the pattern is the causal flag of a square, or nothing at all."""
    parts = (pattern.window, pattern.key_valid_BT, pattern.query_segments_BQ, pattern.mask)
    return all(part is None for part in parts) and (queries == keys or not pattern.causal)
