"""Claims of seed 000 on layer norm, its two placements and their Jacobians: rows S0-14 to S0-25."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxblock.functional import layer_norm, residual, rms_norm
from tests.claims.claims import (
    WIDTH,
    attend,
    batch_norm,
    block,
    draw,
    feed,
    layer,
    readers,
    square_jacobian,
    stream,
    zeroed,
)
from tests.small import config

PRE, POST = config(), config(residual="post_norm")
SEEDS = st.integers(0, 2**32 - 1)
few = settings(max_examples=6, deadline=None)


def plain_norms(params):
    """Return a block's parameters with every norm's scale at 1 and bias at 0."""

    def leaf(path, x):
        norm = "connection" in path[0].key
        return jnp.asarray(np.full_like(x, path[-1].key == "scale")) if norm else x

    return jax.tree_util.tree_map_with_path(leaf, params)


def float64_norm(x, scale=1.0, bias=0.0, *, epsilon=1e-5):
    x = np.asarray(x, np.float64)
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + epsilon) * scale + bias


# Layer norm ----------------------------------------------------------------------------------------------------------


@given(SEEDS)
@few
def test_s0_14_layer_norm_reads_its_own_token_only(seed):
    x_TD = stream(seed=seed)[0]
    np.testing.assert_array_equal(readers(layer_norm, x_TD), np.eye(6, dtype=bool))
    assert np.all(readers(whole_row_norm, x_TD))


@jax.jit
def whole_row_norm(x_BTD):
    """Normalize over positions and features together: the control."""
    return layer_norm(x_BTD.reshape(x_BTD.shape[0], -1)).reshape(x_BTD.shape)


@pytest.mark.parametrize("epsilon", [0.0, 1e-6, 1e-5, 1e-3])
def test_s0_15_epsilon_is_inside_the_root(epsilon):
    x_BTD = 0.05 * stream()
    y_BTD = np.asarray(layer_norm(x_BTD, epsilon=epsilon), np.float64)
    variance_BT = np.asarray(x_BTD, np.float64).var(-1)
    np.testing.assert_allclose(y_BTD, float64_norm(x_BTD, epsilon=epsilon), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(y_BTD.mean(-1), 0, atol=1e-6)
    np.testing.assert_allclose(y_BTD.var(-1), variance_BT / (variance_BT + epsilon), rtol=1e-5)
    outside_BT = (np.sqrt(variance_BT) / (np.sqrt(variance_BT) + epsilon)) ** 2
    assert np.allclose(y_BTD.var(-1), 1, rtol=1e-5) == (epsilon == 0)
    assert np.allclose(y_BTD.var(-1), outside_BT, rtol=1e-5) == (epsilon == 0)


def test_s0_16_scale_and_bias_have_one_entry_per_feature():
    x_BTD, two, three = stream(), jnp.full(WIDTH, 2.0), jnp.full(WIDTH, 3.0)
    plain = np.asarray(layer_norm(x_BTD))
    np.testing.assert_allclose(layer_norm(x_BTD, two, three), 2 * plain + 3, rtol=1e-6, atol=1e-6)
    moved = np.asarray(layer_norm(x_BTD, two.at[5].set(7.0), three)) != np.asarray(
        layer_norm(x_BTD, two, three)
    )
    assert np.argwhere(moved.any((0, 1))).tolist() == [[5]]
    for wrong in (jnp.ones(1), jnp.ones(6), jnp.ones((6, WIDTH))):
        with pytest.raises(AssertionError, match="shape"):
            layer_norm(x_BTD, wrong)


@given(SEEDS)
@few
def test_s0_17_batch_norm_depends_on_the_batch_and_layer_norm_does_not(seed):
    many_BTD = draw(32, 6, WIDTH, seed=seed)
    one_BTD = many_BTD[:1]
    np.testing.assert_array_equal(layer_norm(many_BTD)[:1], layer_norm(one_BTD))
    assert not np.allclose(batch_norm(many_BTD)[:1], batch_norm(one_BTD), atol=1e-2)


# Post-norm and pre-norm ----------------------------------------------------------------------------------------------

SUBLAYERS = (("attention", "resid_pre", "resid_mid"), ("feed_forward", "resid_mid", "resid_post"))


def sublayers_of(model_config):
    """Yield (what the branch read, what it wrote, stream before, stream after, its norm) of both sublayers."""
    params, x_BTD = layer(model_config), stream()
    kept = jax.tree.map(np.asarray, block(model_config)(params, x_BTD)[1])
    for name, before, after in SUBLAYERS:
        parts = params[f"{name}_connection"]["norm"]
        norm = functools.partial(
            float64_norm, scale=np.float64(parts["scale"]), bias=np.float64(parts["bias"])
        )
        yield kept[f"{name}_in"], kept[f"{name}_out"], kept[before], kept[after], norm


def is_post(read, wrote, before, after, norm) -> bool:
    return np.allclose(read, before, atol=1e-5) and np.allclose(after, norm(before + wrote), atol=1e-5)


def is_pre(read, wrote, before, after, norm) -> bool:
    return np.allclose(read, norm(before), atol=1e-5) and np.allclose(after, before + wrote, atol=1e-5)


def test_s0_18_post_norm_is_the_norm_of_the_sum():
    assert all(is_post(*sublayer) for sublayer in sublayers_of(POST))
    assert not any(is_post(*sublayer) for sublayer in sublayers_of(PRE))


def test_s0_19_pre_norm_is_the_stream_plus_the_branch_of_the_norm():
    assert all(is_pre(*sublayer) for sublayer in sublayers_of(PRE))
    assert not any(is_pre(*sublayer) for sublayer in sublayers_of(POST))


@given(SEEDS)
@few
def test_s0_20_the_placement_changes_the_function(seed):
    """The same parameters in both: only post-norm's output has mean 0 and variance 1 per token."""
    params, x_BTD = plain_norms(layer(PRE)), stream(seed=seed)
    pre, post = (np.asarray(block(c)(params, x_BTD)[0], np.float64) for c in (PRE, POST))
    assert not np.allclose(pre, post, atol=0.1)

    def normal(y_BTD):
        return np.abs(y_BTD.mean(-1)) < 1e-5, np.abs(y_BTD.var(-1) - 1) < 1e-3

    assert np.all(normal(post))
    assert not np.any(np.logical_and(*normal(pre)))


