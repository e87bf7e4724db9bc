"""Similarity of streams against numpy in float64, and under the maps that each measure does and does not see."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblock.probes.similarity import (
    angular_distances,
    cka_matrix,
    influences,
    linear_cka,
    sample_places,
    token_states,
)
from jaxblock.probes.stack import Stack, scan_steps, stack_of, whole_blocks
from tests.small import built, config, tokens

TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


def drawn(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape)


def single(x):
    return jnp.asarray(x, jnp.float32)


def cosine(a, b):
    return np.sum(a * b, -1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)


def cka(x_KD, y_KE):
    """Return the linear CKA from the centred Gram matrices of tokens, in float64: another formula of the same."""
    x, y = (z - z.mean(0) for z in (x_KD, y_KE))
    gram = lambda a, b: np.sum((a @ a.T) * (b @ b.T))  # noqa: E731
    return gram(x, y) / np.sqrt(gram(x, x) * gram(y, y))


def streams(stack):
    """Return every stream of a stack, [S + 1, B, T, D] float64."""
    last, before_S = scan_steps(stack, lambda f, x, _: (f(x), x), stack.stream)
    return np.concatenate([before_S, last[None]]).astype(np.float64)


def test_influence_is_one_less_the_mean_cosine_of_real_tokens():
    stack = stack_of(*built(config()), tokens())
    valid = np.arange(6)[None] < np.array([[6], [2]])
    found, blocks, all_of_it = jax.jit(
        lambda s: (
            influences(s, valid_BT=jnp.asarray(valid)),
            influences(whole_blocks(s), valid_BT=jnp.asarray(valid)),
            influences(s),
        )
    )(stack)
    x_SBTD = streams(stack)
    np.testing.assert_allclose(found, 1 - cosine(x_SBTD[:-1], x_SBTD[1:])[:, valid].mean(1), **TOLERANCE)
    np.testing.assert_allclose(blocks, 1 - cosine(x_SBTD[:-1:2], x_SBTD[2::2])[:, valid].mean(1), **TOLERANCE)
    np.testing.assert_allclose(all_of_it, 1 - cosine(x_SBTD[:-1], x_SBTD[1:]).mean((1, 2)), **TOLERANCE)
    assert np.abs(all_of_it - found).max() > 1e-3  # control: padding would count


def test_a_small_influence_keeps_its_digits():
    turn = 1e-3
    params = single(np.broadcast_to(turn * np.array([[0.0, 1.0], [-1.0, 0.0]]), (2, 2, 2)))
    stack = Stack((lambda p, x: x + x @ p,), params, single(drawn(0, 2, 3, 2)))
    np.testing.assert_allclose(influences(stack), 1 - 1 / np.sqrt(1 + turn**2), rtol=1e-3)
    x, y = (z.astype(np.float32) for z in streams(stack)[:2])
    assert (
        abs(np.mean(1 - cosine(x, y)) / (1 - 1 / np.sqrt(1 + turn**2)) - 1) > 1e-3
    )  # control: the plain formula


def test_a_stream_of_several_arrays_has_no_similarity():
    model_config = config(residual="resi_dual")
    stack = stack_of(*built(model_config), tokens())
    assert influences(stack) is None
    assert token_states(stack, np.array([0])) is None


def test_states_are_those_of_the_chosen_tokens():
    stack, valid = stack_of(*built(config()), tokens()), np.arange(6)[None] < np.array([[6], [2]])
    places = sample_places(valid, 5, seed=3)
    assert len(set(places)) == 5
    assert valid.reshape(-1)[places].all()
    states = token_states(stack, places)
    np.testing.assert_allclose(states, streams(stack).reshape(7, 12, 8)[:, places], **TOLERANCE)
    np.testing.assert_array_equal(sample_places(valid, 8, seed=0), np.flatnonzero(valid))
    with pytest.raises(ValueError, match="count is 9; there are 8 real tokens to take"):
        sample_places(valid, 9, seed=0)


def test_angular_distances_are_arc_cosines_over_pi():
    x = drawn(0, 5, 7, 4)
    want = np.arccos(np.clip(cosine(x[:, None], x[None]), -1, 1)).mean(-1) / np.pi
    np.testing.assert_allclose(angular_distances(single(x)), want, **TOLERANCE)
    turned = np.array([[[1.0, 0.0]], [[np.cos(1e-4), np.sin(1e-4)]], [[-2.0, 0.0]], [[0.0, 3.0]]])
    found = angular_distances(single(turned))
    np.testing.assert_allclose(found[0, 1:], [1e-4 / np.pi, 1.0, 0.5], rtol=1e-4)
    np.testing.assert_array_equal(np.diag(found), np.zeros(4))
    # Control: an arc cosine in float32 does not see so small an angle.
    assert np.arccos(np.float32(np.cos(1e-4))) == 0.0


def test_cka_sees_no_rotation_scale_or_shift_but_other_linear_maps():
    x, y = drawn(0, 20, 5), drawn(1, 20, 6)
    rotation = np.linalg.qr(drawn(2, 5, 5))[0]
    compare = jax.jit(linear_cka)
    want = float(compare(single(x), single(y)))
    np.testing.assert_allclose(compare(single(y), single(x)), want, rtol=1e-5)
    for same in (x @ rotation, 7.0 * x, x + drawn(3, 1, 5)):
        np.testing.assert_allclose(compare(single(same), single(y)), want, rtol=1e-4)
        np.testing.assert_allclose(compare(single(same), single(x)), 1.0, rtol=1e-4)
    stretched = x @ np.diag([10.0, 1.0, 1.0, 1.0, 0.1])
    assert abs(float(compare(single(stretched), single(y))) - want) > 0.02
    assert float(compare(single(stretched), single(x))) < 0.9
    assert float(compare(single(np.ones((20, 5))), single(x))) == 0.0  # what does not vary is like nothing


def test_cka_of_two_stacks_of_other_depth_and_width():
    x, y = drawn(0, 3, 9, 4), drawn(1, 2, 9, 5)
    found = jax.jit(cka_matrix)(single(x), single(y))
    np.testing.assert_allclose(found, [[cka(a, b) for b in y] for a in x], rtol=1e-4)
    assert found.shape == (3, 2)
    assert np.std(found) > 0.01  # control: places differ, so another order would show
    few = drawn(2, 1, 3, 4), drawn(3, 1, 3, 5)  # fewer tokens than either is wide
    np.testing.assert_allclose(cka_matrix(*map(single, few))[0, 0], cka(few[0][0], few[1][0]), rtol=1e-4)
