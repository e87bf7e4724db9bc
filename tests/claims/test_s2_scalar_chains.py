"""Seed 002, the depth sliders: our residual rules on branches f(h) = s h, their values and gradients over depth."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblock.functional.norms import rms_norm
from jaxblock.functional.residual import no_residual, post_norm, pre_norm
from tests.claims.depth import chain, scaled, slope

exact_norm = functools.partial(rms_norm, epsilon=0.0)


def repeated(rule, s, depth, *norms):
    """Return `depth` sublayers of f(h) = s h."""
    return chain(rule, [scaled(s)] * depth, *norms)


def matrices(depth, width, *, seed, scale=0.4):
    return list(np.random.default_rng(seed).normal(scale=scale, size=(depth, width, width)))


def linear(matrix):
    return lambda h: jnp.asarray(matrix, jnp.float32) @ h


@pytest.mark.parametrize(("factor", "want"), [(1.4, 3214.2), (1.0, 1.0), (0.6, 4.738e-6)])
def test_s2_04_24_sublayers_at_a_constant_factor(factor, want):
    """Nothing pulls the size back; a norm in each sublayer does, whatever the factor."""
    x = jnp.asarray([1.0, -1.0, 1.0, -1.0])
    after = repeated(no_residual, factor, 24)(x)
    np.testing.assert_allclose(after, want * x, rtol=1e-4)
    held = repeated(post_norm, factor, 24, exact_norm)(x)
    np.testing.assert_allclose(held, x, rtol=1e-6)
    assert np.allclose(after, held, rtol=1e-3) == (factor == 1.0)


@pytest.mark.parametrize("x", [-1.5, 0.0, 0.3, 2.0])
@pytest.mark.parametrize(("f", "df"), [(jnp.sin, math.cos), (jnp.tanh, lambda x: 1 - math.tanh(x) ** 2)])
def test_s2_13_the_derivative_of_a_residual_block_is_f_prime_plus_one(f, df, x):
    assert slope(chain(pre_norm, [f]), x) == pytest.approx(df(x) + 1, abs=1e-6)
    # Control: without the skip the 1 is missing, exactly.
    assert slope(chain(no_residual, [f]), x) == pytest.approx(df(x), abs=1e-6)


@pytest.mark.parametrize(
    ("s", "at_12", "at_24"),
    [(0.5, 2.4414e-4, 5.9605e-8), (0.8, 0.068719, 0.0047224), (0.9, 0.28243, 0.079766)],
)
def test_s2_14_the_bare_chain_loses_its_gradient_and_the_residual_chain_does_not(s, at_12, at_24):
    bare = [slope(repeated(no_residual, s, depth)) for depth in (1, 6, 12, 24)]
    skip = [slope(repeated(pre_norm, s, depth)) for depth in (1, 6, 12, 24)]
    assert bare[2:] == pytest.approx([at_12, at_24], rel=1e-4)
    assert skip == pytest.approx([(1 + s) ** depth for depth in (1, 6, 12, 24)], rel=1e-4)
    assert bare[1] < 0.03 * skip[1]  # the split is plain at 6 sublayers, not only at 12
    assert min(skip) >= 1 > max(bare)


def test_s2_14b_the_residual_chain_is_not_whole_but_grows():
    """(!) The skip removes vanishing, not explosion: (1 + s)^L, not 1."""
    assert slope(repeated(pre_norm, 0.5, 12)) == pytest.approx(129.746, rel=1e-4)
    assert slope(repeated(pre_norm, 0.0, 12)) == 1.0  # whole only where the branches do nothing
    # Control: it can even vanish, where the branches undo the skip.
    assert slope(repeated(pre_norm, -0.9, 12)) == pytest.approx(1e-12, rel=1e-4)


def test_s2_14b_branches_of_random_sign_grow_as_the_root_of_one_plus_s_squared():
    """Over all 2^12 choices of sign the mean gradient is 1 and its root mean square (1 + s^2)^(L / 2)."""
    signs = jnp.asarray(list(itertools.product((-1.0, 1.0), repeat=12)))

    def gradient(rule):
        one = jax.grad(lambda x, s: chain(rule, map(scaled, s))(x))
        return jax.jit(jax.vmap(one, (None, 0)))(1.0, 0.5 * signs)

    skip, bare = gradient(pre_norm), gradient(no_residual)
    assert float(skip.mean()) == pytest.approx(1.0, rel=1e-4)
    assert float(jnp.sqrt(jnp.square(skip).mean())) == pytest.approx(1.25**6, rel=1e-4)
    np.testing.assert_allclose(jnp.abs(bare), 0.5**12, rtol=1e-4)


def test_s2_15_without_the_skip_the_first_block_gets_exactly_the_bare_chains_gradient():
    weights = matrices(6, 4, seed=0)
    x, cotangent = jnp.asarray([0.3, -1.0, 0.7, 2.0]), jnp.asarray([1.0, 2.0, -1.0, 0.5])

    def arriving(rule):
        return np.asarray(jax.vjp(chain(rule, map(linear, weights)), x)[1](cotangent)[0])

    bare = functools.reduce(lambda d, a: a.T @ d, weights[::-1], np.asarray(cotangent, np.float64))
    np.testing.assert_allclose(arriving(no_residual), bare, rtol=1e-5, atol=1e-6)
    # Control: the skip is another path, not a brighter one: its gradient is no multiple of the bare one.
    whole = functools.reduce(lambda d, a: d + a.T @ d, weights[::-1], np.asarray(cotangent, np.float64))
    np.testing.assert_allclose(arriving(pre_norm), whole, rtol=1e-5, atol=1e-5)
    cosine = whole @ bare / np.linalg.norm(whole) / np.linalg.norm(bare)
    assert abs(cosine) < 0.9


@pytest.mark.parametrize(("c", "want"), [(0.5, 1.0034e-3), (0.6, 0.079766), (0.66, 0.78568), (0.7, 3.2251)])
def test_s2_19_scalar_model_a_norm_that_multiplies_gradients_by_c(c, want):
    """(!) (c (1 + s))^L behind the sum: it vanishes for small c and explodes for c above 1 / (1 + s)."""
    assert slope(repeated(post_norm, 0.5, 24, scaled(c))) == pytest.approx(want, rel=1e-3)
    # The +1 of pre-norm is inside no norm: prod (1 + c s) never falls below 1.
    assert slope(repeated(pre_norm, 0.5, 24, scaled(c))) == pytest.approx((1 + 0.5 * c) ** 24, rel=1e-3)
    assert slope(repeated(no_residual, 0.5, 24, scaled(c))) == pytest.approx((0.5 * c) ** 24, rel=1e-3)


def test_s2_19_a_real_norm_is_balanced_where_forward_and_backward_gain_agree():
    """(!) c = 1 / sqrt(1 + v) is set by the branch's size, so "post-norm vanishes" is no law.

    f turns each pair of coordinates by 90 degrees and scales it by g: it adds v = g^2 to the stream's variance and
    to the gradient's. A gradient orthogonal to the stream then crosses 24 post-norm sublayers unchanged.
    """
    g, x, cotangent = 0.5, jnp.asarray([1.2, -1.6, 0.0, 0.0]), jnp.asarray([0.0, 0.0, 0.6, 0.8])
    turn = linear(g * np.kron(np.eye(2), [[0.0, -1.0], [1.0, 0.0]]))

    def deaf(h):
        """The same values, no gradient: v without g."""
        return jax.lax.stop_gradient(turn(h))

    def arriving(f):
        return float(jnp.linalg.norm(jax.vjp(chain(post_norm, [f] * 24, exact_norm), x)[1](cotangent)[0]))

    assert arriving(turn) == pytest.approx(1.0, rel=1e-4)
    # Control: out of balance, each norm keeps c = 1 / sqrt(1 + v) of the gradient.
    assert arriving(deaf) == pytest.approx((1 + g**2) ** -12, rel=1e-4)


def test_s2_32_24_blocks_are_16777216_paths():
    """(!) A branch f(h) = h turns every path into a 1 and the output into their number; say what is counted."""
    one = jnp.float32(1.0)
    assert int(repeated(pre_norm, 1.0, 24)(one)) == 16_777_216  # a block taken as one branch
    assert int(repeated(pre_norm, 1.0, 48)(one)) == 2**48 == 281_474_976_710_656  # sublayers
    assert int(repeated(no_residual, 1.0, 24)(one)) == 1  # control: no skip, one path


def paths(branches, x):
    """Return the sum over all subsets of branches of their composition, in float64."""
    total = np.zeros_like(x)
    for chosen in itertools.product((False, True), repeat=len(branches)):
        y = x
        for taken, f in zip(chosen, branches, strict=True):
            y = f(y) if taken else y
        total = total + y
    return total


def test_s2_33_linear_blocks_unrolled_are_the_sum_over_all_subsets():
    weights, x = matrices(5, 3, seed=1), np.asarray([1.0, -0.5, 2.0])
    want = paths([lambda h, a=a: a @ h for a in weights], x)
    for rule in (pre_norm, no_residual):
        got = chain(rule, map(linear, weights))(jnp.asarray(x, jnp.float32))
        assert np.allclose(got, want, rtol=1e-4, atol=1e-4) == (rule is pre_norm)


def test_s2_33_nonlinear_blocks_are_a_sum_over_paths_only_where_they_are_linearised():
    """(!) The values are no sum over subsets; the Jacobian is, each branch linearised where the stream met it."""
    weights, x = matrices(5, 3, seed=1, scale=0.8), np.asarray([1.0, -0.5, 2.0])
    branches = [lambda h, a=a: jnp.tanh(linear(a)(h)) for a in weights]
    stack, start = chain(pre_norm, branches), jnp.asarray(x, jnp.float32)
    values = paths([lambda h, a=a: np.tanh(a @ h) for a in weights], x)
    assert np.abs(np.asarray(stack(start)) - values).max() > 0.1

    visited, slopes = start, []
    for f in branches:
        slopes.append(np.asarray(jax.jacfwd(f)(visited), np.float64))
        visited = pre_norm(visited, f, lambda h: h)
    want = paths([lambda d, j=j: j @ d for j in slopes], np.eye(3))
    np.testing.assert_allclose(jax.jacrev(stack)(start), want, rtol=1e-4, atol=1e-5)
    # Control: linearised at the input instead, the sum is another matrix.
    at_input = [np.asarray(jax.jacfwd(f)(start), np.float64) for f in branches]
    assert np.abs(want - paths([lambda d, j=j: j @ d for j in at_input], np.eye(3))).max() > 0.05
