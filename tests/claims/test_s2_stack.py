"""Seed 002, the block and the stack: who feeds whom, what a sublayer reads and leaves, the six lines of a decoder."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxblock import Decoder, ExecutionConfig
from jaxblock.functional import attention, dense, embed, feed_forward, layer_norm, unembed
from jaxblock.functional.feed_forward import FeedForwardWeights
from jaxblock.functional.masks import EVERYONE, AttentionPattern
from jaxblock.modules import Attention, AttentionInputs, FeedForward
from jaxblock.residual import PostNorm, PreNorm, residual, topology
from tests.claims import depth
from tests.claims.depth import SIX, real, values
from tests.small import built, config, tokens

CAUSAL = AttentionPattern(causal=True)
SMALL = config()


# ------------------------------------------------------------------ who feeds whom


@functools.cache
def readers(branch: str, pattern: AttentionPattern = EVERYONE) -> np.ndarray:
    """Return the support of the Jacobian over positions, boolean [T out, T in], of a branch off its zeros."""
    params = depth.row(built(SMALL)[1]["blocks"], 0)[branch]
    x_BTD = jnp.asarray(np.random.default_rng(0).normal(size=(1, 6, 8)), jnp.float32)

    def run(x_BTD):
        if branch == "feed_forward":
            return FeedForward(SMALL).apply({"params": params}, x_BTD)
        return Attention(SMALL, ExecutionConfig()).apply({"params": params}, x_BTD, AttentionInputs(pattern))

    jacobian = np.asarray(jax.jit(jax.jacrev(run))(x_BTD))[0, :, :, 0]  # [T, D, T, D]
    return (jacobian != 0).any((1, 3))


def test_s2_01_all_positions_feed_token_2_in_attention_and_only_itself_in_the_feed_forward():
    assert readers("attention")[2].tolist() == [True] * 6
    assert readers("attention", CAUSAL)[2].tolist() == [True] * 3 + [False] * 3
    np.testing.assert_array_equal(readers("feed_forward"), np.eye(6, dtype=bool))


@settings(deadline=None, max_examples=8)
@given(seed=st.integers(0, 999), position=st.integers(0, 5))
def test_s2_37_position_t_of_the_decoder_reads_t_plus_one_positions(seed, position):
    start = tokens(2, 6, seed=seed)
    moved = start.at[:, position].add(1) % 11
    before, after = (values(SMALL, tokens_BT=x)[0] for x in (start, moved))
    np.testing.assert_array_equal((before != after).any(-1), [[t >= position for t in range(6)]] * 2)


def test_s2_37_one_causal_attention_has_a_jacobian_row_of_t_plus_one_entries():
    assert readers("attention", CAUSAL).sum(1).tolist() == [1, 2, 3, 4, 5, 6]
    np.testing.assert_array_equal(readers("attention", CAUSAL), np.tri(6, dtype=bool))
    # Controls: without the mask all read all, and a window cuts what position 5 reads.
    assert readers("attention").sum(1).tolist() == [6] * 6
    assert readers("attention", AttentionPattern(causal=True, window=2)).sum(1).tolist() == [1, 2, 2, 2, 2, 2]


# ------------------------------------------------------------------ the contract of shapes


def shapes(model_config, length=5):
    """Return the shapes of logits and of everything recorded, by abstract evaluation."""
    model, tokens_BT = Decoder(model_config), jax.ShapeDtypeStruct((1, length), jnp.int32)
    variables = {"params": depth.abstract(model_config)}
    logits, made = jax.eval_shape(
        lambda variables, tokens_BT: model.apply(variables, tokens_BT, mutable=["intermediates"]),
        variables,
        tokens_BT,
    )
    return logits.shape, {name: x.shape for name, x in made["intermediates"]["blocks"].items()}


def refused_width(width):
    """Assert that a feed-forward that does not project back to D is refused, whatever the width."""
    x_BTD = jax.ShapeDtypeStruct((1, 2, width), jnp.float32)

    def wide(h):
        return jnp.concatenate([h, h], axis=-1)

    with pytest.raises(AssertionError):
        jax.eval_shape(lambda x: residual(lambda x, f: f(x), x, wide, dtype="float32"), x_BTD)


def test_s2_02_width_in_is_width_out_after_each_sublayer():
    _, recorded = shapes(SMALL)
    assert set(recorded) >= {"resid_pre", "attention_out", "resid_mid", "feed_forward_out", "resid_post"}
    assert set(recorded.values()) == {(3, 1, 5, 8)}
    refused_width(8)


@pytest.mark.parametrize("name", SIX)
def test_s2_03_the_contract_holds_at_real_widths(name):
    blocks, width, _ = SIX[name]
    logits, recorded = shapes(real(name))
    assert set(recorded.values()) == {(blocks, 1, 5, width)}
    assert logits == (1, 5, 50257)
    refused_width(width)


def test_s2_29_more_blocks_change_no_shape():
    (twelve, ninety_six), other = (
        (real("gpt2_small", depth=blocks) for blocks in (12, 96)),
        real("gpt2_medium"),
    )
    assert shapes(twelve)[0] == shapes(ninety_six)[0]
    assert {x[1:] for x in shapes(twelve)[1].values()} == {x[1:] for x in shapes(ninety_six)[1].values()}
    assert depth.abstract_block(twelve) == depth.abstract_block(ninety_six)
    assert depth.abstract_block(twelve) != depth.abstract_block(other)  # control: width does


# ------------------------------------------------------------------ the identity, and where the norm stands


def test_s2_12_zero_branches_make_the_stack_the_identity():
    params = depth.silenced(built(SMALL)[1])
    logits, made = values(SMALL, params)
    table, norm = params["embedding"]["table"], params["final_norm"]
    embedded = embed(table, tokens()) + params["positions"]["table"][None, :6]
    np.testing.assert_array_equal(made["resid_final"], embedded)
    want = unembed(layer_norm(embedded, norm["scale"], norm["bias"], epsilon=1e-5), table)
    np.testing.assert_allclose(logits, want, rtol=1e-5, atol=1e-5)
    # Control: one of the two branches alone, or the norm behind the sum, is no identity.
    for pattern in ("attention/output", "feed_forward/down"):
        _, half = values(SMALL, depth.edited(built(SMALL)[1], pattern, jnp.zeros_like))
        assert np.abs(half["resid_final"] - embedded).max() > 0.1
    post = config(residual="post_norm")
    _, normalized = values(post, depth.silenced(built(post)[1]))
    assert np.abs(normalized["resid_final"] - embedded).max() > 0.1


def test_s2_18_a_pre_norm_block_leaves_a_raw_stream_and_post_norm_a_normalized_one():
    def blocks(residual):
        model_config = config(residual=residual)
        return values(model_config, depth.unit_norms(built(model_config)[1]))[1]["blocks"]["resid_post"]

    post, pre = blocks("post_norm"), blocks("pre_norm")
    np.testing.assert_allclose(post.mean(-1), 0.0, atol=1e-5)
    np.testing.assert_allclose(depth.root_mean_square(post), 1.0, atol=1e-3)
    assert np.median(np.abs(pre.mean(-1))) > 0.1
    assert np.median(np.abs(depth.root_mean_square(pre) - 1.0)) > 0.1


def test_s2_21_the_norm_reads_a_copy():
    blocks = values(SMALL)[1]["blocks"]
    mid, post = blocks["resid_mid"], blocks["resid_post"]
    np.testing.assert_array_equal(mid, blocks["resid_pre"] + blocks["attention_out"])
    np.testing.assert_array_equal(post, mid + blocks["feed_forward_out"])
    assert np.abs(blocks["attention_in"] - blocks["resid_pre"]).max() > 0.1  # what is read is not the stream
    norm = {"norm": {"scale": jnp.full(8, 3.0), "bias": jnp.full(8, -2.0)}}
    x_BTD = jnp.asarray(blocks["resid_pre"][0])
    kept, replaced = (
        np.asarray(rule(SMALL).apply({"params": norm}, x_BTD, jnp.zeros_like)) for rule in (PreNorm, PostNorm)
    )
    np.testing.assert_array_equal(kept, x_BTD)
    assert np.abs(replaced - x_BTD).max() > 1.0  # control: post-norm hands on what it normalized


def test_s2_22_hence_pre_norm_needs_a_norm_after_the_last_block():
    logits = {}
    for final_norm in (True, False):
        own = dataclasses.replace(topology("pre_norm"), final_norm=final_norm)
        model, params = built(config(head="untied", norm_epsilon=1e-12), topology=own)
        run = jax.jit(lambda params, model=model: model.apply({"params": params}, tokens()))
        for factor in (1.0, 100.0):  # every block writes nothing, the stream is `factor` times itself
            started = depth.edited(depth.silenced(params), "embedding|positions", lambda x, f=factor: f * x)
            logits[final_norm, factor] = np.asarray(run(started))
    np.testing.assert_allclose(logits[True, 100.0], logits[True, 1.0], rtol=1e-4, atol=1e-4)
    # Control: left out, the logits have the size of the stream.
    np.testing.assert_allclose(logits[False, 100.0], 100 * logits[False, 1.0], rtol=1e-4, atol=1e-4)
    assert np.abs(logits[False, 100.0] - logits[False, 1.0]).max() > 1.0


def test_s2_22_post_norm_has_no_final_norm_and_needs_none():
    assert "final_norm" in depth.abstract(SMALL)
    assert "final_norm" not in depth.abstract(config(residual="post_norm"))
    post = config(residual="post_norm")
    params = depth.silenced(built(post)[1])
    once, larger = (
        values(post, depth.edited(params, "embedding|positions", lambda x, f=factor: f * x))[1]["resid_final"]
        for factor in (10.0, 100.0)
    )
    np.testing.assert_allclose(larger, once, rtol=1e-3, atol=1e-3)
    # Control: pre-norm's closed stream is as large as what came in.
    pre = depth.silenced(built(SMALL)[1])
    raw = values(SMALL, depth.edited(pre, "embedding|positions", lambda x: 100.0 * x))[1]["resid_final"]
    assert np.abs(raw).max() > 10.0


# ------------------------------------------------------------------ six stages, six lines


SIGNS = {"rsqrt": "norm", "exp": "attention", "erf": "feed_forward"}
"""The primitive that each stage alone has: an inverse root, the softmax, the exact GELU."""


def stages(residual):
    """Return the stages of a block in order; "add x" adds to the stream itself, "add" to something made of it."""
    model_config = config(residual=residual, norm="rms_norm", bias=False, positions="none")
    block, x_BTD = depth.abstract_block(model_config), depth.stream_like(model_config, 5)
    jaxpr = jax.make_jaxpr(functools.partial(depth.run_block, model_config))(block, x_BTD).jaxpr
    names, carried, sizes = [], jaxpr.invars[-1], (1, 5, 8)
    for equation in depth.equations(jaxpr):
        name = equation.primitive.name
        if name == "add" and all(x.aval.shape == sizes for x in equation.invars):
            names.append("add x" if carried in equation.invars else "add")
            carried = equation.outvars[0]
        elif name in SIGNS:
            names.append(SIGNS[name])
    return names


def test_s2_24_a_block_has_six_stages_and_adds_to_what_it_read():
    assert stages("pre_norm") == ["norm", "attention", "add x", "norm", "feed_forward", "add x"]
    # Control: behind the sum, the second add takes a norm's output; without a skip there is no add.
    assert stages("post_norm") == ["attention", "add x", "norm", "feed_forward", "add", "norm"]
    assert stages("none") == ["norm", "attention", "norm", "feed_forward"]


def six_lines(params, ids, *, final_norm=True, swapped=False):
    """The whole decoder as the seed writes it, on the pure functions."""

    def norm(x, p):
        return layer_norm(x, p["scale"], p["bias"], epsilon=1e-5)

    def attn(x, p):
        q, k, v = (dense(x, p[name]["kernel"], p[name]["bias"]) for name in ("query", "key", "value"))
        return dense(attention(q, k, v, CAUSAL), p["output"]["kernel"], p["output"]["bias"], axes=2)

    def ffn(x, p):
        up, down = p["up"], p["down"]
        weights = FeedForwardWeights(up["kernel"], down["kernel"], up["bias"], down["bias"])
        return feed_forward(x, weights, "gelu")

    def first(x, p):
        return x + attn(norm(x, p["attention_connection"]["norm"]), p["attention"])

    def second(x, p):
        return x + ffn(norm(x, p["feed_forward_connection"]["norm"]), p["feed_forward"])

    x = embed(params["embedding"]["table"], ids) + params["positions"]["table"][None, : ids.shape[1]]
    for i in range(3):
        for sublayer in (second, first) if swapped else (first, second):
            x = sublayer(x, depth.row(params["blocks"], i))
    x = norm(x, params["final_norm"]) if final_norm else x
    return unembed(x, params["embedding"]["table"])


def test_s2_35_six_lines_are_the_whole_decoder():
    params, ids = built(SMALL)[1], tokens()
    logits = values(SMALL)[0]
    np.testing.assert_allclose(logits, six_lines(params, ids), rtol=1e-5, atol=1e-5)
    for control in ({"final_norm": False}, {"swapped": True}):
        assert np.abs(logits - six_lines(params, ids, **control)).max() > 0.1
