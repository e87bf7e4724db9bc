"""SIGKILL at random moments, the writing of checkpoints among them; SIGTERM and Ctrl-C."""

import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from experiments.faults.laboratory import (
    Laboratory,
    Trial,
    difference,
    end_of,
    kill,
    last_line,
    metrics_size,
    rows,
    saved_steps,
    steps_made,
    wait_for,
)

KILLS_PER_RUN = 10


def kill_while_starting(process: subprocess.Popen, run: Path, draw: random.Random, *, startup: float) -> None:
    """Kill before the first new row of metrics: at a random moment of imports, data, restoring, compiling."""
    before, begin, wait = metrics_size(run), time.monotonic(), draw.uniform(0.0, startup)
    wait_for(lambda: metrics_size(run) > before or time.monotonic() - begin > wait, process)
    process.send_signal(signal.SIGKILL)


def kill_while_stepping(
    process: subprocess.Popen, run: Path, draw: random.Random, *, startup: float = 0.0
) -> None:
    """Kill after a random time from the first new row of metrics on."""
    # The start writes the file anew, without what it will make again: a row is new when the file grows.
    wait_for(lambda: _grows(run), process)
    time.sleep(draw.uniform(0.0, 0.3))
    process.send_signal(signal.SIGKILL)


def kill_while_saving(
    process: subprocess.Popen, run: Path, draw: random.Random, *, startup: float = 0.0
) -> None:
    """Kill at a random moment of a write: once a name appears among the checkpoints that is no step's."""
    writes, seen = draw.randint(1, 2), unfinished(run)
    for number in range(writes):
        if number:
            wait_for(lambda: not unfinished(run), process, pause=0.0005)
        wait_for(lambda: unfinished(run) - seen, process, pause=0.0005)
    time.sleep(draw.uniform(0.0, 0.12))
    process.send_signal(signal.SIGKILL)


def _grows(run: Path) -> bool:
    before = metrics_size(run)
    time.sleep(0.01)
    return 0 < before < metrics_size(run)


def unfinished(run: Path) -> set[tuple[str, int]]:
    """Return what lies among the checkpoints that bears no step's name: name and inode."""
    found: set[tuple[str, int]] = set()
    try:
        entries = list(os.scandir(run / "checkpoints"))
    except FileNotFoundError:
        return found
    for entry in entries:
        if not entry.name.isdigit():
            found.add((entry.name, entry.inode()))
    return found


MOMENTS: Mapping[str, tuple[float, Callable[..., None]]] = {
    "start": (0.25, kill_while_starting),
    "steps": (0.2, kill_while_stepping),
    "checkpoint": (0.55, kill_while_saving),
}
"""Moment -> how often, how."""


def killed_runs(lab: Laboratory, kills: int) -> Iterator[Trial]:
    """Yield so many kills, about ten to a run, each resumed by the same command; named by where they hit."""
    made, seed = 0, 0
    while made < kills:
        seed += 1
        flags, run = lab.flags(seed=seed), lab.path("killed")
        lab.unbroken(flags)
        hit, fault = _kill_often(lab, run, flags, min(KILLS_PER_RUN, kills - made))
        fault = fault or lab_end(lab, run, flags)
        lab.say(f"seed {seed}: {sum(hit.values())} kills ({_words(hit)}), {fault or 'the same bits'}")
        yield from (Trial(f"SIGKILL, {where}", fault) for where in hit.elements())
        made += sum(hit.values())
        if fault is not None and not hit:  # a run that fails before it can be killed would do so for ever
            yield Trial("SIGKILL, steps", fault)
            return


def lab_end(lab: Laboratory, run: Path, flags: list[str]) -> str | None:
    """Resume to the end, unless the last start came to it; return what is not as in the unbroken run."""
    if (run / "summary.json").exists():
        return difference(run, lab.unbroken(flags))
    return lab.fault_at_end(run, flags)


def _kill_often(lab: Laboratory, run: Path, flags: list[str], times: int) -> tuple[Counter[str], str | None]:
    """Start, kill, start again; return how many kills hit where, and what was lost by one of them."""
    hit: Counter[str] = Counter()
    names, weights = list(MOMENTS), [weight for weight, _ in MOMENTS.values()]
    for _ in range(times):
        (asked,) = lab.draw.choices(names, weights)
        before, leftovers = metrics_size(run), unfinished(run)
        process = lab.go_on(run, flags)
        MOMENTS[asked][1](process, run, lab.draw, startup=lab.seconds_to_first_step)
        ended = end_of(process)
        if ended.code == 0:
            break  # it was done before the kill came
        if ended.code != -signal.SIGKILL:
            return hit, f"it ended with {ended.code} instead of being killed: {last_line(ended)}"
        where = "checkpoint" if unfinished(run) - leftovers else asked if asked == "start" else "steps"
        hit["steps" if where == "start" and metrics_size(run) > before else where] += 1
        rows(run)  # readable at any moment, but for a last line that was cut
    return hit, None


def _words(hit: Counter[str]) -> str:
    return ", ".join(f"{count} {where}" for where, count in sorted(hit.items()))


def interrupted_runs(lab: Laboratory, trials: int) -> Iterator[Trial]:
    """Yield SIGTERM and Ctrl-C: saved, 143 and 130, resumed to the same bits."""
    for name, number in (("SIGTERM", signal.SIGTERM), ("SIGINT", signal.SIGINT)):
        flags = lab.flags(seed=1)
        lab.unbroken(flags)
        for _ in range(trials):
            run = lab.path(name)
            fault = _interrupt(lab, run, flags, number)
            lab.say(f"{name}: {fault or 'saved, and the same bits'}")
            yield Trial(name, fault)


def _interrupt(lab: Laboratory, run: Path, flags: list[str], number: int) -> str | None:
    process = lab.go_on(run, flags)
    wait_for(lambda: steps_made(run), process)
    time.sleep(lab.draw.uniform(0.0, 0.5))
    ended = kill(process, number)
    if ended.code != 128 + number:
        return f"exit code {ended.code}, not {128 + number}: {last_line(ended)}"
    if saved_steps(run)[-1:] != steps_made(run)[-1:]:
        return f"checkpoint {saved_steps(run)[-1:]} after step {steps_made(run)[-1:]}"
    return lab.fault_at_end(run, flags)
