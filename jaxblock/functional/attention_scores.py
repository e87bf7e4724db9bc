"""From q.k to the scores that the softmax sees, the same for every implementation of attention.

    scores = soft_cap * tanh(scale * q.k / soft_cap) - slope * |query position - key position|; hidden: -inf

Sources: scale, arXiv 1706.03762, eq. 1; soft cap, arXiv 2408.00118, section 2; linear bias, arXiv 2108.12409.
"""

import dataclasses

import chex
import jax
import jax.numpy as jnp

from jaxblock.contracts import check_number
from jaxblock.functional.masks import AttentionPattern, check_pattern
from jaxblock.types import Array


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ScoreRule:
    """How scores and weights are made; a pytree: scale, soft_cap and dropout_rate static, the rest leaves.

    scale: factor on q.k, None = 1 / sqrt(K). soft_cap: bound on |scores|, None = none.
    alibi_slopes_H: [H] floats (`positions.alibi_slopes`); constants, their gradient is zero.
    dropout_rate: in [0, 1), applied to the weights, the kept ones divided by 1 - rate; on exactly when a
    dropout_key is passed too. Raises ValueError for numbers out of range.
    """

    scale: float | None = None
    soft_cap: float | None = None
    alibi_slopes_H: Array | None = None
    dropout_rate: float = 0.0
    dropout_key: Array | None = None

    def __post_init__(self) -> None:
        if self.scale is not None:
            check_number("scale", self.scale)
        if self.soft_cap is not None:
            check_number("soft_cap", self.soft_cap, above=0.0)
        check_number("dropout_rate", self.dropout_rate, least=0.0, below=1.0)

    @property
    def drops(self) -> bool:
        """Whether weights are dropped."""
        return self.dropout_key is not None and self.dropout_rate > 0

    def folded(self, number: Array | int) -> "ScoreRule":
        """Return the rule of one part of the scores: the same, with draws of its own."""
        if self.dropout_key is None:
            return self
        return dataclasses.replace(self, dropout_key=jax.random.fold_in(self.dropout_key, number))


jax.tree_util.register_dataclass(
    ScoreRule,
    data_fields=["alibi_slopes_H", "dropout_key"],
    meta_fields=["scale", "soft_cap", "dropout_rate"],
)

PLAIN = ScoreRule()
"""Scale 1 / sqrt(K) and nothing else."""


def finish_scores(
    dots_BGRQT: Array,
    rule: ScoreRule,
    *,
    scale: float,
    distance: Array,
    visible_BHQT: Array | None,
) -> Array:
    """Return scores [B, G, R, Q, T] from q.k: scale, soft cap, linear bias, hidden keys to -inf, in order.

    distance: query position minus key position, [Q, T] or [B or 1, Q, T]. visible_BHQT: boolean
    [B or 1, H or 1, Q or 1, T] or None.
    """
    groups, repeats = dots_BGRQT.shape[1:3]
    s_BGRQT = dots_BGRQT * scale
    if rule.soft_cap is not None:
        s_BGRQT = rule.soft_cap * jnp.tanh(s_BGRQT / rule.soft_cap)
    if rule.alibi_slopes_H is not None:
        slopes = jax.lax.stop_gradient(rule.alibi_slopes_H).astype(s_BGRQT.dtype)
        size = jnp.abs(distance).astype(s_BGRQT.dtype)
        slopes = slopes.reshape(1, groups, repeats, 1, 1)
        s_BGRQT = s_BGRQT - slopes * (size[None, None, None] if size.ndim == 2 else size[:, None, None])
    if visible_BHQT is None:
        return s_BGRQT
    batch, heads, queries, keys = visible_BHQT.shape
    by_group = (1, 1) if heads == 1 else (groups, repeats)
    return jnp.where(visible_BHQT.reshape(batch, *by_group, queries, keys), s_BGRQT, -jnp.inf)


