"""nGPT: the paper's step on the sphere as a float64 loop, its two ends, and weights that stay unit vectors."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblock import Decoder
from jaxblock.axes import parameter_rule, path_name
from jaxblock.functional.residual_updates import sphere_step, unit
from jaxblock.residual.ngpt import UNDECAYED, ngpt, unit_vectors
from jaxblock.training.guard import GOOD
from jaxblock.training.optimizer import decay_mask
from jaxblock.training.step import first_state, make_step
from tests.residual.given import draw
from tests.residual.test_history_references import SUBLAYERS, layer, rms, run
from tests.small import built, config, tokens
from tests.small_training import batch, training

X, U = draw(2, 3, 8, seed=5), draw(2, 3, 8, seed=6)
MODELS = {
    "tied": {"norm": "layer_norm", "bias": True},
    "untied": {"norm": "rms_norm", "head": "untied", "feed_forward": "swiglu", "wiring": "parallel"},
    "experts": {"experts": "dropless(experts=2, active=1)"},
}


def length(x):
    return np.linalg.norm(np.asarray(x, np.float64), axis=-1)


def n(v):
    return v / length(v)[..., None]


def paper(x, weights, params, outer=n):
    x = n(x)
    for i in range(SUBLAYERS):
        p = layer(params, i)
        u = np.tanh(rms(x, p["norm"]["scale"]) @ weights[i])
        a = np.abs(p["step_size"] * 0.05 * np.sqrt(8))
        x = outer(x + a * (n(u) - n(x)))
    return x


# ------------------------------------------------------------------ the step


def test_ngpt_equals_its_paper():
    """Step sizes of both signs: their absolute value counts."""
    closed, *given = run("ngpt")
    assert (given[-1]["blocks"]["attention_connection"]["step_size"] < 0).any()
    np.testing.assert_allclose(closed, paper(*given), rtol=2e-5, atol=2e-6)
    assert not np.allclose(closed, paper(*given, outer=lambda x: x), atol=1e-3)


def test_i22_the_stream_has_length_one():
    """To 1e-6 after six sublayers, however long the embedding was; without the outer N it has not."""
    closed, x, *rest = run("ngpt")
    np.testing.assert_allclose(length(closed), 1.0, atol=1e-6)
    assert np.all(np.abs(length(x) - 1.0) > 1e-2)
    assert np.all(np.abs(length(paper(x, *rest, outer=lambda x: x)) - 1.0) > 1e-4)


def test_i22_a_step_of_zero_is_the_identity_on_the_sphere_and_of_one_the_branchs_direction():
    x = unit(X)
    np.testing.assert_allclose(sphere_step(x, U, jnp.zeros(8)), x, atol=1e-6)
    for one in (1.0, -1.0):
        np.testing.assert_allclose(sphere_step(x, U, jnp.full(8, one)), unit(U), atol=1e-6)
    assert not np.allclose(sphere_step(x, U, jnp.full(8, 0.05)), x, atol=1e-3)
    step = sphere_step(x, U, jnp.full(8, 0.3))
    np.testing.assert_allclose(sphere_step(x, 7.0 * U, jnp.full(8, 0.3)), step, atol=1e-6)


def test_a_zero_vector_has_direction_zero_and_a_finite_gradient():
    """Divided by its own length it has none."""
    zero = jnp.zeros_like(X)
    np.testing.assert_array_equal(unit(zero), zero)
    np.testing.assert_allclose(sphere_step(unit(X), zero, jnp.full(8, 0.3)), unit(X), atol=1e-6)
    gradient = jax.grad(lambda u: jnp.sum(jnp.sin(sphere_step(unit(X), u, jnp.full(8, 0.3)))))(zero)
    assert np.isfinite(gradient).all()
    naive = jax.grad(lambda v: jnp.sum(v / jnp.linalg.norm(v)))(jnp.zeros(8))
    assert not np.isfinite(naive).all()


def test_the_stored_step_size_starts_at_one_over_sqrt_width_and_acts_as_start():
    connection = ngpt(start=0.3).connection(config(), name="connection")
    branch = lambda h: U.astype(h.dtype)  # noqa: E731
    params = connection.init(jax.random.key(0), unit(X), branch)["params"]
    np.testing.assert_allclose(params["step_size"], 8**-0.5, rtol=1e-6)
    after = connection.apply({"params": params}, unit(X), branch)
    np.testing.assert_allclose(after, n(n(X) + 0.3 * (n(U) - n(X))), atol=1e-6)


def test_a_bfloat16_stream_stays_one():
    x = ngpt().open(config(), X.astype(jnp.bfloat16))
    after = sphere_step(x, U.astype(jnp.bfloat16), jnp.full(8, 0.3))
    assert x.dtype == after.dtype == jnp.bfloat16
    np.testing.assert_allclose(length(after.astype(jnp.float32)), 1.0, atol=1e-2)


# ------------------------------------------------------------------ the weights


def leaves(params):
    return {path_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(params)}


@pytest.mark.parametrize("name", MODELS)
def test_i22_weights_are_unit_vectors_along_the_width_after_the_hook(name):
    """Kernels and tables of tokens, and nothing else; before it they are not, and a second time changes nothing."""
    model, params = built(config(**MODELS[name], residual="ngpt"))
    before, after = leaves(params), leaves(model.project(params))
    again = leaves(model.project(model.project(params)))
    for path, x in after.items():
        rule = parameter_rule(path)
        if not re.fullmatch(UNDECAYED, path):
            assert rule.role in ("norm", "bias", "connection", "position", "router"), path
            np.testing.assert_array_equal(x, before[path], err_msg=path)
            continue
        axis = rule.axes.index("width")
        assert x.shape[axis] == 8, path
        np.testing.assert_allclose(np.linalg.norm(x, axis=axis), 1.0, atol=1e-6, err_msg=path)
        assert not np.allclose(np.linalg.norm(before[path], axis=axis), 1.0, atol=1e-2), path
        np.testing.assert_allclose(again[path], x, atol=1e-6, err_msg=path)


def test_a_kernel_of_zeros_stays_zero_and_keeps_its_dtype():
    zeros = jnp.zeros((3, 32, 8), jnp.bfloat16)
    params = {"blocks": {"feed_forward": {"down": {"kernel": zeros}}}}
    found = unit_vectors(config(), params)["blocks"]["feed_forward"]["down"]["kernel"]
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found, zeros)


@pytest.mark.parametrize("name", MODELS)
def test_what_is_projected_is_not_decayed(name):
    """A router, and an MLP over positions, which has no width, are not projected, and decay as they do elsewhere."""
    model = Decoder(config(**MODELS[name], residual="ngpt"))
    params = jax.eval_shape(model.init, jax.random.key(0), tokens(1, 2))["params"]
    mixer = {
        "mlp_up": {"kernel": jax.ShapeDtypeStruct((3, 8, 4), jnp.float32)}
    }  # a decoder has none: its path matters
    params = {**params, "blocks": {**params["blocks"], "token_mixer": mixer}}
    decayed = {path for path, decays in leaves(decay_mask(params, ngpt().labels)).items() if decays}
    router = {"blocks/experts/router/kernel"} if name == "experts" else set()
    assert decayed == {"blocks/token_mixer/mlp_up/kernel"} | router
    without = {path for path, decays in leaves(decay_mask(params)).items() if decays}
    assert len(without) > len(decayed) + 4


@pytest.mark.full
def test_a_training_step_leaves_unit_vectors():
    model_config = config(norm="rms_norm", bias=False, residual="ngpt")
    model, params = built(model_config)
    run_config = training(optimizer={"weight_decay": 0.1, "learning_rate": 0.1, "average": 0.9})
    state = first_state(model, run_config, params)
    state, metrics = jax.jit(make_step(model, run_config))(state, batch(), jax.random.key(0))
    assert metrics.alarm == GOOD
    for held in (
        state.params,
        state.average,
    ):  # a mean of unit vectors is shorter, unless it is projected, too
        kernel = leaves(held)["blocks/feed_forward/up/kernel"]
        np.testing.assert_allclose(np.linalg.norm(kernel, axis=1), 1.0, atol=1e-6)


@pytest.mark.parametrize("start", [0.0, 1.5, float("nan")])
def test_a_step_size_out_of_range_is_refused(start):
    with pytest.raises(
        ValueError, match=f"model.residual: start is {start}; it must be a finite number above 0.0"
    ):
        ngpt(start=start)
