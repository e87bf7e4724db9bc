"""Position tables, rotary angles and slopes against their formulas in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxblock.functional.positions import alibi_slopes, apply_rotary, learned, rotary_angles, sinusoidal

CONVENTIONS = ["half", "interleaved"]


def draw(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def rotated(x, positions, convention, base=10000.0):
    """Each pair as a complex number times exp(i * angle), float64."""
    x, width = np.asarray(x, np.float64), x.shape[-1]
    y = np.zeros_like(x)
    for c in range(width // 2):
        a, b = (2 * c, 2 * c + 1) if convention == "interleaved" else (c, c + width // 2)
        turn = np.exp(1j * np.asarray(positions, np.float64) * base ** (-2 * c / width))[:, None]
        z = (x[..., a] + 1j * x[..., b]) * turn
        y[..., a], y[..., b] = z.real, z.imag
    return y


@settings(deadline=None, max_examples=6)
@given(length=st.integers(1, 9), half=st.integers(1, 5))
def test_sinusoidal_equals_the_formula(length, half):
    table = sinusoidal(length, 2 * half)
    assert table.dtype == jnp.float32
    for t, i in np.ndindex(length, half):
        angle = t / 10000 ** (2 * i / (2 * half))
        np.testing.assert_allclose(table[t, 2 * i : 2 * i + 2], [np.sin(angle), np.cos(angle)], atol=1e-6)


@pytest.mark.parametrize(("length", "width", "field"), [(0, 4, "length"), (3, 5, "width"), (3, 0, "width")])
def test_sinusoidal_refuses(length, width, field):
    with pytest.raises(ValueError, match=field):
        sinusoidal(length, width)


def test_learned_takes_the_rows_of_the_table():
    table = draw(0, 8, 3)
    np.testing.assert_array_equal(learned(table, jnp.arange(8)), table)
    packed = jnp.array([[0, 1, 2, 0], [5, 0, 1, 7]])
    np.testing.assert_array_equal(learned(table, packed), np.asarray(table)[np.asarray(packed)])
    np.testing.assert_array_equal(learned(table, jnp.int32(3)), table[3])
    gradient = jax.grad(lambda table: learned(table, jnp.array([1, 1, 4])).sum())(table)
    np.testing.assert_array_equal(gradient[:, 0], [0, 2, 0, 0, 1, 0, 0, 0])


def test_b88_a_sequence_longer_than_the_table_is_refused_when_traced():
    lookup = jax.jit(lambda table: learned(table, jnp.arange(9)))
    with pytest.raises(ValueError, match="9 positions and the position table 8 rows"):
        lookup.trace(jax.ShapeDtypeStruct((8, 3), jnp.float32))
    assert lookup.trace(jax.ShapeDtypeStruct((9, 3), jnp.float32)).out_info.shape == (9, 3)


def test_b88_a_decoding_step_past_the_table_is_nan_and_not_the_last_row():
    step = jax.jit(learned)
    for position in (8, 100, -1):
        assert np.isnan(step(draw(0, 8, 3), jnp.array([position]))).all()
    assert np.isfinite(step(draw(0, 8, 3), jnp.array([7]))).all()


def test_rotary_angles_equal_the_formula():
    positions = jnp.array([[0, 1, 2], [7, 50, 1000]])
    angles = rotary_angles(positions, 6, base=500.0)
    expected = np.asarray(positions)[..., None] * 500.0 ** (-np.arange(3) / 3)
    assert angles.dtype == jnp.float32
    np.testing.assert_allclose(angles, expected, rtol=1e-6)
    assert np.abs(rotary_angles(positions, 6) - expected).max() > 1


@settings(deadline=None, max_examples=6)
@given(
    length=st.sampled_from([1, 5]),
    heads=st.integers(1, 2),
    half=st.sampled_from([1, 3]),
    start=st.integers(0, 500),
    convention=st.sampled_from(CONVENTIONS),
)
def test_rotary_equals_complex_rotation_in_float64_and_keeps_the_norm(length, heads, half, start, convention):
    x, positions = draw(start, 2, length, heads, 2 * half), jnp.arange(length) + start
    y = apply_rotary(x, rotary_angles(positions, 2 * half), convention=convention)
    np.testing.assert_allclose(y, rotated(x, positions, convention), atol=3e-4)
    np.testing.assert_allclose(jnp.linalg.norm(y, axis=-1), jnp.linalg.norm(x, axis=-1), rtol=1e-5)


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_rotary_scores_depend_on_the_distance_only(convention):
    q, k = draw(1, 1, 1, 2, 8), draw(2, 1, 1, 2, 8)

    def score(i, j):
        a, b = (
            apply_rotary(x, rotary_angles(jnp.array([p]), 8), convention=convention)
            for x, p in ((q, i), (k, j))
        )
        return np.asarray(jnp.sum(a * b, axis=-1))

    np.testing.assert_allclose(score(5, 2), score(105, 102), atol=1e-4)
    np.testing.assert_allclose(score(0, 0), jnp.sum(q * k, axis=-1), atol=1e-5)
    assert np.abs(score(5, 2) - score(5, 3)).max() > 1e-2
    assert np.abs(score(5, 2) - score(2, 5)).max() > 1e-2


def test_the_conventions_are_one_map_up_to_the_order_of_channels():
    x, angles = draw(3, 2, 4, 1, 6), rotary_angles(jnp.arange(4), 6)
    order = np.r_[0:6:2, 1:6:2]
    interleaved = apply_rotary(x, angles, convention="interleaved")
    np.testing.assert_allclose(apply_rotary(x[..., order], angles), interleaved[..., order], atol=1e-6)
    assert np.abs(apply_rotary(x, angles) - interleaved).max() > 1e-1


def test_rotary_takes_positions_per_row_and_returns_the_dtype_it_was_given():
    x, positions = draw(4, 2, 3, 1, 4), jnp.array([[0, 1, 2], [5, 6, 7]])
    y = apply_rotary(x, rotary_angles(positions, 4))
    for row in range(2):
        np.testing.assert_allclose(y[row], rotated(x[row : row + 1], positions[row], "half")[0], atol=1e-5)
    half = apply_rotary(x.astype(jnp.bfloat16), rotary_angles(positions + 1000, 4))
    assert half.dtype == jnp.bfloat16
    # bfloat16 angles would be wrong by whole radians at position 1000.
    exact = apply_rotary(x, rotary_angles(positions + 1000, 4))
    np.testing.assert_allclose(half.astype(jnp.float32), exact, atol=0.03)


def test_rotary_refuses_what_does_not_fit():
    x = draw(5, 2, 3, 1, 4)
    with pytest.raises(ValueError, match="head_dim is 5"):
        rotary_angles(jnp.arange(3), 5)
    with pytest.raises(ValueError, match="base"):
        rotary_angles(jnp.arange(3), 4, base=0.0)
    with pytest.raises(ValueError, match="head_dim is 3"):
        apply_rotary(x[..., :3], jnp.zeros((3, 1)))
    with pytest.raises(ValueError, match="angles have shape"):
        apply_rotary(x, rotary_angles(jnp.arange(4), 4))
    with pytest.raises(ValueError, match="did you mean 'interleaved'"):
        apply_rotary(x, rotary_angles(jnp.arange(3), 4), convention="interleave")


def test_slopes_follow_the_published_rule():
    np.testing.assert_allclose(alibi_slopes(8), [2.0**-i for i in range(1, 9)])
    np.testing.assert_allclose(alibi_slopes(1), [2.0**-8])
    # Six heads: the four slopes of 4, then the first and third of 8.
    np.testing.assert_allclose(alibi_slopes(6), [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3])
    for heads in range(1, 20):
        assert alibi_slopes(heads).shape == (heads,)
        assert len(np.unique(alibi_slopes(heads))) == heads
    with pytest.raises(ValueError, match="heads"):
        alibi_slopes(0)