def test_s0_21_pre_norm_keeps_an_identity_path_and_post_norm_has_none():
    silent, x_BTD = plain_norms(zeroed(layer(PRE), "attention", "feed_forward")), stream()
    np.testing.assert_array_equal(block(PRE)(silent, x_BTD)[0], x_BTD)
    after = np.asarray(block(POST)(silent, x_BTD)[0])
    np.testing.assert_allclose(after, float64_norm(float64_norm(x_BTD)), atol=1e-5)
    assert not np.allclose(after, x_BTD, atol=0.1)


# Jacobians -----------------------------------------------------------------------------------------------------------


@functools.cache
def jacobians():
    """Return I + J_f at several points, and both placements, of an attention and of a feed-forward sublayer."""
    params, x_BTD = layer(PRE), stream()[:1, :2]

    @jax.jit
    def found(x):
        results = []
        for branch in (functools.partial(attend, params), functools.partial(feed, params)):
            results.append(
                {
                    "pre": square_jacobian(lambda x, f=branch: residual.pre_norm(x, f, layer_norm), x),
                    "post": square_jacobian(lambda x, f=branch: residual.post_norm(x, f, layer_norm), x),
                    "branch of norm": square_jacobian(lambda x, f=branch: f(layer_norm(x)), x),
                    "branch": square_jacobian(branch, x),
                    "norm at the sum": square_jacobian(layer_norm, x + branch(x)),
                }
            )
        return results

    return jax.tree.map(np.asarray, found(x_BTD)), np.eye(x_BTD.size)


def test_s0_23_pre_norm_jacobian_is_the_identity_plus_the_branch():
    found, eye = jacobians()
    for sublayer in found:
        np.testing.assert_allclose(sublayer["pre"] - eye, sublayer["branch of norm"], atol=1e-5)
        assert not np.allclose(sublayer["post"] - eye, sublayer["branch of norm"], atol=1e-2)


def test_s0_24_post_norm_jacobian_is_multiplied_by_the_norm():
    found, eye = jacobians()
    for sublayer in found:
        want = sublayer["norm at the sum"] @ (eye + sublayer["branch"])
        np.testing.assert_allclose(sublayer["post"], want, atol=1e-5)
        assert not np.allclose(sublayer["post"], eye + sublayer["branch"], atol=1e-2)


@pytest.mark.parametrize(("norm", "lost"), [(layer_norm, 2), (rms_norm, 1)])
def test_s0_25_the_norms_jacobian_is_not_the_identity(norm, lost):
    """(1 / sigma)(I - 1 1^T / D - n n^T / D), n the normalized token; without the mean's term for RMSNorm."""
    jacobian = jax.jit(jax.jacfwd(functools.partial(norm, epsilon=0.0)))
    singular = []
    for size in (1.0, 4.0):
        x_D = size * (draw(WIDTH, seed=3) + 1)
        token = np.asarray(x_D, np.float64)
        centred = token - token.mean() * (norm is layer_norm)
        sigma = np.sqrt((centred**2).mean())
        outer = np.outer(centred, centred) / sigma**2 + (norm is layer_norm)
        want = (np.eye(WIDTH) - outer / WIDTH) / sigma
        got = np.asarray(jacobian(x_D))
        np.testing.assert_allclose(got, want, atol=1e-5)
        values = np.linalg.svd(got, compute_uv=False)
        assert (values > 1e-4).sum() == WIDTH - lost
        assert values[0] == pytest.approx(1 / sigma, rel=1e-4)
        assert not np.allclose(got, np.eye(WIDTH), atol=0.1)
        singular.append(values[0])
    assert singular[0] == pytest.approx(4 * singular[1], rel=1e-4)
