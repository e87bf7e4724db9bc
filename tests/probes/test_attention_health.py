"""Attention's health against a plain numpy float64 computation of every pair, and a model's against its own queries.

What is hidden does not count; unasked, a model's program is the one without it.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxblock import Classifier, Decoder, Encoder, ExecutionConfig
from jaxblock.functional.attention_health import AttentionHealth, attention_health, first_rows
from jaxblock.functional.attention_scores import ScoreRule
from jaxblock.functional.dense import dense
from jaxblock.functional.masks import AttentionPattern
from jaxblock.functional.positions import alibi_slopes, apply_rotary, rotary_angles
from jaxblock.models.cache import init_cache
from jaxblock.modules.attention import HEALTH_ROWS
from jaxblock.probes.attention import attention_profile, collected_attention
from tests.small import built, config, tokens

B, T, H, G, K = 2, 5, 4, 2, 3


def drawn(seed: int, *, size: float = 1.0):
    draw = np.random.default_rng(seed)
    return size * draw.normal(size=(B, T, H, K)), size * draw.normal(size=(B, T, G, K))


def reference(q_BTHK, k_BTGK, seen_BHQT, first_BHQT, *, scale=K**-0.5, cap=None, slopes_H=None):
    """Everything written out: one loop per query, float64; `seen` has only pairs of real queries."""
    seen_BHQT, first_BHQT = (np.broadcast_to(x, (B, H, T, T)) for x in (seen_BHQT, first_BHQT))
    found = {name: [] for name in AttentionHealth._fields[:-1]}
    norms = [[] for _ in range(G)]
    for h in range(H):
        g = h // (H // G)
        rows = {name: [] for name in found}
        for b in range(B):
            for i in range(T):
                keys = np.flatnonzero(seen_BHQT[b, h, i])
                if len(keys) == 0:
                    continue
                products = scale * (k_BTGK[b, keys, g] @ q_BTHK[b, i, h])
                s = products if cap is None else cap * np.tanh(products / cap)
                s = s if slopes_H is None else s - slopes_H[h] * np.abs(i - keys)
                w = np.exp(s - s.max()) / np.exp(s - s.max()).sum()
                rows["largest_score"].append(s.max())
                rows["largest_product"].append(products.max())
                rows["entropy"].append(-np.sum(w * np.log(w)))
                if len(keys) > 1:
                    rows["relative_entropy"].append(-np.sum(w * np.log(w)) / np.log(len(keys)))
                rows["first_share"].append(w[first_BHQT[b, h, i, keys]].sum())
                rows["query_norm"].append(np.sum(q_BTHK[b, i, h] ** 2))
        for name, values in rows.items():
            kind = np.max if name.startswith("largest") else np.mean
            found[name].append(kind(values) if values else 0.0)
    for g in range(G):
        heads = slice(g * (H // G), (g + 1) * (H // G))
        counted = seen_BHQT[:, heads].any(axis=(1, 2))
        norms[g] = np.sqrt(np.mean(np.sum(k_BTGK[:, :, g] ** 2, -1)[counted])) if counted.any() else 0.0
    found["query_norm"] = np.sqrt(found["query_norm"])
    return AttentionHealth(**{name: np.array(x) for name, x in found.items()}, key_norm=np.array(norms))


def close(got, want, *, rtol=2e-5, atol=2e-6):
    for name, a, b in zip(AttentionHealth._fields, got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol, err_msg=name)


@functools.partial(jax.jit, static_argnames=("cap",))
def measured(q, k, pattern, valid_BQ, slopes_H, *, cap=None):
    return attention_health(
        q, k, pattern, scores=ScoreRule(soft_cap=cap, alibi_slopes_H=slopes_H), query_valid_BQ=valid_BQ
    )


def single(x):
    return jnp.asarray(x, jnp.float32)


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10**6), window=st.integers(0, 4))
def test_every_number_is_that_of_the_pairs_written_out(seed, window):
    """Padding, documents, a window and a causal mask at once; one compiled program for all draws."""
    draw = np.random.default_rng(seed)
    q, k = drawn(seed, size=2.0)
    valid_BT = draw.random((B, T)) < 0.7
    segments_BT = np.sort(draw.integers(0, 2, (B, T)), axis=1)
    i, j = np.indices((T, T))
    own_BQT = (segments_BT[:, :, None] == segments_BT[:, None]) & valid_BT[:, None]
    first_BQT = np.arange(T) == np.argmax(own_BQT, axis=-1)[..., None]
    seen_BQT = own_BQT & (j <= i) & ((i - j < window) | (window == 0)) & valid_BT[:, :, None]
    pattern = AttentionPattern(
        causal=True,
        window=jnp.int32(window),
        key_valid_BT=jnp.asarray(valid_BT),
        query_segments_BQ=jnp.asarray(segments_BT),
        key_segments_BT=jnp.asarray(segments_BT),
    )
    slopes = np.array([0.5, 0.25, 0.1, 0.0])
    got = measured(single(q), single(k), pattern, jnp.asarray(valid_BT), single(slopes), cap=1.5)
    close(got, reference(q, k, seen_BQT[:, None], first_BQT[:, None], cap=1.5, slopes_H=slopes))
    assert all(x.dtype == jnp.float32 for x in got)


def test_without_a_pattern_every_pair_counts_and_heads_keep_apart():
    q, k = drawn(3)
    q[:, :, 1] *= 10.0  # one head is large
    everyone, first_T = np.ones(1, bool), np.arange(T) == 0
    got = jax.jit(attention_health)(single(q), single(k))
    close(got, reference(q, k, everyone, first_T))
    assert np.argmax(got.largest_score) == np.argmax(got.query_norm) == 1
    wrong = reference(q[:, :, ::-1], k, everyone, first_T)
    assert not np.allclose(got.query_norm, wrong.query_norm, rtol=0.1)  # control: a swap of heads would show


def test_nothing_hidden_is_read_not_even_nan():
    """Padded keys and queries hold NaN; a mask that differs by head."""
    q, k = drawn(5)
    draw = np.random.default_rng(0)
    valid_BT = np.array([[1, 1, 1, 0, 0], [0, 1, 1, 1, 1]], bool)
    mask_BHQT = draw.random((B, H, T, T)) < 0.6
    seen_BHQT = mask_BHQT & valid_BT[:, None, None] & valid_BT[:, None, :, None]
    own_BHQT = mask_BHQT & valid_BT[:, None, None]
    q[~valid_BT], k[~valid_BT] = np.nan, np.nan
    pattern = AttentionPattern(mask=jnp.asarray(mask_BHQT), key_valid_BT=jnp.asarray(valid_BT))
    got = measured(single(q), single(k), pattern, jnp.asarray(valid_BT), None)
    first_BHQT = np.arange(T) == np.argmax(own_BHQT, axis=-1)[..., None]
    close(got, reference(q, k, seen_BHQT, first_BHQT))
    bare = measured(single(q), single(k), pattern, None, None)  # control: queries that are not real
    assert np.isnan(bare.query_norm).all()


def test_even_attention_has_relative_entropy_1_and_one_key_has_none():
    k = jnp.ones((B, T, G, K), jnp.float32)
    causal = measured(jnp.ones((B, T, H, K)), k, AttentionPattern(causal=True), None, None)
    np.testing.assert_allclose(causal.relative_entropy, 1.0, rtol=1e-6)
    np.testing.assert_allclose(causal.entropy, np.mean(np.log(np.arange(1, T + 1))), rtol=1e-6)
    np.testing.assert_allclose(causal.first_share, np.mean(1 / np.arange(1, T + 1)), rtol=1e-6)
    alone = measured(jnp.ones((B, T, H, K)), k, AttentionPattern(causal=True, window=1), None, None)
    for name in ("entropy", "relative_entropy"):
        np.testing.assert_array_equal(getattr(alone, name), 0.0)
    np.testing.assert_allclose(
        alone.first_share, 1 / T, rtol=1e-6
    )  # the first query sees itself, no other the first
    none = measured(
        jnp.ones((B, T, H, K)), k, AttentionPattern(key_valid_BT=jnp.zeros((B, T), bool)), None, None
    )
    jax.tree.map(lambda x: np.testing.assert_array_equal(x, 0.0), none)


def test_the_first_key_is_the_first_by_position_where_positions_are_given():
    """Keys of a rolling cache lie in any order."""
    draw = np.random.default_rng(1)
    q = single(draw.normal(size=(1, 2, H, K)))
    k = draw.normal(size=(1, T, G, K))
    order = np.array([3, 4, 0, 1, 2])
    positions = {
        name: jnp.asarray(x)[None]
        for name, x in {"query_positions_BQ": np.array([3, 4]), "key_positions_BT": np.arange(T)}.items()
    }
    health = jax.jit(attention_health)
    straight = health(q, single(k), AttentionPattern(causal=True, **positions))
    positions["key_positions_BT"] = jnp.asarray(order)[None]
    rolled = health(q, single(k[:, order]), AttentionPattern(causal=True, **positions))
    close(rolled, straight)
    close(health(q, single(k), AttentionPattern(causal=True)), straight)
    positions["key_positions_BT"] = jnp.arange(T)[None]
    assert not np.allclose(
        health(q, single(k[:, order]), AttentionPattern(causal=True, **positions)).first_share,
        straight.first_share,
        rtol=0.05,
    )  # control: another key is taken for the first


def test_first_rows_cut_every_array_of_a_batch_and_nothing_else():
    ones_BT = jnp.ones((3, T), jnp.int32)
    pattern = AttentionPattern(
        causal=True,
        window=jnp.int32(2),
        key_valid_BT=ones_BT > 0,
        query_segments_BQ=ones_BT,
        key_segments_BT=ones_BT[:1],
        mask=jnp.ones((3, 1, T, T), bool),
    )
    cut = first_rows(pattern, 2)
    shapes = [x.shape for x in (cut.key_valid_BT, cut.query_segments_BQ, cut.key_segments_BT, cut.mask)]
    assert shapes == [(2, T), (2, T), (1, T), (2, 1, T, T)]
    assert cut.causal
    assert cut.window is pattern.window


def test_what_does_not_fit_is_refused():
    q, k = (single(x) for x in drawn(0))
    with pytest.raises(ValueError, match="query_valid_BQ"):
        attention_health(q, k, query_valid_BQ=jnp.ones((B, T), jnp.int32))
    with pytest.raises(ValueError, match="must be a multiple of the key heads"):
        attention_health(q[:, :, :3], k)
    with pytest.raises(AssertionError):
        attention_health(q, k, query_valid_BQ=jnp.ones((B, T + 1), bool))


VALID = np.array([[1, 1, 1, 1, 1, 0], [1, 1, 1, 0, 0, 0]], bool)
SEGMENTS = np.array([[0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 1, 1]], np.int32)
OPTIONS = {
    "grouped rope, windows by layer, first values": {
        "positions": "rope",
        "kv_heads": 1,
        "window": (2, 0, 3),
        "value_residual": "learned",
    },
    "parallel alibi, soft cap": {"wiring": "parallel", "positions": "alibi", "soft_cap": 0.5, "window": (3,)},
}


def from_its_inputs(model_config, params, *, valid_BT=None, segments_BT=None):
    """Return [L, ...] health made from what each block's attention read, with its kernels; jit it."""
    model = Decoder(model_config)
    _, made = model.apply(
        {"params": params}, tokens(), valid_BT=valid_BT, segments_BT=segments_BT, mutable=["intermediates"]
    )
    name = "parallel_in" if model_config.wiring == "parallel" else "attention_in"
    inputs_LBTD, kernels = made["intermediates"]["blocks"][name], params["blocks"]["attention"]
    kind, layers = model_config.position_choice.name, []
    for layer in range(model_config.depth):
        q, k = (
            dense(inputs_LBTD[layer], kernels[role]["kernel"][layer], kernels[role]["bias"][layer])
            for role in ("query", "key")
        )
        if kind == "rope":
            positions_BT = jnp.asarray(own_positions(SEGMENTS))
            angles = rotary_angles(positions_BT, model_config.head_dim, base=10000.0)
            q, k = (apply_rotary(x, angles, convention="half") for x in (q, k))
        window = (model_config.window or (0,))[layer % max(1, len(model_config.window))]
        pattern = AttentionPattern(
            causal=True,
            window=window or None,
            key_valid_BT=valid_BT,
            query_segments_BQ=segments_BT,
            key_segments_BT=segments_BT,
        )
        slopes = alibi_slopes(model_config.heads) if kind == "alibi" else None
        rule = ScoreRule(soft_cap=model_config.soft_cap, alibi_slopes_H=slopes)
        layers.append(attention_health(q, k, pattern, scores=rule, query_valid_BQ=valid_BT))
    return AttentionHealth(*(jnp.stack(x) for x in zip(*layers, strict=True)))


