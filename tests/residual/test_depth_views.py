"""Views over depth, MUDDFormer's and LIMe's, against their papers, written again in numpy float64 as loops."""

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblock import ExecutionConfig
from jaxblock.functional.depth_mixing import Sources, mix_sources
from jaxblock.functional.depth_views import LinearScores, mix_views, softmax_weights
from jaxblock.models import StackInputs, init_blocks, layer_inputs, run_blocks
from jaxblock.residual import Views, residual, topology
from tests.residual.battery.subject import PLAIN
from tests.residual.given import draw
from tests.small import config

EPSILON = 1e-3  # large enough to show if it were misplaced
DEPTH, WIDTH = 3, 8
SERIAL = ("attention_connection", "feed_forward_connection")


class ViewBranches(nn.Module):
    """A block around branches tanh(q W_0 + k W_1 + v W_2), so that each view shows; one array is all three."""

    config: object
    topology: object

    @nn.compact
    def __call__(self, stream, given, layer):
        for j, name in enumerate(SERIAL if self.config.wiring == "serial" else ("connection",)):

            def f(h, j=j):
                views = h if isinstance(h, Views) else Views(h, h, h)
                matrices = given[layer.sublayer + j]
                return jnp.tanh(sum(view @ matrix for view, matrix in zip(views, matrices, strict=True)))

            connection = self.topology.connection(self.config, name=name)
            stream = residual(connection, stream, f, dtype="float32")
        after = self.topology.after_block
        return stream if after is None else after(self.config, name="after_block")(stream)


def model_config(wiring="serial"):
    return config(**PLAIN, norm_epsilon=EPSILON, wiring=wiring)


@functools.cache
def given(wiring="serial"):
    """Return the embedding and the branches' matrices."""
    sublayers = model_config(wiring).sublayers
    return draw(2, 3, WIDTH), draw(sublayers, 3, WIDTH, WIDTH, seed=1, scale=0.5)


@functools.cache
def stack(name, wiring="serial"):
    """Return the shapes of the blocks' parameters and a compiled (params, x, weights) -> closed stream."""
    made, cfg = topology(name), model_config(wiring)
    block = ViewBranches(cfg, made, parent=None)
    x, weights = given(wiring)
    inputs = StackInputs(weights, layer_inputs(cfg))
    shapes = jax.eval_shape(
        lambda: init_blocks(block, jax.random.key(0), made.open(cfg, x), inputs, depth=DEPTH)
    )

    @jax.jit
    def run(params, x, weights):
        inputs = StackInputs(weights, layer_inputs(cfg))
        stream, _ = run_blocks(
            block, params, made.open(cfg, x), inputs, dropout_key=None, execution=ExecutionConfig()
        )
        return stream if made.close is None else made.close(cfg).apply({}, stream, None)

    return shapes, run


def drawn(shapes, *, seed=2, start=(), scale=0.5):
    """Return random parameters; names that contain one of `start` keep the value 0, scales are near 1."""
    rng = np.random.default_rng(seed)

    def leaf(path, x):
        name = path[-1].key
        value = rng.normal(scale=scale, size=x.shape) + (name == "scale")
        return np.asarray(value * (not any(part in name for part in start)), x.dtype)

    return jax.tree_util.tree_map_with_path(leaf, shapes)


def float64(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


def rms(x, scale=1.0):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON) * scale


def gelu(x):
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / np.sqrt(2)))


def branch(views, matrices):
    return np.tanh(sum(view @ matrix for view, matrix in zip(views, matrices, strict=True)))


def mudd(x, weights, params, *, views=("query", "key", "value", "residual"), sources=None):
    """X_i = Block_i(X^Q, X^K, X^V, X^R);  X^c = sum_j (W2_c gelu(W1 rms(X_i)) + s_c)_j X_j."""
    states, streams = [x], dict.fromkeys(views, x)
    for i in range(DEPTH):
        p = jax.tree.map(lambda leaf, i=i: leaf[i], params)
        x = streams["residual"]
        if "connection" in p:
            x = x + branch([rms(x, p["connection"]["norm"]["scale"])] * 3, weights[i])
        else:
            norms = p["attention_connection"]
            read = [rms(streams[c], norms[f"norm_{c}"]["scale"]) for c in ("query", "key", "value")]
            x = x + branch(read, weights[2 * i])
            x = x + branch([rms(x, p["feed_forward_connection"]["norm"]["scale"])] * 3, weights[2 * i + 1])
        states.append(x)
        own = p["after_block"]
        for c in views:
            a = np.broadcast_to(own[f"{c}_weight"], (*x.shape[:-1], DEPTH + 1)).copy()
            a[..., i + 1] += 1
            if "hidden_kernel" in own:
                a += gelu(rms(x) @ own["hidden_kernel"]) @ own[f"{c}_kernel"].T
            streams[c] = sum(a[..., j, None] * states[j] for j in range(i + 2)[: sources and -sources])
    return streams["residual"]


