"""Coordinate check: do activations keep their size, and go on moving, as the model gets deeper or wider?

For every size one compiled program trains all seeds at once for a few steps on one batch, the config's first, and
records at t = 0, 1, ..., steps, after t updates and from one forward pass without dropout, how large y is:

    mean_abs(y) = mean |y|,    rms(y) = sqrt(mean y^2)

    embedding       what the first block reads (not there where the stream is not one array)
    attention       what the branch writes to the stream, the parametrization's multiplier included; mean over blocks
    feed_forward    the same ("token_mixer" in attention's place, "parallel" where the two are one branch)
    last_*          the same of the last block
    final_stream    x_S, the closed stream before the final norm
    logits
    change          x_S(t) - x_S(0): what has been learned, at the end of the stream

The learning rate is the config's peak from the first update on, without warm-up or schedule; its other optimizer
settings hold. How `jaxblock.sweeps.coordinate_slopes` judges the slopes d log y / d log size is said there.
Sources: arXiv 2203.03466 appendix D (the check, in width); 2505.01618 figure 7 (in depth).
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxblock.config import ModelConfig
from jaxblock.contracts import check_choice, check_integer
from jaxblock.models import Decoder
from jaxblock.modules.intermediates import BRANCHES, recorded_branches
from jaxblock.sweeps.coordinate_slopes import AXES, CoordinateCheck, NonFinite
from jaxblock.training.batches import Batch
from jaxblock.training.config import TrainConfig
from jaxblock.training.guard import GOOD
from jaxblock.training.language_task import language_task
from jaxblock.training.objectives import training_loss
from jaxblock.training.prepare import run_keys
from jaxblock.training.step import TrainState, first_state, make_step
from jaxblock.types import Array

COMPILER_OPTIONS = {"xla_backend_optimization_level": 1}
"""On CPU: the program runs once, for a few steps, and compiling it in full takes longer than that."""
_NAMES = tuple(dict.fromkeys(name for branches in BRANCHES for name in branches))
ORDER = (
    "embedding",
    *_NAMES,
    *(f"last_{name}" for name in _NAMES),
    "final_stream",
    "logits",
    "change",
    "logits_change",
)
"""Every quantity, in the order they are shown."""
Sizes = dict[str, Array]
"""Quantity -> (mean_abs, rms), float32."""


class CheckPlan(NamedTuple):
    """A coordinate check that nothing can refuse any more."""

    axis: str
    sizes: tuple[int, ...]
    configs: tuple[TrainConfig, ...]
    """One per size."""
    seeds: tuple[int, ...]
    steps: int
    batch: Batch


def coordinate_check(
    config: TrainConfig, *, axis: str, sizes: Sequence[int], seeds: Sequence[int], steps: int = 10
) -> CoordinateCheck:
    """Train the config at each size and return the sizes of its activations, their slopes and a verdict.

    Args:
      config: what is checked; its depth, or its width with heads and feed-forward in proportion, is replaced.
      axis: depth (in blocks) or width; a head keeps its size.
      sizes: at least two; with fewer than five no slope is given.
      seeds: of initial values and dropout; all train on the batch of the config's own seed.
      steps: updates, at least 2.

    Raises:
      ValueError: a size the model cannot have, or any of these out of its range.
    """
    return run_check(plan_check(config, axis=axis, sizes=sizes, seeds=seeds, steps=steps))


def plan_check(
    config: TrainConfig, *, axis: str, sizes: Sequence[int], seeds: Sequence[int], steps: int = 10
) -> CheckPlan:
    """Check everything, read the batch and trace the smallest model; see `coordinate_check`."""
    check_choice("axis", axis, AXES)
    check_integer("steps", steps, least=2)
    _check_distinct("sizes", sizes, least=1, count=2)
    _check_distinct("seeds", seeds, least=0, count=1)
    if config.run.task_choice.name != "language_model":
        raise ValueError(f"run.task is {config.run.task!r}; a coordinate check trains language models")
    if config.init.from_run is not None:
        raise ValueError(
            f"init.from is {config.init.from_run!r}; it must be left out: a coordinate check begins at initial values"
        )
    sizes = tuple(sorted(sizes))
    configs = tuple(_at_constant_rate(_resized(config, axis, size), steps) for size in sizes)
    plan = CheckPlan(axis, sizes, configs, tuple(seeds), steps, language_task(config).train[0])
    jax.eval_shape(_program(configs[0], plan), *_keys(plan.seeds))
    return plan


def run_check(plan: CheckPlan, say: Callable[[int], None] = lambda size: None) -> CoordinateCheck:
    """Train and measure, one size after the other; see `coordinate_check`.

    Args:
      plan: from `plan_check`.
      say: called with each size when it is done.
    """
    options = COMPILER_OPTIONS if jax.default_backend() == "cpu" else None
    keys, found = _keys(plan.seeds), []
    for size, config in zip(plan.sizes, plan.configs, strict=True):
        # The program is dropped with its name: no size's is kept while the next one's is made.
        program = jax.jit(_program(config, plan), compiler_options=options).lower(*keys).compile()
        found.append(jax.device_get(program(*keys)))
        del program
        say(size)
    return _gather(plan, found)


def measure(logits: Array, collected: Mapping[str, Any], start_BTD: Array) -> Sizes:
    """Return the size of every quantity: of logits and the collection "intermediates" of one forward pass.

    Args:
      logits: [..., V].
      collected: with "blocks", every leaf [L, ...], and "resid_final" [B, T, D].
      start_BTD: the final stream before the first update.
    """
    blocks, final_BTD = collected["blocks"], collected["resid_final"]
    sizes = {}
    if "resid_pre" in blocks:
        sizes["embedding"] = _size(blocks["resid_pre"][0])
    for name in recorded_branches(collected):
        sizes_L2 = jax.vmap(_size)(blocks[f"{name}_out"])
        sizes[name], sizes[f"last_{name}"] = sizes_L2.mean(0), sizes_L2[-1]
    return {
        **sizes,
        "final_stream": _size(final_BTD),
        "logits": _size(logits),
        "change": _size(final_BTD - start_BTD),
    }


def _size(y: Array) -> Array:
    """Return (mean_abs, rms), float32 [2]."""
    y = y.astype(jnp.float32)
    return jnp.stack([jnp.abs(y).mean(), jnp.sqrt(jnp.square(y).mean())])


def _program(config: TrainConfig, plan: CheckPlan) -> Callable[[Array, Array], tuple[Sizes, Array]]:
    """Return (keys of initial values [R], of dropout [R]) -> (sizes [R, T, 2], alarms [R, T])."""
    model = Decoder(config.model, config.execution)
    step = make_step(model, config, training_loss(model, config))
    inputs_BT, _, _, segments_BT = jax.tree.map(jnp.asarray, plan.batch)

    def forward(state: TrainState) -> tuple[Array, Mapping[str, Any]]:
        given = {"segments_BT": segments_BT, "mutable": ["intermediates"]}
        logits_BTV, collected = model.apply({"params": state.params}, inputs_BT, **given)
        real = config.model.vocab_size  # the ids that pad the table are no tokens
        return cast(Array, logits_BTV)[..., :real], collected["intermediates"]

    def train(init_key: Array, dropout_key: Array) -> tuple[Sizes, Array]:
        params = model.init(init_key, jnp.zeros((1, 1), jnp.int32))["params"]

        def measured_step(carry: tuple[TrainState, Array], t: Array) -> tuple[Any, tuple[Sizes, Array]]:
            state, start_BTD = carry
            logits_BTV, collected = forward(state)
            start_BTD = jnp.where(t == 0, collected["resid_final"], start_BTD)
            state, metrics = step(state, plan.batch, dropout_key)
            return (state, start_BTD), (measure(logits_BTV, collected, start_BTD), metrics.alarm)

        state = first_state(model, config, params)
        final = jax.eval_shape(forward, state)[1]["resid_final"]
        start = (state, jnp.zeros(final.shape, final.dtype))
        # One update too many, so that the program holds one forward pass to measure and not two.
        return jax.lax.scan(measured_step, start, jnp.arange(plan.steps + 1))[1]

    return jax.vmap(train)


def _gather(plan: CheckPlan, found: Sequence[tuple[Sizes, Array]]) -> CoordinateCheck:
    """Return the records of all sizes; a run has no value from where it first was not finite."""
    names = sorted(found[0][0], key=ORDER.index)
    values_QNRT2 = np.stack([[np.asarray(sizes[name], np.float64) for sizes, _ in found] for name in names])
    finite_NRT = np.all(np.isfinite(values_QNRT2), axis=(0, -1))
    # The alarm of update t forbids what comes after it; the last one belongs to an update nobody measures.
    finite_NRT[..., 1:] &= np.stack([alarms == GOOD for _, alarms in found])[..., :-1]
    finite_NRT = np.logical_and.accumulate(finite_NRT, axis=-1)
    values_QNRT2 = np.where(finite_NRT[None, ..., None], values_QNRT2, np.nan)
    lost = tuple(
        NonFinite(size, seed, int(finite_T.argmin()))
        for size, finite_RT in zip(plan.sizes, finite_NRT, strict=True)
        for seed, finite_T in zip(plan.seeds, finite_RT, strict=True)
        if not finite_T.all()
    )
    return CoordinateCheck(
        axis=plan.axis,
        sizes=plan.sizes,
        seeds=plan.seeds,
        steps=plan.steps,
        learning_rate=plan.configs[0].optimizer.learning_rate,
        mean_abs={name: values_QNRT2[q, ..., 0] for q, name in enumerate(names)},
        rms={name: values_QNRT2[q, ..., 1] for q, name in enumerate(names)},
        non_finite=lost,
    )


def _resized(config: TrainConfig, axis: str, size: int) -> TrainConfig:
    """Return the config at another depth or width."""
    model = config.model
    changed = (
        dataclasses.replace(model, depth=size)
        if axis == "depth"
        else dataclasses.replace(model, **_widened(model, size))
    )
    return config.model_copy(update={"model": changed})


def _widened(model: ModelConfig, width: int) -> dict[str, Any]:
    """Return the fields of another width: the size of a head and all proportions stay.

    Raises:
      ValueError: a head, the groups of key/value heads or the feed-forward does not fit the width.
    """
    if width % model.head_dim:
        raise ValueError(
            f"width {width} is no multiple of the head size {model.head_dim} (model.width / model.heads), which stays "
            "as it is; choose other sizes or other model.heads"
        )
    changes = {"width": width, "heads": width // model.head_dim}
    parts = {"kv_heads": model.num_kv_heads, "hidden": model.num_hidden}
    if model.kv_heads is None:  # as many as heads, at every width
        del parts["kv_heads"]
    elif model.num_kv_heads == 1:  # one key/value head for all stays one
        changes["kv_heads"] = parts.pop("kv_heads")
    for name, value in parts.items():
        if value * width % model.width:
            raise ValueError(
                f"model.{name} is {value} at width {model.width}; at width {width} it would be "
                f"{value * width / model.width:g} in proportion, and it must be a whole number"
            )
        changes[name] = value * width // model.width
    return changes


def _at_constant_rate(config: TrainConfig, steps: int) -> TrainConfig:
    """Return the config with its peak learning rate from the first update on, and nothing that answers a spike."""
    changes: dict[str, tuple[Any, dict[str, Any]]] = {
        "run": (config.run, {"steps": steps}),
        "optimizer": (config.optimizer, {"schedule": "constant", "warmup": 0.0, "average": 0.0}),
        "guard": (config.guard, {"non_finite": "stop", "spike": "ignore"}),
    }
    return config.model_copy(
        update={name: section.model_copy(update=update) for name, (section, update) in changes.items()}
    )


def _keys(seeds: Sequence[int]) -> tuple[Array, Array]:
    """Return the keys of initial values and of dropout, [R]: those of a run with the seed."""
    keys = [run_keys(seed) for seed in seeds]
    return jnp.stack([key.init for key in keys]), jnp.stack([key.dropout for key in keys])


def _check_distinct(name: str, values: Sequence[int], *, least: int, count: int) -> None:
    for value in values:
        check_integer(f"each of {name}", value, least=least)
    if len(values) < count or len(set(values)) < len(values):
        raise ValueError(f"{name} are {list(values)}; they must be at least {count}, all different")
