"""jit, vmap and pmap of one pure function: a seed and a learning rate in, a model trained for two steps out."""

import functools
import itertools
from typing import Any, NamedTuple, cast

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxblock import Decoder
from jaxblock.parallel import mean_and_gradient, pmap_mean_and_gradient
from tests.parallel.ragged import loss_sums_of, ragged_batch
from tests.small import config

RESIDUALS = ["pre_norm", "attention_residual"]  # an array as stream, and a history
# The least there is to compile.
PLAIN = {"depth": 2, "bias": False, "norm": "rms_norm", "feed_forward": "relu", "positions": "none"}
SEEDS, RATES = (0, 1), (0.01, 0.1)
BATCH = ragged_batch(3)
every_residual = pytest.mark.parametrize("residual", RESIDUALS)
few_residuals = pytest.mark.parametrize(
    "residual", [RESIDUALS[0], pytest.param(RESIDUALS[1], marks=pytest.mark.full)]
)


class Trained(NamedTuple):
    """What a seed and a learning rate decide; losses and gradients have a leading axis of steps."""

    params: Any
    logits_BTV: jax.Array
    losses: jax.Array
    gradients: Any


@functools.cache
def training_of(residual: str):
    """Return `(key, rate) -> Trained`: init, apply, then loss, gradient and an Adam update twice, and the loss."""
    model = Decoder(config(residual=residual, **PLAIN))
    gradient = mean_and_gradient(loss_sums_of(model))

    def train(key: jax.Array, rate: jax.Array) -> Trained:
        optimizer = optax.adam(rate)

        def step(state, _):
            result = gradient(state[0], BATCH)
            updates, moments = optimizer.update(result.gradient, state[1])
            return (optax.apply_updates(state[0], updates), moments), result

        params = model.init(key, jnp.zeros((1, 1), jnp.int32))["params"]
        logits_BTV = cast(jax.Array, model.apply({"params": params}, jnp.asarray(BATCH.inputs_BT)))
        _, results = jax.lax.scan(step, (params, optimizer.init(params)), length=3)
        return Trained(params, logits_BTV, results.loss, results.gradient)

    return train


@functools.cache
def jitted(residual: str):
    return jax.jit(training_of(residual))


@functools.cache
def alone(residual: str, seed: int, rate: float) -> Trained:
    """Return one run in numpy: slicing arrays outside of jit compiles once per shape."""
    return jax.device_get(jitted(residual)(jax.random.key(seed), jnp.float32(rate)))


def assert_close(ours: Any, theirs: Any) -> None:
    chex.assert_trees_all_equal_shapes_and_dtypes(ours, theirs)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), ours, theirs)


def at(tree: Any, *place: int) -> Any:
    return jax.tree.map(lambda x: x[place], tree)


@few_residuals
def test_vmap_over_seeds_and_learning_rates_gives_what_each_gives_alone(residual):
    over_rates = jax.vmap(training_of(residual), in_axes=(None, 0))
    over_both = jax.jit(jax.vmap(over_rates, in_axes=(0, None)))
    runs = jax.device_get(over_both(jnp.stack([jax.random.key(seed) for seed in SEEDS]), jnp.asarray(RATES)))
    for seed, rate in itertools.product(range(2), range(2)):
        assert_close(at(runs, seed, rate), alone(residual, SEEDS[seed], RATES[rate]))
    # No run is another's: seeds differ from the start, learning rates from the first update on.
    losses = runs.losses
    assert np.abs(losses[0] - losses[1]).min() > 1e-2
    assert np.abs(losses[:, 0, 1:] - losses[:, 1, 1:]).min() > 1e-2
    np.testing.assert_array_equal(losses[:, 0, 0], losses[:, 1, 0])


@few_residuals
def test_pmap_of_init_apply_loss_and_gradient_equals_jit(residual):
    mapped = jax.pmap(training_of(residual), in_axes=(0, None))(
        jnp.stack([jax.random.key(SEEDS[0])]), jnp.float32(RATES[0])
    )
    assert_close(at(jax.device_get(mapped), 0), alone(residual, SEEDS[0], RATES[0]))


@few_residuals
def test_pmap_data_parallelism_over_one_device_equals_jit(residual):
    wanted, model = alone(residual, SEEDS[0], RATES[0]), Decoder(config(residual=residual, **PLAIN))
    mapped = jax.device_get(pmap_mean_and_gradient(loss_sums_of(model), 1)(wanted.params, BATCH))
    assert_close((mapped.loss, mapped.gradient), (wanted.losses[0], at(wanted.gradients, 0)))
    assert mapped.weight == BATCH.valid_BT.sum()


@pytest.mark.full  # the battery compares jit with eager, step tests the gradient
@few_residuals
def test_jit_of_apply_loss_and_gradient_changes_nothing(residual):
    wanted, model = alone(residual, SEEDS[0], RATES[0]), Decoder(config(residual=residual, **PLAIN))
    params = jax.tree.map(jnp.asarray, wanted.params)
    result = mean_and_gradient(loss_sums_of(model))(params, BATCH)
    assert_close(model.apply({"params": params}, jnp.asarray(BATCH.inputs_BT)), wanted.logits_BTV)
    assert_close((result.loss, result.gradient), (wanted.losses[0], at(wanted.gradients, 0)))


@pytest.mark.full
@every_residual
def test_jit_of_init_changes_nothing(residual):
    model = Decoder(config(residual=residual, **PLAIN))
    params = model.init(jax.random.key(SEEDS[0]), jnp.zeros((1, 1), jnp.int32))["params"]
    assert_close(params, alone(residual, SEEDS[0], RATES[0]).params)
