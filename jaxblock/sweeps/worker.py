"""One worker: claims programs from the store and trains them, chunk by chunk, until none waits.

    python -m jaxblock.sweeps.worker DIR       started by the runner, whose end is its own

It is a process of its own, so that what kills it (memory above all) kills neither the sweep nor its other programs.
"""

import contextlib
import gc
import math
import os
import platform
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxblock.parallel.memory import device_bytes
from jaxblock.sweeps.environment import describe_device
from jaxblock.sweeps.identity import code_fingerprint, program_key, run_id
from jaxblock.sweeps.lanes import Lane, LaneProgram, least_bytes
from jaxblock.sweeps.ledger import Ledger
from jaxblock.sweeps.outcomes import Outcome, finished, stopped
from jaxblock.sweeps.plan import SweepConfig
from jaxblock.sweeps.schema import LossRow, Program, Saved
from jaxblock.sweeps.states import state_bytes, state_from
from jaxblock.sweeps.store import Store
from jaxblock.training.config import TrainConfig
from jaxblock.training.config_file import build_config
from jaxblock.training.host_memory import keep_freed_memory
from jaxblock.training.prepare import TASKS
from jaxblock.training.probing import plain
from jaxblock.training.step import StepMetrics, TrainState
from jaxblock.training.summary import versions
from jaxblock.training.task import Task

REFUSED = 2
"""Exit code of a worker whose machine is not the sweep's."""


class TooLargeError(Exception):
    """A program does not fit in memory."""


class OtherMachineError(Exception):
    """This machine has not the sweep's code or data; a sentence that names it.

    No run has failed: were it one, a machine that refuses at once would use up what others are still to train.
    """


