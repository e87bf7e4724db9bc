"""The stream's statistics against numpy in float64, with what each of them is blind to as control."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxblock.probes import stream

B, T, D = 2, 5, 6
VALID = np.array([[1, 1, 1, 1, 0], [0, 1, 1, 0, 0]], bool)


def draw(seed=0, *shape):
    return np.random.default_rng(seed).normal(size=shape or (B, T, D)).astype(np.float32)


def real(x_BTD, valid_BT=VALID):
    """Return the real tokens, float64 [n, D]."""
    return np.asarray(x_BTD, np.float64)[np.broadcast_to(valid_BT, x_BTD.shape[:2])]


def spoiled(x_BTD):
    """Return the array with NaN in its padding."""
    return np.where(VALID[..., None], x_BTD, np.nan).astype(np.float32)


@settings(deadline=None, max_examples=10)
@given(st.integers(0, 999))
def test_every_number_is_that_of_numpy_over_real_tokens(seed):
    x, u = spoiled(draw(seed)), spoiled(0.3 * draw(seed + 1000))
    rx, ru = real(x), real(u)
    rms = lambda a: np.sqrt(np.mean(a**2))  # noqa: E731
    close = lambda got, want: np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)  # noqa: E731
    close(stream.root_mean_square(x, VALID), rms(rx))
    close(stream.relative_update(x, u, VALID), rms(ru) / rms(rx))
    budget = stream.norm_budget(x, u, VALID)
    norm = lambda a: np.linalg.norm(a, axis=-1)  # noqa: E731
    close(budget.before + budget.cross + budget.update, np.mean(norm(rx + ru) ** 2) / D)
    close(budget.cosine, np.mean(np.sum(rx * ru, -1) / norm(rx) / norm(ru)))
    close(stream.constant_share(x, VALID), np.mean(np.abs(rx.mean(-1)) / np.sqrt((rx**2).mean(-1))))
    found = stream.outliers(x, VALID)
    close(found.largest, np.abs(rx).max() / rms(rx))
    close(found.kurtosis, np.mean(rx**4) / np.mean(rx**2) ** 2)
    c = rx.T @ rx
    close(stream.effective_rank(x, VALID), np.trace(c) ** 2 / np.trace(c @ c))
    pairs = []
    for row, valid in zip(np.asarray(x, np.float64), VALID, strict=True):
        tokens = row[valid] / np.linalg.norm(row[valid], axis=-1, keepdims=True)
        pairs += [tokens[i] @ tokens[j] for i in range(len(tokens)) for j in range(len(tokens)) if i != j]
    close(stream.token_similarity(x, VALID), np.mean(pairs))
    close(stream.epsilon_share(x, 0.1, VALID), np.max(0.1 / ((rx**2).mean(-1) + 0.1)))


def test_padding_counts_nowhere_and_would_be_seen():
    x, u = draw(), draw(1)
    for other in (np.nan, 1e3):
        y, v = (np.where(VALID[..., None], a, np.float32(other)) for a in (x, u))
        for read in (
            stream.root_mean_square,
            stream.token_similarity,
            stream.effective_rank,
            stream.not_finite,
        ):
            np.testing.assert_array_equal(read(x, VALID), read(y, VALID))
        np.testing.assert_array_equal(
            stream.relative_update(x, u, VALID), stream.relative_update(y, v, VALID)
        )
    y = np.where(VALID[..., None], x, np.float32(1e3))
    assert stream.root_mean_square(y) > 10 * stream.root_mean_square(x)  # control: without the mask it counts


def test_nothing_real_is_0_and_never_nan():
    x, none = draw(), np.zeros((B, T), bool)
    found = [
        stream.root_mean_square(x, none),
        *stream.norm_budget(x, x, none),
        *stream.outliers(x, none),
        stream.token_similarity(x, none),
        stream.effective_rank(x, none),
        *stream.absorption(x, x, none),
        stream.epsilon_share(x, 1e-5, none),
        *stream.norm_budget(0 * x, 0 * x),
        stream.relative_update(0 * x, x),
    ]
    assert all(float(value) == 0.0 for value in found)


def test_equal_tokens_have_collapsed_and_orthogonal_ones_have_not():
    same = np.broadcast_to(draw(0, 1, 1, D), (B, T, D)).astype(np.float32)
    np.testing.assert_allclose(stream.token_similarity(same), 1.0, atol=1e-6)
    np.testing.assert_allclose(stream.effective_rank(same), 1.0, atol=1e-4)
    apart = np.eye(T, D, dtype=np.float32)[None]
    np.testing.assert_allclose(stream.token_similarity(apart), 0.0, atol=1e-6)
    np.testing.assert_allclose(stream.effective_rank(apart), T, rtol=1e-5)


def test_one_channel_that_holds_everything_is_an_outlier():
    x = np.zeros((B, T, D), np.float32)
    x[..., 2] = 5.0
    found = stream.outliers(x)
    np.testing.assert_allclose(found, [np.sqrt(D), D], rtol=1e-5)


def test_bfloat16_absorbs_what_is_below_half_a_unit():
    x = jnp.ones((1, 1, 4), jnp.bfloat16)
    u = jnp.asarray([[[2.0**-12, 2.0**-4, 0.0, 2.0**-7]]], jnp.bfloat16)
    found = stream.absorption(x, u)
    np.testing.assert_allclose(found.lost, 1 / 3)
    np.testing.assert_allclose(found.bits, ((8 - 4) + (8 - 7)) / 2)
    assert stream.absorption(x.astype(jnp.float32), u).lost == 0.0


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_one_entry_that_is_not_finite_is_found(value):
    x = draw()
    assert not stream.not_finite(x)
    x[0, 1, 2] = value
    assert stream.not_finite(x, VALID)


def test_statistics_are_float32_under_jit_and_vmap_whatever_the_stream_is():
    x, u = jnp.asarray(draw(), jnp.bfloat16), jnp.asarray(draw(1), jnp.bfloat16)

    def all_of(x, u):
        return (
            stream.root_mean_square(x, VALID),
            stream.norm_budget(x, u, VALID),
            stream.outliers(x, VALID),
            stream.token_similarity(x, VALID),
            stream.absorption(x, u, VALID),
        )

    one = all_of(x, u)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(one))
    both = jax.jit(jax.vmap(all_of))(jnp.stack([x, 2 * x]), jnp.stack([u, u]))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b[0], rtol=1e-5, atol=1e-6), one, both)
