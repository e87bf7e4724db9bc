"""Attention without a [Q, T] array: one scan over the permitted pairs of query and key blocks.

Forward: running maximum and denominator per query (arXiv 2112.05682; arXiv 2205.14135, algorithm 1).
Backward: the same scan rebuilds each block of weights from the log-sum-exp (arXiv 2307.08691, algorithm 2).

Axes of this file: I index of a block, J = R * (queries of a block), C keys of a block.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxblock.contracts import check_integer
from jaxblock.functional.attention_scores import (
    PLAIN,
    ScoreRule,
    check_attention,
    finish_scores,
    scale_of,
    score_dtype,
)
from jaxblock.functional.dropout import dropout
from jaxblock.functional.masks import EVERYONE, AttentionPattern, check_no_positions, cut, reach, visible
from jaxblock.types import Array

BLOCK_SIZE = 128
"""Large enough for full matrix units, small enough that a block of scores stays in cache."""


def attention_blocked(
    q_BQHK: Array,
    k_BTGK: Array,
    v_BTGK: Array,
    pattern: AttentionPattern = EVERYONE,
    *,
    scores: ScoreRule = PLAIN,
    block_size: int = BLOCK_SIZE,
) -> Array:
    """Return what `attention` returns, in memory linear in Q and T, forward and backward.

    Block pairs that `causal` and a static window hide altogether are never computed; any Q and T work. Kept
    for the backward pass: q, k, v, the result and one log-sum-exp per query and head. The custom derivative
    has no forward mode (jvp, hessian): use implementation 'xla' there. Dropout folds the dropout key with the
    index of the block pair, so its draw differs from that of 'xla'; the distribution is the same.
    Raises as `attention` does, and ValueError for a block size below 1 and a pattern with explicit positions.
    """
    check_integer("block_size", block_size, least=1)
    check_no_positions(pattern, "blocked")
    check_attention(q_BQHK, k_BTGK, v_BTGK, pattern, scores)
    return _attend(block_size, q_BQHK, k_BTGK, v_BTGK, pattern, scores)


def block_pairs(pattern: AttentionPattern, queries: int, keys: int, block_size: int) -> np.ndarray:
    """Return the pairs (query block, key block), [P, 2], in which the static pattern permits something."""
    left, right = (limit if limit is None or isinstance(limit, int) else None for limit in reach(pattern))
    pairs, offset = [], keys - queries
    for i, query in enumerate(range(0, queries, block_size)):
        last_query = min(query + block_size, queries) - 1
        for j, key in enumerate(range(0, keys, block_size)):
            last_key = min(key + block_size, keys) - 1
            nearest, farthest = query + offset - last_key, last_query + offset - key  # positive = past
            if (left is None or nearest <= left) and (right is None or farthest >= -right):
                pairs.append((i, j))
    return np.array(pairs, dtype=np.int32).reshape(-1, 2)


@dataclasses.dataclass(frozen=True)
class _Tiling:
    """The arrays cut into blocks, and the block of scores of a pair."""

    q_IBGJK: Array
    k_IBGCK: Array
    v_IBGCK: Array
    pattern: AttentionPattern  # arrays padded to whole blocks
    rule: ScoreRule
    offset: int  # position of query 0 among the keys
    repeats: int

    @property
    def query_block(self) -> int:
        return self.q_IBGJK.shape[3] // self.repeats

    def dots(self, i: Array, j: Array) -> Array:
        q_BGJK, k_BGCK = _at(self.q_IBGJK, i), _at(self.k_IBGCK, j)
        return jnp.einsum("bgjk,bgck->bgjc", q_BGJK, k_BGCK, preferred_element_type=score_dtype(q_BGJK))

    def scores(self, dots_BGJC: Array, i: Array, j: Array) -> Array:
        batch, groups, _, keys = dots_BGJC.shape
        queries = self.query_block
        part = cut(self.pattern, query_start=i * queries, queries=queries, key_start=j * keys, keys=keys)
        query_positions = i * queries + self.offset + jnp.arange(queries)
        key_positions = j * keys + jnp.arange(keys)
        s_BGRQC = finish_scores(
            dots_BGJC.reshape(batch, groups, self.repeats, queries, keys),
            self.rule,
            scale=scale_of(self.rule, self.q_IBGJK.shape[-1]),
            distance=query_positions[:, None] - key_positions[None, :],
            visible_BHQT=visible(part, query_positions, key_positions),
        )
        return s_BGRQC.reshape(dots_BGJC.shape)

    def drop(self, weights_BGJC: Array, i: Array, j: Array) -> Array:
        rule = self.rule.folded(i * self.k_IBGCK.shape[0] + j)
        return dropout(weights_BGJC, rule.dropout_rate, rule.dropout_key)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    block_size: int, q_BQHK: Array, k_BTGK: Array, v_BTGK: Array, pattern: AttentionPattern, rule: ScoreRule
) -> Array:
    return _attend_forward(block_size, q_BQHK, k_BTGK, v_BTGK, pattern, rule)[0]


def _attend_forward(
    block_size: int, q_BQHK: Array, k_BTGK: Array, v_BTGK: Array, pattern: AttentionPattern, rule: ScoreRule
) -> tuple[Array, tuple[Any, ...]]:
    queries, keys = q_BQHK.shape[1], k_BTGK.shape[1]
    tiling = _tile(block_size, q_BQHK, k_BTGK, v_BTGK, pattern, rule)
    wide = score_dtype(q_BQHK)

    def step(carry: tuple[Array, Array, Array], pair: Array) -> tuple[tuple[Array, Array, Array], None]:
        y_IBGJK, top_IBGJ, total_IBGJ = carry
        i, j = pair[0], pair[1]
        s_BGJC = tiling.scores(tiling.dots(i, j), i, j)
        top_before = _at(top_IBGJ, i)
        top_BGJ = jnp.maximum(top_before, s_BGJC.max(axis=-1))
        base_BGJ = jnp.where(top_BGJ > -jnp.inf, top_BGJ, 0)  # no permitted key so far: subtract nothing
        p_BGJC = jnp.exp(s_BGJC - base_BGJ[..., None])
        fade_BGJ = jnp.exp(top_before - base_BGJ)
        total_BGJ = fade_BGJ * _at(total_IBGJ, i) + p_BGJC.sum(axis=-1)
        weights = tiling.drop(p_BGJC, i, j).astype(v_BTGK.dtype)
        y_BGJK = jnp.einsum("bgjc,bgck->bgjk", weights, _at(tiling.v_IBGCK, j), preferred_element_type=wide)
        y_BGJK = fade_BGJ[..., None] * _at(y_IBGJK, i) + y_BGJK
        return (_put(y_IBGJK, i, y_BGJK), _put(top_IBGJ, i, top_BGJ), _put(total_IBGJ, i, total_BGJ)), None

    # `*_like`: under shard_map a scan's carry must vary over the same mesh axes from its first step on.
    zeros_IBGJK = jnp.zeros_like(tiling.q_IBGJK, dtype=wide)
    start = (zeros_IBGJK, jnp.full_like(zeros_IBGJK[..., 0], -jnp.inf), zeros_IBGJK[..., 0])
    pairs = block_pairs(pattern, queries, keys, block_size)
    (y_IBGJK, top_IBGJ, total_IBGJ), _ = jax.lax.scan(step, start, jnp.asarray(pairs))
    some = total_IBGJ > 0
    total_IBGJ = jnp.where(some, total_IBGJ, 1)
    logsumexp_IBGJ = jnp.where(some, top_IBGJ, 0) + jnp.log(total_IBGJ)
    y_BQHK = _join(y_IBGJK / total_IBGJ[..., None], tiling.repeats, queries).astype(q_BQHK.dtype)
    return y_BQHK, (q_BQHK, k_BTGK, v_BTGK, pattern, rule, y_BQHK, logsumexp_IBGJ)


def _attend_backward(
    block_size: int, residuals: tuple[Any, ...], dy_BQHK: Array
) -> tuple[Array, Array, Array, None, None]:
    q_BQHK, k_BTGK, v_BTGK, pattern, rule, y_BQHK, logsumexp_IBGJ = residuals
    queries, keys = q_BQHK.shape[1], k_BTGK.shape[1]
    tiling = _tile(block_size, q_BQHK, k_BTGK, v_BTGK, pattern, rule)
    wide = score_dtype(q_BQHK)
    dy_IBGJK = _split(dy_BQHK, k_BTGK.shape[2], tiling.query_block)
    # sum_t w dw of the softmax derivative equals y . dy, dropout included.
    inner_BQH1 = jnp.sum(y_BQHK.astype(wide) * dy_BQHK.astype(wide), axis=-1, keepdims=True)
    inner_IBGJ = _split(inner_BQH1, k_BTGK.shape[2], tiling.query_block)[..., 0]

    def step(carry: tuple[Array, Array, Array], pair: Array) -> tuple[tuple[Array, Array, Array], None]:
        dq_IBGJK, dk_IBGCK, dv_IBGCK = carry
        i, j = pair[0], pair[1]
        q_BGJK, dy_BGJK = _at(tiling.q_IBGJK, i), _at(dy_IBGJK, i)
        k_BGCK, v_BGCK = _at(tiling.k_IBGCK, j), _at(tiling.v_IBGCK, j)
        s_BGJC, to_dots = jax.vjp(lambda dots: tiling.scores(dots, i, j), tiling.dots(i, j))
        p_BGJC = jnp.exp(s_BGJC - _at(logsumexp_IBGJ, i)[..., None])
        weights = tiling.drop(p_BGJC, i, j).astype(v_BGCK.dtype)
        dv = jnp.einsum("bgjc,bgjk->bgck", weights, dy_BGJK, preferred_element_type=wide)
        dweights = jnp.einsum("bgjk,bgck->bgjc", dy_BGJK, v_BGCK, preferred_element_type=wide)
        ds_BGJC = p_BGJC * (tiling.drop(dweights, i, j) - _at(inner_IBGJ, i)[..., None])
        ddots = to_dots(ds_BGJC)[0].astype(k_BGCK.dtype)
        dq = jnp.einsum("bgjc,bgck->bgjk", ddots, k_BGCK, preferred_element_type=wide)
        dk = jnp.einsum("bgjc,bgjk->bgck", ddots, q_BGJK, preferred_element_type=wide)
        return (_add(dq_IBGJK, i, dq), _add(dk_IBGCK, j, dk), _add(dv_IBGCK, j, dv)), None

    zeros_IBGCK = jnp.zeros_like(tiling.k_IBGCK, dtype=wide)
    start = (jnp.zeros_like(tiling.q_IBGJK, dtype=wide), zeros_IBGCK, zeros_IBGCK)
    pairs = block_pairs(pattern, queries, keys, block_size)
    (dq_IBGJK, dk_IBGCK, dv_IBGCK), _ = jax.lax.scan(step, start, jnp.asarray(pairs))
    dq_BQHK = _join(dq_IBGJK, tiling.repeats, queries).astype(q_BQHK.dtype)
    dk_BTGK = _join(dk_IBGCK, 1, keys).astype(k_BTGK.dtype)
    return dq_BQHK, dk_BTGK, _join(dv_IBGCK, 1, keys).astype(v_BTGK.dtype), None, None


_attend.defvjp(_attend_forward, _attend_backward)


def _tile(
    block_size: int, q_BQHK: Array, k_BTGK: Array, v_BTGK: Array, pattern: AttentionPattern, rule: ScoreRule
) -> _Tiling:
    queries, heads = q_BQHK.shape[1:3]
    keys, groups = k_BTGK.shape[1:3]
    query_block, key_block = min(block_size, queries), min(block_size, keys)
    return _Tiling(
        q_IBGJK=_split(q_BQHK, groups, query_block),
        k_IBGCK=_split(k_BTGK, groups, key_block),
        v_IBGCK=_split(v_BTGK, groups, key_block),
        pattern=_pad_pattern(pattern, keys, query_block, key_block),
        rule=rule,
        offset=keys - queries,
        repeats=heads // groups,
    )


def _pad_pattern(pattern: AttentionPattern, keys: int, query_block: int, key_block: int) -> AttentionPattern:
    """Pad the arrays to whole blocks; the padded keys are hidden, the padded queries dropped at the end."""
    valid = pattern.key_valid_BT
    if valid is None and keys % key_block:
        valid = jnp.ones((1, keys), bool)
    mask = _pad(pattern.mask, 3, key_block)
    return dataclasses.replace(
        pattern,
        key_valid_BT=_pad(valid, 1, key_block),
        query_segments_BQ=_pad(pattern.query_segments_BQ, 1, query_block),
        key_segments_BT=_pad(pattern.key_segments_BT, 1, key_block),
        mask=mask if mask is None or mask.shape[2] == 1 else _pad(mask, 2, query_block),
    )


def _pad(x: Any, axis: int, block: int) -> Any:
    """Append zeros (False) until `axis` is a multiple of the block; None stays None."""
    if x is None or x.shape[axis] % block == 0:
        return x
    return jnp.pad(x, [(0, -x.shape[a] % block if a == axis else 0) for a in range(x.ndim)])


def _split(x_BTHK: Array, groups: int, block: int) -> Array:
    """[B, T, H, K] -> [I, B, G, R * block, K], zeros in the padding."""
    x_BTHK = _pad(x_BTHK, 1, block)
    batch, length, heads, width = x_BTHK.shape
    x = x_BTHK.reshape(batch, length // block, block, groups, heads // groups, width)
    return x.transpose(1, 0, 3, 4, 2, 5).reshape(length // block, batch, groups, -1, width)


def _join(x_IBGJK: Array, repeats: int, length: int) -> Array:
    """Undo `_split`: [I, B, G, R * block, K] -> [B, T, H, K]."""
    blocks, batch, groups, _, width = x_IBGJK.shape
    x = x_IBGJK.reshape(blocks, batch, groups, repeats, -1, width).transpose(1, 0, 4, 2, 3, 5)
    return x.reshape(batch, -1, groups * repeats, width)[:, :length]


def _at(x: Array, index: Array) -> Array:
    return jax.lax.dynamic_index_in_dim(x, index, 0, keepdims=False)


def _put(x: Array, index: Array, value: Array) -> Array:
    return jax.lax.dynamic_update_index_in_dim(x, value, index, 0)


def _add(x: Array, index: Array, value: Array) -> Array:
    return _put(x, index, _at(x, index) + value)