class Job:
    """One program being trained."""

    def __init__(self, store: Ledger, sweep: SweepConfig, program: Program, *, sharing: int):
        self.store, self.sweep, self.program, self.sharing = store, sweep, program, sharing
        self.configs = [build_config(store.config(run)) for run in program.runs]
        self.config: TrainConfig = self.configs[0]
        self.task: Task = _task(self.config)
        self.lanes = LaneProgram(self.task, self.config, [Lane.of(config) for config in self.configs])
        self.steps = self.config.run.steps
        self.chunk = min(sweep.chunk, self.steps)
        self.about: dict[str, Any] = dict(program.about)
        if len({program_key(config) for config in self.configs}) > 1:
            raise ValueError(f"the runs of program {program.number} differ in more than their lanes may")
        data = self.task.facts["corpus_fingerprint"]
        if program.runs != tuple(run_id(config, data=data) for config in self.configs):
            raise OtherMachineError(
                f"the data on {platform.node()} (fingerprint {data}) are not those the sweep was started with"
            )

    def train(self) -> None:
        """Train all lanes to the end and keep what was found.

        Raises:
          TooLargeError: it does not fit in the worker's memory.
        """
        limit = memory_limit(self.sweep, sharing=self.sharing)
        self._check_estimate(limit)
        begin = time.perf_counter()
        # The last chunk may be a shorter one: compiled now, or its seconds would be taken for training.
        lengths = {self.chunk, self.steps % self.chunk or self.chunk}
        needed = max(self.lanes.compiled_bytes(steps) for steps in lengths)
        self.about |= {
            **describe_device(),
            "lanes": len(self.configs),
            "compile_s": time.perf_counter() - begin,
            "program_bytes": needed,
        }
        if needed > limit:
            raise TooLargeError(_sentence(needed, limit, len(self.configs)))
        self.store.describe(self.program, self.about)
        state, done = self._begin()
        spent = sum(seconds for _, seconds in self.store.chunk_seconds(self.program.number))
        while done < self.steps and self._alive(state).any():
            if self.sweep.seconds is not None and spent > self.sweep.seconds:
                reason = f"stopped after step {done}: it had trained for more than {self.sweep.seconds:g} s"
                self._fail(Outcome("error", reason), steps=done)
                return
            begin, steps, alive = time.perf_counter(), min(self.chunk, self.steps - done), self._alive(state)
            state, metrics = self.lanes.run(state, done, steps)
            metrics = jax.device_get(metrics)
            seconds = time.perf_counter() - begin
            spent, done = spent + seconds, done + steps
            name = self._save_state(state, done)
            self.store.save_chunk(
                self.program, self._rows(metrics, done, alive), Saved(done, steps, seconds, name)
            )
            self.store.forget_states(self.program, but=name)
        self._finish(state)

    def _check_estimate(self, limit: float) -> None:
        """Raise TooLargeError for what is known not to fit before anything is compiled."""
        needed = least_bytes(self.task, self.config) * len(self.configs)
        if needed > limit:
            raise TooLargeError(_sentence(needed, limit, len(self.configs)))

    def _begin(self) -> tuple[TrainState, int]:
        """Return the saved state and its step, or the first state, whose profiles are then kept."""
        if self.program.file is not None:
            data = self.store.read_state(self.program.file)
            state = None if data is None else state_from(data, self.lanes.like())
            if state is not None:
                return jax.tree.map(jax.numpy.asarray, state), self.program.step
            sentence = f"the saved state {self.program.file} is missing or damaged; its runs start again"
            self.store.add_event("error", sentence, self.program.runs)
        state = self.lanes.first_state()
        self._save_profiles("start", state)
        return state, 0

    def _alive(self, state: TrainState) -> np.ndarray:
        """Return which lanes their guards have not stopped, [lanes]."""
        return np.asarray(state.guard.alarm) == 0

    def _save_state(self, state: TrainState, done: int) -> str:
        """Write the state after `done` steps; return its file's name."""
        name = f"{self.program.number}-{done}.npz"
        self.store.write_state(name, state_bytes(state))
        return name

    def _rows(self, metrics: StepMetrics, done: int, alive: np.ndarray) -> list[LossRow]:
        """Return the rows of a chunk: every lane's steps up to the first one that changed nothing."""
        rows, steps = [], metrics.loss.shape[0]
        for lane, run in enumerate(self.program.runs):
            if not alive[lane]:
                continue
            for index in range(steps):
                loss, norm = float(metrics.loss[index, lane]), float(metrics.gradient_norm[index, lane])
                rows.append((run, done - steps + 1 + index, _finite(loss), _finite(norm)))
                if metrics.alarm[index, lane]:
                    break
        return rows

    def _finish(self, state: TrainState) -> None:
        """Evaluate every lane and keep the results."""
        self._save_profiles("end", state)
        scores = self.lanes.scores(state.params)
        probed = self.lanes.probe(state.params) if self.config.probe.every else {}
        results = {}
        for lane, (run, config) in enumerate(zip(self.program.runs, self.configs, strict=True)):
            rows = self.store.losses(run)
            made = int(state.step[lane])
            nats, weight = scores.nats[:, lane].astype(float), scores.weight[:, lane].astype(float)
            whole = made == config.run.steps
            val_loss = float(nats.sum() / weight.sum())
            if whole:
                losses = [_number(loss) for _, loss, _ in rows]
                outcome = finished(losses, val_loss=val_loss, uniform=uniform_loss(self.task, config))
            else:
                step, loss, norm = rows[-1]
                outcome = stopped(step, loss=_number(loss), gradient_norm=_number(norm))
            results[run] = {
                "outcome": outcome.name,
                "reason": outcome.reason,
                "steps": made,
                "val_loss": _finite(val_loss) if whole else None,
                "val_losses": [_finite(x) for x in nats / np.maximum(weight, 1)] if whole else [],
                "val_weights": weight.tolist() if whole else [],
                "program": self.program.number,
                "probe": {name: plain(values[lane]) for name, values in probed.items()},
            }
        self.store.finish(self.program, results)
        self.store.forget_states(self.program)

    def _fail(self, outcome: Outcome, *, steps: int) -> None:
        fail(self.store, self.program, outcome, steps=steps)

    def _save_profiles(self, moment: str, state: TrainState) -> None:
        """Keep every lane's profile."""
        found = self.lanes.profile(state.params)
        profiles = {
            run: {
                "stream": [_finite(float(x)) for x in found.stream[lane]],
                "branches": [_finite(float(x)) for x in found.branches[lane]],
                "logits": _finite(float(found.logits[lane])),
            }
            for lane, run in enumerate(self.program.runs)
        }
        self.store.save_profiles(moment, profiles)


def _check_code(started_with: Mapping[str, Any]) -> None:
    """Raise OtherMachineError unless this machine has the code and the JAX that the sweep was started with."""
    if code_fingerprint() != started_with["code"]:
        raise OtherMachineError(f"jaxblock on {platform.node()} is not the code the sweep was started with")
    here = versions()
    for name in ("jax", "jaxlib"):
        if here[name] != started_with[name]:
            raise OtherMachineError(
                f"{name} is {here[name]} on {platform.node()}, and the sweep was started with {started_with[name]}"
            )


