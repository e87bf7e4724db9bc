"""Runs of 20 steps on meshes of 8 simulated devices, and mapped; run by test_many_devices.py. Prints one JSON object.

By hand, from the repository root, with any names of the registry (none: three of them):

    XLA_FLAGS=--xla_force_host_platform_device_count=8 JAX_PLATFORMS=cpu python -m tests.parallel.eight_placements NAME
"""

import functools
import json
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxblock.parallel import Mapped, MeshShape, OneDevice, OnMesh, bytes_per_device
from jaxblock.parallel.placement import Placement
from jaxblock.training.batches import Batch
from jaxblock.training.checkpoint import Checkpoints
from jaxblock.training.config import TrainConfig
from jaxblock.training.saved_state import parts_of, state_of
from jaxblock.training.step import TrainState, first_state, make_step
from tests.small import built
from tests.small_training import training

STEPS, ROWS, LENGTH, VOCAB = 20, 32, 10, 12
SHAPES = {
    "data": MeshShape(data=8),
    "fsdp": MeshShape(fsdp=8),
    "fsdp and tensor": MeshShape(fsdp=4, tensor=2),
    "all": MeshShape(replica=2, data=1, fsdp=2, tensor=2),
}
DROPOUT = {"attention_dropout": 0.1, "branch_dropout": 0.1, "hidden_dropout": 0.1}


class Drawn:
    """Batches drawn by number, some targets not real."""

    batch = ROWS

    def __getitem__(self, number: int) -> Batch:
        draw = np.random.default_rng(number)
        rows_BT = draw.integers(0, VOCAB, (ROWS, LENGTH + 1)).astype(np.int32)
        return Batch(rows_BT[:, :-1], rows_BT[:, 1:], draw.random((ROWS, LENGTH)) < 0.8, None)

    def rows(self, number: int, rows: Sequence[int]) -> Batch:
        return Batch(*(None if x is None else x[list(rows)] for x in self[number]))


def run_of(residual: str, **changes: Any) -> TrainConfig:
    """Return a run of two blocks, of a width that 8 divides, without a key bias whose gradient is round-off."""
    data = {"batch": ROWS, "accumulation": changes.pop("accumulation", 1)}
    sizes = {
        "vocab_size": VOCAB,
        "context": LENGTH,
        "width": 16,
        "heads": 2,
        "kv_heads": 2,
        "bias": False,
        "norm": "rms_norm",
    }
    return training(
        steps=STEPS,
        optimizer={"learning_rate": 0.003, "average": 0.9},
        data=data,
        **{"residual": residual, **sizes, **changes},
    )


class Trained(NamedTuple):
    """What came of 20 steps."""

    losses: list[float]
    state: TrainState
    like: TrainState
    """The shapes of a state with their shardings."""
    whole: list[str]
    """Arrays of the compiled program that hold every row of the batch, as f32[5,32,10,16]."""


def trained(run: TrainConfig, placement: Placement) -> Trained:
    """Return what comes of 20 steps."""
    model, params = built(run.model, run.execution)
    params = jax.tree.map(jnp.array, params)  # a step is given them, and may reuse their memory
    start = functools.partial(first_state, model, run)
    shapes = jax.eval_shape(start, params)
    like = placement.like(shapes, shapes.params)
    state, key = placement.put(start(params)), placement.everywhere(jax.random.key(1))
    step = make_step(model, run, rows_axis=placement.rows_axis)
    batches = Drawn()
    program = placement.compile(step, state, placement.batch(batches, 0), key)
    losses = []
    for number in range(STEPS):
        state, metrics = program(state, placement.batch(batches, number), key)
        losses.append(float(metrics.loss))
    text = program.as_text() if hasattr(program, "as_text") else ""
    whole = sorted(set(re.findall(rf"\w+\[(?:\d+,)*{ROWS},{LENGTH}(?:,\d+)*\]", text)))
    return Trained(losses, state, like, whole)


def difference(one: TrainState, other: TrainState) -> float:
    """Return the largest difference of parameters and their averages."""
    pairs = zip(
        jax.tree.leaves((one.params, one.average)),
        jax.tree.leaves((other.params, other.average)),
        strict=True,
    )
    return max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs)


def compared(run: TrainConfig, placements: dict[str, Placement]) -> dict[str, Any]:
    """Return the losses on one device and on each placement, with the differences of the parameters."""
    one = trained(run, OneDevice())
    found: dict[str, Any] = {"one": {"losses": one.losses, "whole": one.whole}}
    for name, placement in placements.items():
        placed = trained(run, placement)
        parameters = difference(one.state, placed.state)
        found[name] = {"losses": placed.losses, "parameters": parameters, "whole": placed.whole}
    return found


def moved() -> dict[str, Any]:
    """Return whether a checkpoint of 8 devices comes back bit by bit on other shapes, and bytes on each device."""
    run = run_of("pre_norm", width=64, vocab_size=64, heads=8, kv_heads=8)
    with tempfile.TemporaryDirectory() as folder:
        fsdp = OnMesh(MeshShape(fsdp=8))
        state = trained(run, fsdp).state
        key, saved = jax.random.key(3), Checkpoints(Path(folder))
        saved.save(STEPS, fsdp.readable(parts_of(state, key)), facts={})
        same = {}
        for name, placement in {
            "one": OneDevice(),
            "all": OnMesh(SHAPES["all"]),
            "data": OnMesh(MeshShape(data=8)),
        }.items():
            shapes = jax.eval_shape(lambda x: x, state)
            like = placement.like(shapes, shapes.params)
            loaded, _ = state_of(saved.load(STEPS, parts_of(like, key)), like)
            pairs = zip(jax.tree.leaves(state), jax.tree.leaves(loaded), strict=True)
            places = zip(jax.tree.leaves(like.params), jax.tree.leaves(loaded.params), strict=True)
            same[name] = {
                "bits": all(np.array_equal(a, b) for a, b in pairs),
                "placed": all(a.sharding in (None, b.sharding) for a, b in places),
            }
    held = {"params": state.params, "moments": state.moments}
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(held))
    return {
        "restored": same,
        "fsdp_bytes": bytes_per_device(held),
        "data_bytes": bytes_per_device({"params": like.params, "moments": like.moments}),
        "total_bytes": total,
    }


def main(names: Sequence[str]) -> None:
    every = {**{name: OnMesh(shape) for name, shape in SHAPES.items()}, "pmap": Mapped(8, pieces=1)}
    if names:
        print(json.dumps({name: compared(run_of(name, **DROPOUT), every) for name in names}))
        return
    chosen = {
        "pre_norm": ("all", "pmap"),
        "attention_residual": ("all",),
        "hyper_connections(streams=2)": ("all",),
    }
    found: dict[str, Any] = {
        name: compared(run_of(name, **DROPOUT), {place: every[place] for place in places})
        for name, places in chosen.items()
    }
    pieces = run_of("pre_norm", accumulation=2, **DROPOUT)
    found["accumulation"] = compared(pieces, {"pmap": Mapped(8, pieces=2)})
    found["moved"] = moved()
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
