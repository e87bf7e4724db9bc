"""The scan with a write-once history is the plain scan: values, gradients of everything, side outputs, any lane."""

import functools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblock import Decoder, ExecutionConfig
from jaxblock.functional.depth_mixing import mix_sources
from jaxblock.models.write_once import holds_history, scan_plain, scan_write_once
from jaxblock.residual import History, open_history, read_once
from tests.residual.battery.subject import PLAIN, dropout_key
from tests.small import built, config, tokens

DEPTH, SHAPE = 4, (2, 3, 5)


class State(NamedTuple):
    """Two histories, a float, an integer: whatever a stream may hold."""

    outputs: History
    states: History
    x: jax.Array
    steps: jax.Array


def step(stream: State, scanned: tuple, closed: tuple) -> tuple:
    """A layer with everything in it: dropout, a constant, a mask, a conditional row, two kinds of side output."""
    (weight, constant, key), (factor, mask) = scanned, closed
    h = read_once(functools.partial(read, mask=mask), stream.outputs, stream.states, factor)
    keep = jax.random.bernoulli(key, 0.8, h.shape)
    u = jnp.where(keep, jnp.tanh((h + stream.x) @ weight), 0.0) * (1.0 + constant)
    outputs = stream.outputs.push(u)
    again = read_once(functools.partial(read, mask=mask), outputs, stream.states, factor)
    outputs = outputs.push(jnp.sin(again @ weight.T))
    x = stream.x + factor * u
    states = stream.states.push(x, when=stream.steps % 2 == 1)
    side = {"size": jnp.sum(u**2), "step": stream.steps, "row": u[0, 0]}
    return State(outputs, states, x, stream.steps + 1), side


def read(outputs: History, states: History, factor: jax.Array, *, mask: jax.Array) -> jax.Array:
    """A nonlinear read of both histories."""
    first, second = outputs.sources(), states.sources()
    weights = jnp.cos(jnp.arange(first.present.shape[0]) * factor)
    mean = mix_sources(second, second.present / jnp.sum(second.present))
    return jnp.where(mask, mix_sources(first, weights), 0.0) * jnp.cos(mean) + outputs.newest()


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def arguments():
    x = draw(*SHAPE)
    keys = jax.random.split(dropout_key(0), DEPTH)
    scanned = (0.5 * draw(DEPTH, 5, 5, seed=1), jnp.arange(DEPTH, dtype=jnp.float32) / 10, keys)
    closed = (jnp.float32(0.3), jnp.asarray(np.random.default_rng(2).random(SHAPE) < 0.8))
    return x, scanned, closed


def objective(scan, x, weight, constant, factor, unroll=1):
    _, (_, _, keys), (_, mask) = arguments()
    stream = State(
        open_history(x, 2 * DEPTH + 1), open_history(x, DEPTH // 2 + 1), x, jnp.zeros((), jnp.int32)
    )
    after, side = scan(step, stream, (weight, constant, keys), (factor, mask), unroll=unroll)
    total = jnp.sum(jnp.sin(after.outputs.rows_NBTD)) + jnp.sum(
        jnp.cos(after.states.rows_NBTD) * after.x[None]
    )
    return total + jnp.sum(side["size"] ** 2) + jnp.sum(side["row"]), (after, side)


def run(scan, **options):
    x, (weight, constant, _), (factor, _) = arguments()
    function = jax.value_and_grad(
        functools.partial(objective, scan, **options), argnums=(0, 1, 2, 3), has_aux=True
    )
    return jax.jit(function)(x, weight, constant, factor)


@functools.cache
def plain():
    return run(scan_plain)


@pytest.mark.parametrize("unroll", [1, 2, DEPTH])
def test_equals_the_plain_scan_in_values_side_outputs_and_every_gradient(unroll):
    (want, want_aux), want_gradients = plain()
    (got, aux), gradients = run(scan_write_once, unroll=unroll)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    chex.assert_trees_all_close(aux, want_aux, rtol=1e-6, atol=1e-6)
    chex.assert_trees_all_close(gradients, want_gradients, rtol=1e-5, atol=1e-5)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(gradients))


def test_a_view_of_the_wrong_rows_would_show(monkeypatch):
    """Negative control: with views of zeros the gradient is another one; rows not yet written are masked anyway."""
    monkeypatch.setattr("jaxblock.models.write_once._view", lambda rows, count: rows)
    _, want = plain()
    _, got = run(scan_write_once)
    chex.assert_trees_all_close(got, want, rtol=1e-5, atol=1e-5)
    monkeypatch.setattr("jaxblock.models.write_once._view", lambda rows, count: jnp.zeros_like(rows))
    _, wrong = run(scan_write_once)
    assert not np.allclose(wrong[1], want[1], rtol=1e-2)


