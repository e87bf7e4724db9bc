"""The stream's gradient profile from taps, against gradients taken the plain way; parameters by role."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblock import Decoder, ExecutionConfig
from jaxblock.functional.gradient_tap import gradient_tap
from jaxblock.probes.gradients import gradient_profile, open_taps, parameter_profile
from tests.small import built, config

TOKENS = jnp.arange(6)[None]
"""One row of distinct ids, so that the embedding table's gradient is that of the stream before the first sublayer."""


def plain(**changes):
    return config(positions="none", head="untied", norm="rms_norm", bias=False, **changes)


def loss_of(model_config, execution=None):
    model = Decoder(model_config, execution or ExecutionConfig())
    return lambda variables: jnp.sum(jnp.sin(model.apply(variables, TOKENS)))


@functools.cache
def profile(model_config, execution=None):
    params = built(model_config)[1]
    run = jax.jit(functools.partial(gradient_profile, model_config, loss_of(model_config, execution)))
    return params, run(params)


def test_a_tap_is_the_identity_and_its_gradient_the_squared_norm():
    x, tap = jnp.arange(6.0).reshape(2, 3), jnp.float32(0)
    value, (gx, gt) = jax.value_and_grad(lambda x, t: jnp.sum(jnp.sin(gradient_tap(x, t))), (0, 1))(x, tap)
    np.testing.assert_array_equal(value, jnp.sum(jnp.sin(x)))
    np.testing.assert_array_equal(gx, jnp.cos(x))
    np.testing.assert_allclose(gt, np.sum(np.cos(x) ** 2), rtol=1e-6)
    with pytest.raises(AssertionError):
        gradient_tap(x, jnp.zeros(2))


@pytest.mark.parametrize("wiring", ["serial", "parallel"])
def test_the_profiles_ends_are_the_gradients_of_embedding_and_closed_stream(wiring):
    model_config = plain(wiring=wiring)
    params, found = profile(model_config)
    assert found.stream_S.shape == (model_config.sublayers + 1,)
    want = jax.jit(jax.grad(lambda p: loss_of(model_config)({"params": p})))(params)
    np.testing.assert_allclose(found.stream_S[0], np.linalg.norm(want["embedding"]["table"]), rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found.params, want)
    assert np.all(np.asarray(found.stream_S) > 0)


def test_a_later_block_has_the_gradient_of_the_stack_that_starts_there():
    model_config = plain()
    params, found = profile(model_config)
    model = Decoder(model_config)
    _, made = model.apply({"params": params}, TOKENS, mutable=["intermediates"])
    middle = made["intermediates"]["blocks"]["resid_pre"][1]
    rest = dict(params, blocks=jax.tree.map(lambda x: x[1:], params["blocks"]))
    table = params["embedding"]["table"].at[:6].set(middle[0])

    def loss(table):
        variables = {"params": dict(rest, embedding={"table": table})}
        return loss_of(plain(depth=2))(variables)

    want = jnp.linalg.norm(jax.jit(jax.grad(loss))(table))
    np.testing.assert_allclose(found.stream_S[2], want, rtol=1e-4)


@pytest.mark.parametrize("residual", ["pre_norm", "peri_norm"])
def test_loop_and_remat_have_the_same_profile(residual):
    model_config = plain(residual=residual)
    want = profile(model_config)[1].stream_S
    got = profile(model_config, ExecutionConfig(scan_unroll=3, remat="full"))[1].stream_S
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_a_stream_that_is_no_array_has_its_closed_gradient_alone():
    found = profile(plain(residual="attention_residual"))[1].stream_S
    np.testing.assert_array_equal(found[:-1], 0.0)
    assert found[-1] > 0


def test_parameters_are_reported_by_role_and_block():
    model_config = plain()
    params, found = profile(model_config)
    rows = parameter_profile(found.params, params)
    rms, relative = rows["output"]
    gradient, kernel = (
        found.params["blocks"]["attention"]["output"]["kernel"],
        params["blocks"]["attention"]["output"]["kernel"],
    )
    np.testing.assert_allclose(rms, np.sqrt(np.mean(np.square(gradient), axis=(1, 2, 3))), rtol=1e-5)
    sizes = [np.linalg.norm(x.reshape(3, -1), axis=1) for x in (gradient, kernel)]
    np.testing.assert_allclose(relative, sizes[0] / sizes[1], rtol=1e-5)
    assert rows["head outside the blocks"][0].shape == ()
    assert open_taps(model_config)["blocks"]["attention"].shape == (3,)
