"""Attention as two batched products and a softmax between them, over chunks of queries where that saves work.

A chunk reads only the keys that the static part of the pattern (causal, a window) lets its queries see: causal
attention over n chunks makes (n + 1) / 2n of the scores, forward and backward. On a CPU the chunks are also what runs
in parallel, as XLA gives a batched product one core.
"""

import jax.numpy as jnp

from jaxblock.contracts import check_integer
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
from jaxblock.functional.masks import EVERYONE, AttentionPattern, cut, distances, reach, visibility, visible
from jaxblock.types import Array

CHUNK = 64
"""Fewest queries of a chunk: enough for a product to run at its rate, few enough for their scores to stay in cache."""
MOST_CHUNKS = 8
"""The program grows with their number; more would save a sixteenth of the scores at most."""


def attention_xla(
    q_BQHK: Array,
    k_BTGK: Array,
    v_BTGK: Array,
    pattern: AttentionPattern = EVERYONE,
    *,
    scores: ScoreRule = PLAIN,
    chunk: int | None = None,
) -> Array:
    """Return what `attention` returns, with every order of derivative, in memory of the scores that are made.

    chunk: queries of a chunk; left out, `chunk_size`. Dropout folds its key with the number of the chunk. Raises as
    `attention` does, and ValueError for a chunk below 1.
    """
    check_attention(q_BQHK, k_BTGK, v_BTGK, pattern, scores)
    queries, keys = q_BQHK.shape[1], k_BTGK.shape[1]
    chunk = chunk_size(queries) if chunk is None else chunk
    check_integer("chunk", chunk, least=1)
    parts = chunk_ranges(pattern, queries, keys, chunk)
    if len(parts) == 1:
        seen, distance = visibility(pattern, queries, keys), distances(pattern, queries, keys)
        return _attend(q_BQHK, k_BTGK, v_BTGK, scores, distance, seen)
    chunks = []
    for number, ((first, last), (start, stop)) in enumerate(parts):
        part = cut(pattern, query_start=first, queries=last - first, key_start=start, keys=stop - start)
        query_positions, key_positions = jnp.arange(first, last) + (keys - queries), jnp.arange(start, stop)
        chunks.append(
            _attend(
                q_BQHK[:, first:last],
                k_BTGK[:, start:stop],
                v_BTGK[:, start:stop],
                scores.folded(number),
                query_positions[:, None] - key_positions[None, :],
                visible(part, query_positions, key_positions),
            )
        )
    return jnp.concatenate(chunks, axis=1)


def chunk_size(queries: int) -> int:
    """Return how many queries a chunk has: CHUNK, or more where there would be more than MOST_CHUNKS."""
    return max(CHUNK, -(-queries // MOST_CHUNKS))


def chunk_ranges(
    pattern: AttentionPattern, queries: int, keys: int, chunk: int
) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Return ((first query, last), (first key, last)) of each chunk, ends excluded: one chunk where that saves nothing.

    A chunk whose queries see no key at all has one key, which its mask hides.
    """
    left, right = (limit if isinstance(limit, int) else None for limit in reach(pattern))
    whole = [((0, queries), (0, keys))]
    if pattern.query_positions_BQ is not None or (left is None and right is None):
        return whole
    parts, offset = [], keys - queries
    for first in range(0, queries, chunk):
        last = min(first + chunk, queries)
        start = 0 if left is None else min(max(first + offset - left, 0), keys - 1)
        stop = keys if right is None else max(min(last + offset + right, keys), start + 1)
        parts.append(((first, last), (start, stop)))
    return parts if any(part[1] != (0, keys) for part in parts) else whole


def _attend(
    q_BQHK: Array, k_BTGK: Array, v_BTGK: Array, rule: ScoreRule, distance: Array, visible_BHQT: Array | None
) -> Array:
    batch, queries, heads, width = q_BQHK.shape
    keys, groups = k_BTGK.shape[1:3]
    q_BGJK, k_BGTK, v_BGTK = group_queries(q_BQHK, groups), k_BTGK.swapaxes(1, 2), v_BTGK.swapaxes(1, 2)
    wide = score_dtype(q_BQHK)
    dots_BGJT = jnp.einsum("bgjk,bgtk->bgjt", q_BGJK, k_BGTK, preferred_element_type=wide)
    s_BGRQT = finish_scores(
        dots_BGJT.reshape(batch, groups, heads // groups, queries, keys),
        rule,
        scale=scale_of(rule, width),
        distance=distance,
        visible_BHQT=visible_BHQT,
    )
    p_BGRQT, total_BGRQ = weigh(s_BGRQT)
    p_BGJT = dropout(p_BGRQT, rule.dropout_rate, rule.dropout_key).reshape(dots_BGJT.shape)
    y_BGJK = jnp.einsum("bgjt,bgtk->bgjk", p_BGJT.astype(v_BGTK.dtype), v_BGTK, preferred_element_type=wide)
    return finish_values(y_BGJK, total_BGRQ, q_BQHK)
