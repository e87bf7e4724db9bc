"""Reading over depth: which sources count, how weights are made, and the two-phase read."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxblock.functional.depth_mixing import (
    Sources,
    content_scores,
    dense_table,
    dense_terms,
    depth_weights,
    depth_window,
    kept_states,
    keyed_scores,
    mix_sources,
    read_finished,
    read_partial,
)

B, T, D = 2, 3, 8


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def sources_of(rows, written, extra=0, seed=0):
    """`rows` places of which `written` are filled (the others hold garbage), and `extra` chunks of one row."""
    chunks = (draw(rows, B, T, D, seed=seed), *(draw(1, B, T, D, seed=seed + 1 + i) for i in range(extra)))
    present = jnp.asarray([i < written for i in range(rows)] + [True] * extra)
    index = jnp.asarray([*range(rows), *range(written, written + extra)], jnp.int32)
    return Sources(chunks, present, index)


def scores_of(sources, heads=1, seed=9):
    return content_scores(sources, draw(D, seed=seed), draw(D, seed=seed + 1), heads=heads, epsilon=1e-6)


def read(sources, heads=1, rule="softmax"):
    return mix_sources(sources, depth_weights(scores_of(sources, heads), sources.present, rule))


@pytest.mark.parametrize(
    ("depth", "dilation", "period", "count"),
    [
        (12, 1, 1, 90),
        (24, 1, 1, 324),
        (48, 1, 1, 1224),
        (72, 1, 1, 2700),
        (48, 4, 1, 324),
        (48, 4, 5, 62),
        (72, 4, 5, 140),
    ],
)
def test_i33_weight_counts_of_the_paper(depth, dilation, period, count):
    assert dense_terms(depth, dilation=dilation, period=period).sum() == count


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 30), st.integers(1, 6), st.integers(1, 6))
def test_i34_dilation_and_period_select_exactly_the_stated_terms(depth, dilation, period):
    terms = dense_terms(depth, dilation=dilation, period=period)
    for i in range(depth + 1):
        want = [j for j in range(i + 1) if j % dilation == i % dilation] if i and i % period == 0 else []
        assert np.nonzero(terms[i])[0].tolist() == want
        assert not want or len(want) == i // dilation + 1
    assert not dense_terms(depth, dilation=dilation, period=depth + 1).any()
    if dilation % 2 == 0:  # nested: 4x1 in 2x1 in 1x1
        assert not (terms & ~dense_terms(depth, dilation=dilation // 2, period=period)).any()


def test_i34_period_equal_to_dilation_leaves_residue_classes_unread():
    terms = dense_terms(48, dilation=4, period=4)
    assert not terms[:, 5].any()
    assert dense_terms(48, dilation=4, period=5)[:, 5].any()


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 30), st.integers(1, 6), st.integers(1, 6))
def test_only_states_that_a_later_average_reads_are_kept(depth, dilation, period):
    terms = dense_terms(depth, dilation=dilation, period=period)
    kept = kept_states(terms).tolist()
    assert kept == sorted({0} | {j for i in range(depth + 1) for j in range(i) if terms[i, j]})
    if dilation == period == 1:
        assert kept == list(range(depth))  # all but the last


def test_the_papers_4x5_keeps_half_of_24_states():
    assert len(kept_states(dense_terms(24, dilation=4, period=5))) == 11


def test_i34_masked_entries_are_zero_and_get_no_gradient():
    terms = dense_terms(6, dilation=2, period=3)
    weights = draw(int(terms.sum()))
    table = dense_table(weights, terms)
    assert np.array_equal(np.asarray(table) != 0, terms)
    np.testing.assert_array_equal(np.asarray(table)[terms], weights)
    jacobian = jax.jacobian(lambda w: dense_table(w, terms))(weights)
    assert np.array_equal(np.asarray(jacobian).sum(-1) != 0, terms)


@pytest.mark.parametrize("heads", [1, 2, 8])
@pytest.mark.parametrize("rule", ["softmax", "sigmoid"])
def test_read_equals_float64(heads, rule):
    sources = sources_of(4, 3, extra=2)
    rows = np.concatenate([np.asarray(c, np.float64) for c in sources.chunks])[np.asarray(sources.present)]
    query, scale = np.asarray(draw(D, seed=9), np.float64), np.asarray(draw(D, seed=10), np.float64)
    keys = rows / np.sqrt((rows**2).mean(-1, keepdims=True) + 1e-6) * scale
    s = (keys * query).reshape(*keys.shape[:-1], heads, -1).sum(-1)
    a = np.exp(s) / np.exp(s).sum(0) if rule == "softmax" else 1 / (1 + np.exp(-s))
    want = (rows.reshape(*rows.shape[:-1], heads, -1) * a[..., None]).sum(0).reshape(B, T, D)
    np.testing.assert_allclose(read(sources, heads, rule), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rule", ["softmax", "sigmoid"])
def test_i38_what_is_not_written_has_weight_zero_and_gradient_zero(rule):
    sources = sources_of(5, 2)
    weights = depth_weights(scores_of(sources), sources.present, rule)
    assert np.array_equal(np.asarray(weights[2:]), np.zeros_like(weights[2:]))
    assert (np.asarray(weights[:2]) > 0).all()

    def total(rows):
        return jnp.sum(jnp.sin(read(sources._replace(chunks=(rows,)), rule=rule)))

    gradient = np.asarray(jax.grad(total)(sources.chunks[0]))
    assert not gradient[2:].any()
    assert gradient[:2].all()
    bad = sources.chunks[0].at[3].set(jnp.nan)
    assert np.isfinite(
        np.asarray(read(sources._replace(chunks=(jnp.where(jnp.isnan(bad), 1e30, bad),)), rule=rule))
    ).all()


@settings(max_examples=8, deadline=None)
@given(st.integers(1, 5), st.integers(0, 2), st.sampled_from([1, 2, 4]), st.integers(0, 99))
def test_i37_weights_are_a_distribution_and_the_mean_is_bounded(rows, extra, heads, seed):
    sources = sources_of(rows, rows, extra, seed)
    weights = np.asarray(depth_weights(scores_of(sources, heads), sources.present, "softmax"))
    assert (weights >= 0).all()
    np.testing.assert_allclose(weights.sum(0), 1.0, rtol=1e-6)
    h = np.asarray(read(sources, heads))
    largest = np.max(
        [np.linalg.norm(np.asarray(c).reshape(-1, B, T, D), axis=-1).max(0) for c in sources.chunks], axis=0
    )
    if heads == 1:
        assert (np.linalg.norm(h, axis=-1) <= largest * (1 + 1e-5)).all()


def test_i37_a_sigmoid_is_no_distribution():
    sources = sources_of(4, 4)
    weights = depth_weights(scores_of(sources), sources.present, "sigmoid")
    assert not np.allclose(weights.sum(0), 1.0, atol=1e-2)


def test_i37_scaling_a_source_leaves_the_weights_and_order_does_not_matter():
    sources = sources_of(4, 4)
    weights = depth_weights(scores_of(sources), sources.present, "softmax")
    scaled = sources._replace(chunks=(sources.chunks[0].at[1].multiply(7.0),))
    np.testing.assert_allclose(
        depth_weights(scores_of(scaled), sources.present, "softmax"), weights, rtol=1e-4
    )
    raw = lambda s: content_scores(s, draw(D, seed=9), None, heads=1, epsilon=0.0)  # noqa: E731
    assert not np.allclose(raw(scaled), raw(sources), rtol=1e-2)
    order = jnp.asarray([2, 0, 3, 1])
    moved = sources._replace(chunks=(sources.chunks[0][order],))
    np.testing.assert_allclose(
        depth_weights(scores_of(moved), sources.present, "softmax"), weights[order], rtol=1e-5
    )
    np.testing.assert_allclose(read(moved), read(sources), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("window", [1, 2, 3, 9])
def test_window_keeps_the_newest_and_the_embedding(window):
    sources = sources_of(6, 4, extra=1)  # sources 0..3 written, 4 recent
    seen = np.asarray(depth_window(sources, window))
    want = {0, *range(max(0, 5 - window), 5)}
    assert set(np.asarray(sources.index)[seen].tolist()) == want
    assert np.array_equal(depth_window(sources, 0), sources.present)


@pytest.mark.parametrize(
    ("heads", "present", "normed"), [(1, True, True), (4, True, True), (1, False, True), (4, True, False)]
)
def test_i39_two_phases_equal_one_softmax(heads, present, normed):
    """Values and gradients, two readers at once; with no partial sum the second phase gives the first's result."""
    finished, partial = sources_of(5, 3), draw(B, T, D, seed=20)
    queries, scales = draw(2, D, seed=9), draw(2, D, seed=10) if normed else None

    def score(sources, reader):
        scale = None if scales is None else scales[reader]
        return content_scores(sources, queries[reader], scale, heads=heads, epsilon=1e-6)

    def naive(rows, partial, reader):
        sources = Sources(
            (rows, partial[None]),
            jnp.append(finished.present, jnp.asarray(present)),
            jnp.append(finished.index, 3),
        )
        return mix_sources(sources, depth_weights(score(sources, reader), sources.present, "softmax"))

    def two_phase(rows, partial, reader):
        sources = finished._replace(chunks=(rows,))
        parts = read_finished(sources, queries, scales, heads=heads, epsilon=1e-6)
        one = Sources((partial[None],), jnp.ones(1, bool), jnp.zeros(1, jnp.int32))
        part = jax.tree.map(lambda x: x[reader], parts)
        return read_partial(part, partial, score(one, reader)[0], jnp.asarray(present))

    def run(read):
        def both(rows, partial):
            return [read(rows, partial, reader) for reader in (0, 1)]

        def total(rows, partial):
            return sum(jnp.sum(jnp.sin((1 + i) * h)) for i, h in enumerate(both(rows, partial)))

        return jax.jit(lambda *x: (both(*x), jax.grad(total, (0, 1))(*x)))(finished.chunks[0], partial)

    (got, gradients), (want, want_gradients) = run(two_phase), run(naive)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    for a, b in zip(gradients, want_gradients, strict=True):
        assert np.isfinite(np.asarray(a)).all()
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    assert not np.allclose(want[0], want[1], atol=1e-2)


