"""Attention against float64 loops, for every implementation that runs on a CPU, and the listed faults."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxblock.functional.attention import attention
from jaxblock.functional.attention_blocked import attention_blocked
from jaxblock.functional.attention_cudnn import fused_attention
from jaxblock.functional.attention_scores import ScoreRule
from jaxblock.functional.attention_xla import attention_xla
from jaxblock.functional.masks import AttentionPattern, visibility
from jaxblock.functional.positions import alibi_slopes

# Small blocks, so that tiny arrays still have several of them, the last one ragged. Jitted, for speed only.
EAGER = {
    "xla": functools.partial(attention_xla, chunk=4),
    "blocked": functools.partial(attention_blocked, block_size=4),
}
FORMS = {name: jax.jit(form) for name, form in EAGER.items()}
each_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


def draw(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def draw_qkv(seed, batch=2, queries=5, keys=5, heads=4, groups=2, width=3):
    q = draw(seed, batch, queries, heads, width)
    return q, draw(seed + 1, batch, keys, groups, width), draw(seed + 2, batch, keys, groups, width)


def reference(q, k, v, allowed=None, *, scale=None, soft_cap=None, slopes=None):
    """softmax(scores) v by loops in float64; `allowed` broadcasts to [B, H, Q, T]."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    (batch, queries, heads, width), (keys, groups) = q.shape, k.shape[1:3]
    allowed = np.broadcast_to(True if allowed is None else allowed, (batch, heads, queries, keys))
    y = np.zeros_like(q)
    for b, i, h in np.ndindex(batch, queries, heads):
        g, scores = h // (heads // groups), {}
        for j in np.flatnonzero(allowed[b, h, i]):
            s = (width**-0.5 if scale is None else scale) * (q[b, i, h] @ k[b, j, g])
            s = s if soft_cap is None else soft_cap * np.tanh(s / soft_cap)
            scores[j] = s - (0 if slopes is None else float(slopes[h]) * abs(i + keys - queries - j))
        top = max(scores.values(), default=0)
        weights = {j: np.exp(s - top) for j, s in scores.items()}
        for j, w in weights.items():
            y[b, i, h] += w / sum(weights.values()) * v[b, j, g]
    return y


@st.composite
def problems(draw_from):
    """q, k, v, a pattern and a rule, of random small shapes."""
    sizes = {name: draw_from(st.integers(1, 2)) for name in ("batch", "groups")}
    sizes |= {name: draw_from(st.integers(1, 7)) for name in ("queries", "keys")}
    heads = sizes["groups"] * draw_from(st.integers(1, 2))
    q, k, v = draw_qkv(
        draw_from(st.integers(0, 99)), heads=heads, width=draw_from(st.integers(1, 4)), **sizes
    )
    rng = np.random.default_rng(draw_from(st.integers(0, 99)))
    batch, queries, keys = sizes["batch"], sizes["queries"], sizes["keys"]

    def some(*shape):
        return jnp.array(rng.random(shape) < 0.7) if draw_from(st.booleans()) else None

    segments = draw_from(st.booleans())
    pattern = AttentionPattern(
        causal=draw_from(st.booleans()),
        window=draw_from(
            st.sampled_from([None, 1, 3, (2, 0), (0, 1), (1, None), jnp.int32(0), jnp.int32(2)])
        ),
        key_valid_BT=some(batch, keys),
        query_segments_BQ=jnp.array(rng.integers(0, 2, (batch, queries))) if segments else None,
        key_segments_BT=jnp.array(rng.integers(0, 2, (1, keys))) if segments else None,
        mask=some(*(draw_from(st.sampled_from([1, n])) for n in (batch, heads, queries)), keys),
    )
    rule = ScoreRule(
        scale=draw_from(st.sampled_from([None, 0.7])),
        soft_cap=draw_from(st.sampled_from([None, 0.8])),
        alibi_slopes_H=alibi_slopes(heads) if draw_from(st.booleans()) else None,
    )
    return q, k, v, pattern, rule


