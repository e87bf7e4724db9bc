"""`jaxblock sample`: what a trained run says after a prompt."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from jaxblock.cli.arguments import (
    Action,
    Flag,
    Integer,
    Number,
    Text,
    asks_for_help,
    check_arguments,
    refuse_flag,
)

SAMPLE_FIELDS = ("prompt", "length", "temperature", "top_k", "top_p")


@dataclasses.dataclass(frozen=True)
class SampleCommand:
    """Continue a prompt with a trained run. Values stay text here: `config_file` reads and checks them."""

    run: Annotated[str, tyro.conf.Positional]
    """The run's folder."""
    prompt: Text = None
    """Text to continue (token ids separated by spaces for token shards). Left out: the run's sample.prompt, if any."""
    length: Integer = None
    """Tokens to draw. Left out, here and below: as the run's config says."""
    temperature: Number = None
    """0 = greedy."""
    top_k: Integer = None
    """Draw among the k likeliest tokens."""
    top_p: Number = None
    """Draw among the likeliest tokens that hold this probability."""
    seed: Annotated[str, tyro.conf.arg(metavar="INTEGER")] = "0"
    """Another seed, another continuation."""
    json: Flag = False
    """Print one line of JSON, at the end."""


def sample(arguments: Sequence[str]) -> Action:
    """Continue a prompt with a trained run, printed as it comes: jaxblock sample RUN --prompt TEXT."""
    from jaxblock.training.config_file import parse_literal, parse_override
    from jaxblock.training.sample_run import sample_run

    known = [*SAMPLE_FIELDS, "seed"]
    loose = check_arguments(arguments, known, positionals=1, refuse=lambda name: refuse_flag(name, known))
    if not loose and not asks_for_help(arguments):
        raise ValueError("RUN is missing; it must be the folder of a run: jaxblock sample RUN --prompt TEXT")
    command = tyro.cli(
        SampleCommand, prog="jaxblock sample", description=sample.__doc__, args=list(arguments)
    )
    texts = {name: getattr(command, name) for name in SAMPLE_FIELDS}
    given = {name: parse_override(f"sample.{name}", text) for name, text in texts.items() if text is not None}
    result = sample_run(Path(command.run), given, seed=parse_literal(command.seed))

    def act() -> int:
        if command.json:
            print(json.dumps({"prompt": result.prompt, "text": "".join(result.pieces)}))
            return 0
        print(result.prompt, end=result.separator, flush=True)
        for piece in result.pieces:
            print(piece, end="", flush=True)
        print()
        return 0

    return act
