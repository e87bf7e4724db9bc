"""The stream's gradient profile from taps, against gradients taken the plain way; parameters by role."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblock import Decoder, ExecutionConfig
from jaxblock.functional.gradient_tap import gradient_tap
from jaxblock.probes.gradients import (
    gradient_noise,
    gradient_profile,
    open_taps,
    parameter_profile,
    stream_gradient,
)
from tests.small import built, config, tokens

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
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found.gradient, want)
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


@pytest.mark.full  # test_equal_everywhere has pre_norm
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
    rows = parameter_profile(found.gradient, params)
    rms, relative = rows["output"]
    gradient, kernel = (
        found.gradient["blocks"]["attention"]["output"]["kernel"],
        params["blocks"]["attention"]["output"]["kernel"],
    )
    np.testing.assert_allclose(rms, np.sqrt(np.mean(np.square(gradient), axis=(1, 2, 3))), rtol=1e-5)
    sizes = [np.linalg.norm(x.reshape(3, -1), axis=1) for x in (gradient, kernel)]
    np.testing.assert_allclose(relative, sizes[0] / sizes[1], rtol=1e-5)
    assert rows["head outside the blocks"][0].shape == ()
    assert open_taps(model_config)["blocks"]["attention"].shape == (3,)


LAYERS, ENTRIES = 2, 30
WEIGHTS = {
    "embedding": {"table": jnp.zeros((5, 3))},
    "blocks": {"attention": {"query": {"kernel": jnp.zeros((LAYERS, 5, 2, 3))}}},
}
"""A role outside the blocks with 15 entries, and one in them with 30 a block."""


def linear(params, batch):
    """A loss whose gradient is the batch itself."""
    products = jax.tree.map(lambda p, x: jnp.sum(p * x), params, batch)
    return sum(jax.tree.leaves(products))


noise_of = jax.jit(functools.partial(gradient_noise, linear))


def noisy(seed, k, *, means=(1.0, -0.5), sigma_L=(1.0, 3.0), sigma=0.5):
    """Return K gradients mean + sigma * normal: tr Cov = entries * sigma^2, |E g|^2 = entries * mean^2."""
    draw = np.random.default_rng(seed)
    table = means[0] + sigma * draw.normal(size=(k, 5, 3))
    kernel = means[1] + np.asarray(sigma_L).reshape(1, LAYERS, 1, 1, 1) * draw.normal(
        size=(k, LAYERS, 5, 2, 3)
    )
    batch = {"embedding": {"table": table}, "blocks": {"attention": {"query": {"kernel": kernel}}}}
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), batch)


def test_noise_of_a_linear_loss_is_what_was_put_in():
    """Unbiased over 400 draws of 4 micro-batches, within 4 standard errors, variance of a chi-square's."""
    k, runs = 4, 400
    batches = noisy(0, k * runs)
    stacked = jax.tree.map(lambda x: x.reshape(runs, k, *x.shape[1:]), batches)
    found = jax.jit(jax.vmap(functools.partial(gradient_noise, linear), in_axes=(None, 0)))(WEIGHTS, stacked)
    table, query = found["embedding outside the blocks"], found["query"]
    for got, sigma, mean, entries in (
        (table, 0.5, 1.0, 15),
        (jax.tree.map(lambda x: x[:, 0], query), 1.0, -0.5, ENTRIES),
        (jax.tree.map(lambda x: x[:, 1], query), 3.0, -0.5, ENTRIES),
    ):
        trace, signal = entries * sigma**2, entries * mean**2
        freedom = entries * (k - 1)
        chi = np.asarray(got.covariance) * freedom / trace
        assert abs(chi.mean() - freedom) < 4 * np.sqrt(2 * freedom / runs)
        np.testing.assert_allclose(chi.var() / (2 * freedom), 1.0, atol=4 * np.sqrt(2 / runs) * 1.2)
        error = np.asarray(got.mean_square).std() / np.sqrt(runs)
        assert abs(got.mean_square.mean() - signal) < 4 * error
        biased = np.asarray(got.mean_square + got.covariance / k)
        assert abs(biased.mean() - signal) > 4 * error  # control: the plain |mean|^2 has the noise in it


def test_noise_is_numpys_also_far_below_the_mean():
    """Where the mean is 1000 times the noise, a sum of squares less the squared sum has lost it in float32."""
    batches = noisy(1, 6, means=(1000.0, 300.0))
    found = noise_of(WEIGHTS, batches)
    kernel = np.asarray(batches["blocks"]["attention"]["query"]["kernel"], np.float64)
    want = kernel.var(axis=0, ddof=1).reshape(LAYERS, -1).sum(1)
    query = found["query"]
    np.testing.assert_allclose(query.covariance, want, rtol=1e-3)
    signal = np.square(kernel.mean(0)).reshape(LAYERS, -1).sum(1) - want / 6
    np.testing.assert_allclose(query.mean_square, signal, rtol=1e-5)
    np.testing.assert_allclose(query.ratio, want / signal, rtol=1e-3)
    table = np.asarray(batches["embedding"]["table"], np.float32).reshape(6, -1)
    naive = np.sum(np.mean(table**2, 0, dtype=np.float32) - np.mean(table, 0, dtype=np.float32) ** 2) * 6 / 5
    true = table.astype(np.float64).var(axis=0, ddof=1).sum()
    assert abs(naive / true - 1) > 0.02  # control
    np.testing.assert_allclose(found["embedding outside the blocks"].covariance, true, rtol=1e-3)


def test_noise_at_its_ends():
    same = jax.tree.map(lambda x: jnp.repeat(x[:1], 3, axis=0), noisy(2, 1))
    still = noise_of(WEIGHTS, same)
    np.testing.assert_array_equal(still["query"].covariance, 0.0)
    np.testing.assert_array_equal(still["query"].ratio, 0.0)
    opposite = jax.tree.map(lambda x: jnp.concatenate([x, -x]), noisy(3, 1))
    assert np.all(np.isposinf(noise_of(WEIGHTS, opposite)["query"].ratio))
    for k in (1, 0):
        with pytest.raises(ValueError, match=rf"leading axes of \[{k}\]"):
            gradient_noise(linear, WEIGHTS, noisy(0, k))


@pytest.mark.full
def test_noise_of_a_model_by_role_and_block_is_that_of_its_gradients():
    model_config = plain()
    params = built(model_config)[1]
    model = Decoder(model_config)
    batches = tokens(6).reshape(3, 2, 6)

    def loss(params, batch):
        return jnp.mean(jnp.sin(model.apply({"params": params}, batch)))

    found = jax.jit(functools.partial(gradient_noise, loss))(params, batches)
    gradients = [jax.jit(jax.grad(loss))(params, batch) for batch in batches]
    output = np.stack(
        [np.asarray(g["blocks"]["attention"]["output"]["kernel"], np.float64) for g in gradients]
    )
    want = output.var(axis=0, ddof=1).reshape(3, -1).sum(1)
    np.testing.assert_allclose(found["output"].covariance, want, rtol=1e-4)
    assert found["head outside the blocks"].ratio.shape == ()


def test_a_token_mixers_sublayers_stand_in_their_order():
    """A gradient's keys come back sorted, "feed_forward" before "token_mixer": the profile is in the order of depth."""
    taps = {"blocks": {"feed_forward": jnp.array([4.0, 16.0]), "token_mixer": jnp.array([1.0, 9.0])}}
    found = stream_gradient({**taps, "closed": jnp.float32(25.0)})
    assert found.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]