@settings(deadline=None, max_examples=6)
@given(problem=problems())
def test_every_form_equals_the_float64_loops(problem):
    q, k, v, pattern, rule = problem
    allowed = visibility(pattern, q.shape[1], k.shape[1])
    expected = reference(
        q, k, v, allowed, scale=rule.scale, soft_cap=rule.soft_cap, slopes=rule.alibi_slopes_H
    )
    for form in FORMS.values():
        np.testing.assert_allclose(form(q, k, v, pattern, scores=rule), expected, atol=1e-5)


@each_form
def test_each_part_of_the_rule_changes_the_result(form):
    # The negative controls of the test above; those of the masks are with their faults below.
    q, k, v = draw_qkv(0)
    plain = form(q, k, v)
    np.testing.assert_allclose(plain, reference(q, k, v), atol=1e-5)
    rules = [ScoreRule(scale=0.7), ScoreRule(soft_cap=0.8), ScoreRule(alibi_slopes_H=alibi_slopes(4))]
    ones = jnp.ones((2, 5), int)
    packed = AttentionPattern(query_segments_BQ=ones, key_segments_BT=ones.at[:, 2].set(0))
    for changed in [form(q, k, v, packed), *(form(q, k, v, scores=rule) for rule in rules)]:
        assert np.abs(changed - plain).max() > 1e-3


@each_form
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_grouped_heads_equal_repeated_keys(form, groups):
    q, k, v = draw_qkv(1, groups=groups)
    pattern, repeats = AttentionPattern(causal=True), 4 // groups
    full = form(q, *(jnp.repeat(x, repeats, axis=2) for x in (k, v)), pattern)
    np.testing.assert_allclose(form(q, k, v, pattern), full, atol=1e-6)
    if groups == 2:  # the other order of heads is another function
        tiled = form(q, *(jnp.tile(x, (1, 1, repeats, 1)) for x in (k, v)), pattern)
        assert np.abs(tiled - full).max() > 1e-2


@each_form
def test_gradients_equal_float64_finite_differences(form):
    q, k, v = draw_qkv(2, batch=1, queries=5, keys=6, heads=2, groups=1, width=2)
    pattern = AttentionPattern(causal=True, window=4, key_valid_BT=jnp.arange(6)[None] != 3)
    allowed, direction = visibility(pattern, 5, 6), np.random.default_rng(3).normal(size=q.shape)
    slopes = jnp.array([0.5, 0.1])
    rule = ScoreRule(soft_cap=1.5, alibi_slopes_H=slopes)

    def loss_of(*qkv):
        return jnp.sum(form(*qkv, pattern, scores=rule) * jnp.asarray(direction, jnp.float32))

    gradients = jax.grad(loss_of, (0, 1, 2))(q, k, v)
    qkv = [np.asarray(x, np.float64) for x in (q, k, v)]
    for x, gradient in zip(qkv, gradients, strict=True):
        for index in np.ndindex(x.shape):
            losses = []
            for step in (1e-5, -2e-5):
                x[index] += step
                losses.append(np.sum(reference(*qkv, allowed, soft_cap=1.5, slopes=slopes) * direction))
            x[index] += 1e-5
            assert abs(gradient[index] - (losses[0] - losses[1]) / 2e-5) < 1e-4


@each_form
@pytest.mark.parametrize("where", ["padding", "future"])
def test_b04_garbage_in_hidden_keys_and_values_changes_nothing(form, where):
    q, k, v = draw_qkv(4, queries=6, keys=6)
    valid = jnp.arange(6)[None] < 4
    pattern = AttentionPattern(key_valid_BT=valid) if where == "padding" else AttentionPattern(causal=True)
    rows = slice(None) if where == "padding" else slice(0, 4)  # the queries that do not see keys 4 and 5

    def out_and_gradients(k, v, pattern):
        out, pull = jax.vjp(lambda q, k, v: form(q, k, v, pattern)[:, rows], q, k, v)
        return out, *(g[:, :4] for g in pull(jnp.ones_like(out)))

    filled = [x.at[:, 4:].set(sign * 1e4) for x, sign in ((k, 1), (v, -1))]
    for clean, dirty in zip(
        out_and_gradients(k, v, pattern), out_and_gradients(*filled, pattern), strict=True
    ):
        np.testing.assert_array_equal(clean, dirty)
    assert np.abs(form(q, *filled) - form(q, k, v)).max() > 1  # without the mask it does


