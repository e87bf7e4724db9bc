"""The gradient of a normed stream has no part along it, sizes and gradients multiply to a flat line; with controls."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblock import Decoder, Encoder
from jaxblock.probes import StreamProbe, gradient_profile, stream_profile
from jaxblock.probes.parity import parity_product, radial_gradient, stream_sizes
from jaxblock.residual import topology
from tests.small import built, config, tokens

VALID = np.array([[1, 1, 1, 1, 1, 0], [1, 1, 1, 0, 0, 0]], bool)


def loss(y):
    return jnp.sum(jnp.sin(3.0 * y))


def radial(model, params, valid_BT=None):
    run = jax.jit(functools.partial(radial_gradient, model, loss=loss))
    return run(params, tokens(), valid_BT=valid_BT)


@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_under_a_final_norm_the_gradient_has_no_radial_part(norm):
    model_config = config(norm=norm, norm_epsilon=1e-8)
    model, params = built(model_config)
    found = radial(model, params, jnp.asarray(VALID))
    assert found.radial < 1e-6
    assert (found.constant < 1e-6) == (norm == "layer_norm")
    bare = Decoder(model_config, topology=dataclasses.replace(topology("pre_norm"), final_norm=False))
    without = radial(bare, {name: x for name, x in params.items() if name != "final_norm"})
    assert without.radial > 1e-2  # control: no norm, and nothing makes it 0
    assert without.constant > 1e-2


def test_it_is_the_share_of_epsilon_that_is_left():
    """Of RMS norm <x, g> = <y, dl/dy> epsilon / (mean x^2 + epsilon): linear in a small epsilon."""
    found = [
        radial(
            Decoder(config(norm="rms_norm", norm_epsilon=epsilon)), built(config(norm="rms_norm"))[1]
        ).radial
        for epsilon in (1e-3, 2e-3)
    ]
    np.testing.assert_allclose(found[1] / found[0], 2.0, rtol=0.05)


@pytest.mark.parametrize(
    ("residual", "normed"),
    [
        ("attention_residual", True),
        ("post_norm", False),
        *(pytest.param(name, True, marks=pytest.mark.full) for name in ("hyper_connections", "dense_former")),
    ],
)
def test_topologies_whose_last_norm_is_the_trunks_and_one_whose_is_not(residual, normed):
    """A closed history is one array, too; post-norm's stream ends normed, and what reads it is linear."""
    model, params = built(config(residual=residual, norm_epsilon=1e-8))
    assert model.connections.final_norm == normed
    found = radial(model, params)
    assert (found.radial < 1e-5) == normed


@pytest.mark.full
def test_an_encoder_and_a_loss_that_is_none():
    params = built(config())[1]
    assert radial(Encoder(config(norm_epsilon=1e-8)), params).radial < 1e-6
    none = radial_gradient(Decoder(config()), params, tokens(), lambda y: 0.0 * jnp.sum(y))
    np.testing.assert_array_equal(none, 0.0)


def profiles(**changes):
    """Return r_s and G_s of a model at its initialization."""
    model_config = config(depth=6, norm="rms_norm", bias=False, positions="none", head="untied", **changes)
    probe = StreamProbe(("sizes",))
    model = Decoder(model_config, observe=probe)

    @jax.jit
    def run(key):
        params = model.init(key, tokens())["params"]
        params["embedding"]["table"] *= 0.1  # a small stream, so that it grows

        def loss_of(variables):
            return jnp.sum(jnp.sin(model.apply(variables, tokens())))

        _, made = model.apply({"params": params}, tokens(), mutable=["observed"])
        return stream_sizes(stream_profile(made["observed"])), gradient_profile(
            model_config, loss_of, params
        ).stream_S

    return [np.asarray(x) for x in jax.vmap(run)(jax.random.split(jax.random.key(0), 8))]


@pytest.mark.full
def test_at_initialization_prenorms_product_is_flat_where_its_factors_are_not():
    r_RS, g_RS = profiles()
    assert r_RS.shape == g_RS.shape == (8, 13)
    products_RS = np.asarray(jax.vmap(parity_product)(jnp.asarray(r_RS), jnp.asarray(g_RS)))
    np.testing.assert_array_equal(products_RS[:, 0], 1.0)
    want = r_RS * g_RS / (r_RS[:, :1] * g_RS[:, :1])
    np.testing.assert_allclose(products_RS, want, rtol=1e-5)
    # Round each seed's line, on a log axis, within a quarter of how far sizes alone go.
    growth = np.log(r_RS[:, -1] / r_RS[:, 0]).mean()
    bend = np.abs(np.log(products_RS).mean(0)).max()
    assert growth > 1.0
    assert bend < growth / 4


def test_a_stream_that_is_no_array_has_no_sizes_and_no_gradient_no_parity():
    model_config = config(residual="hyper_connections")
    model, params = Decoder(model_config, observe=StreamProbe()), built(model_config)[1]
    made = jax.eval_shape(lambda p: model.apply({"params": p}, tokens(), mutable=["observed"])[1], params)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape), made["observed"])
    assert stream_sizes(stream_profile(zeros)) is None
    assert np.all(np.isnan(parity_product(jnp.ones(3), jnp.zeros(3))))
    with pytest.raises(AssertionError):
        parity_product(jnp.ones(3), jnp.ones(4))
