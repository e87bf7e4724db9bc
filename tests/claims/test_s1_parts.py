"""Claims of seed 001 on the feed-forward, attention and layer norm alone, their counts, and its worked example."""

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxblock import Decoder, ExecutionConfig
from jaxblock.functional import (
    AttentionPattern,
    FeedForwardWeights,
    GatedWeights,
    ScoreRule,
    attention,
    dense,
    feed_forward,
    gated_feed_forward,
    layer_norm,
    residual,
    visibility,
)
from jaxblock.functional.attention_blocked import attention_blocked
from jaxblock.modules import Attention, AttentionInputs, FeedForward, Norm
from tests.claims.claims import (
    CAUSAL,
    SHAPE,
    WIDTH,
    attend,
    batch_norm,
    block,
    compiled_attention,
    count,
    draw,
    equations,
    feed,
    layer,
    product_flops,
    readers,
    stream,
    weights,
)
from tests.small import config, tokens

SEEDS = st.integers(0, 2**32 - 1)
few = settings(max_examples=6, deadline=None)
VALID = np.asarray([[True, True, True, True, False, False], [True] * 6])


# The feed-forward ----------------------------------------------------------------------------------------------------


def test_s1_01_only_the_inside_of_the_feed_forward_is_wide():
    hidden = 5
    kernels = FeedForwardWeights(draw(WIDTH, hidden), draw(hidden, WIDTH))
    inside = []

    def seen(h):
        inside.append(h.shape)
        return h

    y_BTD = feed_forward(stream(), kernels, "gelu", hidden_dropout=seen)
    assert (y_BTD.shape, inside) == (SHAPE, [(*SHAPE[:2], hidden)])
    # Control: one matrix alone leaves the width.
    assert (
        feed_forward(stream(), FeedForwardWeights(draw(WIDTH, hidden), jnp.eye(hidden)), "gelu").shape
        != SHAPE
    )


@given(SEEDS)
@few
def test_s1_02_all_positions_share_the_feed_forward(seed):
    """It commutes with every permutation of positions; causal attention does not."""
    params, x_BTD = layer(config()), stream(seed=seed)
    order = np.random.default_rng(seed).permutation(6)
    order = order if np.any(order != np.arange(6)) else order[::-1]
    shuffled_BTD = np.asarray(x_BTD)[:, order]
    y_BTD, causal_BTD = np.asarray(feed(params, x_BTD)), np.asarray(attend(params, x_BTD, CAUSAL))
    # A product of one row adds up in another order than one of many: round-off of the largest terms, whatever is left.
    off = 1e-6 * np.abs(y_BTD).max()
    np.testing.assert_allclose(y_BTD[:, order], feed(params, shuffled_BTD), rtol=0, atol=off)
    np.testing.assert_allclose(y_BTD[:1, 3:4], feed(params, np.asarray(x_BTD)[:1, 3:4]), rtol=0, atol=off)
    assert not np.allclose(causal_BTD[:, order], attend(params, shuffled_BTD, CAUSAL), atol=1e-3)


# The worked example: D = F = 2 ---------------------------------------------------------------------------------------

W1, W2 = jnp.asarray([[1.0, -1.0], [0.5, 0.5]]), jnp.asarray([[2.0, 0.0], [0.0, -1.0]])


def worked(tokens_TD, first=W1):
    """Return h, phi(h), z and y = x + z for tokens [T, 2]: the seed's matrices multiply columns, ours rows."""
    x_BTD = jnp.asarray(tokens_TD, jnp.float32)[None]
    kernels, inside = FeedForwardWeights(first.T, W2.T), []

    def seen(h):
        inside.append(h)
        return h

    y_BTD = residual.pre_norm(
        x_BTD, lambda x: feed_forward(x, kernels, "relu", hidden_dropout=seen), lambda x: x
    )
    z_BTD = feed_forward(x_BTD, kernels, "relu")
    return [np.asarray(x[0]).tolist() for x in (dense(x_BTD, kernels.up), inside[0], z_BTD, y_BTD)]


def test_s1_08_worked_example_of_the_feed_forward():
    assert worked([[1, 2]]) == [[[-1, 1.5]], [[0, 1.5]], [[0, -1.5]], [[1, 0.5]]]
    assert worked([[1, 2]], first=W1.T)[2:] != [[[0, -1.5]], [[1, 0.5]]]  # the kernel the other way round


