"""`jaxblock report`: what a sweep found so far, as one page and its files."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from jaxblock.cli.arguments import Action, Flag, asks_for_help, check_arguments, refuse_flag

if TYPE_CHECKING:
    from jaxblock.sweeps.results import Sweep


@dataclasses.dataclass(frozen=True)
class ReportCommand:
    """Write the report of a sweep, finished or not."""

    sweep: Annotated[str, tyro.conf.Positional]
    """The sweep's folder, into which report.html, results.csv, columns.csv, verdicts.json, tables/ and figures/ go."""
    json: Flag = False
    """Print one line of JSON: the page's path and what verdicts.json holds."""


def report(arguments: Sequence[str]) -> Action:
    """Write the report of a sweep, also while it runs: jaxblock report DIR."""
    loose = check_arguments(arguments, (), positionals=1, refuse=lambda name: refuse_flag(name, ("json",)))
    if not loose and not asks_for_help(arguments):
        raise ValueError("DIR is missing; it must be the folder of a sweep: jaxblock report DIR")
    command = tyro.cli(
        ReportCommand, prog="jaxblock report", description=report.__doc__, args=list(arguments)
    )
    from jaxblock.sweeps.reading import read_sweep

    folder = Path(command.sweep)
    sweep = read_sweep(folder)

    def act() -> int:
        print_report(sweep, folder, as_json=command.json)
        return 0

    return act


def print_report(sweep: "Sweep", folder: Path, *, as_json: bool) -> None:
    """Write a sweep's report into a folder, and print where it is and what it says."""
    from jaxblock.sweeps.report import write_report

    page = write_report(sweep, folder)
    found = json.loads((folder / "verdicts.json").read_text(encoding="utf-8"))
    print(json.dumps({"report": str(page), **found}) if as_json else _words(page, found["verdicts"]))


def _words(page: Path, verdicts: Sequence[dict[str, Any]]) -> str:
    """Return the page's path and one line per verdict."""
    width = max((len(one["status"]) for one in verdicts), default=0)
    return "\n".join([str(page), *(f"  {one['status']:{width}}  {one['sentence']}" for one in verdicts)])
