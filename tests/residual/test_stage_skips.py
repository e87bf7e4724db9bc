"""ResiDual, input injection and U-net skips: their equations as float64 loops, and where each is the plain stream."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblock import Decoder, ModelConfig
from jaxblock.residual import topology
from jaxblock.residual.input_injection import input_injection
from jaxblock.residual.resi_dual import resi_dual
from jaxblock.residual.unet import unet
from tests.residual.battery.structure import measured_mixing
from tests.residual.battery.subject import PLAIN
from tests.residual.given import Entry, GivenModel, draw, given_branch, position_wise, run_given
from tests.residual.test_history_references import EPSILON, layer, rms
from tests.small import config, tokens

WIDTH = 8


class Run:
    """A topology compiled around given weights; `closed(params)` runs it, `params` is off its start."""

    def __init__(self, name: str, depth: int) -> None:
        model_config = config(**PLAIN, norm_epsilon=EPSILON, depth=depth)
        self.sublayers = model_config.sublayers
        model = GivenModel(model_config, topology(name), position_wise)
        x, weights = draw(2, 3, WIDTH), draw(self.sublayers, WIDTH, WIDTH, seed=1)
        self.start = jax.jit(model.init)(jax.random.key(0), x, weights)["params"]
        rng = np.random.default_rng(2)
        off = lambda leaf: leaf + jnp.asarray(rng.normal(scale=0.7, size=leaf.shape), leaf.dtype)  # noqa: E731
        self.params = jax.tree.map(off, self.start)
        apply = jax.jit(model.apply)
        self.closed = lambda params: np.asarray(apply({"params": params}, x, weights)[0])
        self.x, self.weights = (np.asarray(a, np.float64) for a in (x, weights))

    def reference(self, rule, params=None):
        """Return rule(x, branches, params): branches[n](h) = tanh(h W_n), and `p` of each sublayer."""
        params = self.params if params is None else params
        params = jax.tree.map(functools.partial(np.asarray, dtype=np.float64), params)
        layers = [layer(params, n) for n in range(self.sublayers)]
        branches = [lambda h, n=n: np.tanh(h @ self.weights[n]) for n in range(self.sublayers)]
        return rule(self.x, branches, layers, params)


run = functools.cache(Run)


def assert_close(got, want):
    np.testing.assert_allclose(got, want, rtol=3e-5, atol=3e-5 * np.abs(want).max())


def pre_norm(x, branches, layers, params):
    for f, p in zip(branches, layers, strict=True):
        x = x + f(rms(x, p["norm"]["scale"]))
    return x


# ------------------------------------------------------------------ ResiDual


def dual(x, branches, layers, params, scale):
    d = x
    for f, p in zip(branches, layers, strict=True):
        u = f(x)
        d = d + scale * u
        x = rms(x + u, p["norm"]["scale"])
    return x + rms(d, params["close"]["norm"]["scale"])


def test_resi_dual_equals_its_paper():
    found = run("resi_dual(scale=0.3)", 3)
    closed = found.closed(found.params)
    assert_close(closed, found.reference(functools.partial(dual, scale=0.3)))
    assert not np.allclose(closed, found.reference(functools.partial(dual, scale=1.0)), atol=1e-3)


class TakesSum(nn.Module):
    config: ModelConfig

    @nn.compact
    def __call__(self, stream, shared):
        return stream.d_BTD


def test_i25_the_second_stream_is_the_embedding_and_the_scaled_sum_of_all_outputs():
    """d = x + scale * sum of u, whatever the norms do; the first stream is no such sum."""
    model_config = config(**PLAIN)
    x, given = draw(2, 3, WIDTH), draw(model_config.sublayers, WIDTH, seed=1)
    sums = dataclasses.replace(resi_dual(scale=0.25), close=TakesSum)
    d, _ = run_given(Entry("sums", sums), model_config, given_branch, x, given)
    want = np.asarray(x) + 0.25 * np.asarray(given).sum(0)
    np.testing.assert_allclose(d, want, rtol=1e-5, atol=1e-6)
    closed, _ = run_given(Entry("both", resi_dual(scale=0.25)), model_config, given_branch, x, given)
    assert not np.allclose(closed - rms(np.asarray(d)), want, atol=1e-2)


# ------------------------------------------------------------------ input injection


def injected(x, branches, layers, params):
    x0, factors = x, params["blocks"]["attention_connection"]
    for n, (f, p) in enumerate(zip(branches, layers, strict=True)):
        if n % 2 == 0:
            x = factors["state_factor"][n // 2] * x + factors["input_factor"][n // 2] * x0
        x = x + f(rms(x, p["norm"]["scale"]))
    return x


def with_factors(params, keep, inject):
    """Return the parameters with l0 and l1 of every block set."""
    connection = params["blocks"]["attention_connection"]
    depth = connection["state_factor"].shape
    factors = {"state_factor": jnp.full(depth, keep), "input_factor": jnp.full(depth, inject)}
    return {**params, "blocks": {**params["blocks"], "attention_connection": {**connection, **factors}}}


def test_input_injection_equals_its_source():
    found = run("input_injection(decay=1.1)", 3)
    assert_close(found.closed(found.params), found.reference(injected))
    factors = found.start["blocks"]["attention_connection"]
    np.testing.assert_allclose(factors["state_factor"], [1.1] * 3, rtol=1e-6)
    np.testing.assert_array_equal(factors["input_factor"], [0.0] * 3)
    assert "state_factor" not in found.start["blocks"]["feed_forward_connection"]


def test_i24_input_injection_with_factors_one_and_zero_is_the_plain_stream():
    """Bitwise at its own start for decay = 1, declared as `reduces_to`; (1, 0.5) and (0.9, 0) are not."""
    found = run("input_injection(decay=1.1)", 3)
    plain = found.reference(pre_norm)
    assert_close(found.closed(with_factors(found.params, 1.0, 0.0)), plain)
    for factors in ((1.0, 0.5), (0.9, 0.0)):
        assert not np.allclose(found.closed(with_factors(found.params, *factors)), plain, atol=1e-3)
    assert input_injection().reduces_to == "pre_norm"
    assert input_injection(decay=1.1).reduces_to is None


class ChangesInput(nn.Module):
    config: ModelConfig

    @nn.compact
    def __call__(self, stream):
        return stream._replace(input_BTD=0.5 * stream.input_BTD)


def kept_per_block(topology):
    """Return how many arrays [B, T, D] a scan over the blocks stacks for its backward pass; nothing is compiled."""
    model_config = config(**PLAIN)
    model = GivenModel(model_config, topology, position_wise)
    x, weights = draw(2, 3, WIDTH), draw(model_config.sublayers, WIDTH, WIDTH)
    variables = jax.eval_shape(model.init, jax.random.key(0), x, weights)
    loss = lambda variables, x: jnp.sum(model.apply(variables, x, weights)[0])  # noqa: E731
    traced = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(variables, x)
    forward = next(eqn for eqn in traced.jaxpr.eqns if eqn.primitive.name == "scan")
    return sum(out.aval.shape == (model_config.depth, *x.shape) for out in forward.outvars)


def test_a_scan_keeps_the_embedding_once_and_not_once_per_block():
    """One array per block more than pre-norm, the state before the mixing; were x0 changed on the way, two."""
    plain = kept_per_block(topology("pre_norm"))
    assert kept_per_block(input_injection()) == plain + 1
    changing = dataclasses.replace(input_injection(), after_block=ChangesInput)
    assert kept_per_block(changing) == plain + 2


# ------------------------------------------------------------------ U-net skips


def skipped(x, branches, layers, params, lifo=True):
    depth, states = len(branches) // 2, []
    weight = params["shared"]["weight"]
    for block in range(depth):
        i = depth - 1 - block
        if i < depth // 2 and block > i:
            x = x + weight[i] * states[i if lifo else depth // 2 - 1 - i]
        for n in (2 * block, 2 * block + 1):
            x = x + branches[n](rms(x, layers[n]["norm"]["scale"]))
        states.append(x)
    return x


@pytest.mark.parametrize("depth", [4, pytest.param(5, marks=pytest.mark.full)])
def test_unet_equals_its_source(depth):
    """Last in, first out: the other order is another function."""
    found = run("unet", depth)
    closed = found.closed(found.params)
    assert_close(closed, found.reference(skipped))
    assert not np.allclose(closed, found.reference(functools.partial(skipped, lifo=False)), atol=1e-3)


def test_i24_unet_skips_of_weight_zero_are_the_plain_stream():
    """One weight off zero is enough not to be."""
    found = run("unet", 4)
    plain = found.reference(pre_norm)
    weight = found.start["shared"]["weight"]
    np.testing.assert_array_equal(weight, [0.0, 0.0])
    assert_close(found.closed({**found.params, "shared": {"weight": weight}}), plain)
    for i in range(2):
        moved = {"weight": weight.at[i].set(0.5)}
        assert not np.allclose(found.closed({**found.params, "shared": moved}), plain, atol=1e-3)


def test_the_mirror_of_a_block_is_counted_from_the_end():
    """Four blocks: the third adds what the second made, which is all it reads, the fourth what the first made."""
    model_config = config(**PLAIN, norm_epsilon=1.0, depth=4, width=16)
    table = measured_mixing(Entry("unet", unet(start=1.0)), model_config)
    np.testing.assert_allclose(table[3], [1, 1, 1, 1, 0, 0, 0, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(table[4], [2, 2, 2, 2, 2, 0, 0, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(table[6], [3, 3, 3, 2, 2, 1, 1, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(table, unet(start=1.0).mixing(model_config), rtol=1e-6)
    three = unet(start=1.0).mixing(config(depth=3))  # the middle block has no mirror
    np.testing.assert_array_equal(three[2:4, :4], [[1, 1, 1, 0], [1, 1, 1, 1]])
    np.testing.assert_array_equal(three[4], [2, 2, 2, 1, 1, 0, 0])


def test_a_single_block_has_no_skip_and_no_weight_for_one():
    model = Decoder(config(**PLAIN, depth=1, residual="unet(start=1.0)"))
    params = jax.eval_shape(model.init, jax.random.key(0), tokens(1, 2))["params"]
    assert "shared" not in params
    model_config = config(**PLAIN, depth=1)
    assert unet().parameters(model_config) == topology("pre_norm").parameters(model_config)
    x, given = draw(2, 3, WIDTH), draw(2, WIDTH, seed=1)
    closed, _ = run_given(Entry("unet", unet(start=1.0)), model_config, given_branch, x, given)
    np.testing.assert_allclose(closed, np.asarray(x) + np.asarray(given).sum(0), rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------ options


@pytest.mark.parametrize(
    ("factory", "options", "sentence"),
    [
        (resi_dual, {"scale": 0.0}, "scale is 0.0; it must be a finite number above 0.0"),
        (input_injection, {"decay": -1.0}, "decay is -1.0; it must be a finite number above 0.0"),
        (unet, {"start": float("inf")}, "start is inf; it must be a finite number"),
    ],
)
def test_options_out_of_range_are_refused(factory, options, sentence):
    with pytest.raises(ValueError, match=f"model.residual: {sentence}"):
        factory(**options)
