"""A run that is killed again and again, while it writes checkpoints too, ends with the bits of the unbroken one."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.small_runs import MODEL, PLAIN, losses, restored, rows, write_text

ROOT = Path(__file__).resolve().parents[2]
FLAGS = [*MODEL, *PLAIN, "--data.batch", "4", "--sample.length", "8"]
FLAGS += ["--run.log_every", "3", "--run.evaluate_every", "100", "--run.checkpoint_every", "20"]
FLAGS += ["--optimizer.average", "0.9", "--model.branch_dropout", "0.1", "--watch.figure_seconds", "0"]


def start(cache: Path, *arguments: str) -> subprocess.Popen:
    """Start the command in a process of its own; all of them share their compiled programs."""
    flags = "--xla_backend_optimization_level=0"
    environment = {
        **os.environ,
        "XLA_FLAGS": flags,
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    command = [sys.executable, "-m", "jaxblock.cli", "train", *arguments]
    return subprocess.Popen(
        command, env=environment, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def finish(process: subprocess.Popen) -> None:
    _, words = process.communicate(timeout=300)
    assert process.returncode == 0, words


def size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def kill_while_stepping(process: subprocess.Popen, run: Path, draw: random.Random) -> None:
    """Kill after a random time from the first new row of metrics on."""
    before = size(run / "metrics.jsonl")
    while process.poll() is None and size(run / "metrics.jsonl") == before:
        time.sleep(0.002)
    time.sleep(draw.uniform(0.0, 0.6))
    process.send_signal(signal.SIGKILL)


def kill_while_saving(process: subprocess.Popen, run: Path, draw: random.Random) -> None:
    """Kill at a random moment of a write: once a name appears among the checkpoints that is no step's."""
    folder, writes = run / "checkpoints", draw.randint(1, 4)
    while process.poll() is None and writes:
        names = os.listdir(folder) if folder.is_dir() else []
        if any(not name.isdigit() for name in names):
            writes -= 1
            while writes and any(not name.isdigit() for name in os.listdir(folder)):
                time.sleep(0.0005)
        time.sleep(0.0005)
    time.sleep(draw.uniform(0.0, 0.05))
    process.send_signal(signal.SIGKILL)


@pytest.mark.full
@pytest.mark.parametrize(("kills", "steps"), [(2, 200), (30, 600)])
def test_a_run_killed_at_random_moments_ends_with_the_bits_of_the_unbroken_one(tmp_path, kills, steps):
    text, cache, draw = write_text(tmp_path / "fox.jsonl"), tmp_path / "programs", random.Random(kills)
    unbroken, run = tmp_path / "unbroken", tmp_path / "run"
    flags = [*FLAGS, "--run.steps", str(steps), "--data.path", str(text)]
    finish(start(cache, *flags, "--run.dir", str(unbroken)))
    killed, leftovers = 0, 0
    for number in range(kills):
        fresh = [*flags, "--run.dir", str(run)]
        process = start(cache, *(["--resume", str(run)] if run.exists() else fresh))
        kill = kill_while_saving if number % 3 == 1 else kill_while_stepping
        kill(process, run, draw)
        process.communicate(timeout=60)
        killed += process.returncode == -signal.SIGKILL
        folder = run / "checkpoints"
        leftovers += folder.is_dir() and any(not name.isdigit() for name in os.listdir(folder))
        if process.returncode == 0:
            break
        for line in (run / "metrics.jsonl").read_text().splitlines()[:-1]:
            json.loads(line)  # readable at any moment, but for a last line that was cut
    else:
        finish(start(cache, "--resume", str(run)))
    assert killed >= min(kills, 3) - 1
    if kills > 3:
        assert leftovers, "no kill hit a write: the test does not test what it should"
    assert rows(run) == rows(unbroken)
    assert list(losses(run)) == list(range(1, steps + 1))
    for ours, theirs in zip(*(jax.tree.leaves(restored(x)[3]) for x in (run, unbroken)), strict=True):
        np.testing.assert_array_equal(ours, theirs)
