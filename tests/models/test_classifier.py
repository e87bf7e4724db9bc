"""The classifier against numpy in float64; what pooling reads; padding, empty rows, and what `predict` says."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxblock.axes import Label, path_name, roles
from jaxblock.models.classifier import POOLINGS, Classifier, predict
from jaxblock.models.encoder import Encoder
from jaxblock.residual import PreNorm, Topology
from tests.small import config, tokens

BASE = config(depth=2)
SIDES = {
    "right": [[True, True, True, False, False], [True] * 5],
    "left": [[False, False, True, True, True], [True] * 5],
    "hole": [[True, False, False, True, False], [True] * 5],
    "nothing": [[False] * 5, [True] * 5],
}


@functools.cache
def drawn(model: Classifier) -> Any:
    """Return parameters off their initial zeros and ones, drawn by numpy: compiling `init` is slow."""
    shapes = jax.eval_shape(model.init, jax.random.key(0), tokens(1, 2))["params"]
    rng = np.random.default_rng(0)

    def leaf(path, x):
        name = path[-1].key
        scale = 0.35 if name in ("kernel", "table") else 0.1
        return jnp.asarray(rng.normal(scale=scale, size=x.shape) + (name == "scale"), x.dtype)

    return jax.tree_util.tree_map_with_path(leaf, shapes)


def classifier(pooling: str = "mean", **changes: Any) -> Classifier:
    """Return a classifier of three classes and two blocks."""
    return Classifier(config(**{"depth": 2, **changes}), classes=3, pooling=pooling)


@functools.cache
def forward(model: Classifier):
    return jax.jit(
        lambda params, tokens_BT, valid_BT=None: model.apply({"params": params}, tokens_BT, valid_BT=valid_BT)
    )


def run(model: Classifier, tokens_BT, valid_BT=None) -> np.ndarray:
    return np.asarray(forward(model)(drawn(model), tokens_BT, valid_BT))


# Numpy ---------------------------------------------------------------------------------------------------------------


def layer_norm(x, p):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * p["scale"] + p["bias"]


def attend(x_TD, p, visible_TT):
    q, k, v = (
        np.einsum("td,dhk->htk", x_TD, p[n]["kernel"]) + p[n]["bias"][:, None]
        for n in ("query", "key", "value")
    )
    scores = np.einsum("hqk,htk->hqt", q, k) / math.sqrt(q.shape[-1])
    weights = np.exp(scores - scores.max(-1, keepdims=True)) * visible_TT
    weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-300)
    return np.einsum("hqt,htk,hkd->qd", weights, v, p["output"]["kernel"]) + p["output"]["bias"]


def feed(x, p):
    h = x @ p["up"]["kernel"] + p["up"]["bias"]
    gelu = 0.5 * h * (1 + np.vectorize(math.erf)(h / math.sqrt(2)))
    return gelu @ p["down"]["kernel"] + p["down"]["bias"]


def reference(params, tokens_T, valid_T, pooling, *, causal=False) -> np.ndarray:
    """Return one row's logits: pre-norm blocks over learned positions, final norm, pooling, head."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    length = len(tokens_T)
    visible_TT = np.broadcast_to(valid_T[None], (length, length))
    if causal:
        visible_TT = visible_TT & np.tril(np.ones((length, length), bool))
    x_TD = p["embedding"]["table"][tokens_T] + p["positions"]["table"][:length]
    for layer in range(2):
        block = jax.tree.map(lambda x, i=layer: x[i], p["blocks"])
        h_TD = layer_norm(x_TD, block["attention_connection"]["norm"])
        x_TD = x_TD + attend(h_TD, block["attention"], visible_TT)
        x_TD = x_TD + feed(layer_norm(x_TD, block["feed_forward_connection"]["norm"]), block["feed_forward"])
    real = layer_norm(x_TD, p["final_norm"])[valid_T]
    pools = {"mean": lambda x: x.mean(0), "first": lambda x: x[0], "last": lambda x: x[-1]}
    pooled = pools[pooling](real) if len(real) else np.zeros(x_TD.shape[1])
    return pooled @ p["classifier"]["kernel"] + p["classifier"]["bias"]