def test_s1_09_worked_example_of_layer_norm():
    """(!) Exactly [1, -1] without epsilon only: with 1e-5 it is 0.99992, as the variance is 0.0625."""
    y_D = jnp.asarray(worked([[1, 2]])[3][0])
    assert float(y_D.mean()) == 0.75
    assert float(y_D.var()) == 0.0625
    np.testing.assert_array_equal(layer_norm(y_D, epsilon=0.0), [1, -1])
    with_epsilon = np.asarray(layer_norm(y_D, epsilon=1e-5))
    np.testing.assert_allclose(with_epsilon, [0.99992, -0.99992], atol=5e-7)
    assert not np.any(np.abs(with_epsilon) == 1)


def test_s1_10_worked_example_of_the_second_token():
    """A second token has its own answer and leaves the first one's as it was."""
    h, _, z, y = worked([[1, 2], [-1, 1]])
    assert (h[1], z[1], y[1]) == ([-2, 0], [0, 0], [-1, 1])
    assert [part[0] for part in (h, z, y)] == [[-1, 1.5], [0, -1.5], [1, 0.5]]
    assert worked([[1, 2], [-1, 2]])[2][1] != [0, 0]


# Counts --------------------------------------------------------------------------------------------------------------


def kernels_of(width: int, heads: int, **changes) -> tuple[int, int]:
    """Return the parameters of one block's attention and of its feed-forward."""
    model_config = config(width=width, heads=heads, depth=1, bias=False, **changes)
    variables = jax.eval_shape(Decoder(model_config).init, jax.random.key(0), tokens(1, 2))
    blocks = variables["params"]["blocks"]
    return count(blocks["attention"]), count(blocks["feed_forward"])


@pytest.mark.parametrize("width", [8, 96, 512])
def test_s1_06_feed_forward_8_d_squared_attention_4_d_squared(width):
    assert kernels_of(width, 8) == (4 * width**2, 8 * width**2)
    assert kernels_of(width, 8, kv_heads=2)[0] < 4 * width**2
    assert kernels_of(width, 8, feed_forward="swiglu", hidden=4 * width)[1] == 12 * width**2


