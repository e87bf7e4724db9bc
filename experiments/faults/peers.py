"""A run of two processes, one of which is killed: the other ends within a minute, and both together go on."""

import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from experiments.faults.laboratory import (
    PATIENCE,
    Ended,
    Laboratory,
    Trial,
    difference,
    end_of,
    first_fault,
    last_line,
    saved_steps,
    wait_for,
)

MOST_SECONDS = 60.0
"""Within which the process that is left has to end."""


def peer_runs(lab: Laboratory, times: int) -> Iterator[Trial]:
    """Yield a trial for each of `times` runs that lose one of their two processes, now this one, now that."""
    flags = lab.flags(seed=5)
    unbroken = lab.path("unbroken-pair")
    fault = _ended_badly(_ends(_pair(lab, unbroken, flags)))
    if fault is not None:
        raise RuntimeError(f"the unbroken run of two processes {fault}")
    for number in range(times):
        lost = number % 2
        yield Trial(f"SIGKILL of process {lost} of two", _lose(lab, flags, unbroken, lost=lost))


def _lose(lab: Laboratory, flags: Sequence[str], unbroken: Path, *, lost: int) -> str | None:
    """Kill one process of a run, wait for the other, and go on with both; return what was lost."""
    run = lab.path("pair")
    pair = _pair(lab, run, flags)
    wait_for(lambda: len(saved_steps(run)) >= 2, pair[0])
    time.sleep(lab.draw.uniform(0.0, 0.5))
    pair[lost].kill()
    killed, left = time.monotonic(), pair[1 - lost]
    ended = end_of(left)
    seconds = time.monotonic() - killed
    end_of(pair[lost])
    late = f"the process left ended {seconds:.0f} s after the other" if seconds > MOST_SECONDS else None
    well = "the process left ended with 0" if ended.code == 0 else None
    silent = None if ended.words.strip() else "the process left said nothing"
    again = _ended_badly(_ends(_pair(lab, run, flags)))
    return first_fault(late, well, silent, again) or difference(run, unbroken)


def _pair(lab: Laboratory, run: Path, flags: Sequence[str]) -> list[subprocess.Popen]:
    """Start, or resume, a run of two processes."""
    where = ["--resume", str(run)] if run.exists() else [*flags, "--run.dir", str(run)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    group = ["--coordinator", f"127.0.0.1:{port}", "--processes", "2", "--process"]
    return [lab.start(*where, *group, str(index)) for index in range(2)]


def _ends(pair: Sequence[subprocess.Popen]) -> list[Ended]:
    return [end_of(process) for process in pair]


def _ended_badly(pair: Sequence[Ended]) -> str | None:
    """Return what is wrong with the end of two processes."""
    bad = [ended for ended in pair if ended.code]
    return f"ended with {bad[0].code} (within {PATIENCE:.0f} s): {last_line(bad[0])}" if bad else None