def own_positions(segments_BT):
    """Return positions counted from each document's start."""
    starts = [[np.flatnonzero(row == x)[0] for x in row] for row in segments_BT]
    return np.arange(6)[None] - np.array(starts)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_models_profile_is_that_of_its_own_queries_and_keys(options):
    model_config = config(**options)
    model, params = built(model_config)
    # Packed documents for one, padding for the other.
    given = {"segments_BT": jnp.asarray(SEGMENTS)}
    if options.get("wiring") == "parallel":
        given = {"valid_BT": jnp.asarray(VALID)}
    got = jax.jit(functools.partial(attention_profile, model))(params, tokens(), **given)
    close(
        got, jax.jit(functools.partial(from_its_inputs, model_config))(params, **given), rtol=1e-4, atol=1e-5
    )
    assert got.largest_score.shape == (3, 2)
    assert got.key_norm.shape == (3, model_config.num_kv_heads)
    assert np.std(np.asarray(got.query_norm)[:, 0]) > 1e-3  # control: layers differ, their order would show
    if options.get("soft_cap"):
        assert np.all(got.largest_score <= 0.5)
        assert got.largest_product.max() > got.largest_score.max()


def test_the_first_rows_of_a_batch_are_measured():
    """With a mask that has as many rows as the batch."""
    model, params = built(config())
    valid_BT = jnp.arange(6)[None] < jnp.arange(2, HEALTH_ROWS + 3)[:, None]
    run = jax.jit(functools.partial(attention_profile, model, valid_BT=valid_BT))
    batch_BT = tokens(HEALTH_ROWS + 1)
    one, two = run(params, batch_BT), run(params, batch_BT.at[-1].set(0))
    jax.tree.map(np.testing.assert_array_equal, one, two)
    three = run(params, batch_BT.at[HEALTH_ROWS - 1].set(0))
    assert not np.allclose(one.entropy, three.entropy)


