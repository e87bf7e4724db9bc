"""A run's state as the named parts of a checkpoint, and back."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jaxblock.training.guard import GOOD
from jaxblock.training.step import TrainState
from jaxblock.types import Array


def parts_of(state: TrainState, key: Array) -> dict[str, Any]:
    """Return the parts of a checkpoint: params, average, optimizer, progress (step, skipped, guard) and the run's key.

    An alarm is not part of it: whoever continues meets the bad batch again.
    """
    guard = state.guard._replace(alarm=jnp.full((), GOOD, jnp.int32))
    progress = {"step": state.step, "skipped": state.skipped, "guard": guard._asdict()}
    parts = {"params": state.params, "optimizer": state.moments, "progress": progress, "key": key}
    return parts if state.average is None else {**parts, "average": state.average}


def state_of(parts: Mapping[str, Any], like: TrainState) -> tuple[TrainState, Array]:
    """Return the state and the key that `parts_of` took apart; `like` gives the records their types."""
    progress = parts["progress"]
    state = TrainState(
        step=progress["step"],
        skipped=progress["skipped"],
        params=parts["params"],
        moments=parts["optimizer"],
        average=parts.get("average"),
        guard=type(like.guard)(**progress["guard"]),
    )
    return state, parts["key"]
