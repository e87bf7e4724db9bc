"""Several streams: sums against numpy, and what makes a matrix doubly stochastic."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxblock.functional.streams import (
    mix_permutations,
    permutation_matrices,
    project_all,
    project_each,
    read_streams,
    sinkhorn,
    write_streams,
)

B, T, D = 2, 3, 4
EPSILON = 1e-3  # large enough to show if it were misplaced


def draw(*shape, seed=0, scale=1.0):
    return np.random.default_rng(seed).normal(scale=scale, size=shape)


def as_jax(x):
    return jnp.asarray(x, jnp.float32)


def streams_of(count, seed=0):
    x_MBTD = draw(count, B, T, D, seed=seed)
    return x_MBTD, tuple(as_jax(x_MBTD))


def doubly(logits, iterations=20):
    """Sinkhorn's iteration as it is published, in float64: rows, then columns."""
    k = np.exp(logits)
    for _ in range(iterations):
        k = k / k.sum(1, keepdims=True)
        k = k / k.sum(0, keepdims=True)
    return k


@functools.cache
def scaled(iterations=20):
    return jax.jit(functools.partial(sinkhorn, iterations=iterations))


# ------------------------------------------------------------------ sums


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 4), st.booleans())
def test_reading_and_writing_are_sums_over_streams(count, per_token):
    x_MBTD, streams = streams_of(count)
    tail = (B, T) if per_token else ()
    read, mix, write = (
        draw(count, *tail, seed=1),
        draw(count, count, *tail, seed=2),
        draw(count, *tail, seed=3),
    )
    u_MBTD, updates = streams_of(count, seed=4)
    wide = (lambda w: w) if per_token else (lambda w: np.broadcast_to(w[..., None, None], (*w.shape, B, T)))
    h = np.einsum("ibt,ibtd->btd", wide(read), x_MBTD)
    y = np.einsum("ijbt,ibtd->jbtd", wide(mix), x_MBTD) + np.einsum("jbt,jbtd->jbtd", wide(write), u_MBTD)
    np.testing.assert_allclose(read_streams(streams, as_jax(read)), h, rtol=1e-5, atol=1e-5)
    written = write_streams(streams, updates, as_jax(mix), as_jax(write))
    np.testing.assert_allclose(jnp.stack(written), y, rtol=1e-5, atol=1e-5)
    if count > 1:  # R from j to i would be another sum
        swapped = write_streams(streams, updates, as_jax(np.swapaxes(mix, 0, 1)), as_jax(write))
        assert not np.allclose(jnp.stack(swapped), y, atol=1e-3)


def test_streams_keep_their_dtype_and_sums_are_float32():
    """1 + 2^-9 + ... is lost term by term in bfloat16, and kept when the sum is cast once."""
    streams = tuple(jnp.full((1, 1, 1), x, jnp.bfloat16) for x in (1.0, 2.0**-9, 2.0**-9, 2.0**-9, 2.0**-9))
    h = read_streams(streams, jnp.ones(5))
    assert h.dtype == jnp.bfloat16
    assert float(h[0, 0, 0]) == 1.0 + 2.0**-7
    one_by_one = functools.reduce(jnp.add, streams)
    assert float(one_by_one[0, 0, 0]) == 1.0
    written = write_streams(streams, streams, jnp.ones((5, 5)), jnp.zeros(5))
    assert {x.dtype for x in written} == {jnp.dtype(jnp.bfloat16)}
    assert float(written[0][0, 0, 0]) == 1.0 + 2.0**-7


