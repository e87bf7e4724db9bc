"""Disks that are full, become read-only, or take no file above a size."""

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from experiments.faults.laboratory import (
    CannotTry,
    Ended,
    Laboratory,
    Trial,
    content,
    end_of,
    first_fault,
    not_one_sentence,
    saved_steps,
    saved_values,
    stopped_midway,
    wait_for,
)

DISK_MIB = 8
SMALLEST_LIMIT, LARGEST_LIMIT = 2_000, 30_000
"""Bytes a file may have: from less than metrics.jsonl has then, to what only a checkpoint's arrays are above."""


def disk_runs(lab: Laboratory, trials: int) -> Iterator[Trial]:
    """Yield runs whose disk takes no more: exit code 1, one sentence, whole checkpoints, resumed to the same bits."""
    for name, run_on in (
        ("file size limit", _limited),
        ("disk fills up", _filled),
        ("disk full at the start", _full),
        ("read-only disk at a resume", _read_only),
    ):
        for _ in range(trials):
            fault = run_on(lab)
            lab.say(f"{name}: {fault or 'said, and the same bits'}")
            yield Trial(name, fault)


def _limited(lab: Laboratory) -> str | None:
    """A quota for files, set while the run trains (RLIMIT_FSIZE)."""
    try:
        from resource import RLIMIT_FSIZE, prlimit
    except ImportError as error:
        raise CannotTry("another process's limits can be set on Linux alone") from error
    run, flags = lab.path("limited"), lab.flags(seed=1)
    lab.unbroken(flags)
    process = lab.go_on(run, flags)
    if wait_for(lambda: saved_steps(run), process):
        limit = lab.draw.randint(SMALLEST_LIMIT, LARGEST_LIMIT)
        prlimit(process.pid, RLIMIT_FSIZE, (limit, limit))
    return _fault_of_full(lab, run, end_of(process), flags)


def _filled(lab: Laboratory) -> str | None:
    """A disk that fills up at a random moment after the first checkpoint."""
    flags = lab.flags(seed=1)
    lab.unbroken(flags)
    with small_disk(lab) as disk:
        run, filler = disk / "run", disk / "filler"
        process = lab.go_on(run, flags)
        wait_for(lambda: saved_steps(run), process)
        time.sleep(lab.draw.uniform(0.0, 0.5))
        while process.poll() is None:
            fill(filler)  # again and again: the run may free what it had
            time.sleep(0.01)
        ended = end_of(process)
        before = not_whole(run)
        filler.unlink()
        return first_fault(before, _fault_of_full(lab, run, ended, flags))


def _fault_of_full(lab: Laboratory, run: Path, ended: Ended, flags: list[str]) -> str | None:
    """Return what is wrong with the end of a run whose disk was full, or with its end once there is room."""
    said = not_one_sentence(ended, code=1, names=f"--resume {run}")
    return first_fault(said, not_whole(run)) or lab.fault_at_end(run, flags)


def _full(lab: Laboratory) -> str | None:
    """A disk that is full before the run starts: refused, and not even a folder is left."""
    flags = lab.flags(seed=1)
    with small_disk(lab) as disk:
        fill(disk / "filler")
        ended = end_of(lab.go_on(disk / "run", flags))
        left = [name for name in os.listdir(disk) if name != "filler"]
        return first_fault(
            not_one_sentence(ended, code=2, names="No space left"), f"it left {left}" if left else None
        )


def _read_only(lab: Laboratory) -> str | None:
    """A disk that is read-only when the run is to go on: said, nothing changed."""
    flags = lab.flags(seed=1)
    with small_disk(lab) as disk:
        run = disk / "run"
        fault = stopped_midway(lab, run, flags)
        before = content(run)
        mount("-o", "remount,ro", str(disk))
        ended = end_of(lab.go_on(run, flags))
        fault = first_fault(fault, not_one_sentence(ended, code=1, names="Read-only"))
        changed = None if content(run) == before else "files of the run have changed"
        mount("-o", "remount,rw", str(disk))
        return first_fault(fault, changed) or lab.fault_at_end(run, flags)


def not_whole(run: Path) -> str | None:
    """Return which checkpoint that bears its name cannot be read; None = all can."""
    for step in saved_steps(run):
        try:
            saved_values(run, step)
        except ValueError as error:
            return str(error)
    return None if saved_steps(run) else "no checkpoint is left"


@contextlib.contextmanager
def small_disk(lab: Laboratory) -> Iterator[Path]:
    """Yield a folder that is a disk of its own, in memory.

    Raises:
      CannotTry: there can be none here.
    """
    folder = lab.path("disk")
    folder.mkdir()
    mount("-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(folder))
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def mount(*words: str) -> None:
    """Run the system's mount; raise CannotTry where that is not allowed."""
    try:
        subprocess.run(["mount", *words], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", None) or error
        raise CannotTry(f"a small disk of its own cannot be mounted ({str(reason).strip()})") from error


def fill(path: Path) -> None:
    """Append to a file until the disk is full."""
    with contextlib.suppress(OSError), path.open("ab", buffering=0) as file:
        while file.write(bytes(2**12)):
            pass
