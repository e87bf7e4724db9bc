"""Stochastic depth: whole branches dropped, row by row, at rates that rise linearly with depth (arXiv 1603.09382)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblock import Decoder, ExecutionConfig
from jaxblock.functional.dropout import drop_rows
from jaxblock.models import layer_inputs
from tests.residual.battery.subject import dropout_key
from tests.small import built, config, tokens


def test_rates_rise_linearly_over_the_sublayers():
    rates = layer_inputs(config(stochastic_depth="linear(rate=0.6)")).drop_rates
    np.testing.assert_allclose(np.ravel(rates), 0.1 * np.arange(1, 7), rtol=1e-6)
    parallel = layer_inputs(config(stochastic_depth="linear(rate=0.6)", wiring="parallel")).drop_rates
    np.testing.assert_allclose(parallel[:, 0], [0.2, 0.4, 0.6], rtol=1e-6)
    constant = layer_inputs(config(stochastic_depth="constant(rate=0.6)")).drop_rates
    np.testing.assert_allclose(constant, np.full((3, 2), 0.6), rtol=1e-6)
    assert layer_inputs(config()).drop_rates is None


def test_a_row_is_dropped_whole_or_scaled():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(64, 3, 2)), jnp.float32)
    y = np.asarray(drop_rows(x, jnp.float32(0.25), jax.random.key(0)))
    kept = np.any(y != 0, axis=(1, 2))
    assert 0 < kept.sum() < 64
    np.testing.assert_allclose(y[kept], np.asarray(x)[kept] / 0.75, rtol=1e-6)
    assert not y[~kept].any()
    assert drop_rows(x, jnp.float32(0.25), None) is x


def test_its_mean_is_the_branch():
    x, keys = jnp.ones((1, 1)), jax.random.split(jax.random.key(1), 4000)
    mean = jax.vmap(lambda key: drop_rows(x, jnp.float32(0.3), key))(keys).mean()
    assert abs(float(mean) - 1.0) < 4 * np.sqrt(0.3 / 0.7 / 4000)


@pytest.fixture(scope="module")
def collected():
    """Many equal rows through a model at a high rate, and what its branches wrote."""
    model, params = built(config(stochastic_depth="linear(rate=0.9)", positions="none"))
    rows = jnp.tile(tokens(1), (64, 1))

    @jax.jit
    def run(params, key):
        rngs = {"dropout": key}
        _, found = model.apply({"params": params}, rows, rngs=rngs, mutable=["intermediates"])
        return found["intermediates"]["blocks"]

    return run(params, dropout_key(0))


def test_branches_are_dropped_row_by_row_and_deeper_ones_more_often(collected):
    dropped = []
    for name in ("attention_out", "feed_forward_out"):
        gone = ~np.any(np.asarray(collected[name]) != 0, axis=(2, 3))
        partly = np.any(np.asarray(collected[name]) == 0, axis=(2, 3))
        np.testing.assert_array_equal(gone, partly)  # never a part of a row
        dropped.append(gone.mean(1))
    rates = np.stack(dropped, axis=1).ravel()
    np.testing.assert_allclose(rates, 0.15 * np.arange(1, 7), atol=4 * 0.5 / 8)
    assert rates[-1] > rates[0]


def test_each_branch_draws_its_own_rows(collected):
    gone = ~np.any(np.asarray(collected["attention_out"]) != 0, axis=(2, 3))
    other = ~np.any(np.asarray(collected["feed_forward_out"]) != 0, axis=(2, 3))
    assert (gone[2] != other[2]).any()
    assert (gone[1] != gone[2]).any()


def test_without_a_key_nothing_is_dropped_and_scan_equals_loop_with_one():
    small = config(stochastic_depth="linear(rate=0.5)")
    model, params = built(small)
    plain = Decoder(config())
    np.testing.assert_array_equal(
        model.apply({"params": params}, tokens()), plain.apply({"params": params}, tokens())
    )

    def run(execution: ExecutionConfig):
        other = Decoder(small, execution)
        rngs = {"dropout": dropout_key(1)}
        return jax.jit(lambda p: other.apply({"params": p}, tokens(), rngs=rngs))(params)

    scanned = run(ExecutionConfig())
    np.testing.assert_allclose(run(ExecutionConfig(scan_unroll=3)), scanned, rtol=1e-5, atol=1e-5)
    assert np.abs(np.asarray(scanned) - model.apply({"params": params}, tokens())).max() > 1e-3
