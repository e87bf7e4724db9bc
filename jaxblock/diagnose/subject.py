"""What is diagnosed: a task with a model, its parameters, and a few rows of its own data.

Everything is asked of `task.model.apply`, `task.loss`, `task.score` and `task.forward`, the functions that training
uses: a mistake in any of them is in what the checks see. Nothing is written.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxblock.models import Decoder
from jaxblock.residual import Topology
from jaxblock.training.config import TrainConfig
from jaxblock.training.language_task import language_task
from jaxblock.training.prepare import TASKS, run_keys
from jaxblock.training.run_folder import RunFolder
from jaxblock.training.task import Task
from jaxblock.training.weights import load_weights
from jaxblock.types import Array, Params

ROWS, LENGTH = 4, 64
"""Most rows and tokens that are looked at."""


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Subject:
    """What the checks are asked of."""

    config: TrainConfig
    task: Task
    batch: Any
    """Rows of the first training batch."""
    initial: Params
    """The initial values of this seed."""
    stirred: Params
    """Initial values off their zeros and ones, in float32: what starts at 0 hides what comes after it."""
    params: Params
    """Initial values, or a checkpoint's."""
    step: int | None = None
    """Step of the checkpoint; None = initial values."""

    @property
    def model(self) -> Any:
        """The model, a `Decoder` or a `Classifier`."""
        return self.task.model

    @property
    def causal(self) -> bool:
        """Whether it predicts the next token."""
        return isinstance(self.model, Decoder)

    @functools.cached_property
    def exact(self) -> Any:
        """The model in float32, without dropout: what a mistake is told from round-off with."""
        floats = {"dtype": "float32", "stream_dtype": "float32", "param_dtype": "float32"}
        return self.model.clone(config=dataclasses.replace(self.model.config, **floats), observe=None)

    def logits(
        self,
        model: Any,
        params: Params,
        tokens_BT: Array,
        *,
        valid_BT: Array | None = None,
        positions_BT: Array | None = None,
    ) -> Array:
        """Return the model's real columns, [B, T, V] of a decoder, [B, C] of a classifier."""
        found = model.apply({"params": params}, tokens_BT, valid_BT=valid_BT, positions_BT=positions_BT)
        return found[..., : model.config.vocab_size] if self.causal else found


def make_subject(config: TrainConfig, task: Task) -> Subject:
    """Return a task at its initial values; what cannot be built is refused before it is computed.

    Raises:
      ValueError: the model cannot be built.
    """
    key, batch = run_keys(config.run.seed).init, some_rows(task.train[0], config)
    jax.eval_shape(lambda key: task.loss(task.init(key), batch, None), key)
    initial = quick(task.init)(key)
    stirred = task.model.project(stir(initial))
    return Subject(config=config, task=task, batch=batch, initial=initial, stirred=stirred, params=initial)


def subject_of_config(config: TrainConfig, *, topology: Topology | None = None) -> Subject:
    """Return a config at its initial values.

    Args:
      config: the run.
      topology: a residual topology of your own, of a language model, in place of the one the config names.

    Raises:
      ValueError: the data do not fit the config, or the model cannot be built.
    """
    if topology is None:
        return make_subject(config, TASKS[config.run.task_choice.name](config))
    if config.run.task_choice.name != "language_model":
        raise ValueError(
            f"run.task is {config.run.task!r}; a topology of your own is diagnosed as a language model"
        )
    return make_subject(config, language_task(config, topology=topology))


def subject_of_run(path: Path) -> Subject:
    """Return a run at its newest checkpoint; nothing in its folder is changed.

    Raises:
      ValueError: no run, no checkpoint, data that changed since the run started.
    """
    folder = RunFolder.open(path)
    config = folder.read_config()
    folder.start_row()  # refuses a run that has not begun
    task = TASKS[config.run.task_choice.name](config)
    folder.check_data(task.facts)
    like = jax.eval_shape(task.init, run_keys(config.run.seed).init)
    found = load_weights(path, like, which="last")
    return dataclasses.replace(make_subject(config, task), params=found.params, step=found.step)


def some_rows(batch: Any, config: TrainConfig) -> Any:
    """Return the first rows, and of attention, which reads any length, the first tokens of a batch."""
    length = LENGTH if config.model.token_mixer_choice.name == "attention" else config.model.context
    cut = lambda x: x[:ROWS, :length] if x.ndim > 1 else x[:ROWS]  # noqa: E731
    return jax.tree.map(lambda x: jnp.asarray(cut(np.asarray(x))), batch)


def stir(params: Params) -> Params:
    """Return parameters none of which is all 0 or all 1: kernels of zeros get 1 / sqrt(fan-in), vectors 0.1."""
    draw = np.random.default_rng(0)

    def leaf(path: tuple, x: Array) -> Array:
        shape = x.shape[1:] if getattr(path[0], "key", None) == "blocks" else x.shape
        noise = draw.normal(size=x.shape)
        if len(shape) < 2:
            return jnp.asarray(np.asarray(x, np.float32) + 0.1 * noise, jnp.float32)
        start = 0.0 if np.any(np.asarray(x)) else 1.0 / math.sqrt(math.prod(shape[:-1]))
        return jnp.asarray(np.asarray(x, np.float32) + start * noise, jnp.float32)

    return jax.tree_util.tree_map_with_path(leaf, params)


def quick(f: Callable) -> Callable:
    """Return f compiled for few calls: on CPU, optimizing takes longer than all of them."""
    options = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
    return jax.jit(f, compiler_options=options)


def as_float(x: Any) -> float:
    """Return a scalar as Python's float."""
    return float(jax.device_get(x))
