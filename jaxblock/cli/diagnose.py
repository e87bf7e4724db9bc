"""`jaxblock diagnose`: is a model what it says, and does it learn? A table of checks that can fail."""

import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from jaxblock.cli.arguments import Action, Flag, Text
from jaxblock.contracts import check_choice

PASSED, NOT_PASSED = 0, 1
_OPTIONS = ("figures", "only")


@dataclasses.dataclass(frozen=True)
class DiagnoseCommand:
    """Check a config's model, or a run at its newest checkpoint."""

    config: Annotated[str | None, tyro.conf.Positional] = None
    """A TOML file, or the folder of a run. Left out: the built-in defaults, which are configs/quickstart.toml."""
    only: Text = None
    """Names of the checks to run, as in overfit,causality. Left out: all of them."""
    figures: Text = None
    """A folder for two figures: the rows learnt at several rates, and what the stream does along depth."""
    json: Flag = False
    """Print one line of JSON."""


def diagnose(arguments: Sequence[str]) -> Action:
    """Find what is wrong with a model: jaxblock diagnose [CONFIG.toml | RUN] [--figures DIR] [--section.field V]."""
    from jaxblock.cli.config_arguments import parse_with_config, read_config
    from jaxblock.diagnose import (
        CHECKS,
        FAIL,
        Measured,
        page,
        run_checks,
        subject_of_config,
        subject_of_run,
        verdict,
    )
    from jaxblock.diagnose.figures import FIGURES, draw_figures
    from jaxblock.training.host_memory import keep_freed_memory

    keep_freed_memory()
    command, overrides = parse_with_config(
        DiagnoseCommand, arguments, name="diagnose", description=diagnose.__doc__, known=_OPTIONS
    )
    names = list(CHECKS) if command.only is None else [name.strip() for name in command.only.split(",")]
    for name in names:
        check_choice("--only", name, CHECKS)
    figures = None if command.figures is None else _new_figures(command.figures, FIGURES)
    path = None if command.config is None else Path(command.config)
    if path is not None and path.is_dir():
        if overrides:
            raise ValueError(
                f"{next(iter(overrides))} cannot be changed: {str(path)!r} is a run, which has its own config.toml"
            )
        subject = subject_of_run(path)
    else:
        subject = subject_of_config(read_config(path, overrides))
    what = "the built-in defaults" if path is None else str(path)
    at = "initial values" if subject.step is None else f"step {subject.step}"

    def act() -> int:
        begun = time.perf_counter()
        measured = Measured(subject)

        def say(name: str) -> None:
            print(f"{time.perf_counter() - begun:5.1f} s  {name}", file=sys.stderr)

        rows = run_checks(measured, names, say)
        about = {
            "subject": what,
            "at": at,
            "verdict": verdict(rows),
            "seconds": round(time.perf_counter() - begun, 1),
        }
        if not command.json:  # the table first: it is what took the time
            print(page(rows, heading=f"{what}, {at}", seconds=about["seconds"]), flush=True)
        drawn = [] if figures is None else draw_figures(measured, figures)
        print(_record(about, rows, drawn) if command.json else "\n".join(f"figure: {path}" for path in drawn))
        return NOT_PASSED if about["verdict"] == FAIL else PASSED

    return act


def _new_figures(text: str, names: Sequence[str]) -> Path:
    """Return a folder that figures can be written to; it is made.

    Raises:
      ValueError: it is a file, holds a figure already, or cannot be written to.
    """
    folder = Path(text)
    if not text:
        raise ValueError("--figures is ''; it must be a folder")
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--figures is {text!r}, which is no folder")
    for name in names:
        if (folder / name).exists():
            raise ValueError(f"--figures is {text!r}, which has a {name} already; choose another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"--figures is {text!r}, which cannot be written to: {error}") from error
    return folder


def _record(about: dict[str, Any], rows: Sequence[Any], drawn: Sequence[Path]) -> str:
    """Return everything as one line of JSON; what is not finite is null."""
    import math

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: plain(part) for name, part in value.items()}
        return None if isinstance(value, float) and not math.isfinite(value) else value

    checks = [
        {"name": row.name, "step": row.step, "seconds": round(row.seconds, 2), **plain(row.finding.as_dict)}
        for row in rows
    ]
    return json.dumps({**about, "checks": checks, "figures": [str(path) for path in drawn]})
