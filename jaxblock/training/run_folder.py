"""A run is a folder: config.toml, metrics.jsonl, summary.json, checkpoints/, plots/, sample.txt; see `RunFolder`.

With [probe] also probes.jsonl, a row per measured step, and probe_step_N.json, everything measured of a bad one.

A kill at any moment leaves it readable: lines are appended whole, other files replaced in one move.
"""

import contextlib
import hashlib
import json
import math
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxblock.training.config import TrainConfig
from jaxblock.training.config_file import build_config, differences, read_config_file, write_config
from jaxblock.training.files import held, replace_text

CHANGEABLE = (
    "guard.non_finite",
    "guard.spike",
    "guard.deviations",
    "guard.limit",
    "checkpoint.",
    "watch.",
    "probe.",
    "sample.",
    "run.log_every",
    "run.evaluate_every",
    "run.checkpoint_every",
    "parallel.",
    "execution.scan_unroll",
    "execution.remat",
    "execution.history",
    "execution.loss",
)
"""Fields a resumed run may change: none of them changes what a good step computes (beyond round-off, for the last five
and probe; another attention would drop other entries)."""


class RunFolder:
    """The paths and files of one run."""

    writes = True
    """Whether this process writes the run's files."""

    def __init__(self, path: Path):
        self.path = path
        self._made: tuple[Path, ...] = ()
        self.config = path / "config.toml"
        self.metrics = path / "metrics.jsonl"
        self.summary = path / "summary.json"
        self.checkpoints = path / "checkpoints"
        self.plots = path / "plots"
        self.sample = path / "sample.txt"
        self.abandoned = path / "abandoned.jsonl"
        self.probes = path / "probes.jsonl"
        self.abandoned_probes = path / "abandoned_probes.jsonl"

    @classmethod
    def check_new(cls, config: TrainConfig, *, started: float | None = None) -> "RunFolder":
        """Return the folder a new run will have; nothing is written.

        Args:
          config: the run.
          started: seconds since the epoch, which name a folder that the config does not name; left out, now.

        Raises:
          ValueError: it exists already, or cannot be made.
        """
        path = new_path(config, started=started)
        try:
            taken = path.exists() or path.is_symlink()
        except (OSError, ValueError) as error:  # ValueError: a null byte
            raise ValueError(f"run.dir is {str(path)!r}, which cannot be a folder: {error}") from error
        if taken:
            raise ValueError(
                f"run.dir is {str(path)!r}, which exists; choose another, or continue that run with --resume {path}"
            )
        parent = next(folder for folder in path.absolute().parents if folder.exists())
        if not parent.is_dir() or not os.access(parent, os.W_OK):
            raise ValueError(
                f"run.dir is {str(path)!r}, but {str(parent)!r} is not a folder that can be written to"
            )
        return cls(path)

    @classmethod
    def open(cls, path: Path) -> "RunFolder":
        """Return an existing run's folder.

        Raises:
          ValueError: there is no run.
        """
        folder = cls(path)
        try:
            is_run = folder.config.is_file()
        except OSError as error:  # a name too long
            raise ValueError(f"{str(path)!r} is not a run: {error.strerror or error}") from error
        if not is_run:
            raise ValueError(f"{str(path)!r} is not a run: it has no config.toml")
        return folder

    def create(self, config: TrainConfig) -> None:
        """Make the folder with the resolved config in it, in one move: no kill leaves a folder that is not a run.

        Raises:
          ValueError: the folder cannot be made.
        """
        unfinished = RunFolder(self.path.with_name(f".{self.path.name}-{uuid.uuid4().hex[:8]}"))
        missing = tuple(folder for folder in self.path.parents if not folder.exists())
        try:
            unfinished.plots.mkdir(parents=True)
            write_config(config, unfinished.config)
            unfinished.path.rename(self.path)
        except (OSError, ValueError) as error:
            _remove(unfinished.path, *missing)
            raise ValueError(f"run.dir is {str(self.path)!r}, which cannot be made: {error}") from error
        self._made = (self.path, *missing)

    def discard_unstarted(self) -> None:
        """Delete the folder that this record made, unless a step or a checkpoint is in it: a refusal leaves nothing."""
        steps = [row for row in self.read_metrics() if "event" not in row]
        if self._made and not steps and not self.has_checkpoint():
            _remove(*self._made)

    def read_config(self) -> TrainConfig:
        """Return the run's config."""
        return build_config(read_config_file(self.config))

    def check_resumable(self, config: TrainConfig) -> list[str]:
        """Return what `config` changes, as "field: asked for, there"; only what leaves good steps as they are may.

        Raises:
          ValueError: the run is done, or a field differs that decides its numbers, every one of them named.
        """
        written = read_config_file(self.config)
        own = build_config(written)
        first = next(iter(self.read_metrics()), None)
        if first is not None and first["config_fingerprint"] != config_fingerprint(own, written=written):
            raise ValueError(
                f"{str(self.config)!r} has been changed since the run started; start a new run from it"
            )
        found = differences(config, own)
        fixed = [sentence for sentence in found if not sentence.partition(":")[0].startswith(CHANGEABLE)]
        if fixed:
            raise ValueError(
                f"{str(self.path)!r} cannot be resumed with another config; asked for, and there: {'; '.join(fixed)}"
            )
        if self.summary.exists() and _read_json(self.summary)["status"] == "done":
            raise ValueError(
                f"{str(self.path)!r} is done; there is nothing to resume (--init.from starts a new run from it)"
            )
        return found

    def has_checkpoint(self) -> bool:
        """Return whether a step was saved, whole or not."""
        return self.checkpoints.is_dir() and any(path.name.isdigit() for path in self.checkpoints.iterdir())

    def check_data(self, facts: Mapping[str, Any]) -> None:
        """Raise ValueError if the run started on other data than a task's `facts` name."""
        first = next(iter(self.read_metrics()), None)
        if first is not None and first["corpus_fingerprint"] != facts["corpus_fingerprint"]:
            raise ValueError(
                f"{str(self.path)!r} started on data with fingerprint {first['corpus_fingerprint']}; "
                f"what its config names now has {facts['corpus_fingerprint']}"
            )

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the run for this process, where the system has file locks; a kill releases it.

        Raises:
          RunError: another process holds it.
        """
        with held(self.path, taken=RunError(f"{str(self.path)!r} is in use by another process")):
            yield

    def append_metrics(self, rows: list[dict[str, Any]]) -> None:
        """Append one line per row to metrics.jsonl."""
        _append(self.metrics, rows)

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return the rows of metrics.jsonl; a last line that a kill cut short is left out."""
        return _read_rows(self.metrics)

    def start_metrics(
        self, config: TrainConfig, facts: Mapping[str, Any], *, after: int, skipped: int
    ) -> None:
        """Open metrics.jsonl with a row on the data, and drop what will be made again (bad steps: to abandoned.jsonl).

        Args:
          config: the run's; where a resume changed it, config.toml and a row say so.
          facts: what the task says about its data.
          after: the step of the checkpoint that is continued.
          skipped: batches passed over by then: bad steps that were answered later will come again.
        """
        rows, own = self.read_metrics(), self.read_config()
        changed = differences(config, own)
        if changed:
            write_config(config, self.config)
        first = {"step": 0, "event": "start", "config_fingerprint": config_fingerprint(config), **facts}
        kept = [row for row in rows if _stays(row, after=after, skipped=skipped)]
        self._abandon([row for row in rows if row.get("event", "start") != "start" and row not in kept])
        if changed:
            kept.append({"step": after, "event": "config", "changed": changed})
        replace_text(self.metrics, _lines([first, *kept]))

    def abandon_metrics(self, *, after: int) -> None:
        """Move the rows of steps after `after` to abandoned.jsonl: a rewind makes these steps again."""
        rows = self.read_metrics()
        self._abandon([row for row in rows if row["step"] > after and "event" not in row])
        kept = [row for row in rows if row["step"] <= after or "event" in row]
        replace_text(self.metrics, _lines(kept))
        probes = self.read_probes()
        gone = [row for row in probes if row["step"] > after]
        if gone:
            _append(self.abandoned_probes, gone)
            replace_text(self.probes, _lines([row for row in probes if row["step"] <= after]))

    def _abandon(self, rows: list[dict[str, Any]]) -> None:
        """Append rows that a resume or a rewind takes out of metrics.jsonl to abandoned.jsonl."""
        if rows:
            _append(self.abandoned, rows)

    def append_probes(self, rows: list[dict[str, Any]]) -> None:
        """Append one line per row to probes.jsonl."""
        if rows:
            _append(self.probes, rows)

    def read_probes(self) -> list[dict[str, Any]]:
        """Return the rows of probes.jsonl, none where there is none; a last line that a kill cut short is left out."""
        return _read_rows(self.probes)

    def start_probes(self, first: Mapping[str, Any] | None, *, after: int) -> None:
        """Open probes.jsonl with a row on what is measured, and drop the rows of steps that will be made again.

        Args:
          first: the row; None = this run measures nothing, and what an earlier part of it measured stays.
          after: the step of the checkpoint that is continued.
        """
        rows = self.read_probes()
        if first is None and not rows:
            return
        kept = [row for row in rows if row["step"] <= after]
        told = [row for row in kept if row.get("event") == "start"]
        if first is not None and (not told or {**told[-1], "step": 0} != {**first, "step": 0}):
            kept.append({**first, "step": after})  # another part of the run measures something else
        replace_text(self.probes, _lines(kept))

    def start_row(self) -> dict[str, Any]:
        """Return the first row of metrics.jsonl: what the run recorded about its data.

        Raises:
          ValueError: it has not started.
        """
        rows = self.read_metrics()
        if not rows:
            raise ValueError(f"{str(self.path)!r} has not started: its metrics.jsonl is empty")
        return rows[0]

    def write_text(self, path: Path, text: str) -> None:
        """Write one of the run's files in one move."""
        replace_text(path, text)

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write summary.json."""
        replace_text(self.summary, json.dumps(summary, indent=2) + "\n")


class FollowedFolder(RunFolder):
    """A run's folder in a process that reads it and leaves the writing to the main one."""

    writes = False

    def create(self, config: TrainConfig) -> None:
        """Do nothing."""

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold nothing."""
        yield

    def append_metrics(self, rows: list[dict[str, Any]]) -> None:
        """Write nothing."""

    def start_metrics(
        self, config: TrainConfig, facts: Mapping[str, Any], *, after: int, skipped: int
    ) -> None:
        """Write nothing."""

    def abandon_metrics(self, *, after: int) -> None:
        """Write nothing."""

    def append_probes(self, rows: list[dict[str, Any]]) -> None:
        """Write nothing."""

    def start_probes(self, first: Mapping[str, Any] | None, *, after: int) -> None:
        """Write nothing."""

    def write_text(self, path: Path, text: str) -> None:
        """Write nothing."""

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write nothing."""


