"""Manifold-constrained hyper-connections against their papers, in numpy float64, and what the constraint gives."""

import importlib
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblock.functional.streams import mix_permutations, sinkhorn
from jaxblock.residual import topology
from jaxblock.residual.manifold_hyper_connections import mix_start
from tests.residual.given import draw
from tests.residual.test_hyper_connections import (
    EPSILON,
    NAMES,
    PLAIN,
    SUBLAYERS,
    WIDTH,
    given,
    in_float64,
    layer,
    moved,
    pre_norm_of,
    rms,
    run,
    spread,
    start,
    trained,
    with_leaf,
)
from tests.small import config

# The module: the package has a factory of the same name.
MODULE = importlib.import_module(mix_start.__module__)
SINKHORN = "manifold_hyper_connections(streams=3)"
PERMUTATIONS = "manifold_hyper_connections(streams=3, mixing='permutations')"
BOTH = pytest.mark.parametrize("name", [SINKHORN, PERMUTATIONS], ids=["sinkhorn", "permutations"])


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


READ_SUM = sigmoid(2.0) + 2 * sigmoid(-2.0)


def matrix_of(logits, count, iterations):
    """Return R of one token; R[j, i] from stream i to stream j, as in the papers."""
    if iterations is None:
        weights = np.exp(logits) / np.exp(logits).sum()
        r = np.zeros((count, count))
        for weight, order in zip(weights, itertools.permutations(range(count)), strict=True):
            for i, j in enumerate(order):
                r[j, i] += weight
        return r
    k = np.exp(logits.reshape(count, count).T)
    for _ in range(iterations):
        k = k / k.sum(0, keepdims=True)
        k = k / k.sum(1, keepdims=True)  # H' = R H contracts axis 1: last
    return k


def manifold(x, weights, params, *, count=3, iterations=20):
    """Token by token: H is [M, D]."""
    closed = np.zeros_like(x)
    for b, t in np.ndindex(x.shape[:2]):
        h_MD = np.tile(x[b, t], (count, 1))
        for n in range(SUBLAYERS):
            p = layer(params, n)
            z, alpha = rms(h_MD.reshape(-1)), p["dynamic_scale"]
            product = z @ p["dynamic"].reshape(count * WIDTH, -1)
            pre_start = np.where(np.arange(count) == n % count, 2.0, -2.0)
            a = sigmoid(alpha[0] * product[:count] + pre_start + p["static"][:count])
            post = slice(count, 2 * count)
            bias = 2 * sigmoid(alpha[1] * product[post] + p["static"][post])
            kind = "sinkhorn" if iterations else "permutations"
            logits = alpha[2] * product[2 * count :] + mix_start(count, kind) + p["static"][2 * count :]
            u = np.tanh(rms(a @ h_MD) * p["norm"]["scale"] @ weights[n])
            h_MD = matrix_of(logits, count, iterations) @ h_MD + np.outer(bias, u)
        closed[b, t] = h_MD.sum(0)
    return closed


@BOTH
def test_manifold_hyper_connections_equal_their_paper(name):
    """Off the start; one iteration of Sinkhorn would be another matrix, and so would the other mixing."""
    closed, params = run(name, moved(name)), in_float64(moved(name))
    kinds = {SINKHORN: (20, 1), PERMUTATIONS: (None, None)}[name]
    np.testing.assert_allclose(closed, manifold(*given(), params, iterations=kinds[0]), rtol=5e-5, atol=5e-5)
    if name == SINKHORN:
        assert not np.allclose(closed, manifold(*given(), params, iterations=kinds[1]), atol=1e-3)
    swapped = with_leaf(
        moved(name), lambda _, p: {**p, "static": p["static"].at[6:].set(p["static"][6:][::-1])}
    )
    wrong = manifold(*given(), in_float64(swapped), iterations=kinds[0])
    assert not np.allclose(closed, wrong, atol=1e-3)


