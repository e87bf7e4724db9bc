"""`jaxblock eval`: how good a trained run is on its validation data or on a file."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from jaxblock.cli.arguments import (
    Action,
    Flag,
    Integer,
    Text,
    asks_for_help,
    check_arguments,
    refuse_flag,
)


@dataclasses.dataclass(frozen=True)
class EvalCommand:
    """Score text with a trained run, every token once, with sliding context."""

    run: Annotated[str, tyro.conf.Positional]
    """The run's folder."""
    file: Text = None
    """Text (or a .bin shard of token ids) to score. Left out: the run's validation data."""
    stride: Integer = None
    """Tokens a window moves on; each is read with at least context - stride tokens before it. Left out: half of it."""
    weights: Annotated[str, tyro.conf.arg(metavar="last|average")] = "last"
    """last, or average for the moving average of a run that kept one."""
    json: Flag = False
    """Print one line of JSON."""


def evaluate(arguments: Sequence[str]) -> Action:
    """Score a trained run on its validation data or a file: jaxblock eval RUN [--file FILE]."""
    from jaxblock.training.config_file import parse_literal
    from jaxblock.training.evaluate_run import evaluate_run

    known = ["file", "stride", "weights"]
    loose = check_arguments(arguments, known, positionals=1, refuse=lambda name: refuse_flag(name, known))
    if not loose and not asks_for_help(arguments):
        raise ValueError("RUN is missing; it must be the folder of a run: jaxblock eval RUN")
    command = tyro.cli(EvalCommand, prog="jaxblock eval", description=evaluate.__doc__, args=list(arguments))
    found = evaluate_run(
        Path(command.run),
        file=None if command.file is None else Path(command.file),
        stride=None if command.stride is None else parse_literal(command.stride),
        weights=command.weights,
    )

    def act() -> int:
        print(json.dumps(found) if command.json else _report(found))
        return 0

    return act


def _report(found: Mapping[str, Any]) -> str:
    """Return what was found, a line each."""
    lines = []
    for name, value in found.items():
        shown = (
            f"{value:,.4f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value
        )
        lines.append(f"{name.replace('_', ' '):14} {'unknown' if value is None else shown}")
    return "\n".join(lines)