def new_path(config: TrainConfig, *, started: float | None = None) -> Path:
    """Return where a new run's folder will be: run.dir, or runs/NAME-TIME, local time of `started` (now)."""
    name = f"{config.run.name}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(started))}"
    return Path(config.run.dir) if config.run.dir is not None else Path("runs") / name


def _stays(row: Mapping[str, Any], *, after: int, skipped: int) -> bool:
    """Whether a row is history for a run that continues after `after`: a step made, or a bad step answered."""
    if "skipped" in row:
        return row["skipped"] <= skipped
    return row["step"] <= after and row.get("event") in (None, "config")


class RunError(ValueError):
    """A run's folder cannot be used as it is; nothing was written."""


class RunFilesError(RunError):
    """The system could not read or write a run's files: a full disk, a folder that went away; what was saved stays."""


def config_fingerprint(config: TrainConfig, *, written: Mapping[str, Any] | None = None) -> str:
    """Return 16 hex digits that name what decides a run's numbers, wherever it lies: a resume may change the rest.

    Args:
      config: the run's.
      written: the sections of its file. Left out: all fields. A field that came after the run has its default, and
        no place in the file or in the run's fingerprint.
    """
    values = {
        f"{section}.{name}": value
        for section, entries in config.as_dict().items()
        for name, value in entries.items()
        if f"{section}.{name}" != "run.dir"
        and not f"{section}.{name}".startswith(CHANGEABLE)
        and (written is None or name in written.get(section, {}))
    }
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def finite_or_none(value: float) -> float | None:
    """Return a number as JSON can hold it: None where it is not finite."""
    return value if math.isfinite(value) else None


def _remove(folder: Path, *parents: Path) -> None:
    """Delete a folder, and those of its parents that are empty then."""
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        for parent in parents:
            parent.rmdir()


def _append(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(_lines(rows))


def _lines(rows: Sequence[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows)


def _read_rows(path: Path) -> list[dict[str, Any]]:
    """Return a file's rows; a last line that a kill cut short is left out."""
    if not path.exists():
        return []
    if not path.is_file():
        raise ValueError(f"{str(path)!r} is not a file; a run's rows stand in one")
    lines = path.read_bytes().split(b"\n")[:-1]
    try:
        rows = [json.loads(line) for line in lines if line]
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{str(path)!r} holds a line that is not JSON: {error}") from error
    if not all(isinstance(row, dict) and "step" in row for row in rows):
        raise ValueError(f"{str(path)!r} holds a line that is no row of a run, an object with a step")
    return rows


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{str(path)!r} is not JSON: {error}") from error