def shapes_of(model, *args, **kwargs):
    """Return the profile's shapes without compiling."""
    params = jax.eval_shape(model.init, jax.random.key(0), tokens())["params"]
    return jax.eval_shape(functools.partial(attention_profile, model), params, *args, **kwargs)


EVERYWHERE = {
    "blocked": ExecutionConfig(attention="blocked"),
    "loop": ExecutionConfig(scan_unroll=3, remat="full"),
    "plain": ExecutionConfig(history="plain", remat="dots"),
}
STACKS = [
    ("blocked", {"residual": "attention_residual", "value_residual": "fixed"}),
    ("loop", {"residual": "hyper_connections", "experts": "dropless(experts=4)"}),
    ("plain", {"residual": "muddformer"}),
    ("blocked", {"residual": "sub_norm", "dtype": "bfloat16", "stream_dtype": "bfloat16"}),
    ("loop", {"residual": "block_attention_residual", "window": (2, 0)}),
]
"""How a stack is run, and what it is; all pairs of the two are `full`."""
PAIRS = [
    pytest.param(
        changes, how, id=f"{changes['residual']}-{how}", marks=[] if how == own else pytest.mark.full
    )
    for own, changes in STACKS
    for how in EVERYWHERE
]


@pytest.mark.parametrize(("changes", "how"), PAIRS)
def test_every_kind_of_stack_gives_it_out(changes, how):
    found = shapes_of(Decoder(config(**changes), EVERYWHERE[how]), tokens(), valid_BT=jnp.asarray(VALID))
    assert {x.shape for x in found} == {(3, 2)}
    assert {x.dtype for x in found} == {jnp.dtype("float32")}


