"""A sweep's store as plain records, at any moment: while it runs, after it was killed, when it is done."""

import contextlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxblock.sweeps.results import Event, Profile, Result, Sweep
from jaxblock.sweeps.schema import Program
from jaxblock.sweeps.store import Store
from jaxblock.training.config_file import build_config

MOST_POINTS = 200
LEAST_TAIL = 10
"""A slope needs so many steps."""

Losses = Sequence[tuple[int, float | None, float | None]]
"""(step, loss, gradient norm) by step."""


def read_sweep(folder: Path) -> Sweep:
    """Return the newest plan of a sweep and everything known about it.

    Raises:
      ValueError: the folder holds no sweep.
    """
    with contextlib.closing(Store.open(folder)) as store:
        number, plan, facts = store.newest_plan()
        planned = store.planned(number)
        if not planned:
            raise ValueError(f"the sweep in {str(folder)!r} has no runs yet: it is just beginning")
        found = store.results()
        programs = {program.number: program for program, _ in store.progress()}
        results = tuple(
            _result(store, run, axes, about, found.get(run), programs) for run, axes, _, about in planned
        )
        return Sweep(
            name=plan["sweep"]["name"],
            plan=plan,
            axes=_axes(plan["axes"], results),
            fixed=_fixed(planned[0][2] if planned else {}, plan["axes"]),
            results=results,
            events=tuple(
                Event(time=time, kind=kind, sentence=sentence, runs=tuple(runs))
                for time, kind, sentence, runs in store.events()
            ),
            environment={**facts["environment"], **_device(programs)},
            tokens_per_step=facts["tokens_per_step"],
            uniform_loss=facts["uniform_loss"],
        )


def _result(
    store: Store,
    run: str,
    axes: Mapping[str, Any],
    about: Mapping[str, Any],
    found: Mapping[str, Any] | None,
    programs: Mapping[int, Program],
) -> Result:
    """Return one run's record; what is not known yet keeps its default."""
    losses = store.losses(run)
    profiles = store.profiles(run)
    given = {**about, "id": run, "axes": dict(axes)}
    curve = {
        **_curve(losses),
        "start": _profile(profiles.get("start")),
        "end": _profile(profiles.get("end")),
        "steps": losses[-1][0] if losses else 0,
    }
    if found is None:
        return Result(**given, **curve)
    program = programs[found["program"]]
    seconds = [seconds / steps for steps, seconds in store.chunk_seconds(program.number)]
    ended = {
        "outcome": found["outcome"],
        "reason": found["reason"],
        "steps": found["steps"],
        "val_loss": found["val_loss"],
        "val_error": _standard_error(found),
        "probe": _probe(found),
        "val_losses": tuple(x for x in found["val_losses"] if x is not None),
        "lanes": program.about.get("lanes", len(program.runs)),
        "compile_s": program.about.get("compile_s"),
        "program_bytes": program.about.get("program_bytes"),
        "step_s": float(np.median(seconds)) if seconds else None,
    }
    return Result(**given, **{**curve, **ended})


def _curve(losses: Losses) -> dict[str, Any]:
    """Return what a run's losses say."""
    finite = [(step, loss) for step, loss, _ in losses if loss is not None]
    norms = [norm for _, _, norm in losses if norm is not None]
    if not losses:
        return {}
    tail = max(1, len(losses) // 10)
    last = [loss for _, loss, _ in losses[-tail:]]
    whole = all(loss is not None for loss in last)
    return {
        "losses": tuple(thinned(finite)),
        "first_loss": losses[0][1],
        "last_loss": float(np.mean(np.asarray(last, float))) if whole else None,
        "still_falling": _slope(losses[-tail:]) if whole and tail >= LEAST_TAIL else None,
        "first_gradient_norm": losses[0][2],
        "last_gradient_norm": float(np.median(norms[-tail:])) if whole and norms else None,
    }


def thinned(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return at most `MOST_POINTS` of the points, evenly, the first and the last among them."""
    if len(points) <= MOST_POINTS:
        return list(points)
    places = np.linspace(0, len(points) - 1, MOST_POINTS).round().astype(int)
    return [points[place] for place in places]


def _slope(losses: Losses) -> float:
    """Return nats per 1,000 steps, by least squares."""
    steps, values = np.asarray([(step, loss) for step, loss, _ in losses], float).T
    return float(1000 * np.polyfit(steps, values, 1)[0])


def _standard_error(found: Mapping[str, Any]) -> float | None:
    """Return the standard error of the validation loss, the batches taken as independent, weighted by targets."""
    losses, weights = found["val_losses"], np.asarray(found["val_weights"], float)
    if len(losses) < 2 or any(loss is None for loss in losses):
        return None
    values, share = np.asarray(losses, float), weights / weights.sum()
    variance = float((share**2 * (values - found["val_loss"]) ** 2).sum())
    return math.sqrt(variance * len(losses) / (len(losses) - 1))


def _profile(values: Mapping[str, Any] | None) -> Profile | None:
    """Return a profile, or None where there is none or it is not finite."""
    if values is None or None in (*values["stream"], *values["branches"], values["logits"]):
        return None
    return Profile(
        stream=tuple(values["stream"]), branches=tuple(values["branches"]), logits=values["logits"]
    )


def _probe(found: Mapping[str, Any]) -> dict[str, tuple[float | None, ...]]:
    """Return what was measured along depth; {} where nothing was, as in every sweep before there were probes."""
    return {name: tuple(values) for name, values in found["probe"].items()} if "probe" in found else {}


def _device(programs: Mapping[int, Program]) -> dict[str, Any]:
    """Return what the newest program that began computed on."""
    for _, program in sorted(programs.items(), reverse=True):
        if "device" in program.about:
            return {name: program.about[name] for name in ("device", "platform", "devices")}
    return {}


def _axes(planned: Mapping[str, Sequence[Any]], results: Sequence[Result]) -> dict[str, tuple[Any, ...]]:
    """Return the values of each axis: the plan's, and those that a grid was widened by."""
    axes = {path: list(values) for path, values in planned.items()}
    for result in results:
        for path, value in result.axes.items():
            if value not in axes[path]:
                axes[path].append(value)
    return {path: tuple(values) for path, values in axes.items()}


def _fixed(config: Mapping[str, Any], axes: Mapping[str, Any]) -> dict[str, Any]:
    """Return what no axis varies: path -> value."""
    if not config:
        return {}
    values = build_config(config).values()
    return {
        f"{section}.{name}": value
        for section in ("run", "model", "execution", "data", "optimizer", "loss")
        for name, value in values[section].items()
        if f"{section}.{name}" not in axes and f"{section}.{name}" not in _NOT_SHOWN
    }


_NOT_SHOWN = ("run.name", "run.dir", "run.log_every", "run.evaluate_every", "run.checkpoint_every")
