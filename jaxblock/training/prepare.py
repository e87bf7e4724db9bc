"""A config made ready to run: data loaded, model traced, every refusal said before anything is written."""

import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxblock.parallel import Mapped, OneDevice, OnMesh, Placement, mesh_shape
from jaxblock.parallel.memory import device_bytes
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
    probing: Probing | None
    """What is measured along depth; None = nothing."""
    placement: Placement
    """Where its arrays lie."""
    like: TrainState
    """Shapes and dtypes of its state, with shardings where it lies on a mesh."""


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
    placement = place(config)
    task = TASKS[config.run.task_choice.name](config)
    _check_batch(config)
    keys = run_keys(config.run.seed)
    state = jax.eval_shape(functools.partial(init_state, task, config), keys.init)
    like = placement.like(state, state.params)
    _check_memory(like)
    weights = None
    if config.init.from_run is not None and not continues:
        weights = load_weights(Path(config.init.from_run), state.params, which=config.init.weights)
    jax.eval_shape(make_step(task.model, config, task.loss), state, task.train[0], keys.dropout)
    probing = None
    if config.probe.every:
        probing = open_probing(task, config, state.params)
        jax.eval_shape(probed_step_of(task, config, probing), state, task.train[0], keys.dropout)
    return Prepared(config, task, weights, probing, placement, like)


def place(config: TrainConfig) -> Placement:
    """Return where a run is to lie, on the devices that there are.

    Raises:
      ValueError: the sizes do not fit the devices, or the batch does not divide by those that split its rows.
    """
    asked, processes = config.parallel, jax.process_count()
    shape = mesh_shape(
        replica=asked.replica,
        data=asked.data,
        fsdp=asked.fsdp,
        tensor=asked.tensor,
        devices=jax.device_count(),
        processes=processes,
    )
    _check_rows(config, shape.rows)
    if asked.form == "pmap":
        _check_mapped(config, processes)
        return Mapped(shape.data, pieces=config.data.accumulation)
    return OneDevice() if shape.devices == 1 else OnMesh(shape)


def _check_rows(config: TrainConfig, devices: int) -> None:
    """Raise ValueError unless every device gets the same number of rows of every piece of the batch."""
    batch, pieces = config.data.batch, config.data.accumulation
    if batch % (devices * pieces):
        of = "" if pieces == 1 else f" in data.accumulation = {pieces} pieces"
        raise ValueError(
            f"data.batch is {batch}{of}, and {devices} devices split its rows (parallel.replica x data x fsdp); it "
            f"must be a multiple of {devices * pieces}, or parallel.data smaller"
        )


def _check_mapped(config: TrainConfig, processes: int) -> None:
    """Raise ValueError for what pmap does not do here."""
    if processes > 1:
        raise ValueError(
            f'parallel.form is "pmap", which is of one process, and there are {processes}; it must be "jit"'
        )
    if config.probe.every:
        raise ValueError(
            f'parallel.form is "pmap", which takes no probes, and probe.every is {config.probe.every}; it must be "jit"'
        )
    if config.model.experts_choice.name != "none" and config.model.hidden_dropout:
        raise ValueError(
            f'parallel.form is "pmap", model.experts is {config.model.experts!r} and model.hidden_dropout is '
            f"{config.model.hidden_dropout}, whose draws are not by rows; parallel.form must be jit, or the rate 0"
        )


def probed_step_of(task: Task, config: TrainConfig, probing: Probing) -> ProbedStep:
    """Return the step of a run that is measured."""
    return make_probed_step(task.model, config, probing.loss, statistics=probing.statistics)


def init_state(task: Task, config: TrainConfig, key: Array) -> TrainState:
    """Return the state before the first step; jit it, so that nothing is computed but the initial values."""
    return first_state(task.model, config, task.init(key))


def _check_memory(state: Any) -> None:
    """Raise ValueError if what a device has of parameters and optimizer state alone is larger than its memory."""
    needed = sum(_device_bytes(leaf) for leaf in jax.tree.leaves(state))
    available = device_bytes()
    if available is not None and needed > available:
        raise ValueError(
            f"parameters and optimizer state need {needed / 2**30:,.1f} GiB and the device has "
            f"{available / 2**30:,.1f} GiB; choose a smaller model.width, model.depth or model.vocab_size"
        )


def _device_bytes(leaf: jax.ShapeDtypeStruct) -> int:
    """Return the bytes of an array that one device holds."""
    shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
    return math.prod(shape) * leaf.dtype.itemsize


def _check_batch(config: TrainConfig) -> None:
    """Raise ValueError if a batch's integers alone are larger than the device's memory."""
    tokens, available = config.data.batch * config.model.context, device_bytes()
    if available is not None and 16 * tokens > available:  # inputs, targets, weights and segments
        raise ValueError(
            f"data.batch is {config.data.batch} and model.context is {config.model.context}: {tokens:,} tokens are "
            f"more than the {available / 2**30:,.1f} GiB of the device hold"
        )