def test_projections_read_normalized_streams():
    x_MBTD, streams = streams_of(3)
    each, joint = draw(D, 5, seed=1), draw(3, D, 5, seed=2)
    rms = lambda x: x / np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON)  # noqa: E731
    want = np.einsum("mbtd,dc->mcbt", rms(x_MBTD), each)
    np.testing.assert_allclose(
        project_each(streams, as_jax(each), epsilon=EPSILON), want, rtol=1e-5, atol=1e-5
    )
    beside = np.moveaxis(x_MBTD, 0, 2).reshape(B, T, 3 * D)
    want = np.einsum("btx,xc->cbt", rms(beside), joint.reshape(3 * D, 5))
    np.testing.assert_allclose(
        project_all(streams, as_jax(joint), epsilon=EPSILON), want, rtol=1e-5, atol=1e-5
    )
    # One norm of all streams is not a norm of each.
    apart = sum(rms(x) @ w for x, w in zip(x_MBTD, joint, strict=True))
    assert not np.allclose(np.moveaxis(apart, -1, 0), want, atol=1e-2)


def test_shapes_are_checked():
    _, streams = streams_of(2)
    for bad in (
        lambda: read_streams(streams, jnp.ones(3)),
        lambda: write_streams(streams, streams, jnp.ones((2, 3)), jnp.ones(2)),
        lambda: write_streams(streams, streams, jnp.ones((2, 2)), jnp.ones(1)),
        lambda: read_streams((streams[0], streams[1][:1]), jnp.ones(2)),
        lambda: project_all(streams, jnp.ones((3, D, 1)), epsilon=EPSILON),
        lambda: mix_permutations(jnp.ones(5), 3),
        # The fault of a public reimplementation: [n] logits as a 1 x n matrix, for which the result is all ones.
        lambda: sinkhorn(jnp.ones((1, 4)), iterations=2),
    ):
        with pytest.raises(AssertionError):
            bad()
    with pytest.raises(ValueError, match="iterations is 0; it must be a whole number of at least 1"):
        sinkhorn(jnp.ones((2, 2)), iterations=0)


# ------------------------------------------------------------------ doubly stochastic matrices


def test_i30_sinkhorn_is_the_published_iteration():
    logits = draw(4, 4, B, T, scale=2.0)
    np.testing.assert_allclose(scaled()(as_jax(logits)), doubly(logits), rtol=2e-5, atol=1e-6)
    few = scaled(3)(as_jax(logits))
    np.testing.assert_allclose(few, doubly(logits, 3), rtol=2e-5, atol=1e-6)
    assert not np.allclose(few, doubly(logits), atol=1e-4)


def test_i30_rows_and_columns_sum_to_1_and_none_is_negative():
    """Axis 0, which is contracted, to 1e-6; axis 1 to 1e-3 after 20 iterations, not after one."""
    logits = as_jax(draw(4, 4, B, T))
    r = np.asarray(scaled()(logits))
    assert (r >= 0).all()
    np.testing.assert_allclose(r.sum(0), 1.0, atol=1e-6)
    np.testing.assert_allclose(r.sum(1), 1.0, atol=1e-3)
    once = np.asarray(scaled(1)(logits))
    np.testing.assert_allclose(once.sum(0), 1.0, atol=1e-6)
    assert np.abs(once.sum(1) - 1.0).max() > 1e-2


def test_i30_constants_of_rows_and_columns_do_not_matter():
    logits, rows, columns = draw(4, 4), draw(4, 1, seed=1, scale=3.0), draw(1, 4, seed=2, scale=3.0)
    run = jax.jit(functools.partial(sinkhorn, iterations=100))
    want = run(as_jax(logits))
    np.testing.assert_allclose(run(as_jax(logits + rows + columns)), want, rtol=1e-4, atol=1e-6)
    assert not np.allclose(run(as_jax(logits + rows * columns)), want, atol=1e-2)


def test_i30_known_values():
    """I_4: e / (e + 3) and 1 / (e + 3), second singular value 0.3005; 4 I_4: 0.948 and 0.931; one stream: 1."""
    r = np.asarray(scaled()(jnp.eye(4)), np.float64)
    np.testing.assert_allclose(np.diag(r), 0.475367, atol=1e-6)
    np.testing.assert_allclose(r[~np.eye(4, dtype=bool)], 0.174878, atol=1e-6)
    singular = np.linalg.svd(r, compute_uv=False)
    np.testing.assert_allclose(singular[:2], [1.0, 0.3005], atol=5e-5)
    r = np.asarray(scaled()(4.0 * jnp.eye(4)), np.float64)
    np.testing.assert_allclose(np.diag(r), math.exp(4) / (math.exp(4) + 3), atol=1e-6)
    np.testing.assert_allclose(np.linalg.svd(r, compute_uv=False)[:2], [1.0, 0.931], atol=5e-4)
    assert np.asarray(sinkhorn(jnp.full((1, 1), 3.0), iterations=20)).tolist() == [[1.0]]


