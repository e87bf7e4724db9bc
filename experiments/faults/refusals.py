"""What is refused before anything is written: a folder that cannot be made, a logger that is not installed."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from experiments.faults.disks import mount, small_disk
from experiments.faults.laboratory import (
    Laboratory,
    Trial,
    content,
    end_of,
    first_fault,
    not_one_sentence,
    stopped_midway,
)

LOGGERS = {"tensorboard": ("tensorboardX", "true"), "wandb": ("wandb", "project")}
"""Field of [watch] -> its package, a value that asks for it."""


def refused_runs(lab: Laboratory, trials: int) -> Iterator[Trial]:
    """Yield each refusal once, whatever `trials` is: nothing in them is random."""
    below = lab.path("file")
    below.write_text("a file\n", encoding="utf-8")
    yield Trial("run folder below a file", _refused(lab, below / "run", names="run.dir"))
    for field, (package, value) in LOGGERS.items():
        yield Trial(f"{field} not installed", _without_logger(lab, field, package, value))
    yield Trial("run folder that may not be written", _unwritable(lab))


def _refused(
    lab: Laboratory,
    run: Path,
    *more: str,
    names: str,
    environment: Mapping[str, str] | None = None,
) -> str | None:
    """Return what is wrong with the refusal of a new run."""
    before = _entries(run.parent)
    ended = end_of(lab.start(*lab.flags(*more), "--run.dir", str(run), environment=environment))
    left = None if _entries(run.parent) == before else f"it left {_entries(run.parent)}"
    return first_fault(not_one_sentence(ended, code=2, names=names), left)


def _entries(folder: Path) -> Sequence[str]:
    return sorted(os.listdir(folder)) if folder.is_dir() else []


def _without_logger(lab: Laboratory, field: str, package: str, value: str) -> str | None:
    """A new run that asks for a logger, and a run that is to go on with one."""
    shadow = lab.path("shadow")
    shadow.mkdir()
    (shadow / f"{package}.py").write_text(
        f"raise ImportError('No module named {package}')\n", encoding="utf-8"
    )
    paths = os.pathsep.join([str(shadow), *filter(None, [os.environ.get("PYTHONPATH")])])
    asked, names = (f"--watch.{field}", value), f'pip install "jaxblock[{field}]"'
    environment = {"PYTHONPATH": paths}
    folder = lab.path("logged")
    folder.mkdir()
    fault = _refused(lab, folder / "run", *asked, names=names, environment=environment)
    run, flags = lab.path("run"), lab.flags(seed=1)
    fault = first_fault(fault, stopped_midway(lab, run, flags, checkpoints=1))
    before = content(run)
    ended = end_of(lab.start("--resume", str(run), *asked, environment=environment))
    changed = None if content(run) == before else "files of the run have changed"
    return first_fault(fault, not_one_sentence(ended, code=2, names=names), changed) or lab.fault_at_end(
        run, flags
    )


def _unwritable(lab: Laboratory) -> str | None:
    """A folder without the right to write: by its mode, or, since root may write all the same, on a read-only disk."""
    if os.name == "posix" and os.geteuid() != 0:
        folder = lab.path("closed")
        folder.mkdir(mode=0o555)
        return _refused(lab, folder / "run", names="run.dir")
    with small_disk(lab) as disk:
        mount("-o", "remount,ro", str(disk))
        return _refused(lab, disk / "run", names="run.dir")