def test_a_conditional_row_leaves_its_place_free():
    history = open_history(jnp.ones(SHAPE), 3)
    grown = history.push(2 * jnp.ones(SHAPE), when=jnp.asarray(False)).push(3 * jnp.ones(SHAPE))
    filed = grown.filed()
    assert int(filed.count) == 2
    np.testing.assert_array_equal(filed.rows_NBTD[:, 0, 0, 0], [1, 3, 0])
    np.testing.assert_array_equal(grown.newest(), 3 * jnp.ones(SHAPE))
    np.testing.assert_array_equal(grown.sources().present, [True, False, False, False, True])
    np.testing.assert_array_equal(grown.sources().index[3:], [1, 1])
    full = filed.push(4 * jnp.ones(SHAPE)).filed().push(5 * jnp.ones(SHAPE), when=jnp.asarray(False)).filed()
    np.testing.assert_array_equal(full.rows_NBTD[:, 0, 0, 0], [1, 3, 4])  # a full history is not overwritten


def test_only_a_stream_with_a_history_takes_the_write_once_scan():
    assert holds_history({"a": (open_history(jnp.ones(SHAPE), 2),)})
    assert not holds_history({"a": jnp.ones(SHAPE)})


def test_without_a_derivative_it_gives_the_plain_scans_bits():
    """Where nothing is differentiated the plain scan itself is run."""
    x, (weight, constant, _), (factor, _) = arguments()
    forward = lambda scan: functools.partial(objective, scan)  # noqa: E731
    values = [
        jax.jit(forward(scan))(x, weight, constant, factor)[0] for scan in (scan_plain, scan_write_once)
    ]
    np.testing.assert_array_equal(values[0], values[1])


# ---------------------------------------------------------------- in a model


def loss(model, params, scale=1.0):
    scaled = jax.tree.map(lambda x: scale * x, params)
    return jnp.mean(jnp.sin(model.apply({"params": scaled}, tokens())))


@pytest.mark.parametrize(
    "name", ["dense_former", pytest.param("attention_residual(query='dynamic')", marks=pytest.mark.full)]
)
def test_plain_has_every_order_of_derivative(name):
    """Forward mode and second derivatives, against reverse mode and finite differences."""
    model_config = config(**{**PLAIN, "feed_forward": "gelu"}, residual=name, depth=2)
    _, params = built(model_config)
    plain_model = Decoder(model_config, ExecutionConfig(history="plain"))
    along = functools.partial(loss, plain_model, params)
    _, forward = jax.jit(lambda s: jax.jvp(along, (s,), (1.0,)))(1.0)
    reverse = jax.jit(jax.grad(functools.partial(loss, Decoder(model_config), params)))
    np.testing.assert_allclose(forward, reverse(1.0), rtol=1e-4)
    second = jax.jit(jax.jacfwd(jax.grad(along)))(1.0)
    np.testing.assert_allclose(second, (reverse(1.001) - reverse(0.999)) / 0.002, rtol=2e-2, atol=1e-3)


def test_reverse_refuses_forward_mode():
    model_config = config(**PLAIN, residual="attention_residual", depth=2)
    _, params = built(model_config)
    with pytest.raises(TypeError, match=r"run the same parameters with ExecutionConfig\(history='plain'\)"):
        jax.jvp(functools.partial(loss, Decoder(model_config), params), (1.0,), (1.0,))


@pytest.mark.full
def test_a_model_runs_op_by_op_for_debugging():
    model_config = config(**PLAIN, residual="attention_residual", depth=2)
    model, params = built(model_config)
    want = jax.jit(jax.grad(functools.partial(loss, model)))(params)
    with jax.disable_jit():
        got = jax.grad(functools.partial(loss, model))(params)
    chex.assert_trees_all_close(got, want, rtol=1e-4, atol=1e-6)


def test_intermediates_are_collected_and_differentiated_through_both_derivatives():
    def size_of_reads(model, params):
        _, made = model.apply({"params": params}, tokens(), mutable=["intermediates"])
        blocks = made["intermediates"]["blocks"]
        return jnp.sum(blocks["attention_in"] ** 2 * jnp.arange(1.0, 3.0).reshape(2, 1, 1, 1)), blocks

    model_config = config(**PLAIN, residual="attention_residual", depth=2)
    model, params = built(model_config)
    results = [
        jax.jit(jax.value_and_grad(functools.partial(size_of_reads, m), has_aux=True))(params)
        for m in (model, Decoder(model_config, ExecutionConfig(history="plain")))
    ]
    chex.assert_trees_all_close(*results, rtol=1e-4, atol=1e-5)
    weights = results[0][0][1]["attention_connection"]["reader"]["depth_weights"]
    assert weights.shape == (2, 5, 2, 6, 1)
    np.testing.assert_allclose(weights.sum(1), 1.0, rtol=1e-6)
