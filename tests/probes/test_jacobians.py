"""Jacobians along depth against whole ones from a Python loop, and where they are known in closed form."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblock.invariants.branches import zero_branches
from jaxblock.probes.jacobians import (
    Estimated,
    frobenius_norm,
    gains,
    jacobian_growth,
    singular_values,
    spectral_norms,
    subspace_spectrum,
    token_shares,
    two_exponents,
)
from jaxblock.probes.stack import Stack, stack_of, whole_blocks
from tests.small import built, config, tokens

KEY, DEPTH, DIM = jax.random.key(0), 3, 8
LINEAR = tuple(lambda p, x, i=i: x + jnp.einsum("de,bte->btd", p[i], x) for i in range(2))


@functools.cache
def compiled(probe, **options):
    return jax.jit(functools.partial(probe, **options))


def linear(matrices_SDD):
    """Return the stack x + M_s x, two sublayers a block, on one token."""
    params = jnp.asarray(matrices_SDD, jnp.float32).reshape(-1, 2, *matrices_SDD.shape[1:])
    return Stack(LINEAR, params, jnp.ones((1, 1, matrices_SDD.shape[-1])))


def drawn(size=DIM, scale=0.3, sublayers=2 * DEPTH):
    return scale * np.random.default_rng(0).normal(size=(sublayers, size, size))


@functools.cache
def decoder_stack():
    """Return a small decoder's stack on one row of four tokens, 32 entries."""
    return stack_of(*built(config()), tokens(1, 4))


def still_stack():
    """Return the same with branches that write nothing; the same program."""
    params, layers = decoder_stack().params
    return dataclasses.replace(decoder_stack(), params=(zero_branches(params), layers))


@functools.cache
def whole_jacobians():
    """Return the Jacobian of every sublayer of the decoder, [S, 32, 32] float64, from a Python loop."""
    stack, found = decoder_stack(), []
    jacobians = [
        jax.jit(lambda p, x, step=step: (step(p, x), jax.jacrev(step, 1)(p, x))) for step in stack.steps
    ]
    x = stack.stream
    for block in range(DEPTH):
        own = jax.tree.map(lambda leaf, block=block: leaf[block], stack.params)
        for jacobian in jacobians:
            x, j = jacobian(own, x)
            found.append(np.asarray(j, np.float64).reshape(32, 32))
    return np.stack(found)


def within(estimate: Estimated, want, errors=4.0):
    """Whether an estimate lies within so many of its standard errors, give or take round-off."""
    far = np.abs(np.asarray(estimate.value) - want)
    return np.all(far <= errors * np.asarray(estimate.error) + 1e-5 * np.abs(want) + 1e-6)


def test_gains_are_squared_frobenius_norms_over_the_dimension():
    j_S, found = whole_jacobians(), compiled(gains, samples=200)(decoder_stack(), KEY)
    update_S = np.square(j_S - np.eye(32)).sum((1, 2)) / 32
    whole_S = np.square(j_S).sum((1, 2)) / 32
    assert within(found.update, update_S)
    assert within(found.sublayer, whole_S)
    assert np.all(found.update.error < 0.2 * found.update.value)
    assert not within(found.update, np.roll(update_S, 1))  # control: another order of the sublayers is seen
    assert not within(found.update, 1.5 * update_S)
    norm = frobenius_norm(found.update, size=32)
    assert within(norm, np.sqrt(32 * update_S))


def test_of_a_diagonal_map_one_draw_is_as_good_as_all():
    d_SD = np.random.default_rng(1).normal(size=(2 * DEPTH, DIM))
    diagonal = compiled(gains, samples=2)(linear(np.stack([np.diag(d) for d in d_SD])), KEY)
    np.testing.assert_allclose(diagonal.update.value, np.square(d_SD).mean(1), rtol=1e-5)
    np.testing.assert_allclose(diagonal.sublayer.value, np.square(1 + d_SD).mean(1), rtol=1e-5)
    np.testing.assert_allclose(diagonal.update.error, 0.0, atol=1e-6)
    assert np.all(compiled(gains, samples=2)(linear(drawn()), KEY).update.error > 1e-3)  # control


def test_what_does_nothing_has_no_distance_to_the_identity():
    still, moves = (compiled(gains, samples=200)(s, KEY) for s in (still_stack(), decoder_stack()))
    np.testing.assert_array_equal(frobenius_norm(still.update), np.zeros((2, 2 * DEPTH)))
    np.testing.assert_array_equal(still.sublayer.value, np.ones(2 * DEPTH))
    assert np.all(frobenius_norm(moves.update).value > 0.1)


