"""Norms against float64 numpy, their invariances, their dtypes, and constant rows (B29, B32, B34)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxblock.functional.norms import layer_norm, rms_norm

SHAPES = [(5,), (1, 2), (3, 9), (2, 3, 4), (2, 1, 2, 7)]
jit_layer_norm = jax.jit(layer_norm)
jit_rms_norm = jax.jit(rms_norm)


def reference_layer_norm(x, scale=1.0, bias=0.0, epsilon=1e-5):
    x = np.asarray(x, np.float64)
    mean = x.mean(-1, keepdims=True)
    return scale * (x - mean) / np.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + epsilon) + bias


def reference_rms_norm(x, scale=1.0, epsilon=1e-6):
    x = np.asarray(x, np.float64)
    return scale * x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon)


def draw(seed, shape, dtype=jnp.float32, spread=1.0):
    return jnp.asarray(spread * np.random.default_rng(seed).normal(size=shape), dtype)


@settings(deadline=None, max_examples=15)
@given(shape=st.sampled_from(SHAPES), seed=st.integers(0, 99), spread=st.sampled_from([1e-2, 1, 1e3]))
def test_norms_equal_the_float64_formula_at_any_rank(shape, seed, spread):
    rng = np.random.default_rng(seed)
    x = np.float32(spread * (1 + rng.normal(size=shape)))
    scale, bias = np.float32(rng.normal(size=(2, shape[-1])))
    want = reference_layer_norm(x, scale, bias)
    np.testing.assert_allclose(jit_layer_norm(x, scale, bias), want, atol=2e-5)
    np.testing.assert_allclose(jit_rms_norm(x, scale), reference_rms_norm(x, scale), atol=1e-5)


def test_without_parameters_there_is_no_affine_and_either_may_come_alone():
    x, v = draw(0, (2, 5)), draw(1, (5,))
    np.testing.assert_array_equal(layer_norm(x), layer_norm(x, jnp.ones(5), jnp.zeros(5)))
    np.testing.assert_array_equal(rms_norm(x), rms_norm(x, jnp.ones(5)))
    np.testing.assert_allclose(layer_norm(x, None, v), reference_layer_norm(x, bias=np.asarray(v)), atol=1e-5)
    np.testing.assert_allclose(layer_norm(x, v), reference_layer_norm(x, np.asarray(v)), atol=1e-5)


def test_layer_norm_ignores_shift_and_scale_rms_norm_only_scale():
    x = draw(0, (3, 8))
    np.testing.assert_allclose(layer_norm(4 * x + 3, epsilon=0.0), layer_norm(x, epsilon=0.0), atol=1e-5)
    np.testing.assert_allclose(rms_norm(4 * x, epsilon=0.0), rms_norm(x, epsilon=0.0), atol=1e-5)
    # Control: RMS norm sees the shift, and a visible epsilon sees the scale.
    assert np.abs(rms_norm(x + 3) - rms_norm(x)).max() > 0.1
    assert np.abs(layer_norm(4 * x, epsilon=1.0) - layer_norm(x, epsilon=1.0)).max() > 0.1


def test_epsilon_is_inside_the_root():
    x = jnp.array([[3.0, -3.0]])
    np.testing.assert_allclose(layer_norm(x, epsilon=16.0), [[0.6, -0.6]], rtol=1e-6)
    np.testing.assert_allclose(rms_norm(x, epsilon=16.0), [[0.6, -0.6]], rtol=1e-6)


def test_positions_are_normalized_apart():
    x = draw(0, (2, 3, 4))
    changed = x.at[0, 1].set(1e4)
    for norm in (layer_norm, rms_norm):
        same = np.ones((2, 3), bool)
        same[0, 1] = False
        before, after = np.asarray(norm(x)), np.asarray(norm(changed))
        np.testing.assert_array_equal(after[same], before[same])
        assert np.abs(after[0, 1] - before[0, 1]).max() > 0.1


@pytest.mark.parametrize("width", [16, 100, 1000])
def test_b29_a_constant_row_stays_finite_and_near_zero(width):
    x = np.full((1, width), 1000.1, np.float32)
    y, pullback = jax.jit(lambda x: jax.vjp(layer_norm, x))(x)
    assert np.abs(y).max() <= 0.05
    assert np.isfinite(jax.jit(pullback)(np.eye(1, width, dtype=np.float32))[0]).all()
    if width == 16:
        assert np.abs(layer_norm(jnp.asarray(x))).max() <= 0.05


def test_b29_control_the_one_pass_variance_breaks_a_nearly_constant_row():
    x = jnp.full((1, 16), 1000.1).at[0, 0].add(0.01)
    one_pass = jnp.mean(x * x, -1) - jnp.mean(x, -1) ** 2
    true = np.asarray(x, np.float64).var(-1)
    assert np.abs(one_pass - true).max() > 10 * true.max()
    np.testing.assert_allclose(layer_norm(x), reference_layer_norm(x), atol=1e-2)


def test_gradient_equals_the_float64_finite_difference():
    with jax.enable_x64(True):
        x, v, weight = (jnp.asarray(np.random.default_rng(i).normal(size=5)) for i in range(3))
        for norm in (layer_norm, rms_norm):
            for argument in (0, 1):
                value = jax.jit(lambda *a, norm=norm: jnp.vdot(weight, norm(*a)))
                gradient = jax.grad(value, argument)(x, v)
                for i in range(5):
                    step = 1e-5 * jnp.eye(5)[i]
                    up, down = [x, v], [x, v]
                    up[argument], down[argument] = up[argument] + step, down[argument] - step
                    np.testing.assert_allclose(gradient[i], (value(*up) - value(*down)) / 2e-5, atol=1e-8)


def test_float64_input_keeps_float64_statistics():
    with jax.enable_x64(True):
        x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 7)))
        assert layer_norm(x).dtype == rms_norm(x).dtype == jnp.float64
        np.testing.assert_allclose(layer_norm(x), reference_layer_norm(x), atol=1e-13)
        np.testing.assert_allclose(rms_norm(x), reference_rms_norm(x), atol=1e-13)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_b32_b34_narrow_input_is_the_float32_result_cast_once(dtype):
    x, scale, bias = draw(0, (4, 33), dtype), draw(1, (33,)), draw(2, (33,))
    wide = x.astype(jnp.float32)
    got, want = layer_norm(x, scale, bias), layer_norm(wide, scale, bias).astype(dtype)
    assert got.dtype == dtype
    np.testing.assert_array_equal(got, want)
    got, want = rms_norm(x, scale), rms_norm(wide, scale).astype(dtype)
    assert got.dtype == dtype
    np.testing.assert_array_equal(got, want)
    # Control: the other order, cast before the scale, is another number.
    cast_first = rms_norm(wide).astype(dtype) * scale.astype(dtype)[None]
    assert (np.asarray(got) != np.asarray(cast_first)).any()


def test_float16_squares_do_not_overflow():
    x = jnp.array([[6e4, -6e4, 3e4, 0.0]], jnp.float16)
    np.testing.assert_allclose(layer_norm(x), reference_layer_norm(x), atol=2e-3)
    np.testing.assert_allclose(rms_norm(x), reference_rms_norm(x), atol=2e-3)


def test_jit_and_vmap_equal_eager():
    x, v = draw(0, (3, 2, 5)), draw(1, (5,))
    for norm, jitted in ((layer_norm, jit_layer_norm), (rms_norm, jit_rms_norm)):
        np.testing.assert_allclose(jitted(x, v), norm(x, v), atol=1e-6)
        np.testing.assert_allclose(jax.vmap(norm, (0, None))(x, v), norm(x, v), atol=1e-6)


@pytest.mark.parametrize("norm", [layer_norm, rms_norm])
def test_wrong_parameters_are_refused(norm):
    x = jnp.ones((2, 4))
    for scale in (jnp.ones(3), jnp.ones((1, 4)), jnp.ones(1), jnp.ones(())):
        with pytest.raises(AssertionError):
            norm(x, scale)
    with pytest.raises(AssertionError):
        norm(jnp.ones((2, 4), jnp.int32))


def test_seed_001_section_5_worked_example():
    np.testing.assert_allclose(layer_norm(jnp.array([1.0, 0.5]), epsilon=0.0), [1.0, -1.0], atol=1e-6)
