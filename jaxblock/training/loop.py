"""A run from start to summary: data, compile, steps, evaluations, checkpoints, figures, sample.

Everything that can be refused has been, by `prepare`, before the run's folder exists.
"""

import functools
import math
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from jaxblock.functional.losses import CrossEntropy
from jaxblock.training.baseline import trigram_baseline
from jaxblock.training.batches import Batch
from jaxblock.training.checkpoint import Checkpoints, count_parameters
from jaxblock.training.interrupts import Interrupts
from jaxblock.training.optimizer import decay_table
from jaxblock.training.prepare import Prepared, run_keys
from jaxblock.training.progress import Progress
from jaxblock.training.run_folder import RunFolder
from jaxblock.training.step import Step, StepMetrics, TrainState, init_state, make_evaluation, make_step
from jaxblock.training.summary import finish_run
from jaxblock.types import Array, Params

EXIT_DONE, EXIT_NON_FINITE = 0, 3


def train(prepared: Prepared, folder: RunFolder) -> tuple[int, dict[str, Any]]:
    """Run a prepared config in its folder.

    Args:
      prepared: from `prepare`.
      folder: the run's, made by `RunFolder.create` with an equal config; its newest checkpoint is continued.

    Returns:
      The exit code (0 done, 3 non-finite, 130 or 143 interrupted) and the summary.
    """
    start = time.perf_counter()
    config, corpus = prepared.config, prepared.corpus
    keys = run_keys(config.run.seed)
    with folder.locked(), Checkpoints(folder.checkpoints) as checkpoints, Interrupts() as interrupts:
        state = _first_state(prepared, keys.init, checkpoints)
        done, parameters = int(state.step), count_parameters(state.params)
        folder.start_metrics(config, corpus, after=done)
        with Progress(steps=config.run.steps, done=done) as progress:
            baseline = trigram_baseline(corpus.train, corpus.validation, config.model.vocab_size)
            for line in (
                corpus.source,
                *corpus.notes,
                *decay_table(state.params, prepared.model.labels).split("\n"),
            ):
                progress.say(line)
            progress.say(
                f"{parameters:,} parameters; to beat: a trigram model, {baseline.loss:.4f} nats per token"
            )
            if done:
                progress.say(f"continues after step {done}")
            loop = _Loop(prepared, folder, checkpoints, progress)
            state = loop.run(state, keys.dropout, interrupts)
        code = EXIT_NON_FINITE if loop.non_finite_step is not None else interrupts.exit_code
        facts = {
            "status": {EXIT_DONE: "done", EXIT_NON_FINITE: "non_finite"}.get(code, "interrupted"),
            "steps": int(state.step),
            "non_finite_step": loop.non_finite_step,
            "baseline_trigram_loss": baseline.loss,
            "tokens_per_s": loop.tokens_per_s,
            "compile_s": loop.compile_s,
            "params": parameters,
        }
        summary = finish_run(prepared, folder, state.params, facts, started=start)
    return code, summary


def _first_state(prepared: Prepared, key: Array, checkpoints: Checkpoints) -> TrainState:
    """Return the newest saved state, or initial values where there is none."""
    init = functools.partial(init_state, prepared.model, prepared.config)
    saved = checkpoints.latest()
    if saved is not None:
        return checkpoints.restore(saved, jax.eval_shape(init, key))
    # It runs once: on CPU, optimizing the random draws takes many times longer than drawing.
    options = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
    return jax.jit(init, compiler_options=options)(key)


