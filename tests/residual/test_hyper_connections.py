"""Hyper-connections and frac-connections against their papers, written again in numpy float64 as loops."""

import dataclasses
import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxblock.axes import labelled
from jaxblock.residual import topology
from jaxblock.residual.hyper_connections import SumStreams
from tests.residual.given import GivenModel, draw, position_wise
from tests.small import config

EPSILON = 1e-3  # large enough to show if it were misplaced
PLAIN = {"norm": "rms_norm", "bias": False}
DEPTH, WIDTH = 2, 8
SUBLAYERS = 2 * DEPTH
NAMES = ("attention_connection", "feed_forward_connection")


def rms(x, epsilon=EPSILON):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon)


# ------------------------------------------------------------------ the papers' loops


def table_of(streams, start, p, activation):
    """Return the table, [M, C, B, T]: row i belongs to stream i."""
    batch = streams[0].shape[:2]
    table = np.broadcast_to((start + p["static"])[..., None, None], (*start.shape, *batch)).copy()
    if "dynamic" in p:
        squash = np.tanh if activation == "tanh" else (lambda x: x)
        for i, x in enumerate(streams):
            for c in range(start.shape[1]):
                scale = p["dynamic_scale"][int(c == start.shape[1] - 1)]
                table[i, c] += scale * squash(rms(x) @ p["dynamic"][:, c])
    return table[..., None]


def hyper(x, weights, params, *, streams, activation="tanh"):
    states = [x] * streams
    for n in range(SUBLAYERS):
        p = layer(params, n)
        start = np.concatenate([np.zeros((streams, 1)), np.eye(streams), np.ones((streams, 1))], axis=1)
        start[n % streams, 0] = 1.0
        table = table_of(states, start, p, activation)
        h = sum(table[i, 0] * states[i] for i in range(streams))
        u = np.tanh(rms(h) * p["norm"]["scale"] @ weights[n])
        states = [
            sum(table[i, 1 + j] * states[i] for i in range(streams)) + table[j, -1] * u
            for j in range(streams)
        ]
    return sum(states)


def frac(x, weights, params, *, fractions, activation="tanh"):
    for n in range(SUBLAYERS):
        p, parts = layer(params, n), np.split(x, fractions, axis=-1)
        start = np.concatenate([np.eye(fractions), np.eye(fractions), np.ones((fractions, 1))], axis=1)
        table = table_of(parts, start, p, activation)
        read = [sum(table[i, k] * parts[i] for i in range(fractions)) for k in range(fractions)]
        h = np.concatenate(read, axis=-1)
        u = np.split(np.tanh(rms(h) * p["norm"]["scale"] @ weights[n]), fractions, axis=-1)
        mixed = [
            sum(table[i, fractions + j] * parts[i] for i in range(fractions)) + table[j, -1] * u[j]
            for j in range(fractions)
        ]
        x = np.concatenate(mixed, axis=-1)
    return x


