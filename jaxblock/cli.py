"""The `jaxblock` command: train, sample. Bad input ends in one sentence on stderr and exit code 2."""

import dataclasses
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypedDict

import tyro

from jaxblock.contracts import check_choice, nearest

BAD_INPUT, INTERRUPTED = 2, 130
Action = Callable[[], int]
"""What a command does once its arguments are known to be good; returns the exit code."""

SAMPLE_FIELDS = ("prompt", "length", "temperature", "top_k", "top_p")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code.

    0 done, 2 bad input (nothing was written), 3 training stopped by its own guard, 130/143 interrupted.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    name, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if name in ("-h", "--help"):
        print(_overview())
        return 0
    try:
        check_choice("command", name, COMMANDS)
        act = COMMANDS[name](rest)
    except ValueError as error:
        return _refuse(error)
    except KeyboardInterrupt:
        return INTERRUPTED
    try:
        return act()
    except KeyboardInterrupt:  # a second signal, while the first was being obeyed
        return INTERRUPTED


def _refuse(error: ValueError) -> int:
    print(f"jaxblock: {error}", file=sys.stderr)
    return BAD_INPUT


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
    _check_arguments(arguments, known, positionals=1, refuse=lambda name: check_path(name, "flag"))
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
        folder.check_corpus(prepared.corpus)

    def act() -> int:
        keep_freed_memory()
        try:
            code, summary = run(prepared, folder)
        except RunError as error:
            return _refuse(error)
        if command.json:
            print(json.dumps({"run": str(folder.path), **summary}))
        else:
            print(_report(folder.path, summary, folder.sample.read_text(encoding="utf-8")))
        return code

    return act


def sample(arguments: Sequence[str]) -> Action:
    """Continue a prompt with a trained run: jaxblock sample RUN --prompt TEXT."""
    from jaxblock.training.config_file import parse_literal, parse_override
    from jaxblock.training.sample_run import sample_run

    known = [*SAMPLE_FIELDS, "seed"]
    loose = _check_arguments(arguments, known, positionals=1, refuse=lambda name: _refuse_flag(name, known))
    if not loose and not _asks_for_help(arguments):
        raise ValueError("RUN is missing; it must be the folder of a run: jaxblock sample RUN --prompt TEXT")
    command = tyro.cli(
        SampleCommand, prog="jaxblock sample", description=sample.__doc__, args=list(arguments)
    )
    texts = {name: getattr(command, name) for name in SAMPLE_FIELDS}
    given = {name: parse_override(f"sample.{name}", text) for name, text in texts.items() if text is not None}
    result = sample_run(Path(command.run), given, seed=parse_literal(command.seed))

    def act() -> int:
        print(json.dumps(result._asdict()) if command.json else result.prompt + result.text)
        return 0

    return act


COMMANDS: Mapping[str, Callable[[Sequence[str]], Action]] = {"train": train, "sample": sample}

Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff]
Text = Annotated[str | None, tyro.conf.arg(metavar="STRING", help_behavior_hint="")]
Integer = Annotated[str | None, tyro.conf.arg(metavar="INTEGER", help_behavior_hint="")]
Number = Annotated[str | None, tyro.conf.arg(metavar="NUMBER", help_behavior_hint="")]


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
    """Print one line of JSON."""


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


def _check_arguments(
    arguments: Sequence[str], known: Sequence[str], *, positionals: int, refuse: Callable[[str], None]
) -> list[str]:
    """Say in one sentence what the parser would say on half a page; return the arguments that are no flags.

    Args:
      arguments: the words after the command's name.
      known: flags that take a value; `--json` and `--help` take none.
      positionals: most arguments that are no flags.
      refuse: raises ValueError for a flag that is not known.
    """
    words, loose = list(arguments), []
    while words:
        word = words.pop(0)
        flag, equals, _ = word.removeprefix("--").partition("=")
        flag = flag.replace("-", "_")
        if word == "-h":
            continue
        if not word.startswith("--"):
            loose.append(word)
        elif flag in ("json", "help"):
            if equals:
                raise ValueError(f"flag --{flag} takes no value, but came as {word!r}")
        elif flag not in known:
            refuse(flag)
        elif not equals and (not words or words.pop(0).startswith("--")):
            raise ValueError(f"flag {word} needs a value; write {word}=VALUE")
    unexpected = [word for word in loose if word.startswith("-")] + loose[positionals:]
    if unexpected:
        raise ValueError(f"unexpected argument {unexpected[0]!r}; flags start with -- (see --help)")
    return loose


def _refuse_flag(name: str, known: Sequence[str]) -> None:
    raise ValueError(f"unknown flag {name!r}{nearest(name, known)}")


def _asks_for_help(arguments: Sequence[str]) -> bool:
    return "-h" in arguments or "--help" in arguments


def _report(run: Path, summary: Mapping[str, Any], sample: str) -> str:
    """Return what a person wants to know at the end of a run."""
    lines = [f"{summary['status']} after {summary['steps']} steps and {summary['wall_s']:.0f} s"]
    if summary["status"] == "interrupted":
        lines.append(f"saved; continue with: jaxblock train --resume {run}")
    if summary["val_loss"] is not None:
        lines.append(
            f"validation loss {summary['val_loss']:.4f} nats per token"
            f" (to beat, a trigram model: {summary['baseline_trigram_loss']:.4f})"
        )
    if summary["val_bits_per_byte"] is not None:
        lines.append(f"bits per byte   {summary['val_bits_per_byte']:.4f}")
    return "\n".join(
        [*lines, f"run             {run}", "sample (prompt and continuation):", "", sample.rstrip("\n")]
    )


def _overview() -> str:
    lines = [f"  {name:8} {command.__doc__}" for name, command in COMMANDS.items()]
    return "\n".join(
        ["usage: jaxblock COMMAND [ARGUMENTS]", "", *lines, "", "jaxblock COMMAND --help tells more."]
    )


if __name__ == "__main__":
    sys.exit(main())
