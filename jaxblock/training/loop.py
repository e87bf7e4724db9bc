"""A run from start to summary: data, compile, steps, evaluations, checkpoints, bad steps answered, figures, sample.

Everything that can be refused has been, by `prepare`, before the run's folder exists.
"""

import functools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxblock.parallel import Placement, processes
from jaxblock.parallel.memory import check_program
from jaxblock.training.bad_steps import BadStep, answer_of, bad_step_row, exceeded, locate
from jaxblock.training.checkpoint import Checkpoints
from jaxblock.training.guard import GOOD, NAMES, pass_over
from jaxblock.training.interrupts import Interrupts
from jaxblock.training.optimizer.roles import optimizer_table
from jaxblock.training.prepare import Prepared, probed_step_of
from jaxblock.training.probing import probe_row, profiler, start_row, write_profile
from jaxblock.training.progress import Progress
from jaxblock.training.run_folder import RunError, RunFolder, finite_or_none
from jaxblock.training.saved_state import parts_of
from jaxblock.training.seconds import Seconds
from jaxblock.training.start import Begun, begin, saved_facts
from jaxblock.training.step import (
    Measured,
    ProbedStep,
    Step,
    StepMetrics,
    TrainState,
    averaged_weights,
    make_step,
    pieces_of,
)
from jaxblock.training.summary import finish_run
from jaxblock.training.task import Baseline, evaluate
from jaxblock.training.watch import Watch, unwatched
from jaxblock.types import Array

EXIT_DONE, EXIT_GUARD = 0, 3


def train(prepared: Prepared, folder: RunFolder) -> tuple[int, dict[str, Any]]:
    """Run a prepared config in its folder.

    Args:
      prepared: from `prepare`.
      folder: the run's, made by `RunFolder.create` with an equal config; its newest whole checkpoint is continued.

    Returns:
      The exit code (0 done, 3 stopped by the guard, 130 or 143 interrupted) and the summary.
    """
    start = time.perf_counter()
    config, task = prepared.config, prepared.task
    shown = config if folder.writes else unwatched(config)
    with (
        folder.locked(),
        Checkpoints(folder.checkpoints, config.checkpoint, writes=folder.writes) as checkpoints,
        Interrupts() as interrupts,
    ):
        begun = begin(prepared, checkpoints, writes=folder.writes)
        done, parameters = int(begun.state.step), sum(map(jnp.size, jax.tree.leaves(begun.state.params)))
        if done and not folder.read_metrics():
            begun.notes.append(f"{folder.metrics} is not there: the rows up to step {done} are lost")
        folder.start_metrics(config, task.facts, after=done, skipped=int(begun.state.skipped))
        probing = prepared.probing
        folder.start_probes(None if probing is None else start_row(probing, config), after=done)
        for name, text in task.files.items():
            folder.write_text(folder.path / name, text)
        try:
            baseline = task.baseline()
        except ValueError as error:  # data that were not read before, as the ids of a large shard
            raise RunError(str(error)) from error
        with (
            Progress(
                steps=config.run.steps, done=done, unit=prepared.task.unit, quiet=not folder.writes
            ) as progress,
            Watch(shown, folder, baseline=baseline.loss, say=progress.say) as watch,
        ):
            for line in _opening(prepared, begun, parameters, baseline):
                progress.say(line)
            loop = _Loop(prepared, folder, _Outlets(checkpoints, progress, watch))
            state = loop.run(begun.state, begun.key, interrupts)
        code = EXIT_GUARD if loop.stopped_by is not None else interrupts.exit_code
        facts = {
            "status": loop.stopped_by or {EXIT_DONE: "done"}.get(code, "interrupted"),
            "steps": int(state.step),
            "continued_after": done or None,  # times and speed below are of the steps since then
            "skipped_batches": int(state.skipped),
            "bad_step": loop.bad_step,
            "baseline_loss": baseline.loss,
            "baseline": baseline.words,
            **loop.seconds.report(),
            **loop.utilisation(),
            "params": parameters,
            "placement": prepared.placement.words,
            "notes": [*begun.notes, *watch.notes],  # closing a watcher can fail too
        }
        weights = prepared.placement.readable(averaged_weights(state))
        summary = finish_run(prepared, folder, weights, facts, started=start) if folder.writes else facts
        processes.meet("the run's files are written")
    return code, summary


