"""Contenders in processes of their own, one computing at a time, in turns that rotate.

A contender is a module with `prepare(options) -> Job`. `contest` starts `python -m experiments.benchmarks.contest
MODULE OPTIONS` for each, waits until all are ready (compiled, first step done), and then asks one after the other, over
its standard input, for a block of steps: thread pools of two libraries in one process fight, two processes that compute
at once fight, and a figure from another minute was made on another machine, in effect. The first round is not counted.
"""

import contextlib
import importlib
import importlib.util
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import IO, Any, NamedTuple, TypeVar

ROOT = Path(__file__).resolve().parents[2]
Name = TypeVar("Name")
PAUSE = 0.05  # seconds in which the last one's threads stop spinning


class AbsentError(Exception):
    """A contender that cannot take part here, with the sentence that says why."""


class Job(NamedTuple):
    """What a contender does when it is its turn."""

    measure: Callable[[], float]
    """Do one step and return its seconds."""
    facts: Mapping[str, Any] = {}
    """What is worth printing: settings, platform."""
    peak_bytes: Callable[[], int | None] = lambda: None
    """The most bytes it had on its accelerator; None on a CPU."""


@dataclass(frozen=True)
class Contender:
    """A name, the module that prepares it, and its options, which travel as JSON."""

    name: str
    module: str
    options: Mapping[str, Any] = field(default_factory=dict)


class Outcome(NamedTuple):
    """What a contest found."""

    rounds: dict[str, list[list[float]]]
    """Name -> seconds of each step, by round."""
    facts: dict[str, dict[str, Any]]
    """Name -> the job's facts, peak memory, and `ready_s`: from preparing it to its first step done."""
    left_out: dict[str, str]
    """Name -> why it did not take part."""


def need(name: str) -> ModuleType:
    """Return a package, or raise `AbsentError` where it is not installed."""
    if importlib.util.find_spec(name.partition(".")[0]) is None:
        raise AbsentError(f"{name} is not installed")
    return importlib.import_module(name)


def timed(step: Callable[[], Any]) -> Callable[[], float]:
    """Return `step` as a `Job.measure`; it must return only when its results are there."""

    def measure() -> float:
        begin = time.perf_counter()
        step()
        return time.perf_counter() - begin

    return measure


class Worker:
    """One contender's process."""

    def __init__(self, contender: Contender):
        command = [sys.executable, "-m", "experiments.benchmarks.contest"]
        # JAX would take most of a GPU's memory, and leave the next contender none.
        environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ}
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the process
        self._process = subprocess.Popen(
            [*command, contender.module, json.dumps(dict(contender.options))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            cwd=ROOT,
            env=environment,
        )
        self.ready = self._answer()

    def ask(self, **request: Any) -> dict[str, Any]:
        """Return the answer to one request."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:  # it has ended; the answer says why
            pass
        return self._answer()

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        self._errors.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            return json.loads(line)
        self._process.wait()
        self._errors.seek(0)
        return {"left_out": "; ".join(self._errors.read().strip().splitlines()[-1:]) or "its process ended"}


def tell(words: str) -> None:
    """Print to standard error what is going on."""
    print(words, file=sys.stderr, flush=True)


def contest(
    contenders: Sequence[Contender],
    *,
    rounds: int,
    steps: int,
    say: Callable[[str], None] = tell,
) -> Outcome:
    """Return what `rounds` rounds of `steps` steps each took.

    One that cannot start, or fails on its way, is left out with a sentence; what it did before is dropped.
    """
    workers: dict[str, Worker] = {}
    left_out: dict[str, str] = {}
    found: dict[str, list[list[float]]] = {}
    facts: dict[str, dict[str, Any]] = {}
    try:
        for contender in contenders:
            say(f"starting {contender.name}")
            worker = workers[contender.name] = Worker(contender)
            if "left_out" in worker.ready:
                left_out[contender.name] = worker.ready["left_out"]
                workers.pop(contender.name).close()
        for number in range(rounds + 1):
            say(f"round {number} of {rounds}" + ("" if number else ", not counted"))
            for name in turn_order(list(workers), number):
                time.sleep(PAUSE)
                answer = workers[name].ask(steps=steps)
                if "left_out" in answer:
                    left_out[name] = answer["left_out"]
                    workers.pop(name).close()
                elif number:
                    found.setdefault(name, []).append(answer["seconds"])
        for name, worker in workers.items():
            facts[name] = {**worker.ready["facts"], **worker.ask(memory=True)}
    finally:
        for worker in workers.values():
            worker.close()
    kept = {one.name: found[one.name] for one in contenders if one.name in workers and one.name in found}
    return Outcome(kept, facts, left_out)


def jax_platform() -> str:
    """Return "cpu", "gpu" or "tpu": where JAX computes; asked in a process of its own, which holds no device after."""
    code = "import jax; print(jax.default_backend())"
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.strip()


def turn_order(names: Sequence[Name], number: int) -> list[Name]:
    """Return who comes when in a round: rotated by one every second round, and the rounds between backwards."""
    start = number // 2 % len(names) if names else 0
    rotated = [*names[start:], *names[:start]]
    return rotated[::-1] if number % 2 else rotated


def serve(module: str, options: Mapping[str, Any], requests: IO[str], answers: IO[str]) -> None:
    """Prepare the contender and answer until the requests end."""

    def answer(**words: Any) -> None:
        answers.write(json.dumps(words) + "\n")
        answers.flush()

    begin = time.perf_counter()
    try:
        job = importlib.import_module(module).prepare(options)
        job.measure()
        answer(facts={**job.facts, "ready_s": time.perf_counter() - begin})
        for line in requests:
            request = json.loads(line)
            if "steps" in request:
                job.measure()  # not counted: it finds caches and threads as the contender before left them
                answer(seconds=[job.measure() for _ in range(request["steps"])])
            else:
                peak = job.peak_bytes()
                resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
                    1 if sys.platform == "darwin" else 1024
                )
                answer(peak_bytes=resident if peak is None else peak)
    except AbsentError as reason:
        answer(left_out=str(reason))
    except Exception as error:  # whatever another library raises: the others go on
        first = (str(error).strip().splitlines() or [""])[0]
        answer(left_out=f"{type(error).__name__}: {first}"[:300])


def main() -> None:
    """Be one contender's process: libraries that print get standard error, the answers standard output."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(sys.argv[1], json.loads(sys.argv[2]), sys.stdin, answers)


if __name__ == "__main__":
    # By its own name, so that `AbsentError` here and in the contender's module are one class.
    importlib.import_module("experiments.benchmarks.contest").main()
