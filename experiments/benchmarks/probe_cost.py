"""What measuring along depth costs a training step: `python -m experiments.benchmarks.probe_cost`.

The same training step without probes and with the cheap statistics at every step, compiled ahead and run in turns on
the same batches, so that a noisy machine is noisy for both. In a round each runs a few steps, and the order changes
from round to round; a round gives one ratio. Printed is the median ratio with a 95 % bootstrap interval over rounds, of
seconds and of processor seconds; where other work shares the machine, the second is the one to read.

Sizes: 12 blocks of width 256 (4 heads, feed-forward 1024), a batch of 4 x 128 bytes, remat "dots" as in the
quickstart: the smallest model in configs/ is less deep, and a wider one makes the share of the statistics smaller,
since they are passes over [B, T, D] while a block is products with [D, D].

Expected on two CPU cores: a ratio of at most 1.05 for the cheap set (--statistics names another one).
"""

import argparse
import json
import time
from typing import Any

import jax
import numpy as np

from experiments.benchmarks.arguments import Help, positive
from jaxblock.config import ExecutionConfig, ModelConfig
from jaxblock.training.config import DataConfig, ProbeConfig, RunConfig, TrainConfig
from jaxblock.training.host_memory import keep_freed_memory
from jaxblock.training.language_task import language_task
from jaxblock.training.prepare import init_state, probed_step_of, run_keys
from jaxblock.training.probing import open_probing
from jaxblock.training.step import make_step

RESAMPLES = 2000


def main() -> None:
    """Print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument("--rounds", type=positive, default=40, help="turns")
    parser.add_argument("--steps", type=positive, default=3, help="steps of a turn")
    parser.add_argument("--depth", type=positive, default=12, help="in blocks")
    parser.add_argument("--width", type=positive, default=256, help="of the stream")
    parser.add_argument(
        "--statistics", nargs="+", default=list(ProbeConfig().statistics), help="as in a config"
    )
    arguments = parser.parse_args()
    keep_freed_memory()
    config = config_of(arguments.depth, arguments.width, tuple(arguments.statistics))
    runners = [Runner(config, probed=probed) for probed in (False, True)]
    both_R22 = np.array([turn(runners, arguments.steps, number) for number in range(arguments.rounds)])
    seconds_R2, busy_R2 = both_R22[..., 0], both_R22[..., 1]
    print(
        json.dumps(
            {
                "statistics": list(config.probe.statistics),
                "step_off_ms": round(1e3 * float(np.median(seconds_R2[:, 0])), 2),
                "step_on_ms": round(1e3 * float(np.median(seconds_R2[:, 1])), 2),
                "rounds": arguments.rounds,
                **ratio_of(seconds_R2, "ratio"),
                **ratio_of(busy_R2, "processor_ratio"),
            }
        )
    )


def config_of(depth: int, width: int, statistics: tuple[str, ...]) -> TrainConfig:
    """Return the run whose step is timed."""
    return TrainConfig(
        run=RunConfig(steps=10_000),
        model=ModelConfig(vocab_size=256, context=128, depth=depth, width=width, heads=4),
        execution=ExecutionConfig(remat="dots"),
        data=DataConfig(batch=4, validation_tokens=2048),
        probe=ProbeConfig(every=1, statistics=statistics),
    )


class Runner:
    """One compiled step and the state it has come to."""

    def __init__(self, config: TrainConfig, *, probed: bool):
        task, keys = language_task(config), run_keys(config.run.seed)
        self.key, self.batches = keys.dropout, [task.train[number] for number in range(8)]
        self.state: Any = jax.jit(lambda key: init_state(task, config, key))(keys.init)
        step = make_step(task.model, config, task.loss)
        if probed:
            step = probed_step_of(task, config, open_probing(task, config, self.state.params))
        compiled = jax.jit(step, donate_argnums=0)
        self.step = compiled.lower(self.state, self.batches[0], self.key).compile()
        self.run(3)

    def run(self, steps: int) -> tuple[float, float]:
        """Return seconds per step, and processor seconds of all threads, which other work leaves alone."""
        start, busy = time.perf_counter(), time.process_time()
        for number in range(steps):
            self.state, *found = self.step(self.state, self.batches[number % len(self.batches)], self.key)
            jax.block_until_ready((self.state, found))
        return (time.perf_counter() - start) / steps, (time.process_time() - busy) / steps


def turn(runners: list[Runner], steps: int, number: int) -> list[tuple[float, float]]:
    """Return what each took; every second turn begins with the other one."""
    order = (0, 1) if number % 2 == 0 else (1, 0)
    found = {place: runners[place].run(steps) for place in order}
    return [found[0], found[1]]


def ratio_of(seconds_R2: np.ndarray, name: str) -> dict[str, Any]:
    """Return the median over rounds of on / off with a 95 % percentile bootstrap interval."""
    ratios_R = seconds_R2[:, 1] / seconds_R2[:, 0]
    draw = np.random.default_rng(0)
    medians = np.median(draw.choice(ratios_R, (RESAMPLES, len(ratios_R))), axis=1)
    low, high = (round(float(end), 4) for end in np.quantile(medians, [0.025, 0.975]))
    return {name: round(float(np.median(ratios_R)), 4), f"{name}_interval_95": [low, high]}


if __name__ == "__main__":
    main()
