"""Seed 004: what a residual connection adds, where, and what it leaves to the gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblock.functional.norms import layer_norm, rms_norm
from jaxblock.functional.residual import no_residual, post_norm, pre_norm
from jaxblock.modules import FeedForward
from jaxblock.residual import PostNorm, PreNorm, residual
from tests.claims import depth
from tests.claims.depth import values
from tests.small import built, config

SMALL = config()
NORMS = [functools.partial(norm, epsilon=0.0) for norm in (layer_norm, rms_norm)]
NAMES = ["layer_norm", "rms_norm"]


def draw(*shape, seed):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_s4_01_output_is_input_plus_branch_to_the_bit(dtype):
    """F is the feed-forward of the norm, run by the combinator in either compute dtype; the stream is float32."""
    params = depth.row(built(SMALL)[1]["blocks"], 0)
    h_BTD, seen = draw(2, 3, 8, seed=0), []

    def branch(h):
        seen.append(FeedForward(SMALL).apply({"params": params["feed_forward"]}, h))
        return seen[-1]

    def after(module):
        connection = functools.partial(module(SMALL).apply, {"params": params["feed_forward_connection"]})
        return residual(connection, h_BTD, branch, dtype=dtype)

    np.testing.assert_array_equal(after(PreNorm), h_BTD + seen[-1].astype(jnp.float32))
    assert seen[-1].dtype == dtype
    assert np.abs(np.asarray(seen[-1], np.float32)).max() > 0.1
    other = after(PostNorm)
    assert np.abs(other - (h_BTD + seen[-1].astype(jnp.float32))).max() > 0.1  # control


def test_s4_06_a_block_has_two_adds_one_for_attention_and_one_for_the_feed_forward():
    blocks = values(SMALL)[1]["blocks"]
    for before, write, after in (
        ("resid_pre", "attention_out", "resid_mid"),
        ("resid_mid", "feed_forward_out", "resid_post"),
    ):
        np.testing.assert_array_equal(blocks[before] + blocks[write], blocks[after])
        assert np.abs(blocks[write]).max(axis=(1, 2, 3)).min() > 0.1
    np.testing.assert_array_equal(
        blocks["resid_post"][:-1], blocks["resid_pre"][1:]
    )  # nothing between blocks
    for silent, other in (
        ("attention", "feed_forward"),
        ("feed_forward", "attention"),
    ):  # each its own branch
        own = "attention/output" if silent == "attention" else "feed_forward/down"
        without = values(SMALL, depth.edited(built(SMALL)[1], own, jnp.zeros_like))[1]["blocks"]
        assert not without[f"{silent}_out"].any()
        assert without[f"{other}_out"].any()
    # Control: the parallel wiring writes once, and post-norm's stream is no such sum.
    once = values(config(wiring="parallel"))[1]["blocks"]
    assert set(once) == {"resid_pre", "parallel_in", "parallel_out", "resid_post"}
    np.testing.assert_array_equal(once["resid_pre"] + once["parallel_out"], once["resid_post"])
    post = values(config(residual="post_norm"))[1]["blocks"]
    assert np.abs(post["resid_pre"] + post["attention_out"] - post["resid_mid"]).max() > 0.1


@pytest.mark.parametrize("norm", NORMS, ids=NAMES)
def test_s4_07_a_pre_norm_sublayer_nears_the_identity_as_its_stream_grows(norm):
    """J - I = J_f J_norm, and a norm's Jacobian is inverse in the size of what it reads: exactly 1 / r."""
    weight, x = 0.5 * draw(8, 8, seed=1), draw(8, seed=2)

    def excess(size, norm):
        jacobian = jax.jacfwd(lambda x: pre_norm(x, lambda h: jnp.tanh(weight @ h), norm))(size * x)
        return np.asarray(jacobian - jnp.eye(8))

    np.testing.assert_allclose(excess(4.0, norm), excess(1.0, norm) / 4, rtol=1e-4, atol=1e-6)
    assert np.linalg.norm(excess(1.0, norm)) > 0.1

    def linear_excess(size):
        jacobian = jax.jacfwd(lambda x: pre_norm(x, lambda h: weight @ h, depth.identity))(size * x)
        return np.asarray(jacobian - jnp.eye(8))

    # Control: without the norm a linear branch stays as far from the identity as it was.
    np.testing.assert_allclose(linear_excess(4.0), linear_excess(1.0), atol=1e-6)


@pytest.mark.parametrize("norm", NORMS, ids=NAMES)
def test_s4_08_post_norm_takes_the_radial_part_out_of_every_gradient(norm):
    x, cotangent = draw(8, seed=3), draw(8, seed=4)
    x = x - x.mean() * (norm is NORMS[0])  # layer norm's radius is that of the centred row

    def before(rule, branch):
        return np.asarray(jax.vjp(lambda x: rule(x, branch, norm), x)[1](cotangent)[0], np.float64)

    def cosine(a, b):
        return float(a @ np.asarray(b, np.float64) / np.linalg.norm(a) / np.linalg.norm(b))

    post = before(post_norm, jnp.zeros_like)
    assert abs(cosine(post, x)) < 1e-6
    assert 0.1 < cosine(post, cotangent) < 0.999
    if norm is NORMS[0]:
        assert abs(post.sum()) < 1e-5  # and the constant part with it
    # Controls: the pre-norm path hands the gradient on as it is; without a skip a zero branch hands on nothing.
    np.testing.assert_array_equal(before(pre_norm, jnp.zeros_like), cotangent)
    assert abs(cosine(np.asarray(cotangent, np.float64), x)) > 0.01
    np.testing.assert_array_equal(before(no_residual, jnp.zeros_like), jnp.zeros(8))
