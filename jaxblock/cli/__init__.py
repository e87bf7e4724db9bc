"""The `jaxblock` command. Bad input ends in one sentence on stderr and exit code 2."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence

from jaxblock.cli.arguments import INTERRUPTED, Action, refuse
from jaxblock.cli.check import check
from jaxblock.cli.count import count
from jaxblock.cli.diagnose import diagnose
from jaxblock.cli.evaluate import evaluate
from jaxblock.cli.report import report
from jaxblock.cli.sample import sample
from jaxblock.cli.sweep import sweep
from jaxblock.cli.tokenize import tokenize
from jaxblock.cli.topologies import topologies
from jaxblock.cli.train import train
from jaxblock.contracts import check_choice

CLOSED_PIPE = 141
COMMANDS: Mapping[str, Callable[[Sequence[str]], Action]] = {
    "train": train,
    "eval": evaluate,
    "sample": sample,
    "count": count,
    "topologies": topologies,
    "diagnose": diagnose,
    "check": check,
    "sweep": sweep,
    "report": report,
    "tokenize": tokenize,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code.

    0 done, 1 a check failed or a run's files could not be written, 2 bad input (nothing was written), 3 training
    stopped by its own guard, 130 or 143 interrupted.
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
        return refuse(error)
    except BrokenPipeError:
        return _closed_pipe()
    except KeyboardInterrupt:
        return INTERRUPTED
    try:
        return act()
    except BrokenPipeError:
        return _closed_pipe()
    except KeyboardInterrupt:  # a second signal, while the first was being obeyed
        return INTERRUPTED


def _closed_pipe() -> int:
    """Be silent: whoever read the output has enough of it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return CLOSED_PIPE


def _overview() -> str:
    lines = [f"  {name:10} {command.__doc__}" for name, command in COMMANDS.items()]
    return "\n".join(
        ["usage: jaxblock COMMAND [ARGUMENTS]", "", *lines, "", "jaxblock COMMAND --help tells more."]
    )
