"""Feed-forward maps against float64 numpy, seed 001's worked example to the digit, names and dtypes (B34)."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxblock.functional.feed_forward import (
    ACTIVATIONS,
    GATES,
    FeedForwardWeights,
    GatedWeights,
    feed_forward,
    gated_feed_forward,
)
from jaxblock.functional.norms import layer_norm

jit_plain = jax.jit(feed_forward, static_argnums=2)
jit_gated = jax.jit(gated_feed_forward, static_argnums=2)
SHAPES = [(4,), (3, 4), (2, 3, 1)]

PHI = np.vectorize(lambda v: 0.5 * (1 + math.erf(v / math.sqrt(2))))


def sigmoid(v):
    return 1 / (1 + np.exp(-v))


REFERENCES = {
    "relu": lambda v: np.maximum(v, 0),
    "gelu": lambda v: v * PHI(v),
    "gelu_tanh": lambda v: 0.5 * v * (1 + np.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))),
    "silu": lambda v: v * sigmoid(v),
}
GATE_REFERENCES = {"glu": sigmoid, "geglu": REFERENCES["gelu"], "swiglu": REFERENCES["silu"]}


def draw(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def plain_weights(seed, width, hidden):
    return FeedForwardWeights(
        draw(seed, width, hidden),
        draw(seed + 1, hidden, width),
        draw(seed + 2, hidden),
        draw(seed + 3, width),
    )


def gated_weights(seed, width, hidden):
    up, down, up_bias, down_bias = plain_weights(seed, width, hidden)
    return GatedWeights(draw(seed + 4, width, hidden), up, down, draw(seed + 5, hidden), up_bias, down_bias)


def wide(weights):
    return type(weights)(*(np.asarray(w, np.float64) for w in weights))


def test_the_tables_hold_what_the_references_hold():
    assert set(ACTIVATIONS) == set(REFERENCES)
    assert set(GATES) == set(GATE_REFERENCES)


@pytest.mark.parametrize("name", REFERENCES)
def test_activations_equal_their_float64_formula_and_differ_from_each_other(name):
    v = np.linspace(-6, 6, 49)
    got = ACTIVATIONS[name](jnp.asarray(v, jnp.float32))
    np.testing.assert_allclose(got, REFERENCES[name](v), atol=2e-6)
    for other in set(REFERENCES) - {name}:
        assert np.abs(got - REFERENCES[other](v)).max() > 1e-4


@settings(deadline=None, max_examples=8)
@given(shape=st.sampled_from(SHAPES), activation=st.sampled_from(sorted(REFERENCES)), seed=st.integers(0, 99))
def test_feed_forward_equals_the_float64_formula(shape, activation, seed):
    x, weights = draw(seed + 9, *shape), plain_weights(seed, shape[-1], 6)
    w = wide(weights)
    h = REFERENCES[activation](np.asarray(x, np.float64) @ w.up + w.up_bias)
    got = jit_plain(x, weights, activation)
    np.testing.assert_allclose(got, h @ w.down + w.down_bias, atol=3e-5)


@settings(deadline=None, max_examples=8)
@given(shape=st.sampled_from(SHAPES), gate=st.sampled_from(sorted(GATE_REFERENCES)), seed=st.integers(0, 99))
def test_gated_feed_forward_equals_the_float64_formula(shape, gate, seed):
    x, weights = draw(seed + 9, *shape), gated_weights(seed, shape[-1], 6)
    w, x64 = wide(weights), np.asarray(x, np.float64)
    h = GATE_REFERENCES[gate](x64 @ w.gate + w.gate_bias) * (x64 @ w.up + w.up_bias)
    got = jit_gated(x, weights, gate)
    np.testing.assert_allclose(got, h @ w.down + w.down_bias, atol=1e-4)


def test_the_activation_is_on_the_gate_and_not_on_the_linear_half():
    x, w = draw(0, 3, 4), gated_weights(1, 4, 5)
    swapped = w._replace(gate=w.up, up=w.gate, gate_bias=w.up_bias, up_bias=w.gate_bias)
    assert np.abs(gated_feed_forward(x, w, "swiglu") - gated_feed_forward(x, swapped, "swiglu")).max() > 0.1
    # A linear half of zero closes the map; a zero gate halves the linear half under glu.
    closed = w._replace(up=0 * w.up, up_bias=None)
    np.testing.assert_allclose(
        gated_feed_forward(x, closed, "swiglu"), np.broadcast_to(w.down_bias, (3, 4)), atol=1e-6
    )
    half = w._replace(gate=0 * w.gate, gate_bias=None)
    want = 0.5 * (x @ w.up + w.up_bias[None]) @ w.down + w.down_bias[None]
    np.testing.assert_allclose(gated_feed_forward(x, half, "glu"), want, atol=1e-5)


def test_hidden_dropout_acts_on_the_hidden_activation_after_the_gate():
    x = draw(0, 3, 4)
    for function, weights, name in (
        (feed_forward, plain_weights(1, 4, 5), "relu"),
        (gated_feed_forward, gated_weights(1, 4, 5), "swiglu"),
    ):
        shapes = []
        kept = function(x, weights, name, hidden_dropout=lambda h, s=shapes: s.append(h.shape) or 0 * h)
        assert shapes == [(3, 5)]
        np.testing.assert_allclose(kept, np.broadcast_to(weights.down_bias, (3, 4)), atol=1e-6)
        base = function(x, weights, name) - weights.down_bias[None]
        doubled = function(x, weights, name, hidden_dropout=lambda h: 2 * h) - weights.down_bias[None]
        np.testing.assert_allclose(doubled, 2 * base, atol=1e-5)


def test_positions_are_mapped_apart():
    x, weights = draw(0, 2, 3, 4), plain_weights(1, 4, 5)
    before, after = (np.asarray(jit_plain(v, weights, "gelu")) for v in (x, x.at[0, 1].set(1e4)))
    same = np.ones((2, 3), bool)
    same[0, 1] = False
    np.testing.assert_array_equal(after[same], before[same])
    assert (after[0, 1] != before[0, 1]).any()  # control


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_b34_float32_weights_leave_a_narrow_stream_narrow(dtype):
    x = draw(0, 3, 4, dtype=dtype)
    weights, gated = plain_weights(1, 4, 5), gated_weights(1, 4, 5)
    for activation in ACTIVATIONS:
        assert jax.eval_shape(lambda a=activation: feed_forward(x, weights, a)).dtype == dtype
    for gate in GATES:
        assert jax.eval_shape(lambda g=gate: gated_feed_forward(x, gated, g)).dtype == dtype
    y = jit_gated(x, gated, "swiglu")
    want = jit_gated(x.astype(jnp.float32), gated, "swiglu")
    np.testing.assert_allclose(np.asarray(y, np.float32), want, atol=0.15)


def test_unknown_names_are_refused_with_the_nearest():
    x = jnp.ones((1, 4))
    with pytest.raises(ValueError, match=r"activation is 'gelu_tan'.*did you mean 'gelu_tanh'"):
        feed_forward(x, plain_weights(0, 4, 5), "gelu_tan")
    with pytest.raises(ValueError, match=r"gate is 'swigl'.*did you mean 'swiglu'"):
        gated_feed_forward(x, gated_weights(0, 4, 5), "swigl")


def test_shapes_that_do_not_match_are_refused():
    weights = plain_weights(0, 4, 5)
    with pytest.raises(AssertionError):
        feed_forward(jnp.ones((1, 3)), weights, "relu")
    with pytest.raises(AssertionError):
        feed_forward(jnp.ones((1, 4)), weights._replace(down=weights.down.T), "relu")


def test_jit_equals_eager():
    x, weights = draw(0, 2, 3, 4), gated_weights(1, 4, 5)
    np.testing.assert_allclose(
        jit_gated(x, weights, "geglu"), gated_feed_forward(x, weights, "geglu"), atol=1e-5
    )


def test_seed_001_section_3_worked_example_to_the_digit():
    x = jnp.array([[1.0, 2.0], [-1.0, 1.0]])
    first = jnp.array([[1.0, -1.0], [0.5, 0.5]])
    weights = FeedForwardWeights(up=first.T, down=jnp.diag(jnp.array([2.0, -1.0])))
    np.testing.assert_array_equal(x @ weights.up, [[-1.0, 1.5], [-2.0, 0.0]])
    z = feed_forward(x, weights, "relu")
    np.testing.assert_array_equal(z, [[0.0, -1.5], [0.0, 0.0]])
    y = x + z
    np.testing.assert_array_equal(y[0], [1.0, 0.5])
    np.testing.assert_allclose(layer_norm(y[0], epsilon=0.0), [1.0, -1.0], atol=1e-6)
    # Control: the text writes h = W1 x, so its matrix is the transpose of the kernel.
    assert not np.array_equal(feed_forward(x, weights._replace(up=first), "relu"), z)