@BOTH
def test_i31_the_start_is_pre_norm_and_every_stream_is_the_same(name):
    """c_post = 0 and phi = 0. What is read is sum(a) x, which the norm undoes, but for its epsilon."""
    want = 3 * pre_norm_of(gain=READ_SUM)
    np.testing.assert_allclose(run(name, start(name)), want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(want, 3 * pre_norm_of(), rtol=0, atol=2e-2)
    assert spread(name, start(name)) < 1e-5
    assert spread(name, moved(name)) > 1e-2


def test_i31_c_post_multiplies_every_branch():
    """c_post = 1 is the multiplier 2 sigmoid(1) = 1.4621: why a public start of 1 is not pre-norm."""
    with_1 = with_leaf(start(SINKHORN), lambda _, p: {**p, "static": p["static"].at[3:6].set(1.0)})
    want = 3 * pre_norm_of(factor=1.46211716, gain=READ_SUM)
    np.testing.assert_allclose(run(SINKHORN, with_1), want, rtol=1e-5, atol=1e-5)
    assert not np.allclose(want, 3 * pre_norm_of(gain=READ_SUM), atol=1e-1)


def connect(name, params, streams, u):
    """Return the streams after the first sublayer alone, whose branch gives u."""
    connection = topology(name).connection(config(**PLAIN, norm_epsilon=EPSILON), name=None)
    variables = {"params": params, "place": {"block": 0, "sublayer": jnp.int32(0)}}
    return jax.jit(lambda streams, u: connection.apply(variables, streams, lambda h: u))(streams, u)


@pytest.mark.parametrize(
    ("name", "tolerance"), [(SINKHORN, 1e-2), (PERMUTATIONS, 1e-5)], ids=["sinkhorn", "permutations"]
)
def test_i31_the_mean_of_the_streams_moves_by_the_mean_of_b_times_u(name, tolerance, monkeypatch):
    """For streams that differ, whatever R is: to what 20 iterations leave, or to round-off with permutations.

    With R = 1 1^T, which a public reimplementation has (it normalizes 1 x n matrices), the mean is 3 times as large.
    """
    x_MBTD, u = draw(3, 2, 3, WIDTH, seed=4), draw(2, 3, WIDTH, seed=5)
    p = layer(moved(name), 0)
    z = rms(np.moveaxis(np.asarray(x_MBTD, np.float64), 0, 2).reshape(2, 3, -1))
    product = (z @ np.asarray(p["dynamic"], np.float64).reshape(3 * WIDTH, -1))[..., 3:6]
    b = 2 * sigmoid(float(p["dynamic_scale"][1]) * product + np.asarray(p["static"][3:6], np.float64))
    update = b.mean(-1, keepdims=True) * np.asarray(u)
    mean = np.asarray(x_MBTD).mean(0)
    after = jnp.stack(connect(name, p, tuple(x_MBTD), u)).mean(0)
    np.testing.assert_allclose(after, mean + update, rtol=tolerance, atol=tolerance)
    assert not np.allclose(after, mean + np.asarray(u), atol=1e-2)
    kind = "sinkhorn" if name == SINKHORN else "mix_permutations"
    monkeypatch.setattr(MODULE, kind, lambda logits, *_, **__: jnp.ones((3, 3, *logits.shape[-2:])))
    wrong = jnp.stack(connect(name, p, tuple(x_MBTD), u)).mean(0)
    np.testing.assert_allclose(wrong, 3 * mean + update, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("count", [4, pytest.param(2, marks=pytest.mark.full)])
def test_both_mixings_start_at_the_same_matrix(count):
    """((e^4 - 1) I + J) / (e^4 - 1 + M): diagonal 0.948 for M = 4."""
    one = sinkhorn(
        jnp.asarray(mix_start(count, "sinkhorn").reshape(count, count), jnp.float32), iterations=20
    )
    other = mix_permutations(jnp.asarray(mix_start(count, "permutations"), jnp.float32), count)
    want = (np.expm1(4.0) * np.eye(count) + 1) / (np.expm1(4.0) + count)
    np.testing.assert_allclose(one, want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(other, want, rtol=1e-5, atol=1e-6)
    assert count != 4 or abs(float(one[0, 0]) - 0.948) < 5e-4


@pytest.mark.full
def test_i29_the_one_hot_read_parts_the_streams():
    """Read alike, streams stay alike after 4 optimizer steps; read as at the start they part."""

    def change(n, p):
        first = jnp.where(jnp.arange(3) == n % 3, -2.0, 2.0)  # what is learned of c_pre takes its start away
        return {**p, "static": p["static"].at[:3].set(first)}

    apart = spread(SINKHORN, trained(SINKHORN, start(SINKHORN)))
    together = spread(SINKHORN, trained(SINKHORN, with_leaf(start(SINKHORN), change)))
    assert apart > 1e-3
    assert together < 0.02 * apart


def test_i04_parameter_counts_of_the_paper():
    """(n^2 + 2 n)(n D + 1) + 3 a sublayer: 196,635 for width 2048 and 4 streams; 24 logits for R in mHC-lite."""
    model_config = config(depth=1, width=2048, heads=16, wiring="parallel", **PLAIN)
    norms = 2 * 2048
    count = lambda name: topology(name).parameters(model_config) - norms  # noqa: E731
    assert count("manifold_hyper_connections(streams=4)") == 196_635
    assert count("manifold_hyper_connections(mixing='permutations')") == 32 * (4 * 2048 + 1) + 3
    assert topology("manifold_hyper_connections").labels == ()
    assert set(start(SINKHORN)["blocks"][NAMES[0]]) == {"norm", "static", "dynamic", "dynamic_scale"}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("streams=1", "model.residual: streams is 1; it must be a whole number of at least 2"),
        (
            "streams=5, mixing='permutations'",
            "model.residual: streams is 5; it must be a whole number of at most 4",
        ),
        ("mixing='softmax'", "mixing is 'softmax'; it must be one of permutations, sinkhorn"),
        ("iterations=0", "iterations is 0; it must be a whole number of at least 1"),
        ("mixing='permutations', iterations=5", "iterations is 5; it must be left out with mixing"),
    ],
)
def test_options_are_checked(options, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        topology(f"manifold_hyper_connections({options})")