@settings(deadline=None, max_examples=8)
@given(pooling=st.sampled_from(sorted(POOLINGS)), seed=st.integers(0, 10_000))
def test_logits_equal_numpy_in_float64(pooling, seed):
    rng = np.random.default_rng(seed)
    tokens_BT, valid_BT = rng.integers(0, 11, (2, 5)), rng.random((2, 5)) < 0.7
    model = classifier(pooling)
    got = run(model, jnp.asarray(tokens_BT, jnp.int32), jnp.asarray(valid_BT))
    assert got.dtype == np.float32
    assert got.shape == (2, 3)
    rows = list(zip(tokens_BT, valid_BT, strict=True))
    np.testing.assert_allclose(
        got, [reference(drawn(model), *row, pooling) for row in rows], rtol=1e-4, atol=1e-5
    )


def test_the_reference_tells_attention_and_poolings_apart():
    """Control: a causal mask, or another pooling, is another classifier."""
    row = np.asarray(tokens(1, 5)[0]), np.ones(5, bool)
    params = drawn(classifier())
    found = [reference(params, *row, name) for name in POOLINGS] + [
        reference(params, *row, "mean", causal=True)
    ]
    for i, one in enumerate(found):
        assert all(np.abs(one - other).max() > 1e-2 for other in found[:i])


# Padding and pooling -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pooling", "place"), [("first", {"left": 2, "right": 0}), ("last", {"left": 4, "right": 2})]
)
def test_b74_the_pooled_token_is_the_first_or_last_real_one(pooling, place):
    """Three real tokens among five, padded on either side."""
    model = classifier(pooling)
    params = drawn(model)
    body = {name: leaf for name, leaf in params.items() if name != "classifier"}
    head = params["classifier"]
    encode = jax.jit(lambda p, x_BT, v_BT: Encoder(model.config).apply({"params": p}, x_BT, valid_BT=v_BT))
    for side, index in place.items():
        valid_BT = jnp.asarray(SIDES[side])
        states_TD = np.asarray(encode(body, tokens(2, 5), valid_BT))[0]
        want_TC = states_TD @ np.asarray(head["kernel"]) + np.asarray(head["bias"])
        got_C = run(model, tokens(2, 5), valid_BT)[0]
        np.testing.assert_allclose(got_C, want_TC[index], rtol=1e-4, atol=1e-5)
        assert all(np.abs(got_C - want_TC[t]).max() > 1e-2 for t in range(5) if t != index)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_b04_padding_changes_no_bit_of_the_logits(pooling):
    model = classifier(pooling)
    for side in SIDES:
        valid_BT = jnp.asarray(SIDES[side])
        got, *others = (
            run(model, jnp.where(valid_BT, tokens(2, 5), fill), valid_BT) for fill in (0, 7, 10_000)
        )
        for other in others:
            np.testing.assert_array_equal(got, other)
    everything = jnp.ones((2, 5), bool)
    assert not np.allclose(got[0], run(model, tokens(2, 5), everything)[0], atol=1e-3)


@pytest.mark.parametrize(
    ("dtype", "bound"), [("float32", 1e-5), pytest.param("bfloat16", 0.05, marks=pytest.mark.full)]
)
def test_b110_a_row_alone_and_in_a_padded_batch(dtype, bound):
    """Equal to round-off in float32, to a twentieth in bfloat16 (eps 2^-7, logits of size 1)."""
    model = classifier(dtype=dtype, stream_dtype=dtype)
    both = run(model, tokens(2, 5), jnp.asarray(SIDES["right"]))
    alone = run(model, tokens(2, 5)[:1, :3])
    np.testing.assert_allclose(both[:1], alone, atol=bound)
    assert np.abs(run(model, tokens(2, 5))[:1] - alone).max() > 2 * bound


