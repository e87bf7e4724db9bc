"""`jaxblock sweep`: a plan to results, statistics and a report."""

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from jaxblock.cli.arguments import Action, Flag, check_arguments, refuse_flag

FAILED = 1
VALUED, FLAGS = ("store", "ray"), ("dry_run", "retry")


@dataclasses.dataclass(frozen=True)
class SweepCommand:
    """Run a sweep."""

    plan: Annotated[str | None, tyro.conf.Positional] = None
    """A TOML file with [sweep], [axes] and the sections of a config. Left out: the plan in --store."""
    store: str | None = None
    """The sweep's folder, new or not: what has a result there is not run again. Left out: sweeps/NAME."""
    ray: str | None = None
    """Where workers run: auto (the Ray cluster this machine is part of), HOST:PORT of a cluster's head, or local (a
    cluster on this machine, for this sweep). Left out: processes of this machine, without Ray."""
    dry_run: Flag = False
    """Print the arms with parameters, FLOPs, estimated time and memory, and write nothing."""
    retry: Flag = False
    """Also make the runs again that ended by an error, a dead worker or for want of memory."""
    json: Flag = False
    """Print one line of JSON."""


def sweep(arguments: Sequence[str]) -> Action:
    """Run a plan of many trainings and report on them: jaxblock sweep PLAN.toml [--store DIR] [--dry-run]."""
    if "--dry-run" not in arguments and "--dry_run" not in arguments:
        _leave_the_accelerator()
    from jaxblock.cli.sweep_page import arms, page
    from jaxblock.sweeps.crew import LocalCrew, SweepError
    from jaxblock.sweeps.plan import read_plan
    from jaxblock.sweeps.runner import prepare_sweep, run_sweep

    words = [word for word in arguments if word.removeprefix("--").replace("-", "_") not in FLAGS]
    check_arguments(words, VALUED, positionals=1, refuse=lambda flag: refuse_flag(flag, (*VALUED, *FLAGS)))
    command = tyro.cli(SweepCommand, prog="jaxblock sweep", description=_description(), args=list(arguments))
    if command.plan is None and command.store is None:
        raise ValueError("jaxblock sweep needs a plan file, or --store DIR of a sweep that has one")
    if command.plan is not None and Path(command.plan).is_dir():
        raise ValueError(
            f"{command.plan!r} is a folder; go on with the sweep in it by --store {command.plan}"
        )
    path = Path(command.plan) if command.plan is not None else Path(command.store or "") / "plan.toml"
    plan = read_plan(path)
    prepared = prepare_sweep(plan)
    folder = Path(command.store) if command.store is not None else Path("sweeps") / _plain(plan.sweep.name)
    _check_folder(folder, plan.sweep.name)
    cluster = None
    if command.ray is not None and not command.dry_run:
        from jaxblock.sweeps.ray_crew import Cluster

        cluster = Cluster(command.ray, workers=plan.sweep.workers)

    def act() -> int:
        if command.dry_run:
            found = arms(prepared, folder)
            print(
                json.dumps({"plan": plan.values(), "arms": found}) if command.json else page(prepared, found)
            )
            return 0
        try:
            with contextlib.redirect_stdout(sys.stderr):  # where Ray says on stdout that it lost a worker
                code = run_sweep(
                    prepared,
                    folder,
                    retry=command.retry,
                    make_crew=LocalCrew if cluster is None else cluster.crew,
                )
        except SweepError as error:
            print(f"jaxblock: {error}", file=sys.stderr)
            return FAILED
        finally:
            if cluster is not None:
                cluster.close()
        return _report(folder, code, as_json=command.json, ray=command.ray)

    return act


def _description() -> str:
    """Return what `--help` opens with: the command, and what a plan's [sweep] may hold."""
    from jaxblock.sweeps.plan import SweepConfig

    lines = [f"  {name}: {field.description}" for name, field in SweepConfig.model_fields.items()]
    return "\n".join([f"{sweep.__doc__}", "", "[sweep] of a plan holds:", *lines])


def _leave_the_accelerator() -> None:
    """Load JAX for the CPU: an accelerator is the workers', whom this process only looks after."""
    if "jax" in sys.modules:
        return
    given = os.environ.get("JAX_PLATFORMS")
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax  # noqa: F401  reads the variable now

    del os.environ["JAX_PLATFORMS"]
    if given is not None:
        os.environ["JAX_PLATFORMS"] = given


def _report(folder: Path, code: int, *, as_json: bool, ray: str | None) -> int:
    """Write the report of what is there, and print what it says."""
    from jaxblock.cli.report import print_report
    from jaxblock.sweeps.reading import read_sweep

    if not code:
        print_report(read_sweep(folder), folder, as_json=as_json)
    elif as_json:
        print(json.dumps({"store": str(folder), "status": "interrupted"}))
    else:
        where = "" if ray is None else f" --ray {ray}"
        print(f"interrupted; go on with: jaxblock sweep --store {folder}{where}")
    return code


def _check_folder(folder: Path, name: str) -> None:
    """Raise ValueError for a folder that cannot be made, or holds something else than this sweep."""
    from jaxblock.sweeps.schema import NoPlanError
    from jaxblock.sweeps.store import FILE, STATES, Store

    there = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    if not there.is_dir():
        raise ValueError(f"store is {str(folder)!r}, and {str(there)!r} is a file; it must be a folder")
    if not os.access(there, os.W_OK):
        raise ValueError(f"store is {str(folder)!r}, and {str(there)!r} cannot be written to")
    if not folder.is_dir():
        return
    ours = (FILE, f"{FILE}-wal", f"{FILE}-shm", STATES, "plan.toml")
    if not (folder / FILE).exists() and any(entry.name not in ours for entry in folder.iterdir()):
        raise ValueError(f"store is {str(folder)!r}, a folder that holds other things; name a new one")
    if (folder / FILE).exists() and Store.has_begun(folder):
        with contextlib.closing(Store.open(folder)) as store, contextlib.suppress(NoPlanError):
            other = store.newest_plan()[1]["sweep"]["name"]
            if other != name:
                raise ValueError(
                    f"store is {str(folder)!r}, which holds the sweep {other!r}, and the plan is {name!r}; name "
                    "another store, or give the plan that name"
                )


def _plain(name: str) -> str:
    """Return a name as a file name."""
    plain = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in name).strip(".")
    return plain[:100] or "sweep"