def layer(params, n):
    return jax.tree.map(lambda leaf: leaf[n // 2], params["blocks"][NAMES[n % 2]])


# ------------------------------------------------------------------ the library's


class SumAndSpread(nn.Module):
    """What is closed, and beside it the largest difference between streams."""

    config: object

    @nn.compact
    def __call__(self, stream, shared):
        x_MBTD = jnp.stack(stream)
        return SumStreams(self.config)(stream, shared), x_MBTD.max(0) - x_MBTD.min(0)


def model_of(name, branch=position_wise):
    found = topology(name)
    if found.close is not None:
        found = dataclasses.replace(found, close=SumAndSpread)
    return GivenModel(config(**PLAIN, depth=DEPTH, norm_epsilon=EPSILON), found, branch)


def inputs(sublayers=SUBLAYERS):
    return draw(2, 3, WIDTH), draw(sublayers, WIDTH, WIDTH, seed=1, scale=0.5)


def start(name):
    """Return a topology's parameters at their initial values, which a test of its own holds against `init`."""
    values = {"scale": 1.0, "dynamic_scale": 0.01}
    return jax.tree_util.tree_map_with_path(
        lambda path, x: jnp.full(x.shape, values.get(path[-1].key, 0.0), x.dtype), shapes(name)
    )


@functools.cache
def shapes(name):
    return jax.eval_shape(model_of(name).init, jax.random.key(0), *inputs())["params"]


def moved(name):
    rng = np.random.default_rng(2)
    return jax.tree.map(lambda x: x + jnp.asarray(rng.normal(scale=0.4, size=x.shape), x.dtype), start(name))


@functools.cache
def applied(name):
    return jax.jit(lambda params: model_of(name).apply({"params": params}, *inputs())[0])


def run(name, params):
    """Return the closed stream."""
    closed = applied(name)(params)
    return closed[0] if isinstance(closed, tuple) else closed


def spread(name, params):
    """Return how far the streams have parted."""
    return float(jnp.abs(applied(name)(params)[1]).max())


def in_float64(params):
    return jax.tree.map(functools.partial(np.asarray, dtype=np.float64), params)


def given():
    return [np.asarray(x, np.float64) for x in inputs()]


def full(options):
    return pytest.param(options, marks=pytest.mark.full)


HYPER = ({"streams": 3}, {"streams": 2, "weights": "static"}, full({"streams": 2, "activation": "none"}))
FRAC = (
    {"fractions": 2},
    full({"fractions": 4, "weights": "static"}),
    full({"fractions": 2, "activation": "none"}),
)


def text(name, options):
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in options.items())})"


@pytest.mark.parametrize("options", HYPER, ids=lambda options: text("", options))
def test_hyper_connections_equal_their_paper(options):
    """Off the start; with the streams read in another order, or the activation left out, the result is another."""
    name, kept = text("hyper_connections", options), {k: v for k, v in options.items() if k != "weights"}
    closed, params = run(name, moved(name)), in_float64(moved(name))
    np.testing.assert_allclose(closed, hyper(*given(), params, **kept), rtol=2e-5, atol=2e-5)
    if options.get("weights") != "static":
        other = "none" if kept.get("activation", "tanh") == "tanh" else "tanh"
        wrong = hyper(*given(), params, **{**kept, "activation": other})
        assert not np.allclose(closed, wrong, atol=1e-3)


@pytest.mark.parametrize("options", FRAC, ids=lambda options: text("", options))
def test_frac_connections_equal_their_paper(options):
    name, kept = text("frac_connections", options), {k: v for k, v in options.items() if k != "weights"}
    closed, params = run(name, moved(name)), in_float64(moved(name))
    np.testing.assert_allclose(closed, frac(*given(), params, **kept), rtol=2e-5, atol=2e-5)
    if options.get("weights") != "static":
        other = "none" if kept.get("activation", "tanh") == "tanh" else "tanh"
        wrong = frac(*given(), params, **{**kept, "activation": other})
        assert not np.allclose(closed, wrong, atol=1e-3)


# ------------------------------------------------------------------ identities


def with_leaf(params, change):
    """Return the parameters with every connection's leaves changed by `change(sublayer, leaves) -> leaves`."""
    blocks = {}
    for place, name in enumerate(NAMES):
        leaves = [change(2 * block + place, layer(params, 2 * block + place)) for block in range(DEPTH)]
        blocks[name] = jax.tree.map(lambda *parts: jnp.stack([jnp.asarray(x) for x in parts]), *leaves)
    return {**params, "blocks": blocks}


def pre_norm_of(*, factor=1.0, gain=1.0):
    """Return x + factor * f(norm(gain * x)) after all sublayers; gain only scales the norm's epsilon."""
    x, weights = given()
    for n in range(SUBLAYERS):
        x = x + factor * np.tanh(rms(gain * x) @ weights[n])
    return x


@pytest.mark.parametrize("name", ["hyper_connections(streams=3)", "frac_connections"])
def test_initial_values(name):
    """`start` of these tests is what `init` makes; the forward pass is left out as unused."""
    init = jax.jit(lambda key, *given: model_of(name).init(key, *given)["params"])
    made = init(jax.random.key(0), *inputs())
    jax.tree.map(np.testing.assert_array_equal, made, start(name))


