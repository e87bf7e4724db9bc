"""The blocked form against the plain form: gradients, block pairs, memory, dropout."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxblock.functional.attention import attention
from jaxblock.functional.attention_blocked import attention_blocked, block_pairs
from jaxblock.functional.attention_scores import ScoreRule
from jaxblock.functional.masks import AttentionPattern, visibility
from jaxblock.functional.positions import alibi_slopes


def draw(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def draw_qkv(seed, *, queries, keys, batch=2, heads=4, groups=2, width=3):
    q = draw(seed, batch, queries, heads, width)
    return q, draw(seed + 1, batch, keys, groups, width), draw(seed + 2, batch, keys, groups, width)


def out_and_gradients(form, qkv, *arguments):
    """Output and gradients for a fixed random direction."""

    @jax.jit
    def both(qkv, *arguments):
        out, pull = jax.vjp(lambda *qkv: form(*qkv, *arguments), *qkv)
        return out, pull(draw(99, *out.shape, dtype=out.dtype))

    return both(qkv, *arguments)


def rich_pattern(queries, keys, window):
    segments = jnp.arange(keys)[None] // 4
    return AttentionPattern(
        causal=True,
        window=window,
        key_valid_BT=jnp.arange(keys)[None] % 5 != 1,
        query_segments_BQ=segments[:, -queries:],
        key_segments_BT=segments,
        mask=jnp.array(np.random.default_rng(0).random((2, 1, queries, keys)) < 0.8),
    )


@pytest.mark.parametrize(("queries", "keys", "block_size"), [(9, 9, 3), (5, 11, 4), (3, 4, 1), (3, 5, 16)])
@pytest.mark.parametrize("kind", ["plain", "causal", "rich"])
def test_output_and_gradients_equal_the_plain_form(kind, queries, keys, block_size):
    qkv = draw_qkv(0, queries=queries, keys=keys)
    pattern = {
        "plain": AttentionPattern(),
        "causal": AttentionPattern(causal=True, window=(4, 0)),
        "rich": rich_pattern(queries, keys, jnp.int32(6)),
    }[kind]
    rule = ScoreRule(soft_cap=2.0, alibi_slopes_H=alibi_slopes(4)) if kind == "rich" else ScoreRule(scale=0.8)
    blocked = functools.partial(attention_blocked, block_size=block_size)
    found = out_and_gradients(lambda q, k, v, p, r: blocked(q, k, v, p, scores=r), qkv, pattern, rule)
    expected = out_and_gradients(lambda q, k, v, p, r: attention(q, k, v, p, scores=r), qkv, pattern, rule)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
        assert np.abs(b).max() > 1e-2


def test_gradients_are_the_same_under_shard_map():
    qkv = draw_qkv(7, queries=6, keys=6)
    valid = jnp.arange(6)[None] < jnp.array([[4], [6]])
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])

    def gradient(q, k, v, valid):
        pattern = AttentionPattern(causal=True, key_valid_BT=valid)
        return jax.grad(lambda q: (attention_blocked(q, k, v, pattern, block_size=4) ** 2).sum())(q)

    rows = jax.sharding.PartitionSpec("data")
    mapped = jax.jit(jax.shard_map(gradient, mesh=mesh, in_specs=rows, out_specs=rows))(*qkv, valid)
    np.testing.assert_allclose(mapped, jax.jit(gradient)(*qkv, valid), atol=1e-6)


def test_bfloat16_gradients_are_accumulated_in_float32():
    # 64 key blocks of one key: a bfloat16 running sum would lose more than the plain form's one rounding.
    q, k, v = (x.astype(jnp.bfloat16) for x in draw_qkv(1, queries=64, keys=64, heads=2, groups=1, batch=1))
    exact = out_and_gradients(attention, tuple(x.astype(jnp.float32) for x in (q, k, v)))
    blocked = out_and_gradients(functools.partial(attention_blocked, block_size=1), (q, k, v))
    for a, b in zip(jax.tree.leaves(blocked), jax.tree.leaves(exact), strict=True):
        assert a.dtype == jnp.bfloat16
        assert np.abs(a.astype(jnp.float32) - b).max() < 0.01 * np.abs(b).max()


@settings(deadline=None, max_examples=12)
@given(
    queries=st.integers(1, 9),
    keys=st.integers(1, 9),
    block=st.integers(1, 4),
    causal=st.booleans(),
    window=st.sampled_from([None, 1, 3, (2, 0), (0, 1), (None, 0), (1, None)]),
)
def test_a_block_pair_is_visited_exactly_when_something_in_it_is_visible(
    queries, keys, block, causal, window
):
    pattern = AttentionPattern(causal=causal, window=window)
    mask = visibility(pattern, queries, keys)
    mask = np.ones((queries, keys), bool) if mask is None else np.asarray(mask[0, 0])
    expected = [
        (i, j)
        for i in range(-(-queries // block))
        for j in range(-(-keys // block))
        if mask[i * block : (i + 1) * block, j * block : (j + 1) * block].any()
    ]
    assert [tuple(pair) for pair in block_pairs(pattern, queries, keys, block)] == expected


def test_work_is_triangular_for_causal_and_linear_for_a_window():
    def pairs(length, **pattern):
        return len(block_pairs(AttentionPattern(**pattern), length, length, 16))

    assert pairs(128) == 64
    assert pairs(128, causal=True) == 36
    assert pairs(256, causal=True, window=17) == 2 * pairs(128, causal=True, window=17) + 1 == 31
    # A traced window is not known when the list is made.
    assert pairs(128, causal=True, window=jnp.int32(17)) == 36


def largest_array(text):
    """The number of elements of the largest array whose shape appears in HLO text."""
    shapes = re.findall(r"\b(?:pred|bf16|[suf]\d+)\[([\d,]*)\]", text)
    return max(int(np.prod([int(n) for n in shape.split(",") if n] or [1])) for shape in shapes)


KINDS = {
    "plain": ({}, {}),
    "causal window": ({"causal": True, "window": 30}, {}),
    "padding": ({"key_valid_BT": jnp.arange(96)[None] < 90, "window": jnp.int32(20)}, {}),
    "rule": ({"causal": True}, {"soft_cap": 2.0, "alibi_slopes_H": alibi_slopes(2)}),
    "dropout": ({}, {"dropout_rate": 0.2, "dropout_key": jax.random.key(0)}),
}


def gradient_texts(form, pattern, rule):
    """The jaxpr and the compiled HLO of the gradient at Q = T = 96."""
    qkv = draw_qkv(2, queries=96, keys=96, batch=1, heads=2, groups=1, width=4)
    gradient = jax.jit(jax.grad(lambda *qkv: form(*qkv, pattern, scores=rule).sum(), (0, 1, 2)))
    traced = gradient.trace(*qkv)
    return str(traced.jaxpr), traced.lower().compile().as_text()


@pytest.mark.parametrize(("pattern", "rule"), KINDS.values(), ids=KINDS)
def test_no_array_of_queries_by_keys_is_made(pattern, rule):
    blocked = functools.partial(attention_blocked, block_size=16)
    jaxpr, compiled = gradient_texts(blocked, AttentionPattern(**pattern), ScoreRule(**rule))
    assert "96,96" not in jaxpr
    assert "96,96" not in compiled
    # Neither in one piece nor as a stack of blocks (a [Q, T] array has 9216 elements).
    assert largest_array(compiled) < 96 * 96 / 4


def test_the_plain_form_makes_an_array_of_queries_by_keys():
    # The negative control of the test above.
    jaxpr, compiled = gradient_texts(attention, AttentionPattern(), ScoreRule())
    assert "96,96" in jaxpr
    assert largest_array(compiled) >= 96 * 96


def draws_of(rule, qkv, block):
    """The documented draw of the blocked form, as one [B, H, Q, T] array."""
    (batch, queries, heads, _), (keys, groups) = qkv[0].shape, qkv[1].shape[1:3]
    rows, columns = -(-queries // block), -(-keys // block)
    keep = np.zeros((batch, heads, rows * block, columns * block), bool)
    shape = (batch, groups, heads // groups * block, block)

    @jax.jit
    @jax.vmap
    def draw_of(pair):
        return jax.random.bernoulli(jax.random.fold_in(rule.dropout_key, pair), 1 - rule.dropout_rate, shape)

    drawn = np.asarray(draw_of(jnp.arange(rows * columns))).reshape(rows, columns, batch, heads, block, block)
    for i, j in np.ndindex(rows, columns):
        keep[:, :, i * block : (i + 1) * block, j * block : (j + 1) * block] = drawn[i, j]
    return jnp.array(keep[:, :, :queries, :keys])


def dense(q, k, v, visible, factor):
    """Plain attention with the weights multiplied by `factor`."""
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("bqhk,bthk->bhqt", q, k) * q.shape[-1] ** -0.5
    weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf))
    return jnp.einsum("bhqt,bthk->bqhk", weights * factor, v)


def test_dropout_has_the_gradient_of_a_dense_replay_of_its_draws():
    qkv, pattern = draw_qkv(3, queries=8, keys=10), AttentionPattern(causal=True)
    rule = ScoreRule(dropout_rate=0.4, dropout_key=jax.random.key(7))
    found = out_and_gradients(lambda *qkv: attention_blocked(*qkv, pattern, scores=rule, block_size=4), qkv)
    factor, visible = draws_of(rule, qkv, 4) / 0.6, visibility(pattern, 8, 10)
    replay = out_and_gradients(dense, qkv, visible, factor)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(replay), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    other = out_and_gradients(dense, qkv, visible, factor[:, ::-1])
    assert np.abs(other[0] - found[0]).max() > 1e-2


def test_dropout_keeps_the_mean():
    q, k, v = draw_qkv(4, queries=6, keys=6, batch=1, heads=2, groups=1)

    def dropped(key):
        rule = ScoreRule(dropout_rate=0.5, dropout_key=key)
        return attention_blocked(q, k, v, scores=rule, block_size=3)

    draws = jax.jit(jax.vmap(dropped))(jax.random.split(jax.random.key(5), 4000))
    error = np.abs(draws.mean(0) - attention(q, k, v)) / (draws.std(0) / np.sqrt(4000))
    assert error.max() < 4.5  # in standard errors, the largest of 36
    halved = np.abs(draws.mean(0) / 2 - attention(q, k, v)) / (draws.std(0) / np.sqrt(4000))
    assert halved.max() > 10


def test_there_is_no_forward_mode():
    q, k, v = draw_qkv(5, queries=4, keys=4)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda q: attention_blocked(q, k, v), (q,), (q,))


@pytest.mark.parametrize("block_size", [0, -4, 2.0, True])
def test_a_block_size_below_one_is_refused(block_size):
    with pytest.raises(ValueError, match="block_size"):
        attention_blocked(*draw_qkv(6, queries=4, keys=4), block_size=block_size)
