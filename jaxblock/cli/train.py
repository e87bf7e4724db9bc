"""`jaxblock train`: a config, changed by flags, to a run."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypedDict

import tyro

from jaxblock.cli.arguments import Action, Flag, check_arguments, refuse


@dataclasses.dataclass(frozen=True)
class TrainCommand:
    """Train a language model."""

    config: Annotated[str | None, tyro.conf.Positional] = None
    """A TOML file. Left out: the built-in defaults, which are configs/quickstart.toml."""
    resume: str | None = None
    """Continue the run in this folder from its newest checkpoint."""
    json: Flag = False
    """Print the summary as one line of JSON."""


def _train_command() -> type[TrainCommand]:
    """Return the record of `train`'s arguments: a text flag for every field of every section."""
    from jaxblock.training.config_file import fields

    sections: dict[str, dict[str, Any]] = {}
    for field in fields():
        text = f"{field.description} (default: {'none' if field.default is None else field.default})"
        argument = tyro.conf.arg(metavar=field.type.upper(), help=text, help_behavior_hint="")
        sections.setdefault(field.section, {})[field.name] = Annotated[str, argument]
    kinds = [
        (name, TypedDict(name, entries, total=False), dataclasses.field(default_factory=dict))  # type: ignore[operator]
        for name, entries in sections.items()
    ]
    return dataclasses.make_dataclass("TrainOverrides", kinds, bases=(TrainCommand,), frozen=True)


def train(arguments: Sequence[str]) -> Action:
    """Train a language model: jaxblock train [CONFIG.toml] [--section.field VALUE]."""
    from jaxblock.training.config_file import (
        build_config,
        check_path,
        fields,
        parse_override,
        read_config_file,
    )
    from jaxblock.training.host_memory import keep_freed_memory
    from jaxblock.training.loop import train as run
    from jaxblock.training.prepare import prepare
    from jaxblock.training.run_folder import RunError, RunFolder

    known = ["resume", *(field.path for field in fields())]
    check_arguments(arguments, known, positionals=1, refuse=lambda name: check_path(name, "flag"))
    command = tyro.cli(
        _train_command(), prog="jaxblock train", description=train.__doc__, args=list(arguments)
    )
    overrides = {
        f"{section}.{name}": parse_override(f"{section}.{name}", text)
        for section, entries in vars(command).items()
        if isinstance(entries, dict)
        for name, text in entries.items()
    }
    if command.resume is not None:
        folder = RunFolder.open(Path(command.resume))
        source = folder.config if command.config is None else Path(command.config)
        config = build_config(read_config_file(source), overrides)
        folder.check_resumable(config)
    else:
        values = {} if command.config is None else read_config_file(Path(command.config))
        config = build_config(values, overrides)
        folder = RunFolder.check_new(config)
    prepared = prepare(config)
    if command.resume is None:
        folder.create(config)
    else:
        folder.check_data(prepared.task.facts)

    def act() -> int:
        keep_freed_memory()
        try:
            code, summary = run(prepared, folder)
        except RunError as error:
            return refuse(error)
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
    if summary["val_loss"] is not None:
        lines.append(
            f"validation loss {summary['val_loss']:.4f} nats per target"
            f" (to beat, {summary['baseline']}: {summary['baseline_loss']:.4f})"
        )
    if summary["val_bits_per_byte"] is not None:
        lines.append(f"bits per byte   {summary['val_bits_per_byte']:.4f}")
    return "\n".join(
        [*lines, f"run             {run}", "sample (prompt and continuation):", "", sample.rstrip("\n")]
    )