def test_of_whole_blocks_the_gain_is_that_of_two_sublayers():
    d_SD = np.random.default_rng(1).normal(size=(2 * DEPTH, DIM))
    found = gains(whole_blocks(linear(np.stack([np.diag(d) for d in d_SD]))), KEY, samples=2)
    want_LD = (1 + d_SD[::2]) * (1 + d_SD[1::2])
    np.testing.assert_allclose(found.sublayer.value, np.square(want_LD).mean(1), rtol=1e-5)
    np.testing.assert_allclose(found.update.value, np.square(want_LD - 1).mean(1), rtol=1e-4)


def test_a_map_of_tokens_alone_crosses_as_much_as_it_is_off_its_diagonal():
    row, keep = np.array([0.5, -0.3, 0.2, 0.1]), np.array([0.7, 0.0, 0.0, 0.0])
    mixes = jnp.asarray([[np.roll(r, i) for i in range(4)] for r in (row, keep)], jnp.float32)
    stream = jnp.ones((2, 4, 3))
    stack = Stack((lambda m_TU, x: x + jnp.einsum("tu,bud->btd", m_TU, x),), mixes, stream)
    found = compiled(token_shares, samples=3)(stack, KEY)
    np.testing.assert_allclose(found.local.value, [0.25, 0.49], rtol=1e-5)
    np.testing.assert_allclose(found.cross.value, [0.14, 0.0], rtol=1e-5)
    np.testing.assert_allclose(found.share.value, [0.14 / 0.39, 0.0], rtol=1e-5)
    np.testing.assert_allclose(found.share.error, 0.0, atol=1e-6)
    with pytest.raises(ValueError, match=r"where all are \[B, T, \.\.\.\]"):
        token_shares(Stack(stack.steps, mixes, {"x": stream, "y": jnp.ones((3, 4))}), KEY)


def test_only_attention_carries_a_change_to_another_token():
    found = compiled(token_shares, samples=200)(decoder_stack(), KEY)
    np.testing.assert_array_equal(found.cross.value[1::2], np.zeros(DEPTH))
    assert np.all(found.share.value[::2] > 0.1)
    j_S = (whole_jacobians() - np.eye(32)).reshape(-1, 4, DIM, 4, DIM)
    squares_STU = np.square(j_S).sum((2, 4))
    local_S = np.trace(squares_STU, axis1=1, axis2=2)
    assert within(found.local, local_S / 32)
    assert within(found.share, 1 - local_S / squares_STU.sum((1, 2)))
    assert not within(found.local, squares_STU.sum((1, 2)) / 32)  # control


@pytest.mark.parametrize("start", [0, 3])
def test_growth_is_the_norm_of_the_product_so_far(start):
    found = compiled(jacobian_growth, samples=200, start=start)(decoder_stack(), KEY)
    product, want = np.eye(32), [1.0] * (start + 1)
    for j in whole_jacobians()[start:]:
        product = j @ product
        want.append(np.square(product).sum() / 32)
    assert within(found, np.array(want))
    np.testing.assert_array_equal(found.value[: start + 1], np.ones(start + 1))
    assert not within(found, np.array(want)[::-1])  # control


def test_spectral_norms_are_the_largest_singular_values_and_never_above():
    j_S = whole_jacobians()
    found = compiled(spectral_norms, iterations=60)(decoder_stack(), KEY)
    for estimate, maps in ((found.update, j_S - np.eye(32)), (found.sublayer, j_S)):
        sigma_S = np.linalg.svd(maps, compute_uv=False)[:, 0]
        np.testing.assert_allclose(estimate.value, sigma_S, rtol=0.01)
        assert np.all(estimate.value <= sigma_S * (1 + 1e-5))


def test_an_iteration_that_is_not_done_says_so_and_of_nothing_it_is_nothing():
    spectral = compiled(spectral_norms, iterations=1)
    sigma_S = np.linalg.svd(drawn(), compute_uv=False)[:, 0]
    one = spectral(linear(drawn()), KEY).update
    assert np.all(sigma_S - one.value > 0.01)
    assert np.all(one.error > 0.1)
    zeros = spectral(linear(0 * drawn()), KEY)
    np.testing.assert_array_equal(zeros.update, np.zeros((2, 6)))
    np.testing.assert_allclose(zeros.sublayer, [np.ones(6), np.zeros(6)], atol=1e-6)


def test_all_singular_values():
    j_S, found = whole_jacobians(), jax.jit(singular_values)(decoder_stack())
    np.testing.assert_allclose(found.sublayer, np.linalg.svd(j_S, compute_uv=False), atol=2e-5)
    np.testing.assert_allclose(found.update, np.linalg.svd(j_S - np.eye(32), compute_uv=False), atol=2e-5)
    assert np.abs(found.update - found.sublayer).max() > 0.5  # control: the two are told apart
    with pytest.raises(ValueError, match="the stream has 2049 entries"):
        singular_values(Stack(LINEAR, jnp.zeros((1, 2, 1, 1)), jnp.ones((1, 2049, 1))))


