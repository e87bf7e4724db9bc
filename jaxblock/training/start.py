"""Where a run begins: its newest whole checkpoint, another run's weights, or initial values."""

import functools
from typing import Any, NamedTuple

import jax

from jaxblock.parallel import processes
from jaxblock.training.checkpoint import Checkpoints
from jaxblock.training.prepare import Prepared, init_state, run_keys
from jaxblock.training.run_folder import RunError
from jaxblock.training.saved_state import parts_of, state_of
from jaxblock.training.step import TrainState, first_state
from jaxblock.types import Array


class Begun(NamedTuple):
    """Where a run begins or goes on."""

    state: TrainState
    key: Array
    notes: list[str]


def begin(prepared: Prepared, checkpoints: Checkpoints, *, writes: bool) -> Begun:
    """Return the newest saved state that is whole, or initial values where there is none.

    Of several processes the one that writes moves what is damaged out of the way.
    """
    config, keys = prepared.config, run_keys(prepared.config.run.seed)
    init = functools.partial(init_state, prepared.task, config)
    like, placement = prepared.like, prepared.placement
    checkpoints.wait()
    processes.meet("all look at the checkpoints")
    step, parts, notes = checkpoints.newest_whole(parts_of(like, keys.dropout), set_aside=writes)
    seen = -1 if step is None else step
    if processes.largest(seen) != seen:
        raise RunError("this process sees other checkpoints than another: all need the same folder")
    if step is not None and parts is not None:
        state, key = state_of(parts, like)
        return Begun(placement.put(state), placement.everywhere(key), notes)
    if prepared.weights is not None:
        state = placement.put(first_state(prepared.task.model, config, prepared.weights.params))
        # From here on the run is whole without the one it came from, which may change or go.
        key = placement.everywhere(keys.dropout)
        checkpoints.save(0, parts_of(state, key), facts=saved_facts(prepared, None))
        return Begun(
            state,
            key,
            [*notes, f"starts from step {prepared.weights.step} of {config.init.from_run}"],
        )
    if config.init.from_run is not None:
        raise RunError(
            "; ".join([*notes, "no checkpoint is left, and init.from is read at a run's start only"])
        )
    # It runs once: on CPU, optimizing the random draws takes many times longer than drawing.
    options = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
    state = placement.init(init, keys.init, options=options)
    return Begun(state, placement.everywhere(keys.dropout), notes)


def saved_facts(prepared: Prepared, val_loss: float | None) -> dict[str, Any]:
    """Return what is saved beside a state."""
    return {"config": prepared.config.as_dict(), "data": prepared.task.facts, "val_loss": val_loss}