class _Loop:
    """The steps themselves, with what is counted on the way."""

    def __init__(self, prepared: Prepared, folder: RunFolder, checkpoints: Checkpoints, progress: Progress):
        self.prepared, self.folder = prepared, folder
        self.checkpoints, self.progress = checkpoints, progress
        self.evaluate = jax.jit(make_evaluation(prepared.model, prepared.config))
        self.pending: list[tuple[int, StepMetrics]] = []
        self.compile_s, self.step_s, self.tokens = 0.0, 0.0, 0.0
        self.non_finite_step: int | None = None

    @property
    def tokens_per_s(self) -> float | None:
        """Target tokens per second of stepping, without compiling, evaluating and saving."""
        return self.tokens / self.step_s if self.step_s else None

    def run(self, state: TrainState, key: Array, interrupts: Interrupts) -> TrainState:
        """Step until the end, a non-finite value or a signal; the state returned is saved."""
        config = self.prepared.config.run
        done = int(state.step)
        step = self._compile(state, key) if done < config.steps else None
        started = time.perf_counter()
        while step is not None and done < config.steps and interrupts.signal is None:
            state, metrics = step(state, self.prepared.train[done], key)
            done += 1
            self.pending.append((done, metrics))
            last = done == config.steps
            evaluates = last or done % config.evaluate_every == 0
            saves = last or done % config.checkpoint_every == 0
            if evaluates or saves or done % config.log_every == 0:
                if not self._flush(started):
                    break
                if evaluates:
                    self._evaluate(done, state)
                if saves:
                    self.checkpoints.save(done, state)
                started = time.perf_counter()
        self._flush(started)
        self.checkpoints.save(int(state.step), state)
        return state

    def _compile(self, state: TrainState, key: Array) -> Step:
        """Compile the step ahead of the first one, so that speed and compile time are told apart."""
        start = time.perf_counter()
        step = jax.jit(make_step(self.prepared.model, self.prepared.config), donate_argnums=0)
        compiled = step.lower(state, self.prepared.train[0], key).compile()
        self.compile_s = time.perf_counter() - start
        self.progress.say(f"compiled in {self.compile_s:.1f} s")
        return compiled

    def _flush(self, started: float) -> bool:
        """Write the pending steps' metrics; return False once a value was not finite."""
        fetched: list[tuple[int, StepMetrics]] = jax.device_get(self.pending)
        self.pending.clear()
        if not fetched:
            return self.non_finite_step is None
        self.step_s += time.perf_counter() - started
        rows = []
        for number, metrics in fetched:
            rows.append(_row(number, metrics))
            self.tokens += float(metrics.tokens)
            if not metrics.healthy:
                self.non_finite_step = number
                rows[-1]["event"] = "non_finite"
                self.progress.say(f"step {number}: loss or gradient is not finite; stopped before its update")
                break
        self.folder.append_metrics(rows)
        if self.non_finite_step is None:
            self.progress.step(
                fetched[-1][0], loss=float(fetched[-1][1].loss), tokens_per_s=self.tokens_per_s or 0.0
            )
        return self.non_finite_step is None

    def _evaluate(self, step: int, state: TrainState) -> None:
        """Score the validation slice, every token once, and write the loss."""
        loss = validation_loss(self.evaluate, state.params, self.prepared.validation)
        self.folder.append_metrics([{"step": step, "val_loss": loss if math.isfinite(loss) else None}])
        self.progress.say(f"step {step}: validation loss {loss:.4f} nats per token")


def validation_loss(
    evaluate: Callable[[Params, Batch], CrossEntropy], params: Params, batches: Iterable[Batch]
) -> float:
    """Return the mean loss in nats per target over all batches, each target weighted once."""
    results = [evaluate(params, batch) for batch in batches]
    nats, weight = np.sum([(float(r.nats), float(r.weight)) for r in results], axis=0)
    return float(nats / weight)


def _row(step: int, metrics: StepMetrics) -> dict[str, Any]:
    """Return one step's row of metrics.jsonl; JSON has no NaN, so what is not finite is null."""
    names = ("loss", "objective", "gradient_norm", "parameter_norm", "learning_rate")
    values = {name: float(getattr(metrics, name)) for name in names}
    if not metrics.tokens:  # a mean over no target is no loss
        values["loss"] = values["objective"] = math.nan
    return {
        "step": step,
        **{name: value if math.isfinite(value) else None for name, value in values.items()},
        "tokens": int(metrics.tokens),
    }