@each_form
def test_b05_a_query_without_a_permitted_key_gets_zero(form):
    q, k, v = draw(0, 1, 1, 1, 1), draw(1, 1, 2, 1, 1), jnp.array([1.0, 3.0]).reshape(1, 2, 1, 1)
    assert form(q, k, v, AttentionPattern(mask=jnp.zeros((1, 1, 1, 2), bool))).item() == 0.0
    assert 1.0 < form(q, k, v, AttentionPattern(mask=jnp.ones((1, 1, 1, 2), bool))).item() < 3.0


@each_form
@pytest.mark.parametrize("rule", [ScoreRule(), ScoreRule(soft_cap=2.0, alibi_slopes_H=alibi_slopes(4))])
def test_b05_empty_rows_have_zero_and_finite_gradients(form, rule):
    q, k, v = draw_qkv(5, queries=6, keys=6)
    pattern = AttentionPattern(causal=True, key_valid_BT=jnp.arange(6)[None] >= 2)  # queries 0, 1 see nothing
    out, pull = jax.vjp(lambda q, k, v: form(q, k, v, pattern, scores=rule), q, k, v)
    np.testing.assert_array_equal(out[:, :2], 0.0)
    gradients = pull(jnp.zeros_like(out).at[:, :2].set(1.0))
    for gradient in gradients:
        np.testing.assert_array_equal(gradient, 0.0)
    for gradient in pull(jnp.ones_like(out)):
        assert np.isfinite(gradient).all()
        assert np.abs(gradient).max() > 1e-3


@each_form
def test_b06_float16_is_finite_and_close_to_float32(form):
    q, k, v = draw_qkv(6, batch=1, queries=4, keys=4, heads=2, groups=2, width=8)
    pattern, half = AttentionPattern(causal=True), [x.astype(jnp.float16) for x in (q, k, v)]
    out, gradients = jax.value_and_grad(lambda *qkv: form(*qkv, pattern).sum(), (0, 1, 2))(*half)
    assert form(*half, pattern).dtype == jnp.float16
    assert all(g.dtype == jnp.float16 and np.isfinite(g).all() for g in (out, *gradients))
    np.testing.assert_allclose(form(*half, pattern), form(q, k, v, pattern), atol=1e-2)
    # Scores of 300 * 300 * 8 do not fit float16 (65504), and need not.
    large = [jnp.full_like(x, 300) for x in half[:2]]
    assert np.isfinite(form(*large, half[2], pattern)).all()
    assert not np.isfinite(jnp.sum(large[0] * large[1], axis=-1)).all()


@each_form
@pytest.mark.parametrize("dtype", [jnp.int32, jnp.float32])
def test_b09_only_a_boolean_mask_is_taken(form, dtype):
    q, v = jnp.zeros((1, 2, 1, 1)), jnp.array([10.0, 20.0]).reshape(1, 2, 1, 1)
    mask = jnp.array([[True, False], [True, True]]).reshape(1, 1, 2, 2)
    np.testing.assert_allclose(form(q, q, v, AttentionPattern(mask=mask)).ravel(), [10.0, 15.0])
    np.testing.assert_allclose(form(q, q, v, AttentionPattern(mask=~mask)).ravel(), [20.0, 0.0])
    with pytest.raises(ValueError, match="boolean"):
        form(q, q, v, AttentionPattern(mask=mask.astype(dtype)))


