"""What is known of a program before it is run: its data, parameters, FLOPs and least memory; nothing is allocated."""

import functools
from typing import Any, NamedTuple

import jax

from jaxblock.accounting import (
    abstract_parameters,
    count_parameters,
    flop_conventions,
    kept_bytes,
    tree_bytes,
)
from jaxblock.sweeps.worker import uniform_loss
from jaxblock.training.config import TrainConfig
from jaxblock.training.prepare import TASKS, init_state, run_keys


class Survey(NamedTuple):
    """A program, before it is run."""

    data: str
    """The corpus's fingerprint."""
    parameters: dict[str, int]
    """"blocks", "non_embedding" and "total"; "total" alone for a classifier."""
    flops_per_token: dict[str, float]
    """In training, by convention; {} for a classifier."""
    tokens_per_step: int
    lane_bytes: int
    """Parameters, gradients, optimizer state and what the backward pass keeps, of one lane."""
    validation_tokens: int
    uniform_loss: float


def survey(config: TrainConfig) -> Survey:
    """Load the data and trace the model.

    Raises:
      ValueError: the data do not fit the config, or the model cannot be built.
    """
    task = TASKS[config.run.task_choice.name](config)
    data, model = config.data, config.model
    state = jax.eval_shape(functools.partial(init_state, task, config), run_keys(0).init)
    parameters, flops, kept = {"total": _size(state.params)}, {}, 0
    if config.run.task_choice.name == "language_model":
        params = abstract_parameters(model)
        counted = count_parameters(params)
        parameters = {
            "blocks": counted.blocks,
            "non_embedding": counted.non_embedding,
            "total": counted.total,
        }
        flops = {row.name: float(row.training) for row in flop_conventions(model)}
        rows = data.batch // data.accumulation
        kept = kept_bytes(model, config.execution, params, batch=rows, length=model.context).total
    return Survey(
        data=task.facts["corpus_fingerprint"],
        parameters=parameters,
        flops_per_token=flops,
        tokens_per_step=data.batch * model.context,
        lane_bytes=tree_bytes(state) + tree_bytes(state.params) + kept,
        validation_tokens=sum(1 for _ in task.validation) * data.batch * model.context,
        uniform_loss=uniform_loss(task, config),
    )


def _size(params: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(params))
