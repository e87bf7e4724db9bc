"""A training step small enough to compile in seconds, shared by the tests of the trainer."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxblock import Decoder, ExecutionConfig
from jaxblock.functional import Scaling
from jaxblock.training.batches import Batch
from jaxblock.training.config import (
    DataConfig,
    GuardConfig,
    LossConfig,
    OptimizerConfig,
    RunConfig,
    TrainConfig,
)
from jaxblock.training.step import TrainState, first_state, make_step
from tests.small import built, config, tokens


def training(
    *,
    steps: int = 100,
    optimizer: dict[str, Any] | None = None,
    loss: dict[str, Any] | None = None,
    data: dict[str, Any] | None = None,
    guard: dict[str, Any] | None = None,
    execution: ExecutionConfig | None = None,
    **model: Any,
) -> TrainConfig:
    """Return a run of the small model with some fields changed."""
    return TrainConfig(
        run=RunConfig(steps=steps),
        model=config(**{"depth": 2, **model}),
        execution=execution or ExecutionConfig(),
        optimizer=OptimizerConfig(**{"learning_rate": 0.03, **(optimizer or {})}),
        data=DataConfig(**{"batch": 2, **(data or {})}),
        loss=LossConfig(**(loss or {})),
        guard=GuardConfig(**(guard or {})),
    )


def batch(*, seed: int = 0, vocab_size: int = 11) -> Batch:
    """Return two windows of six tokens, the last target of the first one not real."""
    rows_BT = np.asarray(tokens(2, 7, seed=seed, vocab_size=vocab_size))
    valid_BT = np.ones((2, 6), bool)
    valid_BT[0, -1] = False
    return Batch(rows_BT[:, :-1], rows_BT[:, 1:], valid_BT, None)


def state_of(run: TrainConfig, params: Any) -> TrainState:
    """Return the state before the first step."""
    return first_state(Bigram(), run, params)


def traced_once(step: Callable) -> Callable:
    """Return the step jitted; a second trace fails. (chex counts by name: all steps have the same one.)"""
    traces = 0

    def counted(*args):
        nonlocal traces
        traces += 1
        assert traces == 1, f"traced {traces} times"
        return step(*args)

    return jax.jit(counted)


@functools.cache
def stepper(run: TrainConfig):
    """Return the jitted step of a run, which refuses to be traced twice, and its first state."""
    model, params = built(run.model, run.execution)
    return traced_once(make_step(model, run)), state_of(run, params)


def abstract_state(run: TrainConfig) -> tuple[Decoder, Any]:
    """Return the model and the shapes and dtypes of the first state; nothing is computed."""
    model = Decoder(run.model, run.execution)

    def start(key):
        return first_state(model, run, model.init(key, jnp.zeros((1, 1), jnp.int32))["params"])

    return model, jax.eval_shape(start, jax.random.key(0))


class Bigram:
    """logits = E[x] K: a model whose gradient can be written down. E is a table, K a head's kernel."""

    labels = ()
    scaling = Scaling()

    def project(self, params):
        return params

    def apply(self, variables, tokens_BT, *, segments_BT, rngs):
        params = variables["params"]
        return params["embedding"]["table"][tokens_BT] @ params["head"]["kernel"]


def bigram_params(vocab_size: int = 11, width: int = 4) -> dict:
    draw = np.random.default_rng(5)
    table_VD, kernel_DV = draw.normal(size=(vocab_size, width)), draw.normal(size=(width, vocab_size))
    return {"embedding": {"table": jnp.float32(table_VD)}, "head": {"kernel": jnp.float32(kernel_DV)}}