@each_form
def test_b14_every_broadcast_shape_of_a_mask_is_the_same_mask(form):
    q, k, v = draw_qkv(7, queries=5, keys=6)
    valid = jnp.array([[1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1]], bool)
    masks = [jnp.broadcast_to(valid[:, None, None], s) for s in ((2, 1, 1, 6), (2, 1, 5, 6), (2, 4, 5, 6))]
    both = jax.jit(lambda p: jax.value_and_grad(lambda *qkv: form(*qkv, p).sum(), (0, 1, 2))(q, k, v))
    results = [both(AttentionPattern(mask=mask)) for mask in masks]
    by_key = form(q, k, v, AttentionPattern(key_valid_BT=valid)).sum()
    np.testing.assert_allclose(by_key, results[0][0], rtol=1e-5)
    for result in results[1:]:
        for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(results[0]), strict=True):
            np.testing.assert_array_equal(a, b)
            assert np.isfinite(a).all()
    assert abs(results[0][0] - form(q, k, v).sum()) > 1e-2
    with pytest.raises(ValueError, match=r"mask has shape \(2, 6\).*\[B,1,1,T\], \[B,1,Q,T\], \[B,H,Q,T\]"):
        form(q, k, v, AttentionPattern(mask=valid))


@each_form
def test_masks_and_slopes_of_a_head_reach_that_head(form):
    q, k, v = draw_qkv(20, heads=6, groups=2)
    mask = jnp.array(np.random.default_rng(0).random((1, 6, 5, 5)) < 0.6)
    slopes = alibi_slopes(6)
    found = form(q, k, v, AttentionPattern(mask=mask), scores=ScoreRule(alibi_slopes_H=slopes))
    np.testing.assert_allclose(found, reference(q, k, v, mask, slopes=slopes), atol=1e-5)
    by_repeat = np.arange(6).reshape(2, 3).T.ravel()  # heads taken in the order (R, G), a different function
    assert np.abs(found - reference(q, k, v, mask[:, by_repeat], slopes=slopes)).max() > 1e-2


@each_form
@pytest.mark.parametrize("window", [2, jnp.int32(2), (1, 0)])
def test_b15_a_window_works_without_any_other_mask(form, window):
    q, v = jnp.zeros((1, 6, 1, 1)), jnp.arange(6.0).reshape(1, 6, 1, 1)
    assert form(q, q, v, AttentionPattern(causal=True, window=window))[0, 5, 0, 0] == 4.5
    assert form(q, q, v, AttentionPattern(causal=True))[0, 5, 0, 0] == 2.5


@each_form
def test_b16_a_left_window_without_the_causal_flag_never_sees_the_future(form):
    q, k, v = draw_qkv(8, queries=6, keys=6)
    changed = v.at[:, 5].add(1.0)
    left = AttentionPattern(window=(2, 0))
    np.testing.assert_array_equal(form(q, k, changed, left)[:, :5], form(q, k, v, left)[:, :5])
    both = AttentionPattern(window=(2, 2))
    assert np.abs(form(q, k, changed, both)[:, :5] - form(q, k, v, both)[:, :5]).max() > 1e-3


@each_form
def test_fewer_queries_are_the_last_rows(form):
    q, k, v = draw_qkv(9, queries=6, keys=6)
    rule = ScoreRule(alibi_slopes_H=alibi_slopes(4))
    pattern = AttentionPattern(causal=True, window=3)
    full = form(q, k, v, pattern, scores=rule)
    for queries in (1, 4):
        last = form(q[:, -queries:], k, v, pattern, scores=rule)
        np.testing.assert_allclose(last, full[:, -queries:], atol=1e-6)
        first = form(q[:, :queries], k, v, pattern, scores=rule)
        assert np.abs(first - full[:, :queries]).max() > 1e-3


