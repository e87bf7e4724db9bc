"""Paths by length: together the Jacobian, each length a sum over subsets of branches, forward as backward."""

import functools
import itertools
from math import comb

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblock.functional import layer_norm
from jaxblock.probes.paths import path_cotangents, path_spectrum, path_tangents
from jaxblock.probes.stack import Stack, exit_of, inner_product, run_stack, stack_of
from tests.small import built, config, tokens

SUBLAYERS = 6
LINEAR = tuple(lambda p, x, i=i: x + jnp.einsum("de,bte->btd", p[i], x) for i in range(2))
TANGENTS, COTANGENTS, SPECTRUM = jax.jit(path_tangents), jax.jit(path_cotangents), jax.jit(path_spectrum)


def linear(matrices_SDD):
    """Return the stack x + M_s x, two sublayers a block."""
    params = jnp.asarray(matrices_SDD, jnp.float32).reshape(-1, 2, *matrices_SDD.shape[1:])
    return Stack(LINEAR, params, jnp.ones((1, 1, matrices_SDD.shape[-1])))


def drawn(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape)


@functools.cache
def ran(name):
    """Return of a model: parts of a tangent and of a loss's gradient, jvp and vjp, by one program."""
    model, params = built(config(residual=name))

    @jax.jit
    def run(params):
        stack = stack_of(model, params, tokens(1, 4))
        tangent = jax.tree.map(lambda x: jnp.asarray(drawn(1, *x.shape), x.dtype), stack.stream)
        read = exit_of(model, params, tokens(1, 4))
        vectors = tangent, jax.grad(lambda x: jnp.sum(jnp.sin(read(x))))(run_stack(stack))
        through = lambda x: run_stack(Stack(stack.steps, stack.params, x))  # noqa: E731
        _, jvp = jax.jvp(through, (stack.stream,), (vectors[0],))
        _, pull = jax.vjp(through, stack.stream)
        parts = path_tangents(stack, vectors[0]), path_cotangents(stack, vectors[1])
        products = inner_product(parts[0], jax.tree.map(lambda c: jnp.stack([c] * 7), vectors[1]), axes=1)
        again = inner_product(parts[1], jax.tree.map(lambda t: jnp.stack([t] * 7), vectors[0]), axes=1)
        return parts, (jvp, pull(vectors[1])[0]), (products, again)

    return run(params)


@pytest.mark.parametrize(
    "name",
    [
        "pre_norm",
        *(
            pytest.param(name, marks=pytest.mark.full)
            for name in ("post_norm", "keel", "resi_dual", "hyper_connections")
        ),
    ],
)
def test_lengths_add_up_to_the_jacobian_forward_and_backward(name):
    parts, whole, _ = ran(name)
    for part, want in zip(parts, whole, strict=True):
        jax.tree.map(lambda p, w: np.testing.assert_allclose(p.sum(0), w, rtol=1e-4, atol=1e-4), part, want)
    tops = [float(jnp.abs(leaf[1:].sum(0)).max()) for leaf in jax.tree.leaves(parts)]
    assert max(tops) > 0.1  # control: without the direct path alone they do not add up


def test_a_stream_of_several_arrays_is_one_vector():
    """x + M y, y + N x: two arrays that feed each other are one stack on both, end to end."""
    m_L2DD, both = 0.4 * drawn(0, 2, 2, 3, 3), drawn(1, 2, 1, 1, 3)
    pair = lambda p, z: {"x": z["x"] + z["y"] @ p[0], "y": z["y"] + z["x"] @ p[1]}  # noqa: E731
    joined = np.zeros((2, 6, 6))
    joined[:, :3, 3:], joined[:, 3:, :3] = m_L2DD[:, 0].swapaxes(1, 2), m_L2DD[:, 1].swapaxes(1, 2)
    single = lambda x: jnp.asarray(x, jnp.float32)  # noqa: E731
    stream = {"x": single(both[0]), "y": single(both[1])}
    parts = TANGENTS(Stack((pair,), single(m_L2DD), stream), stream)
    want = TANGENTS(
        Stack(
            (lambda p, x: x + jnp.einsum("de,bte->btd", p, x),), single(joined), single(both.reshape(1, 1, 6))
        ),
        single(both.reshape(1, 1, 6)),
    )
    np.testing.assert_allclose(np.concatenate([parts["x"], parts["y"]], -1), want, rtol=1e-5, atol=1e-6)
    spectrum = SPECTRUM(parts)
    np.testing.assert_allclose(spectrum.share, SPECTRUM(want).share, rtol=1e-4, atol=1e-6)
    assert np.abs(spectrum.share - SPECTRUM(parts["x"]).share).max() > 1e-3  # control: half of it is not it