class _Outlets(NamedTuple):
    """Where a loop's results go besides the folder."""

    checkpoints: Checkpoints
    progress: Progress
    watch: Watch


def _opening(prepared: Prepared, begun: Begun, parameters: int, baseline: Baseline) -> Iterator[str]:
    """Yield the lines a run starts with."""
    yield from prepared.task.words
    if prepared.placement.devices > 1:
        yield prepared.placement.words
    model = prepared.task.model
    table = optimizer_table(
        prepared.config.optimizer, begun.state.params, model.labels, scaling=model.scaling
    )
    yield from table.split("\n")
    yield f"{parameters:,} parameters; to beat: {baseline.words}, {baseline.loss:.4f} nats per target"
    if prepared.probing is not None:
        yield prepared.probing.sentence
    yield from begun.notes
    if int(begun.state.step):
        yield f"continues after step {int(begun.state.step)}"


class _Loop:
    """The steps themselves, with what is counted on the way."""

    def __init__(self, prepared: Prepared, folder: RunFolder, outlets: _Outlets):
        self.prepared, self.folder = prepared, folder
        self.checkpoints, self.progress, self.watch = outlets
        self.placement = prepared.placement
        self.score = self.placement.function(prepared.task.score)
        self.pending: list[tuple[int, StepMetrics, Measured | None]] = []
        self.programs: dict[bool, Step | ProbedStep] = {}
        """The compiled steps: False is the plain one, True the one that measures."""
        self.profile: Callable[[Any, Any, Array], dict[str, Any]] | None = None
        """What measures a bad step; made when there is one."""
        self.seconds = Seconds()
        self.evaluated: tuple[int, float | None] = (-1, None)
        self.saved = -1
        self.stopped_by: str | None = None
        self.bad_step: int | None = None

    def run(self, state: TrainState, key: Array, interrupts: Interrupts) -> TrainState:
        """Step until the end, a bad step that stops, or a signal; the state returned is saved."""
        config, task = self.prepared.config.run, self.prepared.task
        done, skipped = int(state.step), int(state.skipped)
        if done < config.steps:
            self._program(done + 1, state, key)
            with self.seconds.spent_on("loop"):
                started = time.perf_counter()
                while done < config.steps and not self._is_stopped(done, interrupts):
                    self.watch.before_step(done + 1)
                    program, waited = self._program(done + 1, state, key)
                    started += waited
                    state, metrics, *measured = program(
                        state, self.placement.batch(task.train, done + skipped), key
                    )
                    done += 1
                    self.pending.append((done, metrics, measured[0] if measured else None))
                    self.watch.after_step(done, state)
                    if not self._is_due(done):
                        continue
                    bad = self._flush(started)
                    self.watch.settled(done)
                    if bad is None:
                        self._report(done, state, key)
                    else:
                        state = self.placement.put(self._answer(bad, state, key))
                        done, skipped = int(state.step), int(state.skipped)
                    if self.stopped_by is not None:
                        break
                    started = time.perf_counter()
                self._flush(started)
                self.watch.settled(done)
        self._save(int(state.step), state, key)
        with self.seconds.spent_on("save"):
            self.checkpoints.wait()
        return state

    def _is_stopped(self, done: int, interrupts: Interrupts) -> bool:
        """Whether a signal came; several processes ask each other after the steps that are reported, and all stop."""
        if jax.process_count() == 1:
            return interrupts.signal is not None
        if not self._is_due(done):
            return False
        interrupts.signal = processes.largest(interrupts.signal or 0) or None
        return interrupts.signal is not None

    def _is_due(self, done: int) -> bool:
        """Whether something is reported, evaluated or saved after this step."""
        run = self.prepared.config.run
        due = (done % every == 0 for every in (run.log_every, run.evaluate_every, run.checkpoint_every))
        return done == run.steps or any(due)

    def _report(self, done: int, state: TrainState, key: Array) -> None:
        """Evaluate, save and draw where it is time to."""
        run = self.prepared.config.run
        self.checkpoints.raise_failure()
        last = done == run.steps
        if last or done % run.evaluate_every == 0:
            with self.seconds.spent_on("evaluate"):
                self._evaluate(done, state)
        if last or done % run.checkpoint_every == 0:
            self._save(done, state, key)
        self.watch.figure()

    def _program(self, number: int, state: TrainState, key: Array) -> tuple[Step | ProbedStep, float]:
        """Return the compiled program of a step, by the number it will have, and the seconds of compiling it now."""
        probed = self.prepared.config.probe.is_due(number)
        if probed in self.programs:
            return self.programs[probed], 0.0
        before = self.seconds.compile
        with self.seconds.spent_on("compile"):
            self.programs[probed] = self._compile(state, key, probed=probed)
        waited = self.seconds.compile - before
        # Compiled ahead of the first step, or between two: in neither case a part of the loop.
        self.seconds.loop -= waited if len(self.programs) > 1 else 0.0
        self.progress.say(f"compiled{' with probes' if probed else ''} in {waited:.1f} s")
        return self.programs[probed], waited

    def _compile(self, state: TrainState, key: Array, *, probed: bool) -> Step | ProbedStep:
        """Compile a step, so that speed and compile time are told apart."""
        task, config, probing = self.prepared.task, self.prepared.config, self.prepared.probing
        if probed and probing is not None:
            step = probed_step_of(task, config, probing)
        else:
            step = make_step(task.model, config, task.loss, rows_axis=self.placement.rows_axis)
        program = self.placement.compile(step, state, self.placement.batch(task.train, 0), key)
        try:
            check_program(program)
        except ValueError as error:  # exact, and only known now: before the first step nothing is lost
            raise RunError(str(error)) from error
        return program

    def _flush(self, started: float) -> BadStep | None:
        """Write the pending steps' metrics; return the first bad one, where there is one."""
        fetched: list[tuple[int, StepMetrics, Measured | None]] = jax.device_get(self.pending)
        self.pending.clear()
        if not fetched:
            return None
        self.seconds.step += time.perf_counter() - started
        good = [step for step in fetched if step[1].alarm == GOOD]
        self.seconds.targets += sum(float(metrics.tokens) for _, metrics, _ in good)
        self._append([_row(number, metrics) for number, metrics, _ in good])
        self.folder.append_probes(
            [probe_row(number, measured) for number, _, measured in good if measured is not None]
        )
        if good:
            number, metrics, _ = good[-1]
            speed = self.seconds.tokens_per_s or 0.0
            self.progress.step(number, loss=float(metrics.loss), tokens_per_s=speed, **self.utilisation())
        # Every step after the first bad one left the state as it was.
        bad = fetched[len(good) :]
        return BadStep(bad[0][0], NAMES[int(bad[0][1].alarm)], bad[0][1]) if bad else None

    def utilisation(self) -> dict[str, float]:
        """Return the model FLOPs utilisation so far, and nothing for a chip whose peak is not known."""
        speed = (self.seconds.tokens_per_s or 0.0) / self.placement.devices
        found = self.prepared.task.utilisation(speed)
        return {} if found is None else {"model_flops_utilisation": found}

    def _answer(self, bad: BadStep, state: TrainState, key: Array) -> TrainState:
        """Log a bad step with the place it went wrong, and return the state to go on with."""
        answer = answer_of(bad, state, self.prepared.config.guard)
        number = int(state.step) + int(state.skipped)
        task = self.prepared.task
        fault = locate(bad, task, state, self._pieces(number, state, key))
        bounds = exceeded(bad, state.guard, self.prepared.config.guard)
        probe = self._dump(bad, number, state, key)
        if answer.action == "rewind":
            state = self._rewound(number)
            self.folder.abandon_metrics(after=int(state.step))
        elif answer.action == "skip":
            state = state._replace(skipped=state.skipped + 1)
        skipped = int(state.skipped)
        row = bad_step_row(bad, answer, fault, bounds, batch=number, skipped=skipped, probe=probe)
        self._append([row])
        self.progress.say(row["sentence"])
        if answer.action == "stop":
            self.stopped_by, self.bad_step = bad.kind, bad.step
            return state
        again = bad.step - 1 - int(state.step)
        return state._replace(guard=pass_over(state.guard, answer.strikes, again=again))

    def _dump(self, bad: BadStep, number: int, state: TrainState, key: Array) -> str | None:
        """Write everything that can be measured of a bad step; return where it is, None for a run without probes.

        Measuring must not hide the bad step itself: what goes wrong in here, as too little memory, becomes the words.
        """
        task, config = self.prepared.task, self.prepared.config
        if self.prepared.probing is None:
            return None
        try:
            dropout_key = jax.random.fold_in(key, state.step)
            self.profile = self.profile or profiler(task, config, state.params)
            told = {"event": bad.kind, **self.profile(state.params, task.train[number], dropout_key)}
            name = write_profile(self.folder.path, told, step=bad.step, batch=number)
        except Exception as error:
            return f"measuring it along depth failed with {type(error).__name__}: {error}"
        return f"measured along depth in {name}"

    def _pieces(self, number: int, state: TrainState, key: Array) -> list[tuple[Any, Array]]:
        """Return what the step computed at once: its batch, or the pieces it was accumulated from, with their keys."""
        count = self.prepared.config.data.accumulation
        return pieces_of(self.prepared.task.train[number], jax.random.fold_in(key, state.step), count)

    def _rewound(self, number: int) -> TrainState:
        """Return the newest saved state (the first one where none is), whose next batch follows batch `number`."""
        state = begin(self.prepared, self.checkpoints, writes=self.folder.writes).state
        return state._replace(skipped=jnp.asarray(number + 1 - int(state.step), jnp.int32))

    def _evaluate(self, done: int, state: TrainState) -> None:
        """Score the validation data, every target once, and write what was found."""
        validation, parts = self.prepared.task.validation, self.prepared.task.parts
        batches = functools.partial(_placed, self.placement, validation)
        found = evaluate(self.score, state.params, batches(), parts=parts)
        if state.average is not None:
            average = evaluate(self.score, averaged_weights(state), batches(), parts=parts)
            found |= {f"{name}_average": value for name, value in average.items()}
        self.evaluated = (done, finite_or_none(found["loss"]))
        self._append([{"step": done, **{f"val_{name}": finite_or_none(x) for name, x in found.items()}}])
        words = ", ".join(
            f"{name.replace('_average', ' of the moving average')} {value:.4f}"
            for name, value in found.items()
        )
        self.progress.say(f"step {done}: validation {words}")

    def _save(self, done: int, state: TrainState, key: Array) -> None:
        """Begin to save the state, unless this step is saved."""
        if done == self.saved:
            return
        with self.seconds.spent_on("save"):
            step, val_loss = self.evaluated
            facts = saved_facts(self.prepared, val_loss if step == done else None)
            self.checkpoints.start(done, parts_of(state, key), facts=facts)
            self.saved = done

    def _append(self, rows: list[dict[str, Any]]) -> None:
        """Write rows to metrics.jsonl and to whatever watches."""
        self.folder.append_metrics(rows)
        self.watch.rows(rows)


def _placed(placement: Placement, batches: Any) -> Iterator[Any]:
    """Yield the batches of an evaluation, placed."""
    return (placement.batch(batches, number) for number in range(len(batches)))


def _row(step: int, metrics: StepMetrics) -> dict[str, Any]:
    """Return one step's row of metrics.jsonl; JSON has no NaN, so what is not finite is null."""
    names = ("loss", "objective", "gradient_norm", "update_norm", "parameter_norm", "learning_rate")
    values = {name: float(getattr(metrics, name)) for name in names}
    if not metrics.tokens:  # a mean over no target is no loss
        values["loss"] = values["objective"] = math.nan
    return {
        "step": step,
        **{name: finite_or_none(value) for name, value in values.items()},
        "tokens": int(metrics.tokens),
    }