def flops_per_token(width: int, positions: int) -> tuple[float, float, float]:
    """Return operations per token of the score and mixing products, of the projections, of the feed-forward."""
    model_config = config(width=width, heads=2, bias=False)
    x_BTD = jax.ShapeDtypeStruct((1, positions, width), jnp.float32)
    head_BTHK = jax.ShapeDtypeStruct((1, positions, 2, width // 2), jnp.float32)
    module, inputs = Attention(model_config, ExecutionConfig()), AttentionInputs(CAUSAL)
    shapes = jax.eval_shape(module.init, jax.random.key(0), x_BTD, inputs)
    whole = product_flops(lambda p, x: module.apply(p, x, inputs), shapes, x_BTD)
    scores = product_flops(attention, head_BTHK, head_BTHK, head_BTHK)
    # Of the scores that the mask hides, ours leaves out what whole chunks of queries do not see.
    made = product_flops(lambda *qkv: attention(*qkv, CAUSAL), head_BTHK, head_BTHK, head_BTHK)
    module = FeedForward(model_config)
    shapes = jax.eval_shape(module.init, jax.random.key(0), x_BTD)
    wide = product_flops(module.apply, shapes, x_BTD)
    return scores / positions, (whole - made) / positions, wide / positions


def test_s1_07_long_sequences_are_ruled_by_scores_and_parameters_by_the_feed_forward():
    """Per token 4 T D, 8 D^2 and 16 D^2, read off our own products; a causal mask shows half of the 4 T D."""
    width = 16
    for positions in (1, 64, 96):
        assert flops_per_token(width, positions) == (4 * positions * width, 8 * width**2, 16 * width**2)
    scores, _, wide = flops_per_token(width, 4 * width)
    assert scores == wide
    scores, projections, wide = flops_per_token(width, 6 * width)
    assert scores == projections + wide
    scores, _, wide = flops_per_token(width, 2 * width)
    assert scores < wide
    # Of each visible pair, 4 D: equal to the feed-forward at T = 8 D and to the block at 12 D, up to the diagonal.
    for positions, others in ((8 * width, 16), (12 * width, 24)):
        seen = int(jnp.sum(visibility(CAUSAL, positions, positions)))
        assert seen * 4 * width / positions == pytest.approx(others * width**2, rel=2 / positions)


def test_s1_58_exercise_of_counts_at_width_512():
    """D = 512, F = 2048, H = 8: parameters do not know T, score entries grow with its square."""
    assert kernels_of(512, 8, hidden=2048) == (1_048_576, 2_097_152)
    assert kernels_of(512, 8, hidden=2049) != (1_048_576, 2_097_152)
    assert [score_entries(positions, heads=8) for positions in (512, 1024)] == [2_097_152, 8_388_608]
    assert score_entries(512, heads=4) != 2_097_152
    totals = {count(jax.eval_shape(Decoder(LONG).init, jax.random.key(0), tokens(1, t))) for t in (512, 1024)}
    assert len(totals) == 1


LONG = config(width=512, heads=8, hidden=2048, depth=1, positions="rope")


def score_entries(positions: int, heads: int) -> int:
    """Return the entries of the array that attention's softmax is taken of."""
    head_BTHK = jax.ShapeDtypeStruct((1, positions, heads, 64), jnp.float32)
    jaxpr = jax.make_jaxpr(attention)(head_BTHK, head_BTHK, head_BTHK).jaxpr
    (size,) = [math.prod(e.outvars[0].aval.shape) for e in equations(jaxpr) if e.primitive.name == "exp"]
    return size


# What attention computes ---------------------------------------------------------------------------------------------


def test_s1_03_the_relation_matrix_is_t_by_t_per_head():
    """Of all arrays in attention, the softmax's has B H T T entries; the feed-forward has none of T by T."""
    q = jax.ShapeDtypeStruct((2, 5, 3, 5), jnp.float32)
    assert jax.eval_shape(weights, q, q).shape == (2, 3, 5, 5)
    jaxpr = jax.make_jaxpr(attention)(q, q, q).jaxpr
    (scores,) = [e.outvars[0].aval for e in equations(jaxpr) if e.primitive.name == "exp"]
    assert scores.size == 2 * 3 * 5 * 5
    for fits, shape in ((True, (2, 3, 5, 5)), (False, (2, 3, 4, 5)), (False, (2, 2, 5, 5))):
        masked = functools.partial(attention, pattern=AttentionPattern(mask=jnp.ones(shape, bool)))
        if fits:
            assert jax.eval_shape(masked, q, q, q).shape == q.shape
        else:
            with pytest.raises(ValueError, match="mask has shape"):
                jax.eval_shape(masked, q, q, q)
    kernels = FeedForwardWeights(draw(WIDTH, 7), draw(7, WIDTH))
    jaxpr = jax.make_jaxpr(lambda x: feed_forward(x, kernels, "gelu"))(draw(2, 5, WIDTH)).jaxpr
    assert not any(e.outvars[0].aval.shape.count(5) > 1 for e in equations(jaxpr))


@given(SEEDS)
@few
def test_s1_04_attention_is_a_weighted_mean_of_values(seed):
    q, k, v = (draw(2, 4, 2, 4, seed=seed + i) for i in range(3))
    for pattern in (AttentionPattern(), CAUSAL):
        w_BHTT = np.asarray(weights(q, k, pattern), np.float64)
        y_BTHK = np.asarray(compiled_attention(q, k, v, pattern))
        assert np.abs(w_BHTT.sum(-1) - 1).max() < 1e-6
        assert w_BHTT.min() >= 0
        np.testing.assert_allclose(y_BTHK, np.einsum("bhqt,bthk->bqhk", w_BHTT, v), atol=1e-5)
        low, high = np.min(v, axis=1, keepdims=True), np.max(v, axis=1, keepdims=True)
        assert np.all((y_BTHK >= low - 1e-6) & (y_BTHK <= high + 1e-6))
    dropped = weights(
        q, k, scores=ScoreRule(dropout_rate=0.5, dropout_key=jax.random.key(3))
    )  # no mean any more
    assert np.abs(np.asarray(dropped).sum(-1) - 1).max() > 0.1


def test_s1_59_gates_windows_and_fused_kernels_change_different_things():
    """The blocked kernel changes no value, a gate no reader, a window the graph of who reads whom."""
    q, k, v = (draw(2, 6, 2, 4, seed=i) for i in range(3))
    plain = compiled_attention(q, k, v, CAUSAL)
    blocked = jax.jit(attention_blocked, static_argnames="block_size")(q, k, v, CAUSAL, block_size=2)
    np.testing.assert_allclose(plain, blocked, rtol=1e-5, atol=1e-6)
    x_TD, params = stream()[0], layer(config())
    up, down = params["feed_forward"]["up"]["kernel"], params["feed_forward"]["down"]["kernel"]
    for gate in ("glu", "geglu", "swiglu"):
        gated = lambda x, gate=gate: gated_feed_forward(x, GatedWeights(up[:, ::-1], up, down), gate)  # noqa: E731
        np.testing.assert_array_equal(readers(gated, x_TD), np.eye(6, dtype=bool))
        ungated = feed_forward(x_TD, FeedForwardWeights(up, down), "silu")
        assert not np.allclose(gated(x_TD), ungated, atol=1e-2)
    window = AttentionPattern(causal=True, window=2)
    seen = {p: readers(functools.partial(attend, params, pattern=p), x_TD) for p in (CAUSAL, window)}
    np.testing.assert_array_equal(seen[CAUSAL], np.tri(6, dtype=bool))
    np.testing.assert_array_equal(seen[window], np.tri(6, dtype=bool) & ~np.tri(6, k=-2, dtype=bool))
    assert not np.allclose(plain, compiled_attention(q, k, v, window), atol=1e-2)


# Layer norm ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_s1_15_the_norm_has_no_running_statistics(norm):
    module, x_BTD = Norm(config(norm=norm)), stream()
    evaluated, variables = module.init_with_output(jax.random.key(0), x_BTD)
    assert set(variables) == {"params"}
    trained, changed = module.apply(variables, x_BTD, rngs={"dropout": jax.random.key(1)}, mutable=True)
    np.testing.assert_array_equal(trained, evaluated)
    assert all(jax.tree.map(np.array_equal, changed, variables)["params"].values())
    control = jax.eval_shape(nn.BatchNorm(use_running_average=False).init, jax.random.key(0), x_BTD)
    assert set(control) == {"params", "batch_stats"}


@given(SEEDS)
@few
def test_s1_16_a_batch_of_32_and_of_1_give_the_same_rows(seed):
    x_BTD = np.asarray(draw(32, *SHAPE[1:], seed=seed))

    def row_7(f):
        return np.asarray(f(x_BTD))[7:8], np.asarray(f(x_BTD[7:8]))

    np.testing.assert_array_equal(*row_7(jax.jit(layer_norm)))
    np.testing.assert_allclose(*row_7(lambda x: block(config())(layer(config()), x)[0]), atol=1e-5)
    assert not np.allclose(*row_7(batch_norm), atol=1e-2)


@given(SEEDS)
@few
def test_s1_17_padding_does_not_reach_the_norm_of_real_tokens(seed):
    x_BTD = np.asarray(stream(seed=seed))
    noisy_BTD = np.where(VALID[..., None], x_BTD, 100 * np.asarray(draw(*SHAPE, seed=seed + 1)))

    def real(f):
        return np.asarray(f(x_BTD))[VALID], np.asarray(f(noisy_BTD))[VALID]

    np.testing.assert_array_equal(*real(jax.jit(layer_norm)))
    assert not np.allclose(*real(batch_norm), atol=1e-2)


compiled_norm = jax.jit(layer_norm)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_s1_18_a_constant_vector_gives_finite_zeros(dtype):
    for value in (0.0, 1e-20, 3.3, 6e4):
        np.testing.assert_array_equal(compiled_norm(jnp.full(WIDTH, value, dtype)), np.zeros(WIDTH))
    assert np.all(np.isnan(compiled_norm(jnp.zeros(WIDTH, dtype), epsilon=0.0)))


def test_s1_18_epsilon_and_range_fail_apart():
    """Too small: a smaller epsilon repairs it. Too large: no epsilon does, only a smaller range before the norm."""
    unit_D = draw(WIDTH)

    def size(scale, *, dtype="float32", epsilon=1e-5):
        return float(
            jnp.std(compiled_norm((scale * unit_D).astype(dtype), epsilon=epsilon).astype(jnp.float32))
        )

    assert size(1.0) == pytest.approx(1, abs=1e-4)
    assert size(1e-12) < 1e-8
    assert size(1e-12, epsilon=1e-35) == pytest.approx(1, abs=1e-4)
    for dtype in ("float32", "bfloat16"):  # the variance, 1e40, is infinite in float32
        assert [size(1e20, dtype=dtype, epsilon=e) for e in (1e-35, 1e-5, 1.0)] == [0, 0, 0]
    assert size(1e18, dtype="bfloat16") == pytest.approx(1, abs=1e-2)
    assert math.isnan(size(1e20, dtype="float16"))  # the input itself is infinite
    assert size(1e4, dtype="float16") == pytest.approx(1, abs=1e-2)


def test_s1_46_a_feed_forward_over_flattened_positions_is_caught():
    params, x_TD = layer(config()), stream()[0]
    np.testing.assert_array_equal(readers(functools.partial(feed, params), x_TD), np.eye(6, dtype=bool))
    flat = FeedForwardWeights(draw(6 * WIDTH, 16, scale=0.1), draw(16, 6 * WIDTH, scale=0.1))

    def flattened(x_BTD):
        return feed_forward(x_BTD.reshape(x_BTD.shape[0], -1), flat, "gelu").reshape(x_BTD.shape)

    assert np.all(readers(flattened, x_TD))
