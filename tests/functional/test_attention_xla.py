"""Chunks of queries: the same attention in less work, whatever is hidden and however the chunks fall."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblock.functional.attention_scores import ScoreRule
from jaxblock.functional.attention_xla import CHUNK, MOST_CHUNKS, attention_xla, chunk_ranges
from jaxblock.functional.masks import AttentionPattern, visibility

CAUSAL = AttentionPattern(causal=True)


def draw_qkv(queries, keys, heads=4, groups=2):
    of = np.random.default_rng(queries + keys)
    shapes = ((2, queries, heads, 3), (2, keys, groups, 3), (2, keys, groups, 3))
    return tuple(jnp.asarray(of.normal(size=shape), jnp.float32) for shape in shapes)


def value_and_gradients(qkv, pattern, chunk, rule):
    def total(qkv):
        y = attention_xla(*qkv, pattern, scores=rule, chunk=chunk)
        return jnp.sum(y * jnp.cos(jnp.arange(y.size).reshape(y.shape))), y

    (_, y), gradients = jax.jit(jax.value_and_grad(total, has_aux=True))(qkv)
    return y, gradients


def rich(queries, keys, **pattern):
    of = np.random.default_rng(1)
    return AttentionPattern(
        key_valid_BT=jnp.asarray(of.random((2, keys)) < 0.8),
        query_segments_BQ=jnp.asarray(of.integers(0, 2, (2, queries))),
        key_segments_BT=jnp.asarray(of.integers(0, 2, (2, keys))),
        mask=jnp.asarray(of.random((1, 4, queries, keys)) < 0.9),
        **pattern,
    )


@pytest.mark.parametrize(
    ("queries", "keys", "pattern"),
    [
        (7, 7, {"causal": True}),
        (3, 8, {"causal": True}),
        (8, 3, {"causal": True}),  # the first queries see no key
        (7, 7, {"causal": True, "window": 2}),
        (7, 7, {"window": (1, 2)}),
    ],
    ids=str,
)
def test_chunks_change_neither_values_nor_gradients(queries, keys, pattern):
    rule = ScoreRule(soft_cap=3.0, alibi_slopes_H=jnp.array([0.5, 0.25, 0.125, 0.1]))
    qkv, pattern = draw_qkv(queries, keys), rich(queries, keys, **pattern)
    assert len(chunk_ranges(pattern, queries, keys, 2)) > 1
    whole = value_and_gradients(qkv, pattern, queries, rule)
    for one, other in zip(
        jax.tree.leaves(value_and_gradients(qkv, pattern, 2, rule)), jax.tree.leaves(whole), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    "pattern", [CAUSAL, AttentionPattern(window=(2, 1)), AttentionPattern(causal=True, window=3)]
)
@pytest.mark.parametrize(("queries", "keys"), [(9, 9), (4, 11), (11, 4)])
def test_a_chunk_reads_every_key_that_one_of_its_queries_sees(pattern, queries, keys):
    seen_QT = np.broadcast_to(visibility(pattern, queries, keys)[0, 0], (queries, keys))
    parts = chunk_ranges(pattern, queries, keys, 2)
    assert [first for (first, _), _ in parts] == list(range(0, queries, 2))
    for (first, last), (start, stop) in parts:
        outside = np.ones(keys, bool)
        outside[start:stop] = False
        assert 0 <= start < stop <= keys
        assert not seen_QT[first:last, outside].any()
        # Negative control: nothing narrower would do.
        if seen_QT[first:last].any():
            assert seen_QT[first:last, start].any()
            assert seen_QT[first:last, stop - 1].any()


def dot_flops(pattern, length, chunk=None):
    qkv = draw_qkv(length, length)
    compiled = jax.jit(lambda *qkv: attention_xla(*qkv, pattern, chunk=chunk)).lower(*qkv).compile()
    return compiled.cost_analysis()["flops"]


def test_causal_attention_makes_little_more_than_the_scores_it_uses():
    length = 8 * CHUNK
    share = dot_flops(CAUSAL, length) / dot_flops(CAUSAL, length, chunk=length)
    assert share == pytest.approx((MOST_CHUNKS + 1) / (2 * MOST_CHUNKS), abs=0.02)
    # Negative controls: where nothing is hidden, and where only a traced window hides, nothing is cut.
    whole = [((0, 9), (0, 9))]
    assert chunk_ranges(AttentionPattern(), 9, 9, 2) == whole
    assert chunk_ranges(AttentionPattern(window=jnp.array(2)), 9, 9, 2) == whole


def test_each_chunk_drops_other_weights():
    v = jnp.broadcast_to(jnp.eye(4)[None, :, None], (1, 4, 1, 4))
    rule = ScoreRule(dropout_rate=0.5, dropout_key=jax.random.key(0))

    def dropped(first):
        pattern = AttentionPattern(mask=jnp.ones((1, 1, 4, 4), bool), window=(3, 2))
        q = jnp.zeros((1, 4, 1, 4))
        return np.asarray(attention_xla(q, q, v, pattern, scores=rule, chunk=2))[0, first : first + 2, 0] > 0

    assert (dropped(0) != dropped(2)).any()


@pytest.mark.parametrize("chunk", [0, -1, 2.0])
def test_a_chunk_below_one_is_refused(chunk):
    with pytest.raises(ValueError, match="chunk"):
        attention_xla(*draw_qkv(4, 4), CAUSAL, chunk=chunk)