def _task(config: TrainConfig) -> Task:
    """Return a config's task; the runner has made the same one, so what is refused here is the machine."""
    try:
        return TASKS[config.run.task_choice.name](config)
    except (ValueError, OSError, ImportError) as error:
        raise OtherMachineError(
            f"the data on {platform.node()} cannot be used: {_first_line(error)}"
        ) from error


def fail(store: Ledger, program: Program, outcome: Outcome, *, steps: int) -> None:
    """Give every run of a program the same outcome, without a loss."""
    result = {
        "outcome": outcome.name,
        "reason": outcome.reason,
        "steps": steps,
        "val_loss": None,
        "val_losses": [],
        "val_weights": [],
        "program": program.number,
        "probe": {},
    }
    store.finish(program, dict.fromkeys(program.runs, result))
    store.forget_states(program)


def uniform_loss(task: Task, config: TrainConfig) -> float:
    """Return the loss of guessing every token (every class) alike."""
    classes = task.facts.get("classes")
    return float(np.log(len(classes) if classes else config.model.vocab_size))


def memory_limit(sweep: SweepConfig, *, sharing: int) -> float:
    """Return the bytes one of `sharing` workers on a device may use; infinite where neither plan nor device says."""
    if sweep.memory_gib is not None:
        return sweep.memory_gib * 2**30 / sweep.workers
    available = device_bytes()
    return math.inf if available is None else 0.8 * available / sharing


def work(store: Ledger, worker: int, *, sharing: int | None = None) -> None:
    """Train programs until none waits.

    Args:
      store: where programs wait.
      worker: the number this worker claims them by.
      sharing: how many workers, this one too, may have the memory of its device; None for all of the sweep's.

    Raises:
      OtherMachineError: code or data of this machine are not the sweep's; the program it had stays as it was.
    """
    _, plan, facts = store.newest_plan()
    _check_code(facts["environment"])
    sweep = SweepConfig.model_validate(plan["sweep"])
    sharing = sweep.workers if sharing is None else min(sharing, sweep.workers)
    keep_freed_memory()
    while (program := store.claim(worker)) is not None:
        try:
            Job(store, sweep, program, sharing=sharing).train()
        except TooLargeError as error:
            _answer_too_large(store, program, str(error))
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                _answer_error(store, sweep, program, error)
            else:
                _answer_too_large(store, program, f"memory ran out: {_first_line(error)}")
        except MemoryError as error:
            _answer_too_large(store, program, f"memory ran out: {_first_line(error)}")
        except OtherMachineError:
            raise
        except Exception as error:
            _answer_error(store, sweep, program, error)
        jax.clear_caches()  # or every depth's programs would stay
        gc.collect()


def _answer_too_large(store: Ledger, program: Program, sentence: str) -> None:
    """Halve a program, or say that its one run does not fit."""
    if len(program.runs) == 1:
        fail(store, program, Outcome("out_of_memory", sentence), steps=0)
    else:
        store.halve(program, f"program {program.number}: {sentence}; halved")


def _answer_error(store: Ledger, sweep: SweepConfig, program: Program, error: Exception) -> None:
    """Try a failed program again, or give it up."""
    sentence = f"{type(error).__name__}: {_first_line(error)}"
    if program.tries < sweep.attempts:
        store.add_event(
            "error", f"program {program.number} failed and is tried again: {sentence}", program.runs
        )
        store.release(program)
    else:
        store.add_event("error", f"program {program.number} failed: {sentence}", program.runs)
        fail(store, program, Outcome("error", sentence), steps=program.step)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0][:300]


def _sentence(needed: float, limit: float, lanes: int) -> str:
    runs = "one run needs" if lanes == 1 else f"{lanes} runs at once need"
    return f"{runs} at least {needed / 2**30:,.2f} GiB and a worker has {limit / 2**30:,.2f} GiB"


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None


def _number(value: float | None) -> float:
    return float("nan") if value is None else value


def _end_with_the_runner() -> None:
    """End this process when the runner, which holds the other end of stdin, is gone."""

    def watch() -> None:
        while os.read(0, 1):  # not sys.stdin: its lock would be held when the interpreter ends
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    _end_with_the_runner()
    with contextlib.closing(Store.open(Path(sys.argv[1]))) as own:
        try:
            work(own, os.getpid())
        except OtherMachineError as refusal:
            print(f"jaxblock: {refusal}", file=sys.stderr)
            sys.exit(REFUSED)
