"""Whole runs small enough for a test: made by the command, shared programs, what their folders hold."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

from jaxblock.cli import main
from jaxblock.training.batches import TrainBatches
from jaxblock.training.checkpoint import Checkpoints
from jaxblock.training.prepare import run_keys
from jaxblock.training.run_folder import RunFolder
from jaxblock.training.saved_state import parts_of, state_of
from tests.small_training import abstract_state

STEPS = 6
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog", "and", "runs", "away"]
MODEL = ["--model.depth", "1", "--model.width", "8", "--model.heads", "2", "--model.context", "16"]
PLAIN = ["--model.norm", "rms_norm", "--model.bias", "false", "--model.positions", "none"]
PLAIN += ["--model.feed_forward", "relu", "--model.initialization", "plain", "--execution.scan_unroll", "1"]
RUN = ["--run.log_every", "2", "--run.evaluate_every", "4", "--run.checkpoint_every", "4"]
RUN += ["--optimizer.learning_rate", "3e-3"]
DATA = ["--data.batch", "4", "--data.seams", "separate"]
SHORT = [*MODEL, *PLAIN, *RUN, *DATA, "--run.steps", str(STEPS), "--sample.length", "8"]


@contextmanager
def shared_programs(folder: Path) -> Iterator[None]:
    """Runs of one config share their programs: compiling is what takes the time here."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = [getattr(jax.config, name) for name in names]
    for name, value in zip(names, (str(folder), 0), strict=True):
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield
    for name, value in zip(names, before, strict=True):
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def write_text(path: Path) -> Path:
    """Write a JSONL file of a hundred documents, most of them longer than a window."""
    draw = np.random.default_rng(0)
    lines = [json.dumps({"text": " ".join(draw.choice(WORDS, draw.integers(1, 9)))}) for _ in range(100)]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def train(data: Path, run: Path, *flags: str) -> int:
    return main(["train", *SHORT, "--data.path", str(data), "--run.dir", str(run), *flags])


def resume(run: Path, *flags: str) -> int:
    return main(["train", "--resume", str(run), *flags])


def rows(run: Path) -> list[dict]:
    """Return the rows of metrics.jsonl as a strict reader sees them."""

    def refuse(constant: str):
        raise AssertionError(f"{constant} is no JSON")

    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def losses(run: Path) -> dict[int, float]:
    """Return the loss of each step, and check that no step stands there twice or out of order."""
    made = [row for row in rows(run) if "loss" in row and "event" not in row]
    assert [row["step"] for row in made] == list(range(1, len(made) + 1))
    return {row["step"]: row["loss"] for row in made}


def summary(run: Path) -> dict:
    return json.loads((run / "summary.json").read_text(encoding="utf-8"))


def restored(run: Path):
    """Return the config, the model, the newest checkpoint's step and its state."""
    folder = RunFolder.open(run)
    config = folder.read_config()
    model, like = abstract_state(config)
    with Checkpoints(folder.checkpoints) as checkpoints:
        newest = checkpoints.latest()
        assert newest is not None
        parts = checkpoints.load(newest, parts_of(like, run_keys(0).dropout))
        return config, model, newest, state_of(parts, like)[0]


def at_step(monkeypatch, number: int, action) -> None:
    """Let `action(batch)` stand in for the batch of one step; `number` counts the updates before it."""
    read = TrainBatches.__getitem__
    monkeypatch.setattr(
        TrainBatches,
        "__getitem__",
        lambda self, step: action(read(self, step)) if step == number else read(self, step),
    )


def at_batches(monkeypatch, actions: dict, *, passing_over: tuple[int, ...] = ()) -> None:
    """Let `actions[i](batch)` stand in for batch i, and leave batches out of the data altogether."""
    read = TrainBatches.__getitem__

    def changed(self, number):
        for gone in sorted(passing_over):
            number += number >= gone
        return actions.get(number, lambda batch: batch)(read(self, number))

    monkeypatch.setattr(TrainBatches, "__getitem__", changed)


def signalled(number: int):
    """Return an action that sends this process a signal and changes nothing."""

    def action(batch):
        os.kill(os.getpid(), number)
        return batch

    return action


def bad_target(batch):
    """A target that is no token: the loss is NaN."""
    targets_BT = batch.targets_BT.copy()
    targets_BT[1, 3] = 999
    return batch._replace(targets_BT=targets_BT)


def bad_input(batch):
    """An input that is no token: its row of the embedding is NaN."""
    inputs_BT = batch.inputs_BT.copy()
    inputs_BT[0, 5] = 999
    return batch._replace(inputs_BT=inputs_BT)