def test_on_all_directions_the_spectrum_is_that_of_the_product():
    m_SDD = drawn()
    found = compiled(subspace_spectrum, directions=DIM)(linear(m_SDD), KEY)
    product = functools.reduce(lambda p, m: (np.eye(DIM) + m) @ p, m_SDD, np.eye(DIM))
    want = np.log(np.linalg.svd(product, compute_uv=False))
    np.testing.assert_allclose(found.log_singular, want, atol=1e-3)
    np.testing.assert_allclose(np.sum(found.exponents) * 6, want.sum(), atol=1e-4)  # one volume
    assert np.abs(found.exponents * 6 - want).max() > 1e-2  # control: but other numbers
    some = compiled(subspace_spectrum, directions=3)(linear(m_SDD), KEY)
    assert np.all(some.log_singular <= found.log_singular[:3] + 1e-4)  # a part of the space stretches less
    assert np.all(some.log_singular >= found.log_singular[-3:] - 1e-4)


def test_growth_beyond_float32_is_still_measured():
    scaled = linear(np.broadcast_to((1e8 - 1) * np.eye(DIM), (6, DIM, DIM)))
    found = compiled(subspace_spectrum, directions=DIM)(scaled, KEY)
    np.testing.assert_allclose(found.log_singular, 6 * np.log(1e8), rtol=1e-4)
    np.testing.assert_allclose(found.exponents, np.log(1e8), rtol=1e-4)
    with np.errstate(over="ignore"):
        assert np.isinf(np.float32(1e8) ** 6)  # control: the product itself is not


def test_a_token_alone():
    product = functools.reduce(lambda p, j: j @ p, whole_jacobians(), np.eye(32))
    spectrum = compiled(subspace_spectrum, directions=DIM, token=1)
    sigma_4D = np.linalg.svd(product.reshape(32, 4, DIM).swapaxes(0, 1), compute_uv=False)
    moves, still = (spectrum(s, KEY) for s in (decoder_stack(), still_stack()))
    np.testing.assert_allclose(np.exp(moves.log_singular), sigma_4D[1], rtol=1e-2, atol=1e-4)
    assert np.abs(np.exp(moves.log_singular) - sigma_4D[2]).max() > 0.1  # control: another token's are others
    np.testing.assert_allclose(still.log_singular, 0.0, atol=1e-5)  # branches at 0: an isometry
    np.testing.assert_allclose(still.exponents, 0.0, atol=1e-6)
    with pytest.raises(ValueError, match="directions is 9"):
        subspace_spectrum(decoder_stack(), KEY, directions=DIM + 1, token=0)
    with pytest.raises(ValueError, match="token is 4"):
        subspace_spectrum(decoder_stack(), KEY, directions=1, token=4)


def test_two_exponents_are_the_planted_rates():
    s = np.arange(12)
    found = two_exponents(np.cos(0.5 * np.exp(-0.2 * s)), 3.0 * np.exp(-0.1 * s))
    np.testing.assert_allclose(found, [[-0.2, 0.0], [0.1, 0.0]], atol=1e-9)
    noise = np.random.default_rng(0).normal(scale=0.1, size=12)
    rough = two_exponents(np.cos(0.5 * np.exp(-0.2 * s + noise)), 3.0 * np.exp(-0.1 * s))
    assert 0.0 < rough.angle.error < 0.05
    assert abs(rough.angle.value + 0.2) < 4 * rough.angle.error


@pytest.mark.parametrize(
    ("similarity", "gradient", "says"),
    [
        ([0.1, 0.2], [1.0, 1.0, 1.0], "3 places at least"),
        ([0.1, 0.2, 1.0], [1.0, 1.0, 1.0], "have no angle"),
        ([0.1, 0.2, 0.3], [1.0, 0.0, 1.0], "has no logarithm"),
        ([0.1, 0.2, np.nan], [1.0, 1.0, 1.0], "have no angle"),
    ],
)
def test_profiles_without_a_rate_are_refused(similarity, gradient, says):
    with pytest.raises(ValueError, match=says):
        two_exponents(np.array(similarity), np.array(gradient))


def test_one_draw_has_no_error_and_is_refused():
    for probe in (gains, token_shares, jacobian_growth):
        with pytest.raises(ValueError, match="samples is 1"):
            probe(linear(drawn()), KEY, samples=1)
    with pytest.raises(ValueError, match="start is 6"):
        jacobian_growth(linear(drawn()), KEY, start=6)
