"""What every command shares: words to flags, refusals of one sentence, exit codes."""

import sys
from collections.abc import Callable, Sequence
from typing import Annotated

import tyro

from jaxblock.contracts import nearest

BAD_INPUT, INTERRUPTED = 2, 130
_MOST_CHARACTERS, _LAST_CHARACTERS = 1200, 400
Action = Callable[[], int]
"""What a command does once its arguments are known to be good; returns the exit code."""

Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff]
Text = Annotated[str | None, tyro.conf.arg(metavar="STRING", help_behavior_hint="")]
Integer = Annotated[str | None, tyro.conf.arg(metavar="INTEGER", help_behavior_hint="")]
Number = Annotated[str | None, tyro.conf.arg(metavar="NUMBER", help_behavior_hint="")]


def refuse(error: ValueError) -> int:
    """Say what is wrong with the input; return the exit code."""
    print(f"jaxblock: {one_line(str(error))}", file=sys.stderr)
    return BAD_INPUT


def one_line(text: str) -> str:
    """Return a text as one line that a terminal shows and does not obey: names hold line ends, values megabytes."""
    if len(text) > _MOST_CHARACTERS:
        text = f"{text[: _MOST_CHARACTERS - _LAST_CHARACTERS]} ... {text[-_LAST_CHARACTERS:]}"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def check_arguments(
    arguments: Sequence[str],
    known: Sequence[str],
    *,
    positionals: int,
    refuse: Callable[[str], None],
    switches: Sequence[str] = (),
) -> list[str]:
    """Say in one sentence what the parser would say on half a page; return the arguments that are no flags.

    Args:
      arguments: the words after the command's name.
      known: flags that take a value.
      positionals: most arguments that are no flags.
      refuse: raises ValueError for a flag that is not known.
      switches: flags that take none, besides `--json` and `--help`.
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
        elif flag in ("json", "help", *switches):
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


def refuse_flag(name: str, known: Sequence[str]) -> None:
    """Raise ValueError for a flag that does not exist, with the nearest one that does."""
    raise ValueError(f"unknown flag {name!r}{nearest(name, known)}")


def asks_for_help(arguments: Sequence[str]) -> bool:
    """Return whether the words ask for help."""
    return "-h" in arguments or "--help" in arguments
