"""What a run does at a bad step: stop, skip its batch, or rewind; and the row that says so in metrics.jsonl."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxblock.training.config import GuardConfig
from jaxblock.training.diagnosis import Fault, find_fault, first_not_finite
from jaxblock.training.guard import Guard, spike_bounds
from jaxblock.training.run_folder import finite_or_none
from jaxblock.training.step import StepMetrics, TrainState
from jaxblock.training.task import Task
from jaxblock.types import Array


class BadStep(NamedTuple):
    """A step whose update was not applied."""

    step: int
    """The number it would have had."""
    kind: str
    """non_finite or spike."""
    metrics: StepMetrics


class Answer(NamedTuple):
    """What is done about it."""

    action: str
    """stop, skip or rewind."""
    strikes: int
    """Bad steps since the last `window` good ones, this one included."""
    reason: str
    """Why another action than the config's, or nothing."""


def answer_of(bad: BadStep, state: TrainState, config: GuardConfig) -> Answer:
    """Return the config's action, or stop where more bad steps came than its limit."""
    action = config.non_finite if bad.kind == "non_finite" else config.spike
    strikes = int(state.guard.strikes) + 1
    if action != "stop" and strikes > config.limit:
        return Answer("stop", strikes, f"more than guard.limit = {config.limit} bad steps")
    return Answer(action, strikes, "")


def locate(bad: BadStep, task: Task, state: TrainState, pieces: Sequence[tuple[Any, Array]]) -> Fault:
    """Return where the step went wrong; `state` is the one before it, since a bad step is not applied.

    Searching must not hide the bad step itself: what goes wrong in here, as too little memory, becomes the sentence.

    Args:
      bad: the step.
      task: what is trained.
      state: frozen by the alarm.
      pieces: the batches the step computed one after the other, each with its dropout key.
    """
    try:
        if bad.kind == "non_finite":
            for batch, key in pieces[:-1]:
                found = first_not_finite(task, state.params, batch, key)
                if found is not None:
                    return found
            return find_fault(task, state.params, *pieces[-1], kind=bad.kind)
        found = [find_fault(task, state.params, batch, key, kind=bad.kind) for batch, key in pieces]
        return max(found, key=lambda fault: fault.value or 0.0)
    except Exception as error:
        words = f"its place is not known, the search failed with {type(error).__name__}: {error}"
        return Fault(bad.kind, "unknown", "unknown", "unknown", None, None, words)


def exceeded(bad: BadStep, guard: Guard, config: GuardConfig) -> dict[str, float]:
    """Return what a spike was above: mean + deviations * sd of the loss, the gradient norm or both."""
    if bad.kind != "spike":
        return {}
    bound_2 = spike_bounds(guard, deviations=config.deviations)
    names = ("loss", "gradient_norm")
    return {n: float(b) for n, b in zip(names, bound_2, strict=True) if float(getattr(bad.metrics, n)) > b}


def bad_step_row(
    bad: BadStep,
    answer: Answer,
    fault: Fault,
    bounds: Mapping[str, float],
    *,
    batch: int,
    skipped: int,
    probe: str | None = None,
) -> dict[str, Any]:
    """Return the row of metrics.jsonl; what is not finite is null, what a spike was above is `NAME_bound`.

    Args:
      bad: the step.
      answer: what is done about it.
      fault: where it went wrong.
      bounds: from `exceeded`.
      batch: number of the batch the step read.
      skipped: batches passed over, this one included where it is.
      probe: where everything measured of the step is, in words; None = nothing is.

    A row with `skipped` is history that a resume keeps; a stop is not: whoever resumes meets the step again.
    """
    values = {name: float(getattr(bad.metrics, name)) for name in ("loss", "gradient_norm", "parameter_norm")}
    why = f" ({answer.reason})" if answer.reason else ""
    seen = ", ".join(f"{name} {values[name]:.4g} above {bound:.4g}" for name, bound in bounds.items())
    words = f"{bad.kind} ({seen})" if seen else bad.kind
    end = "" if probe is None else f"; {probe}"
    row: dict[str, Any] = {
        "step": bad.step,
        "event": bad.kind,
        "action": answer.action,
        "batch": batch,
        "strikes": answer.strikes,
        **{name: finite_or_none(value) for name, value in values.items()},
        **{f"{name}_bound": bound for name, bound in bounds.items()},
        "quantity": fault.quantity,
        "place": fault.place,
        "tensor": fault.tensor,
        "layer": fault.layer,
        "sentence": f"step {bad.step}, batch {batch}: {words}; {fault.sentence}; {answer.action}{why}{end}",
    }
    return row if answer.action == "stop" else {**row, "skipped": skipped}