def test_i26_the_start_is_pre_norm_and_every_stream_is_the_same():
    """The sum of 3 is 3 times pre-norm's; moved off the start streams differ from each other."""
    name = "hyper_connections(streams=3)"
    np.testing.assert_allclose(run(name, start(name)), 3 * pre_norm_of(), rtol=1e-5, atol=1e-5)
    assert spread(name, start(name)) == 0.0
    assert spread(name, moved(name)) > 1e-2


@pytest.mark.full
def test_i26_dynamic_without_its_projection_is_static():
    dynamic = "hyper_connections(streams=2, activation='none')"
    static = "hyper_connections(streams=2, weights='static')"
    off = moved(dynamic)
    without = with_leaf(off, lambda _, p: {**p, "dynamic": 0.0 * p["dynamic"]})
    want = run(static, with_leaf(off, lambda _, p: {"norm": p["norm"], "static": p["static"]}))
    np.testing.assert_allclose(run(dynamic, without), want, rtol=1e-5, atol=1e-5)
    assert not np.allclose(run(dynamic, off), want, atol=1e-3)


def test_i26_i32_one_stream_or_one_part_is_pre_norm():
    """n = 1 with a = b = R = 1; one part is one stream, on and off the start."""
    one, part = "hyper_connections(streams=1)", "frac_connections(fractions=1)"
    np.testing.assert_allclose(run(one, start(one)), pre_norm_of(), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(run(part, moved(one)), run(one, moved(one)), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        run(one, moved(one)), hyper(*given(), in_float64(moved(one)), streams=1), atol=2e-5
    )
    assert not np.allclose(run(one, moved(one)), run(one, start(one)), atol=1e-2)


def test_i32_parts_start_as_pre_norm():
    name = "frac_connections(fractions=2)"
    np.testing.assert_allclose(run(name, start(name)), pre_norm_of(), rtol=1e-5, atol=1e-5)
    assert not np.allclose(run(name, moved(name)), pre_norm_of(), atol=1e-2)


def hyper_start(n, streams):
    one_hot = np.eye(streams)[:, n % streams, None]
    return np.concatenate([one_hot, np.eye(streams), np.ones((streams, 1))], axis=1)


def test_i27_the_order_of_streams_does_not_matter():
    """Conjugating (a, R, b) by one permutation changes nothing; permuting a and b alone does."""
    name, order = "hyper_connections(streams=3)", [2, 0, 1]

    def conjugate(columns):
        def change(n, p):
            start = hyper_start(n, 3)
            table, dynamic = (start + p["static"])[np.asarray(order)], p["dynamic"]
            if columns:
                places = np.asarray([0, *(1 + j for j in order), 4])
                table, dynamic = table[:, places], dynamic[:, places]
            return {**p, "static": jnp.asarray(table - start, jnp.float32), "dynamic": dynamic}

        return with_leaf(moved(name), change)

    want = run(name, moved(name))
    np.testing.assert_allclose(run(name, conjugate(columns=True)), want, rtol=2e-5, atol=2e-5)
    assert not np.allclose(run(name, conjugate(columns=False)), want, atol=1e-2)


def test_i28_two_streams_can_be_the_parallel_block():
    """x + f(norm x) + g(norm x): stream 1 keeps x for g to read, and both become the sum. The start is not that."""
    name = "hyper_connections(streams=2, weights='static')"
    tables = (
        np.array([[1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]]),  # read 1, keep both, write to 2
        np.array([[1.0, 0.0, 0.0, 1.0], [0.0, 1.0, 1.0, 1.0]]),  # read 1, copy 2 to both, write to both
    )

    def change(n, p):
        return {**p, "static": jnp.asarray(tables[n % 2] - hyper_start(n, 2), jnp.float32)}

    x, weights = given()
    for n in range(0, SUBLAYERS, 2):
        x = x + np.tanh(rms(x) @ weights[n]) + np.tanh(rms(x) @ weights[n + 1])
    np.testing.assert_allclose(run(name, with_leaf(start(name), change)), 2 * x, rtol=1e-5, atol=1e-5)
    assert not np.allclose(run(name, start(name)), 2 * x, atol=1e-2)


@functools.cache
def training_step(name):
    model, optimizer = model_of(name), optax.adam(1e-2)
    target = draw(2, 3, WIDTH, seed=5)

    @jax.jit
    def step(params, moments):
        loss = lambda params: jnp.sum((model.apply({"params": params}, *inputs())[0][0] - target) ** 2)  # noqa: E731
        updates, moments = optimizer.update(jax.grad(loss)(params), moments, params)
        return optax.apply_updates(params, updates), moments

    return step, optimizer.init


def trained(name, params, steps=4):
    step, init = training_step(name)
    moments = init(params)
    for _ in range(steps):
        params, moments = step(params, moments)
    return params


def test_i29_streams_read_alike_stay_alike():
    """Uniform a and b: equal streams after 4 optimizer steps. With the one-hot read of the start they part."""
    name = "hyper_connections(streams=2, weights='static')"

    def change(n, p):
        uniform = np.concatenate([np.full((2, 1), 0.5), np.eye(2), np.ones((2, 1))], axis=1)
        return {**p, "static": jnp.asarray(uniform - hyper_start(n, 2), jnp.float32)}

    uniform = with_leaf(start(name), change)
    after = trained(name, uniform)
    assert spread(name, after) < 1e-6
    moves = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), after, uniform)
    assert moves["blocks"][NAMES[0]]["static"] > 1e-2  # it did train
    assert spread(name, trained(name, start(name))) > 1e-3


