"""`jaxblock diagnose`: is a model what it says, and does it learn? A table of checks that can fail."""

import dataclasses
import json
import sys
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
        run_checks,
        subject_of_config,
        subject_of_run,
        verdict,
    )
    from jaxblock.diagnose.figures import FIGURES, draw_figures
    from jaxblock.training.host_memory import keep_freed_memory

    command, overrides = parse_with_config(
        DiagnoseCommand, arguments, name="diagnose", description=diagnose.__doc__, known=_OPTIONS
    )
    names = list(CHECKS) if command.only is None else [name.strip() for name in command.only.split(",")]
    for name in names:
        check_choice("--only", name, CHECKS)
    figures = None if command.figures is None else _new_figures(Path(command.figures), FIGURES)
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
        keep_freed_memory()
        begun = time.perf_counter()
        measured = Measured(subject)

        def say(name: str) -> None:
            print(f"{time.perf_counter() - begun:5.1f} s  {name}", file=sys.stderr)

        rows = run_checks(measured, names, say)
        drawn = [] if figures is None else draw_figures(measured, figures)
        about = {
            "subject": what,
            "at": at,
            "verdict": verdict(rows),
            "seconds": round(time.perf_counter() - begun, 1),
        }
        print(_record(about, rows, drawn) if command.json else _page(about, rows, drawn))
        return NOT_PASSED if about["verdict"] == FAIL else PASSED

    return act


def _new_figures(folder: Path, names: Sequence[str]) -> Path:
    """Return a folder that figures can be written to.

    Raises:
      ValueError: it is a file, or holds a figure already.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--figures is {str(folder)!r}, which is no folder")
    for name in names:
        if (folder / name).exists():
            raise ValueError(
                f"--figures is {str(folder)!r}, which has a {name} already; choose another folder"
            )
    return folder


def _page(about: dict[str, Any], rows: Sequence[Any], drawn: Sequence[Path]) -> str:
    """Return the table: what was found, the bound, the control; then what to look at."""
    lines = [f"{about['subject']}, {about['at']}", ""]
    for row in rows:
        found = row.finding
        step = f"{row.step}." if row.step else ""
        lines.append(f"{found.verdict:4}  {step:2} {row.name.replace('_', ' '):16} {found.found}")
        if found.bound:
            lines.append(f"{'':26}bound: {found.bound}")
        if found.control is not None:
            number = "" if found.control.number is None else f": {found.control.number:.3g}"
            caught = "" if found.control.caught else ", NOT caught"
            lines.append(f"{'':26}control: {found.control.planted}{number}{caught}")
        if found.verdict in ("warn", "fail"):
            lines.append(f"{'':26}look at: {found.look}")
    counts = {
        word: sum(row.finding.verdict == word for row in rows) for word in ("pass", "warn", "fail", "skip")
    }
    lines += ["", f"{', '.join(f'{n} {word}' for word, n in counts.items())}; {about['seconds']:g} s"]
    lines += [f"figure: {path}" for path in drawn]
    return "\n".join(lines)


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
