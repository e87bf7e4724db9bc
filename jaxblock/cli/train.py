"""`jaxblock train`: a config, changed by flags, to a run."""

import dataclasses
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from jaxblock.cli.arguments import Action, Flag, refuse

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
    from jaxblock.training.loop import train as run
    from jaxblock.training.prepare import prepare
    from jaxblock.training.run_folder import FollowedFolder, RunError, RunFilesError, RunFolder, new_path
    from jaxblock.training.token_files import DataError

    keep_freed_memory()
    import jax

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
    with processes.together("cannot make the run's folder"):
        if command.resume is None:
            folder.create(config)

    def act() -> int:
        try:
            code, summary = run(prepared, folder)
        except (
            RunFilesError,
            OSError,
            DataError,
        ) as error:  # a full disk, a folder or a shard that went away
            print(f"jaxblock: {error}; continue with: jaxblock train --resume {folder.path}", file=sys.stderr)
            return FAILED
        except RunError as error:
            folder.discard_unstarted()
            return refuse(error)
        except jax.errors.JaxRuntimeError as error:
            if not processes.several():
                raise
            processes.leave(
                f"another process of the run is gone ({error}); continue with --resume {folder.path}"
            )
        if not folder.writes:
            return code
        if command.json:
            print(json.dumps({"run": str(folder.path), **summary}))
        else:
            print(_report(folder.path, summary, folder.sample.read_text(encoding="utf-8")))
        return code

    return act


def _report(run: Path, summary: Mapping[str, Any], sample: str) -> str:
    """Return what a person wants to know at the end of a run."""
    lines = [f"{summary['status']} after {summary['steps']} steps and {summary['wall_s']:.0f} s"]
    if summary["status"] == "interrupted":
        lines.append(f"saved; continue with: jaxblock train --resume {run}")
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
