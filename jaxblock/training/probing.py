"""What a run with [probe] measures: the loss that observes, rows of probes.jsonl, all of it at a bad step.

The trainer knows no topology: what a stream has not is found by tracing the model, is named once, and is in no row.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxblock.probes import EVERY, open_taps, parameter_profile
from jaxblock.probes.observer import missing_statistics, observed_branches
from jaxblock.training.config import TrainConfig
from jaxblock.training.files import replace_text
from jaxblock.training.objectives import ProbedLoss
from jaxblock.training.run_folder import finite_or_none
from jaxblock.training.step import Measured, probed_gradient
from jaxblock.training.task import Task
from jaxblock.types import Array, Params


class Probing(NamedTuple):
    """What a run measures, once the model has been traced."""

    loss: ProbedLoss
    statistics: tuple[str, ...]
    """Those asked for that this model has."""
    missing: tuple[str, ...]
    """Those that it has not, as its topology's stream is not one array."""
    branches: tuple[str, ...]
    """Names of a block's sublayers, in order."""

    @property
    def sentence(self) -> str:
        """What is measured and what is not."""
        words = f"probes.jsonl: {', '.join(self.statistics) or 'nothing'}"
        if not self.missing:
            return words
        return f"{words}; missing, as the stream of this topology is not one array: {', '.join(self.missing)}"


def open_probing(
    task: Task, config: TrainConfig, params: Any, statistics: Sequence[str] | None = None
) -> Probing:
    """Return what a run measures; the model is traced, nothing is computed.

    Args:
      task: what is trained.
      config: the run.
      params: shapes and dtypes of the parameters.
      statistics: left out, the config's.
    """
    asked = tuple(config.probe.statistics if statistics is None else statistics)
    look = task.probed(EVERY)
    observed = jax.eval_shape(lambda p: look({"params": p}, task.train[0], None)[1], params)
    lacks = missing_statistics(observed, EVERY)
    # A tap stands where the stream is one array, as the statistics of the stream do.
    missing = tuple(name for name in asked if name in lacks or (name == "gradient" and lacks))
    measured = tuple(name for name in asked if name not in missing)
    forward = [name for name in measured if name in EVERY]
    return Probing(task.probed(forward), measured, missing, observed_branches(observed))


def start_row(probing: Probing, config: TrainConfig) -> dict[str, Any]:
    """Return the first row of probes.jsonl: what the rows after it hold, and what is missing."""
    return {
        "step": 0,
        "event": "start",
        "every": config.probe.every,
        "statistics": list(probing.statistics),
        "missing": list(probing.missing),
        "branches": list(probing.branches),
        "sublayers": config.model.sublayers,
    }


def probe_row(step: int, measured: Measured) -> dict[str, Any]:
    """Return a step's row: lists over sublayers by name, and updates of parameters by role."""
    row: dict[str, Any] = {"step": step, **{name: plain(x) for name, x in measured.stream.items()}}
    if measured.updates:
        row["parameter_update"] = {
            role: {name: plain(x) for name, x in found._asdict().items()}
            for role, found in measured.updates.items()
        }
    return row


def plain(x: Any) -> Any:
    """Return an array as JSON can hold it: float32 in the fewest digits that give it back, null where not finite."""
    x = np.asarray(x, np.float32)
    if x.ndim:
        return [plain(entry) for entry in x]
    return finite_or_none(float(str(x[()])))


def profiler(
    task: Task, config: TrainConfig, params: Params
) -> Callable[[Params, Any, Array], dict[str, Any]]:
    """Return (parameters, whole batch, dropout key) -> all that can be measured of a step, compiled when first called.

    That is every statistic, the norm of the stream's gradient, and the parameters' gradient by role.

    Args:
      task: what is trained.
      config: the run.
      params: parameters, or their shapes and dtypes.
    """
    probing = open_probing(task, config, params, (*EVERY, "gradient"))
    taps = open_taps(config.model) if "gradient" in probing.statistics else None
    pieces = config.data.accumulation

    @jax.jit
    def measure(params: Params, batch: Any, key: Array) -> Any:
        gradient, _, stream = probed_gradient(probing.loss, params, batch, key, taps=taps, pieces=pieces)
        return stream, parameter_profile(gradient, params)

    def profile(params: Params, batch: Any, key: Array) -> dict[str, Any]:
        stream, by_role = jax.device_get(measure(params, batch, key))
        return {
            "statistics": list(probing.statistics),
            "missing": list(probing.missing),
            "branches": list(probing.branches),
            **{name: plain(x) for name, x in stream.items()},
            "parameter_gradient": {
                role: {"rms": plain(rms), "relative": plain(relative)}
                for role, (rms, relative) in by_role.items()
            },
        }

    return profile


def write_profile(folder: Path, profile: Mapping[str, Any], *, step: int, batch: int) -> str:
    """Write probe_step_N.json and return its name; that of another batch tried at the same step stays."""
    name = f"probe_step_{step}.json"
    if (folder / name).exists() and json.loads((folder / name).read_bytes())["batch"] != batch:
        name = f"probe_step_{step}_batch_{batch}.json"
    text = json.dumps({"step": step, "batch": batch, **profile}, allow_nan=False)
    replace_text(folder / name, text + "\n")
    return name