# ------------------------------------------------------------------ counts, labels, options


def test_i04_parameter_counts_of_the_paper():
    """OLMo-1B, 32 sublayers of width 2048, 4 streams: 768 static, 394,048 dynamic; norms are not counted there."""
    olmo = config(depth=16, width=2048, heads=16, **PLAIN)
    norms = 33 * 2048
    count = lambda name: topology(name).parameters(olmo) - norms  # noqa: E731
    assert count("hyper_connections(streams=4, weights='static')") == 768
    assert count("hyper_connections(streams=4)") == 394_048
    assert count("frac_connections(fractions=4)") == 32 * (4 * 9 + 512 * 9 + 2)
    assert count("frac_connections(fractions=4, weights='static')") == 32 * 4 * 9


@pytest.mark.parametrize("name", ["hyper_connections", "frac_connections"])
def test_the_projection_decays_and_nothing_else(name):
    params = start(name)
    labels = labelled(params, topology(name).labels)["blocks"][NAMES[0]]
    decays = {key: label is not None and label.decay for key, label in labels.items() if key != "norm"}
    assert decays == {"static": False, "dynamic": True, "dynamic_scale": False}
    assert topology(f"{name}(weights='static')").labels == ()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "hyper_connections(streams=0)",
            "model.residual: streams is 0; it must be a whole number of at least 1",
        ),
        ("hyper_connections(weights='fixed')", "weights is 'fixed'; it must be one of dynamic, static"),
        ("hyper_connections(activation='relu')", "activation is 'relu'; it must be one of none, tanh"),
        (
            "frac_connections(weights='static', activation='none')",
            "activation is 'none'; it must be left out where weights are static",
        ),
        ("frac_connections(fractions=0)", "model.residual: fractions is 0; it must be a whole number"),
    ],
)
def test_options_are_checked(name, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        topology(name)


def test_parts_divide_the_width():
    bad = topology("frac_connections(fractions=3)")
    says = re.escape("model.residual: fractions is 3; it must divide model.width, which is 8")
    with pytest.raises(ValueError, match=says):
        bad.parameters(config())
    with pytest.raises(ValueError, match=says):
        jax.eval_shape(GivenModel(config(), bad, position_wise).init, jax.random.key(0), *inputs(6))
