"""What the commands that take a config share: a flag for every field of every section, and a checked config."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypedDict, TypeVar

import tyro

from jaxblock.cli.arguments import check_arguments, refuse_flag
from jaxblock.contracts import nearest
from jaxblock.training.config import TrainConfig
from jaxblock.training.config_file import build_config, check_path, fields, parse_override, read_config_file

Command = TypeVar("Command")


def parse_with_config(
    command: type[Command],
    arguments: Sequence[str],
    *,
    name: str,
    description: str | None,
    known: Sequence[str] = (),
    switches: Sequence[str] = (),
) -> tuple[Command, dict[str, Any]]:
    """Return a command's record and the overrides, {"model.depth": 6}, that its words hold.

    Args:
      command: a frozen dataclass of the command's own arguments, at most one of them positional.
      arguments: the words after the command's name.
      name: the command's name.
      description: what `--help` opens with.
      known: flags of the record's own that take a value.
      switches: flags of its own that take none, besides `--json`.

    Raises:
      ValueError: an unknown flag, one without its value, a word too many.
    """
    flags = [*known, *(field.path for field in fields())]

    def refuse(flag: str) -> None:
        if nearest(flag, own := [*known, *switches]):
            refuse_flag(flag, own)
        check_path(flag, "flag")

    check_arguments(arguments, flags, positionals=1, refuse=refuse, switches=switches)
    parsed = tyro.cli(
        _with_sections(command), prog=f"jaxblock {name}", description=description, args=list(arguments)
    )
    overrides = {
        f"{section}.{field}": parse_override(f"{section}.{field}", text)
        for section, entries in vars(parsed).items()
        if isinstance(entries, dict)
        for field, text in entries.items()
    }
    return parsed, overrides


def read_config(path: str | Path | None, overrides: dict[str, Any]) -> TrainConfig:
    """Return the checked config of a file, or of the built-in defaults for None, with overrides on top.

    Raises:
      ValueError: a file that cannot be read, or what is wrong with its values or the overrides.
    """
    return build_config({} if path is None else read_config_file(Path(path)), overrides)


def _with_sections(command: type[Command]) -> type[Command]:
    """Return the record with a text flag for every field of every section."""
    sections: dict[str, dict[str, Any]] = {}
    for field in fields():
        text = f"{field.description} (default: {'none' if field.default is None else field.default})"
        argument = tyro.conf.arg(metavar=field.type.upper(), help=text, help_behavior_hint="")
        sections.setdefault(field.section, {})[field.name] = Annotated[str, argument]
    kinds = [
        (name, TypedDict(name, entries, total=False), dataclasses.field(default_factory=dict))  # type: ignore[operator]
        for name, entries in sections.items()
    ]
    return dataclasses.make_dataclass(f"{command.__name__}Flags", kinds, bases=(command,), frozen=True)
