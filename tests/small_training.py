"""A training step small enough to compile in seconds, shared by the tests of the trainer."""

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jaxblock import Decoder, ExecutionConfig, ModelConfig
from jaxblock.training.batches import Batch
from jaxblock.training.config import LossConfig, OptimizerConfig, RunConfig, TrainConfig
from jaxblock.training.optimizer import make_optimizer
from jaxblock.training.step import TrainState, init_state, make_step
from tests.small import built, config, tokens


def training(
    *,
    steps: int = 100,
    optimizer: dict[str, Any] | None = None,
    loss: dict[str, Any] | None = None,
    execution: ExecutionConfig | None = None,
    **model: Any,
) -> TrainConfig:
    """Return a run of the small model with some fields changed."""
    return TrainConfig(
        run=RunConfig(steps=steps),
        model=config(**{"depth": 2, **model}),
        execution=execution or ExecutionConfig(),
        optimizer=OptimizerConfig(**{"learning_rate": 0.03, **(optimizer or {})}),
        loss=LossConfig(**(loss or {})),
    )


def batch(*, seed: int = 0, vocab_size: int = 11) -> Batch:
    """Return two windows of six tokens, the last target of the first one not real."""
    rows_BT = np.asarray(tokens(2, 7, seed=seed, vocab_size=vocab_size))
    valid_BT = np.ones((2, 6), bool)
    valid_BT[0, -1] = False
    return Batch(rows_BT[:, :-1], rows_BT[:, 1:], valid_BT, None)


def state_of(run: TrainConfig, params: Any) -> TrainState:
    """Return the state before the first step."""
    moments = make_optimizer(run.optimizer, run.run.steps).init(params)
    return TrainState(jnp.zeros((), jnp.int32), params, moments, jnp.ones((), bool))


@functools.cache
def stepper(run: TrainConfig):
    """Return the jitted step of a run, which refuses to be traced twice, and its first state."""
    model, params = built(run.model, run.execution)
    step = jax.jit(chex.assert_max_traces(make_step(model, run), n=1))
    return step, state_of(run, params)


def abstract_state(run: TrainConfig) -> tuple[Decoder, Any]:
    """Return the model and the shapes and dtypes of the first state; nothing is computed."""
    model = Decoder(run.model, run.execution)
    return model, jax.eval_shape(functools.partial(init_state, model, run), jax.random.key(0))


def with_model(run: TrainConfig, model: ModelConfig) -> TrainConfig:
    """Return the run with another model."""
    return run.model_copy(update={"model": model})