@pytest.mark.parametrize("name", FORMS)
def test_jit_vmap_and_scan_over_windows_equal_the_plain_call(name):
    form, (q, k, v) = FORMS[name], draw_qkv(10)
    windows, valid = jnp.array([0, 2], jnp.int32), jnp.array([[[1, 1, 1, 1, 0]], [[0, 1, 1, 1, 1]]], bool)

    def attend(window, valid, form=form):
        return form(q, k, v, AttentionPattern(causal=True, window=window, key_valid_BT=valid))

    np.testing.assert_allclose(
        attend(windows[1], valid[0], EAGER[name]), attend(windows[1], valid[0]), atol=1e-6
    )
    plain = jnp.stack([jnp.stack([attend(w, m) for w in windows]) for m in valid])
    mapped = jax.jit(jax.vmap(jax.vmap(attend, (0, None)), (None, 0)))(windows, valid)
    np.testing.assert_allclose(mapped, plain, atol=1e-6)
    scanned = jax.lax.scan(lambda _, w: (None, attend(w, valid[0])), None, windows)[1]
    np.testing.assert_allclose(scanned, plain[0], atol=1e-6)
    by_row = jax.vmap(lambda *qkv: form(*(x[None] for x in qkv))[0])(q, k, v)
    np.testing.assert_allclose(by_row, form(q, k, v), atol=1e-6)
    assert np.abs(plain[0] - plain[1]).max() > 1e-3


@each_form
def test_dropout_drops_weights_at_its_rate_and_rescales_the_rest(form):
    length, rate = 40, 0.3
    q, k, _ = draw_qkv(11, queries=length, keys=length, heads=2, groups=1, width=length)
    v = jnp.broadcast_to(jnp.eye(length)[None, :, None], k.shape)  # values e_t: the output is the weights
    weights = form(q, k, v)
    dropped = form(q, k, v, scores=ScoreRule(dropout_rate=rate, dropout_key=jax.random.key(0)))
    kept = np.asarray(dropped) != 0
    np.testing.assert_allclose(dropped, np.where(kept, weights / (1 - rate), 0), rtol=1e-5)
    assert abs(kept.mean() - (1 - rate)) < 0.03  # 6400 draws: 5 standard deviations
    assert np.abs(kept.mean(axis=(0, 1, 2)) - (1 - rate)).max() < 0.2
    assert np.abs(kept.mean(axis=(0, 2, 3)) - (1 - rate)).max() < 0.2
    # Different entries have different draws: no head, row or block repeats another.
    assert (kept[0, :, 0] != kept[0, :, 1]).any()
    assert (kept[0] != kept[1]).any()
    assert (kept[0, :4, 0, :4] != kept[0, 4:8, 0, 4:8]).any()


@each_form
def test_dropout_is_on_exactly_with_a_key_and_a_rate(form):
    q, k, v = draw_qkv(12)
    plain, key = form(q, k, v), jax.random.key(1)
    np.testing.assert_array_equal(form(q, k, v, scores=ScoreRule(dropout_rate=0.5)), plain)
    np.testing.assert_array_equal(form(q, k, v, scores=ScoreRule(dropout_key=key)), plain)
    on = ScoreRule(dropout_rate=0.5, dropout_key=key)
    assert np.abs(form(q, k, v, scores=on) - plain).max() > 1e-2
    np.testing.assert_array_equal(form(q, k, v, scores=on), form(q, k, v, scores=on))


@each_form
def test_slopes_are_constants(form):
    q, k, v = draw_qkv(13)
    gradient = jax.grad(lambda m: form(q, k, v, scores=ScoreRule(alibi_slopes_H=m)).sum())(alibi_slopes(4))
    np.testing.assert_array_equal(gradient, 0.0)


@each_form
def test_wrong_inputs_are_refused_with_a_sentence(form):
    q, k, v = draw_qkv(14, heads=4, groups=2)
    with pytest.raises(ValueError, match="4 heads and k, v have 3"):
        form(q, *(jnp.ones((2, 5, 3, 3)) for _ in range(2)))
    with pytest.raises(ValueError, match="dtypes"):
        form(q, k.astype(jnp.bfloat16), v.astype(jnp.bfloat16))
    with pytest.raises(ValueError, match="alibi_slopes_H"):
        form(q, k, v, scores=ScoreRule(alibi_slopes_H=jnp.ones(2)))
    with pytest.raises(AssertionError):
        form(q, k, v[:, :4])
    with pytest.raises(AssertionError):
        form(q[0], k, v)