@pytest.mark.parametrize("pooling", ["mean", pytest.param("first", marks=pytest.mark.full)])
def test_a_row_without_a_real_token_has_the_bias_for_logits_and_finite_gradients(pooling):
    model, valid_BT = classifier(pooling), jnp.asarray(SIDES["nothing"])
    params = drawn(model)
    got = run(model, tokens(2, 5), valid_BT)
    np.testing.assert_array_equal(got[0], params["classifier"]["bias"])
    assert not np.allclose(got[1], params["classifier"]["bias"], atol=1e-2)

    def first_row(params):
        return jnp.sum(jnp.sin(model.apply({"params": params}, tokens(2, 5), valid_BT=valid_BT)[0]))

    gradients = jax.jit(jax.grad(first_row))(params)
    moved = {path_name(path) for path, x in jax.tree_util.tree_leaves_with_path(gradients) if np.any(x)}
    assert moved == {"classifier/bias"}
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradients))


# What it says, and what it is made of --------------------------------------------------------------------------------


def test_predictions_are_the_softmax_and_its_largest_entry():
    model, valid_BT = classifier(), jnp.asarray(SIDES["right"])
    label_B, p_BC = predict(model, drawn(model), tokens(2, 5), valid_BT)
    logits_BC = run(model, tokens(2, 5), valid_BT).astype(np.float64)
    want_BC = np.exp(logits_BC) / np.exp(logits_BC).sum(-1, keepdims=True)
    np.testing.assert_allclose(p_BC, want_BC, atol=1e-6)
    np.testing.assert_allclose(np.asarray(p_BC).sum(-1), 1, atol=1e-6)
    np.testing.assert_array_equal(label_B, want_BC.argmax(-1))
    assert label_B.dtype == jnp.int32
    assert p_BC.dtype == jnp.float32
    again = predict(model, drawn(model), tokens(2, 5), valid_BT)
    np.testing.assert_array_equal(again.probability_BC, p_BC)


def test_dropout_is_on_exactly_when_a_key_is_passed():
    model = classifier(branch_dropout=0.5)
    plain = run(model, tokens(2, 5))
    np.testing.assert_array_equal(plain, run(classifier(), tokens(2, 5)))
    key = jax.random.key(0, impl="unsafe_rbg")
    dropped = jax.jit(lambda p, key: model.apply({"params": p}, tokens(2, 5), rngs={"dropout": key}))(
        drawn(model), key
    )
    assert not np.allclose(dropped, plain, atol=1e-3)


@pytest.mark.parametrize("bias", [True, False])
def test_every_parameter_has_a_role_and_the_head_is_the_only_one_of_its_own(bias):
    model = classifier(bias=bias, norm="rms_norm")
    shapes = jax.eval_shape(model.init, jax.random.key(0), tokens(1, 2))["params"]
    body = jax.eval_shape(Encoder(model.config).init, jax.random.key(0), tokens(1, 2))["params"]
    head = shapes.pop("classifier")
    assert jax.tree.map(lambda x: x.shape, shapes) == jax.tree.map(lambda x: x.shape, body)
    assert jax.tree.map(lambda x: x.shape, head) == (
        {"kernel": (8, 3), "bias": (3,)} if bias else {"kernel": (8, 3)}
    )
    found = roles({**shapes, "classifier": head})["classifier"]
    assert found == ({"kernel": "head", "bias": "bias"} if bias else {"kernel": "head"})


def test_it_hands_on_what_its_topology_asks_of_the_optimizer():
    label = Label("final_norm/scale", decay=True)
    mine = Topology(
        PreNorm, "x + f(norm(x))", "test", labels=(label,), project=lambda config, p: jax.tree.map(abs, p)
    )
    model = Classifier(BASE, topology=mine, classes=3)
    assert model.labels == (label,)
    projected = model.project(drawn(model))
    assert all((x >= 0).all() for x in jax.tree.leaves(projected))
    plain = classifier()
    assert plain.labels == ()
    assert plain.project(drawn(plain)) is drawn(plain)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"classes": 0}, "classes is 0; it must be a whole number of at least 1"),
        ({"classes": True}, "classes is True"),
        (
            {"classes": 3, "pooling": "frist"},
            r"pooling is 'frist'; .* first, last, mean \(did you mean 'first'",
        ),
    ],
)
def test_what_is_no_classifier_is_refused_when_it_is_made(changes, message):
    with pytest.raises(ValueError, match=message):
        Classifier(BASE, **changes)
    with pytest.raises(TypeError, match="classes"):
        Classifier(BASE)
