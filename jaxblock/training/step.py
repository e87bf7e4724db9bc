"""One optimizer step as a pure function: batch -> loss -> gradients -> update, guarded against non-finite values."""

from collections.abc import Callable
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import optax

from jaxblock.functional.losses import CrossEntropy, LossOptions, cross_entropy
from jaxblock.models.decoder import Decoder
from jaxblock.training.batches import Batch
from jaxblock.training.config import TrainConfig
from jaxblock.training.optimizer import learning_rate_schedule, make_optimizer
from jaxblock.types import Array, Params


class TrainState(NamedTuple):
    """Everything a run carries from step to step. The data's place and the keys follow from `step`."""

    step: Array
    """Updates made, int32."""
    params: Params
    moments: optax.OptState
    """The optimizer's state."""
    healthy: Array
    """False from the first non-finite loss or gradient on; nothing is updated any more."""


class StepMetrics(NamedTuple):
    """Float32 scalars of one step."""

    loss: Array
    """Cross entropy, nats per real target token; without z-loss and smoothing."""
    objective: Array
    """What was minimised, z-loss and smoothing included."""
    gradient_norm: Array
    """Global norm of the gradient, before clipping."""
    parameter_norm: Array
    """Global norm of the parameters, after the update."""
    learning_rate: Array
    """The learning rate applied."""
    tokens: Array
    """Real target tokens."""
    healthy: Array
    """Whether the update was applied."""


Step = Callable[[TrainState, Batch, Array], tuple[TrainState, StepMetrics]]


def init_state(model: Decoder, config: TrainConfig, key: Array) -> TrainState:
    """Return the state before the first step; jit it, so that nothing is computed but the initial values."""
    tokens_BT = jnp.zeros((1, 1), jnp.int32)
    params = model.init(key, tokens_BT)["params"]
    moments = make_optimizer(config.optimizer, config.run.steps, model.labels).init(params)
    return TrainState(jnp.zeros((), jnp.int32), params, moments, jnp.ones((), bool))


def batch_loss(
    model: Decoder, params: Params, batch: Batch, *, options: LossOptions, dropout_key: Array | None = None
) -> CrossEntropy:
    """Return the loss of a batch; dropout is on exactly when a key is passed."""
    rngs = {} if dropout_key is None else {"dropout": dropout_key}
    inputs_BT, targets_BT, valid_BT, segments_BT = jax.tree.map(jnp.asarray, batch)
    logits_BTV = model.apply({"params": params}, inputs_BT, segments_BT=segments_BT, rngs=rngs)
    return cross_entropy(cast(Array, logits_BTV), targets_BT, valid_BT=valid_BT, options=options)


def make_step(model: Decoder, config: TrainConfig) -> Step:
    """Return the step `(state, batch, key) -> (state, metrics)`; jit it with the state donated.

    `key` is the run's: each step folds its number in, so no two steps drop the same entries.
    """
    optimizer = make_optimizer(config.optimizer, config.run.steps, model.labels)
    schedule = learning_rate_schedule(config.optimizer, config.run.steps)
    options = loss_options(config)

    def step(state: TrainState, batch: Batch, key: Array) -> tuple[TrainState, StepMetrics]:
        def objective(params: Params) -> tuple[Array, CrossEntropy]:
            dropout_key = jax.random.fold_in(key, state.step)
            result = batch_loss(model, params, batch, options=options, dropout_key=dropout_key)
            return result.loss, result

        gradients, result = jax.grad(objective, has_aux=True)(state.params)
        norm = optax.tree.norm(gradients)
        updates, moments = optimizer.update(gradients, state.moments, state.params)
        params = model.project(optax.apply_updates(state.params, updates))
        parameter_norm = optax.tree.norm(params)
        healthy = state.healthy & jnp.isfinite(jnp.stack([result.loss, norm, parameter_norm])).all()
        new = TrainState(state.step + 1, params, moments, healthy)
        # A select per leaf fuses into the update, and the last finite state is always there to be saved.
        kept = jax.tree.map(lambda ours, theirs: jnp.where(healthy, ours, theirs), new, state)
        metrics = StepMetrics(
            loss=result.nats / jnp.maximum(result.weight, 1),
            objective=result.loss,
            gradient_norm=norm,
            parameter_norm=parameter_norm,
            learning_rate=schedule(state.step),
            tokens=result.weight,
            healthy=healthy,
        )
        return kept._replace(healthy=healthy), metrics

    return step


def make_evaluation(model: Decoder, config: TrainConfig) -> Callable[[Params, Batch], CrossEntropy]:
    """Return `(params, batch) -> CrossEntropy` without dropout, smoothing or z-loss; add `nats` and `weight`."""
    options = LossOptions(vocab_size=config.model.vocab_size)

    def evaluate(params: Params, batch: Batch) -> CrossEntropy:
        return batch_loss(model, params, batch, options=options)

    return evaluate


def loss_options(config: TrainConfig) -> LossOptions:
    """Return the training objective's options."""
    return LossOptions(
        z_loss=config.loss.z_loss,
        label_smoothing=config.loss.label_smoothing,
        vocab_size=config.model.vocab_size,
    )
