"""Claims of seed 000 on modules, sublayers, blocks, stacks and the residual connection: S0-01 to 12, S0-30, S0-31."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblock import Decoder, ExecutionConfig
from jaxblock.functional import layer_norm, residual, rms_norm
from jaxblock.modules import Attention, AttentionInputs
from jaxblock.residual import PeriNorm, PreNorm
from jaxblock.residual import residual as combine
from tests.claims.claims import (
    CAUSAL,
    SHAPE,
    attend,
    block,
    count,
    feed,
    layer,
    readers,
    square_jacobian,
    stack,
    started,
    stream,
    stream_adds,
    zeroed,
)
from tests.small import built, config, tokens

PRE = config()


# Names: module, sublayer, block, stack -------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(1, 1, 8, 1), (2, 6, 8, 2), (3, 2, 12, 4)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_s0_01_attention_keeps_shape_and_dtype(sizes, dtype):
    batch, positions, width, heads = sizes
    module = Attention(config(width=width, heads=heads), ExecutionConfig())
    x_BTD = jax.ShapeDtypeStruct((batch, positions, width), jnp.dtype(dtype))
    shapes = jax.eval_shape(module.init, jax.random.key(0), x_BTD, AttentionInputs(CAUSAL))
    y_BTD = jax.eval_shape(module.apply, shapes, x_BTD, AttentionInputs(CAUSAL))
    assert (y_BTD.shape, y_BTD.dtype) == (x_BTD.shape, x_BTD.dtype)
    # Control: a width that is not the projections' does not go through unnoticed.
    wider_BTD = jax.ShapeDtypeStruct((batch, positions, width + 1), jnp.dtype(dtype))
    with pytest.raises(AssertionError, match="Tuples differ"):
        jax.eval_shape(module.apply, shapes, wider_BTD, AttentionInputs(CAUSAL))


def test_s0_02_the_attention_module_is_not_the_attention_sublayer():
    """With zero weights the module gives 0 and the sublayer gives the stream, bit for bit."""
    x_BTD, params = stream(), layer(PRE)
    silent = zeroed(params, "attention", "feed_forward")
    np.testing.assert_array_equal(attend(silent, x_BTD), jnp.zeros(SHAPE))
    _, kept = block(PRE)(silent, x_BTD)
    np.testing.assert_array_equal(kept["resid_mid"], x_BTD)
    _, kept = block(PRE)(params, x_BTD)
    assert np.all(attend(params, x_BTD) != 0)
    assert np.all(kept["resid_mid"] != x_BTD)


def test_s0_03_a_block_is_two_sublayers_with_one_addition_each():
    assert len(stream_adds(PRE)) == 2
    assert len(stream_adds(config(wiring="parallel"))) == 1
    assert stream_adds(config(residual="none")) == []


@pytest.mark.parametrize(("changes", "per_block"), [({}, 2), ({"wiring": "parallel"}, 1)])
def test_s0_04_blocks_and_sublayers_are_different_units(changes, per_block):
    """S = 2 N, counted as the rows of what branches wrote; a parallel block has one sublayer."""
    for depth in (1, 6):
        model_config = config(depth=depth, **changes)
        shapes = jax.eval_shape(Decoder(model_config).init, jax.random.key(0), tokens())
        _, kept = jax.eval_shape(
            lambda variables, c=model_config: Decoder(c).apply(
                variables, tokens(), mutable=["intermediates"]
            ),
            shapes,
        )
        written = [rows for name, rows in kept["intermediates"]["blocks"].items() if name.endswith("_out")]
        assert sum(rows.shape[0] for rows in written) == model_config.sublayers == per_block * depth


def test_s0_06_blocks_have_weights_of_their_own():
    blocks = started()["blocks"]
    for part, names in (("attention", ("query", "key", "value")), ("feed_forward", ("up",))):
        for name in names:
            kernels_LD = np.asarray(blocks[part][name]["kernel"]).reshape(PRE.depth, -1)
            assert all(np.all(kernels_LD[i] != kernels_LD[j]) for i in range(3) for j in range(i))
    one = jax.eval_shape(Decoder(dataclasses.replace(PRE, depth=1)).init, jax.random.key(0), tokens())
    assert count(blocks) == PRE.depth * count(one["params"]["blocks"])
    # Control: a tied stack has the parameters of one block, whose edit is seen by every block.
    assert count(layer(PRE)) == count(one["params"]["blocks"])


@pytest.mark.parametrize("edited", [0, 1, 2])
def test_s0_06_an_edited_block_leaves_all_blocks_before_it(edited):
    params, x_BTD = jax.tree.map(np.asarray, built(PRE)[1]["blocks"]), stream()
    factor_L = np.where(np.arange(PRE.depth) == edited, np.float32(1.5), np.float32(1))
    changed = jax.tree.map(lambda leaf: leaf * factor_L.reshape(-1, *[1] * (leaf.ndim - 1)), params)
    tied = jax.tree.map(lambda leaf: np.broadcast_to(leaf[edited], leaf.shape), params)
    before, after, shared, shared_after = (
        np.asarray(stack(PRE)(weights, x_BTD, CAUSAL)[1]["resid_post"])
        for weights in (params, changed, tied, jax.tree.map(lambda leaf: np.float32(1.5) * leaf, tied))
    )
    same_L = [np.array_equal(before[i], after[i]) for i in range(PRE.depth)]
    assert same_L == [i < edited for i in range(PRE.depth)]
    assert not any(np.array_equal(shared[i], shared_after[i]) for i in range(PRE.depth))


# The residual connection ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream_dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_s0_09_a_zero_branch_leaves_the_stream_bitwise(stream_dtype, dtype):
    x_BTD = stream().astype(stream_dtype)

    def after(branch):
        connect = lambda x, f: residual.pre_norm(x, f, rms_norm)  # noqa: E731
        return np.asarray(combine(connect, x_BTD, branch, dtype=dtype))

    got = after(jnp.zeros_like)
    assert got.dtype == x_BTD.dtype
    np.testing.assert_array_equal(got, x_BTD)
    assert not np.array_equal(after(lambda h: h / 8), x_BTD)


def test_s0_11_each_sublayer_has_a_skip_of_its_own():
    """J = (f I + J_F)(a I + J_A) with a, f = 1 exactly where a skip is kept, for the four kinds of block."""
    params, x_BTD = layer(PRE), stream()[:1, :2]
    rules = {0: residual.no_residual, 1: residual.pre_norm}
    attention, feed_forward = functools.partial(attend, params), functools.partial(feed, params)
    both = [(a, f) for a in (0, 1) for f in (0, 1)]

    @jax.jit
    def jacobians(x):
        found = {}
        for a, f in both:
            first = lambda x, a=a: rules[a](x, attention, layer_norm)  # noqa: E731
            whole = square_jacobian(lambda x, f=f: rules[f](first(x), feed_forward, layer_norm), x)  # noqa: B023
            found[a, f] = whole, square_jacobian(lambda h: feed_forward(layer_norm(h)), first(x))
        return found, square_jacobian(lambda x: attention(layer_norm(x)), x)

    found, of_attention = jacobians(x_BTD)
    eye = np.eye(x_BTD.size)
    for kept, (whole, of_feed_forward) in found.items():
        fits = [
            np.allclose((f * eye + of_feed_forward) @ (a * eye + of_attention), whole, rtol=1e-4, atol=1e-5)
            for a, f in both
        ]
        assert fits == [pair == kept for pair in both]


def test_s0_12_attention_mixes_tokens_and_the_feed_forward_does_not():
    params, x_TD = layer(PRE), stream()[0]

    def sublayer(branch):
        return lambda x_BTD: residual.pre_norm(x_BTD, branch, layer_norm)

    alone = readers(sublayer(functools.partial(feed, params)), x_TD)
    np.testing.assert_array_equal(alone, np.eye(6, dtype=bool))
    assert np.all(readers(sublayer(functools.partial(attend, params)), x_TD))
    causal = readers(sublayer(functools.partial(attend, params, pattern=CAUSAL)), x_TD)
    np.testing.assert_array_equal(causal, np.tri(6, dtype=bool))


# The block and the stack ---------------------------------------------------------------------------------------------


def test_s0_30_attention_writes_first_then_the_feed_forward():
    params, x_BTD = layer(PRE), stream()
    after, kept = block(PRE)(params, x_BTD, CAUSAL)
    np.testing.assert_array_equal(kept["resid_pre"], x_BTD)
    np.testing.assert_array_equal(kept["resid_mid"], x_BTD + kept["attention_out"])
    np.testing.assert_array_equal(after, kept["resid_mid"] + kept["feed_forward_out"])

    @functools.partial(jax.jit, static_argnums=1)
    def in_order(x, names):
        for name in names:
            parts = params[f"{name}_connection"]["norm"]
            norm = functools.partial(layer_norm, scale=parts["scale"], bias=parts["bias"])
            branch = functools.partial(attend, params, pattern=CAUSAL) if name == "attention" else None
            x = residual.pre_norm(x, branch or functools.partial(feed, params), norm)
        return x

    order = ("attention", "feed_forward")
    np.testing.assert_allclose(in_order(x_BTD, order), after, atol=1e-5)
    assert not np.allclose(in_order(x_BTD, order[::-1]), after, atol=0.1)


@pytest.mark.parametrize("depth", [1, 2, 12, 96])
def test_s0_31_stacking_changes_no_shape(depth):
    model_config = config(depth=depth)

    def run(tokens_BT):
        variables = Decoder(model_config).init(jax.random.key(0), tokens_BT)
        return Decoder(model_config).apply(variables, tokens_BT, mutable=["intermediates"])

    logits_BTV, kept = jax.eval_shape(run, tokens())
    kept = kept["intermediates"]
    assert kept["resid_final"].shape == SHAPE
    assert kept["blocks"]["resid_post"].shape == (depth, *SHAPE)
    assert logits_BTV.shape == (*SHAPE[:2], model_config.vocab_size)


@pytest.mark.parametrize("connection", [PreNorm, PeriNorm])
def test_s0_31_control_a_branch_that_changes_the_shape_does_not_stack(connection):
    module = connection(config())
    params = {name: {"scale": jnp.ones(8), "bias": jnp.zeros(8)} for name in ("norm", "norm_in", "norm_out")}
    rule = lambda x, f: module.apply({"params": params}, x, f)  # noqa: E731
    with pytest.raises(AssertionError, match="shape"):
        combine(rule, stream(), lambda h: h[..., :4], dtype="float32")
