"""A config made ready to run: data loaded, model traced, every refusal said before anything is written."""

import functools
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxblock.training.classifier_task import classifier_task
from jaxblock.training.config import TrainConfig
from jaxblock.training.language_task import language_task
from jaxblock.training.probing import Probing, open_probing
from jaxblock.training.step import ProbedStep, TrainState, first_state, make_probed_step, make_step
from jaxblock.training.task import Task
from jaxblock.training.watch import Watch
from jaxblock.training.weights import Weights, load_weights
from jaxblock.types import Array

TASKS: Mapping[str, Callable[[TrainConfig], Task]] = {
    "language_model": language_task,
    "classifier": classifier_task,
}


class Prepared(NamedTuple):
    """A run that nothing can refuse any more."""

    config: TrainConfig
    task: Task
    weights: Weights | None
    """The parameters to start from; None = drawn anew, or the run goes on from a checkpoint of its own."""
    probing: Probing | None = None
    """What is measured along depth; None = nothing."""


class Keys(NamedTuple):
    """The run's keys, one per purpose."""

    init: Array
    dropout: Array
    sample: Array


def run_keys(seed: int) -> Keys:
    """Return the keys of a seed."""
    return Keys(*jax.random.split(jax.random.key(seed), 3))


def prepare(config: TrainConfig, *, continues: bool = False) -> Prepared:
    """Load the data and trace the step, so that whatever is wrong is said before anything is written.

    Args:
      config: the run.
      continues: whether it has a checkpoint of its own; what `init.from` names is then not looked at.

    Raises:
      ValueError: the data do not fit the config, or the model cannot run as asked.
    """
    Watch.check(config)
    task = TASKS[config.run.task_choice.name](config)
    _check_batch(config)
    keys = run_keys(config.run.seed)
    state = jax.eval_shape(functools.partial(init_state, task, config), keys.init)
    _check_memory(state)
    weights = None
    if config.init.from_run is not None and not continues:
        weights = load_weights(Path(config.init.from_run), state.params, which=config.init.weights)
    jax.eval_shape(make_step(task.model, config, task.loss), state, task.train[0], keys.dropout)
    probing = None
    if config.probe.every:
        probing = open_probing(task, config, state.params)
        jax.eval_shape(probed_step_of(task, config, probing), state, task.train[0], keys.dropout)
    return Prepared(config, task, weights, probing)


def probed_step_of(task: Task, config: TrainConfig, probing: Probing) -> ProbedStep:
    """Return the step of a run that is measured."""
    return make_probed_step(task.model, config, probing.loss, statistics=probing.statistics)


def init_state(task: Task, config: TrainConfig, key: Array) -> TrainState:
    """Return the state before the first step; jit it, so that nothing is computed but the initial values."""
    return first_state(task.model, config, task.init(key))


def _check_memory(state: Any) -> None:
    """Raise ValueError if parameters and optimizer state alone are larger than the device's memory."""
    needed = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    available = device_bytes()
    if available is not None and needed > available:
        raise ValueError(
            f"parameters and optimizer state need {needed / 2**30:,.1f} GiB and the device has "
            f"{available / 2**30:,.1f} GiB; choose a smaller model.width, model.depth or model.vocab_size"
        )


def _check_batch(config: TrainConfig) -> None:
    """Raise ValueError if a batch's integers alone are larger than the device's memory."""
    tokens, available = config.data.batch * config.model.context, device_bytes()
    if available is not None and 16 * tokens > available:  # inputs, targets, weights and segments
        raise ValueError(
            f"data.batch is {config.data.batch} and model.context is {config.model.context}: {tokens:,} tokens are "
            f"more than the {available / 2**30:,.1f} GiB of the device hold"
        )


def device_bytes() -> int | None:
    """Return the memory of the first device, of the machine for a CPU; None where it is not known."""
    available = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    if available is None and hasattr(os, "sysconf"):  # a CPU has no limit of its own
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return available