def test_length_by_length_backward_is_the_transpose_of_forward():
    forward, backward = ran("pre_norm")[2]
    np.testing.assert_allclose(forward, backward, rtol=1e-3, atol=1e-3)
    assert np.abs(forward - backward[::-1]).max() > 0.1  # control


def test_a_length_is_the_sum_over_all_subsets_of_branches():
    m_SDD, v_D = 0.4 * drawn(0, 4, 3, 3), drawn(1, 3)
    want = np.zeros((5, 3))
    for k in range(5):
        for chosen in itertools.combinations(range(4), k):
            want[k] += functools.reduce(lambda v, s: m_SDD[s] @ v, chosen, v_D)
    stack = linear(m_SDD)
    tangent = jnp.asarray(v_D, jnp.float32).reshape(1, 1, 3)
    parts = TANGENTS(stack, tangent)
    np.testing.assert_allclose(parts[:, 0, 0], want, rtol=1e-5, atol=1e-6)
    turned = TANGENTS(linear(m_SDD[::-1]), tangent)
    assert np.abs(turned - parts).max() > 1e-2  # control: branches do not commute
    np.testing.assert_array_equal(turned[0], parts[0])


@pytest.mark.parametrize("gain", [0.1, 1.0])
def test_branches_that_are_one_number_give_the_binomial(gain):
    stack = linear(np.broadcast_to(gain * np.eye(2), (SUBLAYERS, 2, 2)))
    want = np.array([comb(SUBLAYERS, k) * gain**k for k in range(SUBLAYERS + 1)])
    for parts in (TANGENTS(stack, stack.stream), COTANGENTS(stack, stack.stream)):
        found = SPECTRUM(parts)
        np.testing.assert_allclose(found.share, want / want.sum(), rtol=1e-4)
        np.testing.assert_allclose(found.norm, want * np.sqrt(2), rtol=1e-4)
        np.testing.assert_allclose(found.length, SUBLAYERS * gain / (1 + gain), rtol=1e-5)


def test_other_branches_do_not_give_it():
    # Control: rotations by a right angle commute as well, but lengths k and k + 2 point against each other.
    turn = np.array([[0.0, -0.5], [0.5, 0.0]])
    parts = TANGENTS(linear(np.broadcast_to(turn, (SUBLAYERS, 2, 2))), jnp.ones((1, 1, 2)))
    found = SPECTRUM(parts)
    gains = np.array([comb(SUBLAYERS, k) * 0.5**k for k in range(SUBLAYERS + 1)])
    np.testing.assert_allclose(found.norm, gains * np.sqrt(2), rtol=1e-5)
    np.testing.assert_allclose(found.share.sum(), 1.0, rtol=1e-5)
    assert np.min(found.share) < -0.1
    assert np.abs(found.share - gains / gains.sum()).max() > 0.1


def test_shares_of_a_model_add_up_to_one():
    for parts in ran("pre_norm")[0]:
        np.testing.assert_allclose(SPECTRUM(parts).share.sum(), 1.0, rtol=1e-5)
        assert 0 < SPECTRUM(parts).length < SUBLAYERS


def test_what_cancels_has_no_shares_and_what_is_not_a_number_stays_it():
    stack = linear(np.stack([-np.eye(2), np.zeros((2, 2))]))
    found = SPECTRUM(TANGENTS(stack, stack.stream))
    np.testing.assert_array_equal(found.share, np.zeros(3))
    assert np.isnan(path_spectrum(jnp.full((3, 1, 1, 2), jnp.nan)).length)


def test_many_cotangents_of_large_streams_still_add_up_to_the_vjp():
    """The size from which jaxlib 0.10 gets a norm's vmapped vjp wrong on CPU: 16 cotangents of [4, 64, 64]."""
    normed = lambda x: layer_norm(x, epsilon=1e-5)  # noqa: E731
    w_LDD = jnp.asarray(0.3 * drawn(0, 17, 64, 64) / 8, jnp.float32)
    stack = Stack((lambda w, x: x + normed(x) @ w,), w_LDD, jnp.asarray(drawn(1, 4, 64, 64), jnp.float32))
    cotangent = jnp.asarray(drawn(2, 4, 64, 64), jnp.float32)
    through = lambda x: run_stack(Stack(stack.steps, stack.params, x))  # noqa: E731
    want = jax.jit(lambda c: jax.vjp(through, stack.stream)[1](c)[0])(cotangent)
    parts = COTANGENTS(stack, cotangent)
    np.testing.assert_allclose(parts.sum(0), want, rtol=1e-4, atol=1e-4)
    _, jvp = jax.jit(lambda t: jax.jvp(through, (stack.stream,), (t,)))(cotangent)
    np.testing.assert_allclose(TANGENTS(stack, cotangent).sum(0), jvp, rtol=1e-4, atol=1e-4)
