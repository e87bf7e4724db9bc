"""Small runs of the real command as real processes, and whether two of them ended alike."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxblock.training.checkpoint import Checkpoints
from jaxblock.training.checkpoint_manifest import read_manifest

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 300.0
"""Seconds until a process counts as hung; a whole run takes ten."""
STEPS, CHECKPOINT_EVERY = 240, 12
MODEL = ["--model.depth", "1", "--model.width", "8", "--model.heads", "2", "--model.context", "16"]
MODEL += ["--model.norm", "rms_norm", "--model.bias", "false", "--model.positions", "none"]
MODEL += ["--model.feed_forward", "relu", "--model.initialization", "plain", "--execution.scan_unroll", "1"]
MODEL += ["--model.branch_dropout", "0.1", "--optimizer.average", "0.9"]
RUN = ["--data.batch", "4", "--data.accumulation", "2", "--sample.length", "8", "--watch.figure_seconds", "0"]
RUN += ["--run.steps", str(STEPS), "--run.log_every", "3", "--run.evaluate_every", "1000"]
RUN += ["--run.checkpoint_every", str(CHECKPOINT_EVERY)]
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog", "and", "runs", "away"]


class Trial(NamedTuple):
    """One fault done to one run."""

    kind: str
    fault: str | None
    """What was lost; None = nothing."""


class CannotTry(Exception):  # noqa: N818
    """This machine cannot have this fault; the words say why."""


class Ended(NamedTuple):
    """How a process ended."""

    code: int
    words: str
    """Its stderr."""


class Laboratory:
    """A folder of runs that share their data and their compiled programs.

    Args:
      folder: an empty folder.
      draw: decides every moment and every place.
      say: gets a line of progress.
    """

    def __init__(self, folder: Path, draw: random.Random, say: Callable[[str], None]):
        self.folder, self.draw, self.say = folder, draw, say
        self.text = _write_text(folder / "fox.jsonl")
        self.seconds_to_first_step = PATIENCE
        """Shortest time seen from the start of a process to its first row of metrics."""
        self._unbroken: dict[tuple[str, ...], Path] = {}
        self._names = iter(range(10**9))

    def path(self, name: str) -> Path:
        """Return a path in the folder that no one has had before."""
        return self.folder / f"{name}-{next(self._names)}"

    def flags(self, *more: str, seed: int = 0, data: Path | None = None) -> list[str]:
        """Return what a small run is asked for, but its folder."""
        path = self.text if data is None else data
        return [*MODEL, *RUN, "--data.path", str(path), "--run.seed", str(seed), *more]

    def start(self, *words: str, environment: Mapping[str, str] | None = None) -> subprocess.Popen:
        """Start `jaxblock train WORDS`."""
        return self.command("train", *words, environment=environment)

    def command(self, *words: str, environment: Mapping[str, str] | None = None) -> subprocess.Popen:
        """Start `jaxblock WORDS`."""
        variables = {
            **os.environ,
            "XLA_FLAGS": "--xla_backend_optimization_level=0",
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(self.folder / "programs"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            **(environment or {}),
        }
        return subprocess.Popen(
            [sys.executable, "-m", "jaxblock.cli", *words],
            env=variables,
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def go_on(self, run: Path, flags: Sequence[str]) -> subprocess.Popen:
        """Start the run in a folder, or resume it where there is one."""
        return self.start(*(["--resume", str(run)] if run.exists() else [*flags, "--run.dir", str(run)]))

    def unbroken(self, flags: Sequence[str]) -> Path:
        """Return the folder of a run that nothing was done to; made once.

        Raises:
          RuntimeError: it did not end well.
        """
        key = tuple(flags)
        if key not in self._unbroken:
            run, begin = self.path("unbroken"), time.monotonic()
            process = self.start(*flags, "--run.dir", str(run))
            if wait_for(lambda: steps_made(run), process):
                self.seconds_to_first_step = min(self.seconds_to_first_step, time.monotonic() - begin)
            ended = end_of(process)
            if ended.code:
                raise RuntimeError(f"the unbroken run ended with {ended.code}: {ended.words[-2000:]}")
            self._unbroken[key] = run
        return self._unbroken[key]

    def fault_at_end(self, run: Path, flags: Sequence[str]) -> str | None:
        """Resume a run until its end; return what is not as in the unbroken one, None = nothing."""
        ended = end_of(self.go_on(run, flags))
        if ended.code:
            return f"the resumed run ended with {ended.code}: {last_line(ended)}"
        return difference(run, self.unbroken(flags))


def end_of(process: subprocess.Popen) -> Ended:
    """Wait for a process; one that hangs is killed, and its code is -9."""
    try:
        words = process.communicate(timeout=PATIENCE)[1]
    except subprocess.TimeoutExpired:
        process.kill()
        words = process.communicate()[1] + f"\nhung for {PATIENCE:.0f} s"
    return Ended(process.returncode, words)


def wait_for(what: Callable[[], Any], process: subprocess.Popen, *, pause: float = 0.002) -> bool:
    """Return True once `what` is true, False where the process ended before, or took too long."""
    begin = time.monotonic()
    while process.poll() is None and time.monotonic() - begin < PATIENCE:
        if what():
            return True
        time.sleep(pause)
    return False


def kill(process: subprocess.Popen, number: int = signal.SIGKILL) -> Ended:
    """Send a signal and wait for the end."""
    process.send_signal(number)
    return end_of(process)


def stopped_midway(lab: Laboratory, run: Path, flags: Sequence[str], *, checkpoints: int = 2) -> str | None:
    """Start a run and kill it once some checkpoints are whole; return what went wrong."""
    process = lab.go_on(run, flags)
    wait_for(lambda: len(saved_steps(run)) >= checkpoints, process)
    ended = kill(process)
    return None if ended.code == -signal.SIGKILL else f"it ended with {ended.code} before it could be stopped"


# --- what a folder holds


def metrics_size(run: Path) -> int:
    """Return the bytes of metrics.jsonl, 0 where there is none."""
    try:
        return (run / "metrics.jsonl").stat().st_size
    except FileNotFoundError:
        return 0


def rows(run: Path) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl, which must all be whole but for a last one that was cut."""
    path = run / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def steps_made(run: Path) -> list[int]:
    """Return the steps that metrics.jsonl has a loss of, in its order."""
    return [row["step"] for row in rows(run) if "loss" in row and "event" not in row]