def lime(x, weights, params, *, views=("key", "value"), bias=None):
    """x + f(norm(x), norm(sum_j k_j X_j), norm(sum_j v_j X_j)); dynamic where there is a bias."""
    states = [x]
    for i in range(DEPTH):
        p = jax.tree.map(lambda leaf, i=i: leaf[i], params)
        own = p.get("connection") or p["attention_connection"]
        mixed = {}
        for c in views:
            a = np.broadcast_to(own[f"{c}_weight"][: i + 1], (*x.shape[:-1], i + 1)).copy()
            a[..., i] += 1 if bias is None else bias
            if bias is not None:
                a = np.exp(a + rms(x) @ own[f"{c}_kernel"][: i + 1].T)
                a = a / a.sum(-1, keepdims=True)
            mixed[c] = sum(a[..., j, None] * states[j] for j in range(i + 1))
        if "connection" in p:
            x = x + branch([rms(mixed["value"], own["norm"]["scale"])] * 3, weights[i])
        else:
            read = {"query": x, **mixed}
            x = x + branch([rms(read[c], own[f"norm_{c}"]["scale"]) for c in Views._fields], weights[2 * i])
            x = x + branch([rms(x, p["feed_forward_connection"]["norm"]["scale"])] * 3, weights[2 * i + 1])
        states.append(x)
    return x