@pytest.mark.parametrize(
    "wrong", [{"dropout_rate": 1.0}, {"dropout_rate": -0.1}, {"soft_cap": 0.0}, {"scale": float("nan")}]
)
def test_numbers_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ScoreRule(**wrong)


def test_the_implementation_is_chosen_by_name():
    q, k, v = draw_qkv(15)
    chosen = jax.jit(attention, static_argnames="implementation")
    rule = ScoreRule(dropout_rate=0.5, dropout_key=jax.random.key(0))
    by_name = chosen(q, k, v, scores=rule, implementation="blocked")
    np.testing.assert_allclose(by_name, jax.jit(attention_blocked)(q, k, v, scores=rule), atol=1e-6)
    assert np.abs(by_name - chosen(q, k, v, scores=rule)).max() > 1e-3  # another draw, as documented
    with pytest.raises(ValueError, match="did you mean 'blocked'"):
        attention(q, k, v, implementation="bloked")


def test_xla_has_every_order_of_derivative():
    q, k, v = draw_qkv(16)
    pattern = AttentionPattern(causal=True, key_valid_BT=jnp.arange(5)[None] >= 1)

    @jax.jit
    def slope_and_curvature(q):
        def loss(x):
            return (attention(x, k, v, pattern) ** 2).sum()

        return jax.jvp(loss, (q,), (q,))[1], jax.jvp(jax.grad(loss), (q,), (q,))[1]

    slope, curvature = slope_and_curvature(q)
    assert np.isfinite(slope)
    assert np.isfinite(curvature).all()


@pytest.mark.parametrize(
    ("dtype", "pattern", "rule", "sentence"),
    [
        (jnp.bfloat16, {}, {}, "needs an NVIDIA GPU, and the backend is cpu"),
        (jnp.float32, {}, {}, "needs bfloat16 or float16, not float32"),
        (jnp.bfloat16, {}, {"soft_cap": 3.0}, "no soft cap"),
        (jnp.bfloat16, {}, {"alibi_slopes_H": alibi_slopes(4)}, "no linear bias"),
        (jnp.bfloat16, {}, {"dropout_rate": 0.1, "dropout_key": jax.random.key(0)}, "no dropout"),
        (jnp.float16, {"window": 2}, {}, "no mask in float16"),
        (jnp.bfloat16, {"mask": jnp.ones((1, 1, 5, 5))}, {}, "boolean"),
    ],
)
def test_cudnn_refuses_what_it_cannot_do(dtype, pattern, rule, sentence):
    q, k, v = (x.astype(dtype) for x in draw_qkv(17))
    with pytest.raises(ValueError, match=sentence) as refusal:
        attention(q, k, v, AttentionPattern(**pattern), scores=ScoreRule(**rule), implementation="cudnn")
    assert "boolean" in sentence or "use implementation='xla' or 'blocked'" in str(refusal.value)


def test_cudnn_passes_the_right_arguments():
    # The same call with the plain back end of jax.nn: the kernel itself needs a GPU.
    fused = jax.jit(functools.partial(fused_attention, backend="xla"))
    q, k, v = draw_qkv(18, queries=4, keys=6)
    square = draw_qkv(19, queries=6, keys=6)
    valid = jnp.array([[0, 1, 1, 1, 0, 1], [0, 0, 0, 0, 0, 0]], bool)
    for qkv, pattern in (
        (square, AttentionPattern(causal=True)),
        (square, AttentionPattern(window=(None, None))),
        (square, AttentionPattern(causal=True, window=jnp.int32(2))),
        ((q, k, v), AttentionPattern(causal=True)),
        ((q, k, v), AttentionPattern(window=(2, 0), key_valid_BT=valid)),
    ):
        rule = ScoreRule(scale=0.6)
        expected = FORMS["xla"](*qkv, pattern, scores=rule)
        np.testing.assert_allclose(fused(*qkv, pattern, rule), expected, atol=1e-5)
