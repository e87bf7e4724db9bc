"""How much of the quickstart's loop is the compiled step: `python -m experiments.benchmarks.step_share`.

Two things are timed in turns, so that a noisy machine is noisy for both: the compiled step alone, over batches that
are in memory already, and the trainer's loop, which reads batches, fetches and writes metrics. Their ratio times the
share of the loop's time that a real run spends stepping (the rest: evaluations, checkpoints, figures; from its
summary.json) is the share of the loop's wall time in the compiled step.

Expected: above 0.95 (the quickstart evaluates once, at its end, and saves five times).
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import jax

from experiments.benchmarks.arguments import Help, positive
from jaxblock.training.config import TrainConfig
from jaxblock.training.host_memory import keep_freed_memory
from jaxblock.training.loop import train
from jaxblock.training.prepare import init_state, prepare, run_keys
from jaxblock.training.run_folder import RunFolder
from jaxblock.training.step import make_step

STEPS = 100


def main() -> None:
    """Print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument("run", type=Path, help="folder of a finished quickstart, for its summary.json")
    parser.add_argument("--rounds", type=positive, default=5, help="turns of 100 steps each")
    arguments = parser.parse_args()
    summary = json.loads((arguments.run / "summary.json").read_text())
    keep_freed_memory()
    alone, looped = [], []
    for _ in range(arguments.rounds):
        alone.append(time_step_alone())
        looped.append(time_loop())
    ratio = statistics.median(a / b for a, b in zip(alone, looped, strict=True))
    stepping = summary["step_s"] / summary["loop_s"]
    print(
        json.dumps(
            {
                "step_alone_ms": [round(1e3 * x, 2) for x in alone],
                "step_in_loop_ms": [round(1e3 * x, 2) for x in looped],
                "ratio": round(ratio, 4),
                "stepping_share_of_loop": round(stepping, 4),
                "share": round(min(ratio, 1.0) * stepping, 4),
            }
        )
    )


def time_step_alone() -> float:
    """Return seconds per step over batches in memory."""
    config = TrainConfig()
    prepared = prepare(config)
    task, keys = prepared.task, run_keys(config.run.seed)
    state = jax.jit(lambda key: init_state(task, config, key))(keys.init)
    batches = [task.train[number] for number in range(STEPS)]
    step = jax.jit(make_step(task.model, config, task.loss), donate_argnums=0)
    compiled = step.lower(state, batches[0], keys.dropout).compile()
    for batch in batches[:10]:
        state, _ = compiled(state, batch, keys.dropout)
    jax.block_until_ready(state)
    start = time.perf_counter()
    for batch in batches:
        state, _ = compiled(state, batch, keys.dropout)
    jax.block_until_ready(state)
    return (time.perf_counter() - start) / STEPS


def time_loop() -> float:
    """Return seconds per step of the trainer's own loop."""
    default = TrainConfig()
    run = default.run.model_copy(update={"steps": STEPS})
    data = default.data.model_copy(update={"validation_tokens": 2048})
    config = default.model_copy(update={"run": run, "data": data})
    with tempfile.TemporaryDirectory() as folder:
        place = RunFolder(Path(folder) / "run")
        place.create(config)
        _, summary = train(prepare(config), place)
    return summary["step_s"] / STEPS


if __name__ == "__main__":
    main()