@pytest.mark.parametrize("wiring", ["serial", pytest.param("parallel", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "name", ["muddformer", pytest.param("muddformer(weights='static')", marks=pytest.mark.full)]
)
def test_muddformer_equals_its_paper(name, wiring):
    shapes, run = stack(name, wiring)
    params, (x, weights) = drawn(shapes), given(wiring)
    views = ("query", "key", "value", "residual") if wiring == "serial" else ("residual",)
    closed, wanted = run(params, x, weights), float64((x, weights, params))
    np.testing.assert_allclose(closed, mudd(*wanted, views=views), rtol=2e-5, atol=2e-5)
    assert not np.allclose(closed, mudd(*wanted, views=views, sources=1), atol=1e-2)  # the newest left out
    if wiring == "serial":  # each view has a weight of its own
        for one, other in (("query", "key"), ("key", "value"), ("value", "residual")):
            own = dict(params["after_block"])
            own[f"{one}_weight"], own[f"{other}_weight"] = own[f"{other}_weight"], own[f"{one}_weight"]
            swapped = float64({**params, "after_block": own})
            assert not np.allclose(closed, mudd(*wanted[:2], swapped), atol=1e-2), (one, other)


@pytest.mark.parametrize("wiring", ["serial", pytest.param("parallel", marks=pytest.mark.full)])
@pytest.mark.parametrize(("name", "bias"), [("lime", None), ("lime(weights='dynamic', bias=1.5)", 1.5)])
def test_lime_equals_its_equation(name, bias, wiring):
    shapes, run = stack(name, wiring)
    params, (x, weights) = drawn(shapes), given(wiring)
    views = ("key", "value") if wiring == "serial" else ("value",)
    closed, wanted = run(params, x, weights), float64((x, weights, params))
    np.testing.assert_allclose(closed, lime(*wanted, views=views, bias=bias), rtol=2e-5, atol=2e-5)
    place = "attention_connection" if wiring == "serial" else "connection"
    own = params[place]
    rolled = {name: np.roll(x, 1, axis=1) if name.endswith("_weight") else x for name, x in own.items()}
    wrong = [rolled]  # places of another order, and in a serial block each view with the other's weights
    if wiring == "serial":
        wrong.append({**own, "key_weight": own["value_weight"], "value_weight": own["key_weight"]})
    for other in wrong:
        other = lime(*wanted[:2], float64({**params, place: other}), views=views, bias=bias)
        assert not np.allclose(closed, other, atol=1e-2)


def plain(params, wiring="serial"):
    """Return pre-norm's closed stream; every norm's scale is 1 in these tests."""
    shapes, run = stack("pre_norm", wiring)
    return run(ones(drawn(shapes)), *given(wiring))


def ones(params):
    return jax.tree_util.tree_map_with_path(
        lambda path, x: np.ones_like(x) if path[-1].key == "scale" else x, params
    )


def test_i42_mudd_with_w2_at_0_is_pre_norm_whatever_w1_is():
    """Controls: a W2 of 0.01, or a static weight off its start, is not."""
    shapes, run = stack("muddformer")
    params = ones(drawn(shapes, start=("query_", "key_", "value_", "residual_")))
    np.testing.assert_allclose(run(params, *given()), plain(params), rtol=1e-6, atol=1e-6)
    for view in ("query", "key", "value", "residual"):
        for kind in ("kernel", "weight"):
            own, name = params["after_block"], f"{view}_{kind}"
            moved = {**params, "after_block": {**own, name: own[name] + 0.01}}
            assert not np.allclose(run(moved, *given()), plain(params), atol=1e-4), name


def test_lime_starts_as_pre_norm_and_its_dynamic_form_as_a_mean():
    """A large bias on the newest input gives pre-norm back; none is not pre-norm."""
    zero = {"start": ("key_", "value_")}
    shapes, run = stack("lime")
    params = ones(drawn(shapes, **zero))
    np.testing.assert_allclose(run(params, *given()), plain(params), rtol=1e-6, atol=1e-6)
    shapes, run = stack("lime(weights='dynamic', bias=1.5)")
    params = ones(drawn(shapes, **zero))
    own = params["attention_connection"]
    places = np.arange(DEPTH)
    for offset, equal in ((0.0, False), (40.0, True)):
        newest = offset * (places[:, None] == places)  # block i's newest input has place i
        biased = {name: own[name] + np.float32(newest) for name in ("key_weight", "value_weight")}
        closed = run({**params, "attention_connection": {**own, **biased}}, *given())
        assert np.allclose(closed, plain(params), rtol=1e-5, atol=1e-5) == equal


@pytest.mark.parametrize("name", ["muddformer", "lime(weights='dynamic', bias=1.5)"])
def test_places_that_do_not_exist_yet_are_never_read(name):
    """NaN there changes no bit; at a place that exists it does."""
    shapes, run = stack(name)
    params, at = drawn(shapes), "after_block" if name == "muddformer" else "attention_connection"
    # After block i states 0 .. i + 1 exist; within it inputs 0 .. i.
    exist = 2 if name == "muddformer" else 1
    before = np.asarray(run(params, *given()))

    def spoilt(block, place):
        own = {name: x.copy() for name, x in params[at].items() if name.endswith(("_weight", "_kernel"))}
        for name in own:
            if name != "hidden_kernel":
                own[name][block, place] = np.nan
        own = {**params[at], **own}
        return np.asarray(run({**params, at: own}, *given()))

    for block in range(DEPTH - 1):
        for place in range(block + exist, params[at]["key_weight"].shape[1]):
            np.testing.assert_array_equal(spoilt(block, place), before)
        assert np.isnan(spoilt(block, block + exist - 1)).any()


@pytest.mark.parametrize("shape", [(), (2, 3)], ids=["static", "per_token"])
def test_views_are_sums_over_depth_of_which_each_is_one(shape):
    """In one pass as one by one, and a row that does not exist counts for nothing even if it holds numbers."""
    rows, recent = draw(4, 2, 3, 5), draw(1, 2, 3, 5, seed=1)
    present = jnp.asarray([True, True, False, False, True])
    sources = Sources((rows, recent), present, jnp.asarray([0, 1, 2, 3, 2], jnp.int32))
    weights = draw(3, 5, *shape, seed=2)
    mixed = jax.jit(mix_views)(sources, weights)
    for view in range(3):
        one = np.asarray(weights[view])
        by_one = jax.jit(mix_sources)(sources, one[..., None] if shape else one)
        np.testing.assert_allclose(mixed[view], by_one, rtol=1e-5, atol=1e-5)
        x = np.concatenate([rows, recent])
        wanted = sum(one[n].reshape(*shape, *(1,) * (3 - len(shape))) * x[n] for n in (0, 1, 4))
        np.testing.assert_allclose(mixed[view], wanted, rtol=1e-5, atol=1e-5)
    narrow = sources._replace(chunks=tuple(x.astype(jnp.bfloat16) for x in sources.chunks))
    assert jax.eval_shape(mix_views, narrow, weights).dtype == jnp.bfloat16


def test_a_softmax_over_depth_sums_to_1_over_the_rows_that_exist():
    rows, present = draw(4, 2, 3, 5), jnp.asarray([True, True, True, False])
    sources = Sources((rows,), present, jnp.arange(4, dtype=jnp.int32))
    scores = LinearScores(draw(2, 6, 5, seed=1), draw(2, 6, seed=2))
    run = jax.jit(lambda newest: softmax_weights(sources, rows[2], scores, newest=newest, epsilon=EPSILON))
    weights, raised = np.asarray(run(0.5)), np.asarray(run(1.5))
    assert weights.shape == (2, 4, 2, 3)
    np.testing.assert_allclose(weights.sum(1), 1.0, rtol=1e-6)
    np.testing.assert_array_equal(weights[:, 3], 0.0)
    odds = (raised[:, 2] / raised[:, 0]) / (weights[:, 2] / weights[:, 0])
    np.testing.assert_allclose(odds, math.e, rtol=1e-5)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("muddformer(weights='softmax')", "weights is 'softmax'; it must be one of dynamic, static"),
        ("muddformer(dynamic=1)", "has no option 'dynamic'"),
        ("lime(weights='dynamical')", r"weights is 'dynamical'.*did you mean 'dynamic'"),
        ("lime(bias=2.0)", "bias is 2.0 and weights is 'static'; only dynamic weights have one"),
        ("lime(weights='dynamic', bias=1e400)", "bias is inf; it must be a finite number"),
    ],
)
def test_options_that_are_refused(text, words):
    with pytest.raises(ValueError, match=words):
        topology(text)
