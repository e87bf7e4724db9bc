"""`jaxblock train`: a config, changed by flags, to a run."""

import dataclasses
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from jaxblock.cli.arguments import BAD_INPUT, Action, Flag, refuse

if TYPE_CHECKING:
    from jaxblock.training.prepare import Prepared
    from jaxblock.training.run_folder import RunFolder

FAILED = 1


@dataclasses.dataclass(frozen=True)
class TrainCommand:
    """Train a model."""

    config: Annotated[str | None, tyro.conf.Positional] = None
    """A TOML file. Left out: the built-in defaults, which are configs/quickstart.toml."""
    resume: str | None = None
    """Continue the run in this folder from its newest checkpoint."""
    json: Flag = False
    """Print the summary as one line of JSON."""
    distributed: Flag = False
    """One of several processes of this run, which find each other by SLURM's, Open MPI's or the TPU's environment."""
    coordinator: str | None = None
    """HOST:PORT of process 0, for one of several processes that nothing in the environment tells of each other."""
    processes: int | None = None
    """How many processes there are, with --coordinator."""
    process: int | None = None
    """Which this one is, from 0, with --coordinator."""


def train(arguments: Sequence[str]) -> Action:
    """Train a model: jaxblock train [CONFIG.toml] [--section.field VALUE]."""
    from jaxblock.cli.config_arguments import parse_with_config, read_config
    from jaxblock.parallel import processes
    from jaxblock.training.host_memory import keep_freed_memory
    from jaxblock.training.prepare import prepare
    from jaxblock.training.run_folder import FollowedFolder, RunFolder, new_path

    keep_freed_memory()
    command, overrides = parse_with_config(
        TrainCommand,
        arguments,
        name="train",
        description=train.__doc__,
        known=["resume", "coordinator", "processes", "process"],
        switches=["distributed"],
    )
    group = processes.Group(command.coordinator, command.processes, command.process)
    processes.check_group(group)
    if command.distributed or group.processes is not None:
        processes.join(group)
    started, kind = processes.of_main(int(time.time())), RunFolder if processes.is_main() else FollowedFolder
    with processes.together("cannot start the run"):
        if command.resume is not None:
            folder = kind.open(Path(command.resume))
            config = read_config(folder.config if command.config is None else command.config, overrides)
            folder.check_resumable(config)
        else:
            config = read_config(command.config, overrides)
            folder = kind(new_path(config, started=started))
            if folder.writes:
                RunFolder.check_new(config, started=started)
        prepared = prepare(config, continues=folder.has_checkpoint())
        if command.resume is not None:
            folder.check_data(prepared.task.facts)
    processes.check_same("config", json.dumps(config.as_dict(), sort_keys=True))
    processes.check_same("data", json.dumps(prepared.task.facts, sort_keys=True, default=str))
    with processes.together("cannot make the run's folder"):
        if command.resume is None:
            folder.create(config)

    def act() -> int:
        with processes.leaving():
            code = _run(prepared, folder, as_json=command.json)
        if code in (FAILED, BAD_INPUT) and processes.several():
            processes.leave(code)
        return code

    return act


def _run(prepared: "Prepared", folder: "RunFolder", *, as_json: bool) -> int:
    """Train, and say what came of it; return the exit code."""
    import jax

    from jaxblock.parallel import processes
    from jaxblock.training.loop import train
    from jaxblock.training.run_folder import RunError, RunFilesError
    from jaxblock.training.token_files import DataError

    again = f"continue with: jaxblock train --resume {folder.path}{_in_all()}"
    try:
        code, summary = train(prepared, folder)
    except (RunFilesError, OSError, DataError) as error:  # a full disk, a folder or a shard that went away
        print(f"jaxblock: {error}; {again}", file=sys.stderr)
        return FAILED
    except RunError as error:
        folder.discard_unstarted()
        return refuse(error)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            print(f"jaxblock: memory ran out: {' '.join(str(error).split())[:300]}; {again}", file=sys.stderr)
            return FAILED
        if not processes.several():
            raise
        print(
            f"jaxblock: another process of the run is gone ({' '.join(str(error).split())[:400]}); {again}",
            file=sys.stderr,
        )
        return FAILED
    if not folder.writes:
        return code
    if as_json:
        print(json.dumps({"run": str(folder.path), **summary}))
    else:
        print(_report(folder.path, summary, folder.sample.read_text(encoding="utf-8")))
    return code


def _in_all() -> str:
    """Return what a command for one process leaves unsaid where there are several."""
    from jaxblock.parallel import processes

    return ", in every process as before, or in one alone" if processes.several() else ""


def _report(run: Path, summary: Mapping[str, Any], sample: str) -> str:
    """Return what a person wants to know at the end of a run."""
    lines = [f"{summary['status']} after {summary['steps']} steps and {summary['wall_s']:.0f} s"]
    if summary["status"] == "interrupted":
        lines.append(f"saved; continue with: jaxblock train --resume {run}{_in_all()}")
    if summary["bad_step"] is not None:
        lines.append(
            f"stopped by the guard at step {summary['bad_step']} (last row of metrics.jsonl); pass over bad steps "
            f"with: jaxblock train --resume {run} --guard.{summary['status']} skip"
        )
    if summary["val_loss"] is not None:
        lines.append(
            f"validation loss {summary['val_loss']:.4f} nats per target"
            f" (to beat, {summary['baseline']}: {summary['baseline_loss']:.4f})"
        )
    if summary["val_bits_per_byte"] is not None:
        lines.append(f"bits per byte   {summary['val_bits_per_byte']:.4f}")
    return "\n".join([*lines, f"run             {run}", "sample:", "", sample.rstrip("\n")])