def group_queries(q_BQHK: Array, groups: int) -> Array:
    """Return the queries of each group's heads end to end, [B, G, J = R * Q, K].

    Both products are then batched matrix products and nothing is repeated; on CPU a third faster, forward and
    backward, than einsums over five axes.
    """
    batch, queries, heads, width = q_BQHK.shape
    q_BGRQK = q_BQHK.reshape(batch, queries, groups, heads // groups, width).transpose(0, 2, 3, 1, 4)
    return q_BGRQK.reshape(batch, groups, -1, width)


def weigh(s_BGRQT: Array) -> tuple[Array, Array]:
    """Return exp(s - max) and its sums over keys [B, G, R, Q]: a softmax before its division.

    The maximum cancels in the quotient, so it carries no gradient; -inf (an empty row) must not be subtracted from
    itself.
    """
    top_BGRQ1 = jax.lax.stop_gradient(s_BGRQT.max(axis=-1, keepdims=True))
    p_BGRQT = jnp.exp(s_BGRQT - jnp.where(top_BGRQ1 > -jnp.inf, top_BGRQ1, 0))
    return p_BGRQT, p_BGRQT.sum(axis=-1)


def finish_values(y_BGJK: Array, total_BGRQ: Array, like_BQHK: Array) -> Array:
    """Return weighted sums of values over the softmax's total, 0 where it is 0, in the shape and dtype of q.

    Dividing after the product touches [Q, K] numbers instead of [Q, T].
    """
    y_BGRQK = y_BGJK.reshape(*total_BGRQ.shape, y_BGJK.shape[-1])
    y_BGRQK = y_BGRQK / jnp.where(total_BGRQ > 0, total_BGRQ, 1)[..., None]
    return y_BGRQK.transpose(0, 3, 1, 2, 4).reshape(like_BQHK.shape).astype(like_BQHK.dtype)


def check_attention(
    q_BQHK: Array,
    k_BTGK: Array,
    v_BTGK: Array,
    pattern: AttentionPattern,
    rule: ScoreRule,
) -> None:
    """Check ranks, equal shapes and dtypes (chex), then head counts, pattern and slopes (ValueError)."""
    chex.assert_rank([q_BQHK, k_BTGK, v_BTGK], 4)
    chex.assert_type([q_BQHK, k_BTGK, v_BTGK], float)
    chex.assert_equal_shape([k_BTGK, v_BTGK])
    batch, queries, heads, width = q_BQHK.shape
    chex.assert_shape(k_BTGK, (batch, None, None, width))
    if not q_BQHK.dtype == k_BTGK.dtype == v_BTGK.dtype:
        raise ValueError(
            f"q, k, v have dtypes {q_BQHK.dtype}, {k_BTGK.dtype}, {v_BTGK.dtype}; they must be equal"
        )
    keys, groups = k_BTGK.shape[1:3]
    if 0 in (batch, queries, keys, width):
        raise ValueError(
            f"q has shape {q_BQHK.shape} and k, v {k_BTGK.shape}; every axis must hold at least one entry"
        )
    if groups < 1 or heads % groups:
        raise ValueError(
            f"q has {heads} heads and k, v have {groups}; the query heads must be a multiple of the key heads"
        )
    check_pattern(pattern, batch=batch, heads=heads, queries=queries, keys=keys)
    if rule.alibi_slopes_H is not None and rule.alibi_slopes_H.shape != (heads,):
        raise ValueError(
            f"alibi_slopes_H has shape {rule.alibi_slopes_H.shape}; with {heads} heads it is [{heads}]"
        )


def scale_of(rule: ScoreRule, width: int) -> float:
    """Return the factor on q.k: the rule's, or 1 / sqrt(head dim)."""
    return width**-0.5 if rule.scale is None else rule.scale


def score_dtype(x: Array) -> jnp.dtype:
    """Return the dtype of scores and softmax: float32, for float64 inputs float64."""
    return jnp.promote_types(x.dtype, jnp.float32)