def saved_steps(run: Path) -> list[int]:
    """Return the steps of the checkpoints that bear their names."""
    folder = run / "checkpoints"
    return sorted(int(name) for name in os.listdir(folder) if name.isdigit()) if folder.is_dir() else []


def saved_values(run: Path, step: int) -> dict[str, np.ndarray]:
    """Return every array of a checkpoint but the key, compared with its checksums, by its name."""
    folder = run / "checkpoints"
    like: dict[str, Any] = {}
    for name, leaf in read_manifest(folder / str(step)).leaves.items():
        part, _, path = name.partition("/")
        struct = jax.ShapeDtypeStruct(leaf.shape, "uint32" if leaf.generator else leaf.dtype)
        if not leaf.generator:
            like.setdefault(part, {})[path] = struct
    with Checkpoints(folder) as checkpoints:
        found = checkpoints.load(step, like)
    return {f"{part}/{path}": np.asarray(x) for part, tree in found.items() for path, x in tree.items()}


def difference(run: Path, unbroken: Path) -> str | None:
    """Return where a run's end is not the unbroken one's, bit by bit; None = nowhere."""
    made = steps_made(run)
    if made != list(range(1, STEPS + 1)):
        return f"metrics.jsonl has the steps {made[:3]}... {len(made)} of them, not each of {STEPS} once"
    if [row for row in rows(run) if row.get("event") != "config"] != rows(unbroken):
        return "rows of metrics.jsonl are not the unbroken run's"
    ours, theirs = (saved_values(one, saved_steps(one)[-1]) for one in (run, unbroken))
    if ours.keys() != theirs.keys():
        return "the last checkpoint holds other arrays"
    wrong = [name for name in ours if ours[name].tobytes() != theirs[name].tobytes()]
    return f"{wrong[0]} and {len(wrong) - 1} more are not bit-identical" if wrong else None


def not_finite(run: Path) -> str | None:
    """Return where a saved parameter is not finite; None = nowhere."""
    for step in saved_steps(run):
        for name, value in saved_values(run, step).items():
            if name.startswith("params/") and not np.isfinite(value).all():
                return f"{name} of checkpoint {step} is not finite"
    return None


def content(folder: Path) -> dict[str, bytes]:
    """Return every file below a folder."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


# --- what a process said


def last_line(ended: Ended) -> str:
    """Return the last line of stderr."""
    return (ended.words.strip().splitlines() or [""])[-1]


def not_one_sentence(ended: Ended, *, code: int, names: str) -> str | None:
    """Return what is wrong with an end that should be one sentence and an exit code; None = nothing.

    Args:
      ended: the process.
      code: the exit code it should have.
      names: words the sentence must have.
    """
    said = [line for line in ended.words.splitlines() if line.startswith("jaxblock: ")]
    if ended.code != code:
        return f"exit code {ended.code}, not {code}: {last_line(ended)}"
    if "Traceback" in ended.words:
        return f"it ended with a traceback: {ended.words[ended.words.index('Traceback') :][-1000:]!r}"
    if len(said) != 1 or last_line(ended) != said[0]:
        return f"it did not end with one sentence: {ended.words[-500:]!r}"
    return None if names in said[0] else f"its sentence does not say {names!r}: {said[0]}"


def first_fault(*faults: str | None) -> str | None:
    """Return the first that is one."""
    return next((fault for fault in faults if fault is not None), None)


def _write_text(path: Path) -> Path:
    """Write a JSONL file of a hundred documents; the letter Z is in the first alone."""
    draw = random.Random(0)
    documents: Iterator[list[str]] = (draw.choices(WORDS, k=draw.randint(1, 8)) for _ in range(100))
    lines = [json.dumps({"text": " ".join(words)}) for words in [["Zebras", "too"], *documents]]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path
