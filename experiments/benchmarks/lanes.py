"""How much faster a sweep is than one process per run, two at a time: compilation, start and evaluation included.

    python -m experiments.benchmarks.lanes [--steps 50] [--rates 8] [--seeds 3] [--rounds 1]

One side is `run_sweep` on a plan of rates x seeds (depth 4, width 64, batch 8, context 64), with its worker process,
its store and its saves. The other is a process per run that does the least a run can do: load the data, compile the
step, make the steps, evaluate; no checkpoint, no log. Prints one line of JSON; the ratio is per round, the sides
alternate.
"""

import argparse
import functools
import json
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from experiments.benchmarks.arguments import Help, positive

RATES = [1e-4 * 2**octave for octave in range(12)]


def values(steps: int, rates: int, seeds: int) -> dict:
    """Return the plan."""
    return {
        "sweep": {"name": "lanes", "extend": 0},
        "axes": {"optimizer.learning_rate": RATES[:rates], "run.seed": list(range(seeds))},
        "run": {"steps": steps},
        "model": {
            "vocab_size": 256,
            "context": 64,
            "depth": 4,
            "width": 64,
            "heads": 4,
            "initialization": "plain",
        },
        "data": {"batch": 8, "validation_tokens": 4096},
    }


def as_lanes(plan: dict) -> float:
    """Return the seconds of the sweep."""
    program = (
        "import json, sys, pathlib\n"
        "from jaxblock.sweeps.plan import build_plan\n"
        "from jaxblock.sweeps.runner import prepare_sweep, run_sweep\n"
        "sys.exit(run_sweep(prepare_sweep(build_plan(json.loads(sys.argv[1]))), pathlib.Path(sys.argv[2])))"
    )
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        subprocess.run(
            [sys.executable, "-c", program, json.dumps(plan), f"{folder}/store"],
            check=True,
            capture_output=True,
        )
        return time.perf_counter() - begin


def as_processes(plan: dict) -> float:
    """Return the seconds of all runs, a process each, two at a time."""
    from jaxblock.sweeps.plan import build_plan

    runs = [json.dumps(run.axes) for run in build_plan(plan).runs()]
    command = [sys.executable, "-m", "experiments.benchmarks.lanes", "--plan", json.dumps(plan), "--single"]
    begin = time.perf_counter()
    with ThreadPoolExecutor(2) as pool:
        one = functools.partial(subprocess.run, check=True, capture_output=True)
        list(pool.map(lambda axes: one([*command, axes]), runs))
    return time.perf_counter() - begin


def single(plan: dict, axes: dict) -> None:
    """Train and evaluate one run, and nothing else."""
    import jax

    from jaxblock.sweeps.plan import build_plan
    from jaxblock.training.host_memory import keep_freed_memory
    from jaxblock.training.prepare import TASKS, init_state, run_keys
    from jaxblock.training.step import make_step
    from jaxblock.training.task import evaluate

    keep_freed_memory()
    config = build_plan(plan).config(axes)
    task, keys = TASKS[config.run.task_choice.name](config), run_keys(config.run.seed)
    options = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
    state = jax.jit(functools.partial(init_state, task, config), compiler_options=options)(keys.init)
    step = jax.jit(make_step(task.model, config, task.loss), donate_argnums=0)
    losses = []
    for number in range(config.run.steps):
        state, metrics = step(state, task.train[number], keys.dropout)
        losses.append(metrics.loss)
    print(jax.device_get(losses)[-1], evaluate(jax.jit(task.score), state.params, task.validation))


def main() -> None:
    """Measure, or be one of the processes that are measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument("--steps", type=positive, default=50, help="of a run")
    parser.add_argument("--rates", type=positive, default=8, help="learning rates, at most 12")
    parser.add_argument("--seeds", type=positive, default=3, help="runs of each rate")
    parser.add_argument("--rounds", type=positive, default=1, help="times that both sides run")
    parser.add_argument("--plan", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--single", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rates > len(RATES):
        parser.error(f"--rates is {arguments.rates}; there are {len(RATES)}")
    if arguments.single is not None:
        single(arguments.plan, arguments.single)
        return
    plan = values(arguments.steps, arguments.rates, arguments.seeds)
    rounds = []
    for _ in range(arguments.rounds):
        lanes, processes = as_lanes(plan), as_processes(plan)
        rounds.append({"lanes_s": lanes, "processes_s": processes, "ratio": processes / lanes})
    print(json.dumps({"steps": arguments.steps, "runs": arguments.rates * arguments.seeds, "rounds": rounds}))


if __name__ == "__main__":
    sys.path.insert(0, str(Path.cwd()))
    main()
