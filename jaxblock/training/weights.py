"""The weights of a run's newest checkpoint, alone: what sampling, evaluating and a new run's start read."""

from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxblock.training.checkpoint import CheckpointDamaged, Checkpoints
from jaxblock.training.run_folder import RunError, RunFolder
from jaxblock.types import Params


class Weights(NamedTuple):
    """Parameters and the step they were saved after."""

    step: int
    params: Params


def load_weights(path: Path, like: Params, *, which: str) -> Weights:
    """Return the parameters of the newest checkpoint of the run in `path` that can be read.

    Args:
      path: the run's folder; nothing in it is changed.
      like: a tree of the shapes and dtypes that are wanted.
      which: "last", or "average" for the moving average, in the dtypes of `like`.

    Raises:
      ValueError: no run, no checkpoint, no average, or weights of another shape, named.
    """
    folder = RunFolder.open(path)
    part, wanted = "params", like
    if which == "average":
        if not folder.read_config().optimizer.average:
            raise ValueError(f"the run in {str(path)!r} kept no average: its optimizer.average is 0")
        part, wanted = "average", jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), like)
    if not folder.checkpoints.is_dir():
        raise ValueError(f"the run in {str(path)!r} has no checkpoint yet")
    damaged: RunError | None = None
    with Checkpoints(folder.checkpoints) as checkpoints:
        for step in reversed(checkpoints.steps()):
            try:
                found = checkpoints.load(step, {part: wanted})[part]
            except CheckpointDamaged as error:  # named by whoever resumes the run; here the one before serves
                damaged = damaged or error
                continue
            return Weights(step, jax.tree.map(lambda x, y: x.astype(y.dtype), found, like))
    if damaged is not None:
        raise damaged
    raise ValueError(f"the run in {str(path)!r} has no checkpoint yet")