def test_models_that_are_not_causal_have_it_too_and_other_token_mixers_have_none():
    for model in (Encoder(config()), Classifier(config(), classes=3)):
        assert shapes_of(model, tokens(), valid_BT=jnp.asarray(VALID)).entropy.shape == (3, 2)
    mixer = config(token_mixer="convolution(size=3)")
    assert shapes_of(Decoder(mixer), tokens()) is None
    assert collected_attention({}) is None


@pytest.mark.full
def test_decoding_gives_out_the_health_of_the_new_queries():
    """After a prompt, the last token's health: one query, whose entropy is that of attention over all six keys."""
    model, params = built(config(positions="rope"))
    apply = functools.partial(model.apply, {"params": params}, mutable=["attention_health"])
    cache = init_cache(model.config, 2)
    (_, cache), _ = apply(tokens()[:, :5], cache=cache)
    _, made = apply(tokens()[:, 5:], cache=cache)
    got = collected_attention(made)
    sums = [collected_attention(apply(tokens()[:, :length])[1]).entropy * length for length in (5, 6)]
    np.testing.assert_allclose(got.entropy, sums[1] - sums[0], rtol=1e-4, atol=1e-4)


def refuse(*_, **__):
    raise ZeroDivisionError


def test_unasked_the_program_is_the_same_and_asked_the_gradient_is(monkeypatch):
    model = Decoder(config())
    params = built(config())[1]
    assert set(jax.eval_shape(model.init, jax.random.key(0), tokens())) == {"params"}

    def loss(params, mutable):
        logits_BTV, made = model.apply({"params": params}, tokens(), mutable=mutable)
        return jnp.sum(jnp.sin(logits_BTV)) + sum(jnp.sum(x) for x in jax.tree.leaves(made)), made

    def lowered(mutable):
        return jax.jit(functools.partial(jax.grad(loss, has_aux=True), mutable=mutable)).lower(params)

    plain, asked = lowered([]), lowered(["attention_health"])
    assert asked.as_text() != plain.as_text()
    with monkeypatch.context() as patched:  # unasked, nothing of it is even traced
        patched.setattr("jaxblock.modules.attention.attention_health", refuse)
        assert lowered([]).as_text() == plain.as_text()
        with pytest.raises(ZeroDivisionError):
            lowered(["attention_health"])
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        asked.compile()(params)[0],
        plain.compile()(params)[0],
    )