def test_i41_keys_of_places_do_not_look_at_contents():
    keys, query = draw(4, D), draw(B, T, D, seed=1)
    scores = keyed_scores(keys, query, heads=2)
    want = np.einsum(
        "nhk,bthk->nbth", np.asarray(keys).reshape(4, 2, 4), np.asarray(query).reshape(B, T, 2, 4)
    )
    np.testing.assert_allclose(scores, want, rtol=1e-5, atol=1e-6)


def test_sums_are_float32_and_the_result_has_the_rows_dtype():
    rows = jnp.ones((300, 1, 1, 4), jnp.bfloat16)
    sources = Sources((rows,), jnp.ones(300, bool), jnp.arange(300))
    h = mix_sources(sources, jnp.full(300, 1 / 300, jnp.float32))
    assert h.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(h, np.float32), 1.0, rtol=1e-2)
    # A bfloat16 running sum of 300 times 1 would have stopped at 256.
    assert float(mix_sources(sources, jnp.ones(300, jnp.float32))[0, 0, 0]) == 300.0


def test_bad_input_is_refused():
    sources = sources_of(3, 3)
    with pytest.raises(AssertionError):
        mix_sources(sources, jnp.ones(4))
    with pytest.raises(ValueError, match=r"score is 'softmx'.*did you mean 'softmax'"):
        depth_weights(jnp.ones(3), sources.present, "softmx")
    with pytest.raises(AssertionError):
        content_scores(sources, jnp.ones(D + 1), None, heads=1, epsilon=1e-6)
