"""Batches whose loss is NaN, and a learning rate that overflows: what guard.non_finite promises.

The NaN comes through the model: a run starts from weights (init.from) whose embedding of one rare byte is above what
float16 holds, so that a batch is NaN exactly when it has that byte in it, and every parameter is finite.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments.faults.laboratory import (
    Laboratory,
    Trial,
    difference,
    end_of,
    first_fault,
    last_line,
    not_finite,
    rows,
    saved_steps,
    saved_values,
    stopped_midway,
)
from jaxblock.training.checkpoint import Checkpoints

HALF = ("--model.dtype", "float16", "--model.stream_dtype", "float16", "--model.head", "untied")
RARE, ABOVE_FLOAT16 = ord("Z"), 1e5
LIMIT = 3


def bad_step_runs(lab: Laboratory, trials: int) -> Iterator[Trial]:
    """Yield runs that meet bad batches."""
    planted = plant(lab)
    for trial in range(trials):
        for kind, made in _answers(lab, planted, seed=1 + trial):
            lab.say(f"{kind}: {made or 'as documented'}")
            yield Trial(kind, made)


def _answers(lab: Laboratory, planted: Path, *, seed: int) -> Iterator[tuple[str, str | None]]:
    def flags(*more: str) -> list[str]:
        start = ("--init.from", str(planted), "--guard.limit", "100")
        return lab.flags(*HALF, *start, *more, seed=seed)

    for action in ("skip", "rewind"):
        asked = flags("--guard.non_finite", action)
        yield f"NaN batch, {action}", _passed_over(lab.unbroken(asked), action)
        run = lab.path(action)
        fault = stopped_midway(lab, run, asked, checkpoints=2) or lab.fault_at_end(run, asked)
        yield f"NaN batch, {action}, and SIGKILL", fault
    yield "NaN batch, stop, then skip", _stopped(lab, flags(), flags("--guard.non_finite", "skip"))
    yield "overflow at each step, skip", _overflowing(lab, seed)


def _passed_over(run: Path, action: str) -> str | None:
    """Return what is wrong with a run that met bad batches and came to its end."""
    events, told = events_of(run), summary(run)
    if not events or any((row["event"], row["action"]) != ("non_finite", action) for row in events):
        return f"no row, or another one, says what happened: {events}"
    if (told["status"], told["bad_step"]) != ("done", None) or told["skipped_batches"] < len(events):
        return f"its summary says {told['status']}, {told['skipped_batches']} skipped, {len(events)} rows"
    return not_finite(run) or difference(run, run)


def _stopped(lab: Laboratory, flags: list[str], skipping: list[str]) -> str | None:
    """Return what is wrong with a run that stops at its first bad batch and is resumed with another answer."""
    run = lab.path("stop")
    ended = end_of(lab.go_on(run, flags))
    if ended.code != 3:
        return f"exit code {ended.code}, not 3: {last_line(ended)}"
    events, told = events_of(run), summary(run)
    if [row["action"] for row in events] != ["stop"] or told["status"] != "non_finite":
        return f"no row, or another one, says what happened: {events}, {told['status']}"
    if told["bad_step"] != events[0]["step"] or saved_steps(run)[-1] != told["bad_step"] - 1:
        return f"bad step {told['bad_step']}, but checkpoint {saved_steps(run)[-1]} is the last"
    fault = not_finite(run)
    ended = end_of(lab.start("--resume", str(run), "--guard.non_finite", "skip"))
    if ended.code:
        return f"resumed with skip, exit code {ended.code}: {last_line(ended)}"
    return first_fault(fault, difference(run, lab.unbroken(skipping)))


def _overflowing(lab: Laboratory, seed: int) -> str | None:
    """Return what is wrong with a run that would skip every batch: the limit stops it, with finite parameters."""
    flags = lab.flags("--optimizer.learning_rate", "1e30", "--guard.non_finite", "skip", seed=seed)
    run = lab.path("overflow")
    ended = end_of(lab.go_on(run, [*flags, "--guard.limit", str(LIMIT)]))
    if ended.code != 3:
        return f"exit code {ended.code}, not 3: {last_line(ended)}"
    actions = [row["action"] for row in events_of(run)]
    if actions != ["skip"] * LIMIT + ["stop"]:
        return f"rows of metrics.jsonl say {actions}"
    return not_finite(run) if saved_steps(run) else "nothing is saved"


def plant(lab: Laboratory) -> Path:
    """Return a run whose weights are finite, and too large for float16 in the embedding of one byte."""
    source, target = lab.unbroken(lab.flags(*HALF)), lab.path("planted")
    step = saved_steps(source)[-1]
    params = {
        name.removeprefix("params/"): value.copy()
        for name, value in saved_values(source, step).items()
        if name.startswith("params/")
    }
    (table,) = (name for name in params if "embedding" in name)
    params[table][RARE] = ABOVE_FLOAT16
    target.mkdir()
    shutil.copy(source / "config.toml", target)
    Checkpoints(target / "checkpoints").save(step, {"params": params}, facts={})
    return target


def events_of(run: Path) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl about bad steps."""
    return [row for row in rows(run) if row.get("event") not in (None, "start", "config")]


def summary(run: Path) -> dict[str, Any]:
    """Return summary.json."""
    return json.loads((run / "summary.json").read_text(encoding="utf-8"))