@pytest.mark.parametrize("kind", ["sinkhorn", "permutations"])
def test_i30_products_stay_doubly_stochastic(kind):
    """50 of them, no larger than 1; the same number of unconstrained matrices I + noise is."""
    if kind == "sinkhorn":
        many = scaled()(as_jax(draw(4, 4, 50)))
    else:
        many = mix_permutations(as_jax(draw(24, 50, scale=2.0)), 4)
    product = functools.reduce(np.matmul, np.moveaxis(np.asarray(many, np.float64), -1, 0))
    np.testing.assert_allclose(product.sum(0), 1.0, atol=1e-3)
    np.testing.assert_allclose(product.sum(1), 1.0, atol=1e-3)
    assert np.linalg.svd(product, compute_uv=False)[0] < 1.001
    free = functools.reduce(np.matmul, np.eye(4) + draw(50, 4, 4, scale=0.3))
    assert np.linalg.svd(free, compute_uv=False)[0] > 5.0


def test_i30_the_gradient_is_the_derivative_and_finite_for_any_logits():
    logits, weights = draw(3, 3), draw(3, 3, seed=1)
    slope = jax.jit(jax.grad(lambda x: jnp.sum(as_jax(weights) * sinkhorn(x, iterations=20))))
    got, step = np.asarray(slope(as_jax(logits))), 1e-5
    for place in np.ndindex(3, 3):
        shift = np.zeros((3, 3))
        shift[place] = step
        want = ((doubly(logits + shift) - doubly(logits - shift)) * weights).sum() / (2 * step)
        np.testing.assert_allclose(got[place], want, rtol=1e-3, atol=1e-5)
    assert np.abs(got).max() > 1e-2  # a 1 x n matrix would have none
    for scale in (1e2, 1e4, 1e30):
        large = as_jax(scale * draw(3, 3, seed=2))
        r = np.asarray(sinkhorn(large, iterations=20))
        assert np.isfinite(r).all()
        np.testing.assert_allclose(r.sum(0), 1.0, atol=1e-6)
        assert np.isfinite(np.asarray(slope(large))).all()


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_i31_permutations_are_all_there_once_and_the_identity_first(count):
    table = permutation_matrices(count)
    assert table.shape == (math.factorial(count), count, count)
    assert len({matrix.tobytes() for matrix in table}) == len(table)
    assert (table.sum(1) == 1).all()
    assert (table.sum(2) == 1).all()
    np.testing.assert_array_equal(table[0], np.eye(count))


def test_i31_the_mean_of_permutations_is_exactly_doubly_stochastic():
    """Up to round-off, a few 1e-7 in float32, however far apart the logits; without the softmax it is not."""
    logits = draw(24, B, T, scale=5.0)
    r = np.asarray(mix_permutations(as_jax(logits), 4))
    weights = np.exp(logits) / np.exp(logits).sum(0)
    want = sum(w * p[..., None, None] for w, p in zip(weights, permutation_matrices(4), strict=True))
    np.testing.assert_allclose(r, want, rtol=1e-5, atol=1e-6)
    for axis in (0, 1):
        np.testing.assert_allclose(r.astype(np.float64).sum(axis), 1.0, atol=6e-7)
    with jax.enable_x64(True):
        r = np.asarray(mix_permutations(jnp.asarray(logits), 4))
    assert r.dtype == np.float64
    for axis in (0, 1):
        np.testing.assert_allclose(r.sum(axis), 1.0, atol=1e-14)
    raw = np.einsum("pij,pbt->ijbt", permutation_matrices(4), np.exp(logits))
    assert np.abs(raw.sum(0) - 1.0).max() > 1.0
