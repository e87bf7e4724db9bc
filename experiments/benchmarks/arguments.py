"""What the command lines of the benchmarks share: numbers, figures and help that are checked and said the same way."""

import argparse
import os
from pathlib import Path


class Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """The description as it is written, and the default after an option's help, where there is one to state."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or isinstance(action.default, bool):
            return action.help
        return super()._get_help_string(action)


def positive(word: str) -> int:
    """Return a whole number of at least 1.

    Raises:
      argparse.ArgumentTypeError: anything else.
    """
    try:
        number = int(word)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{word!r} is not a whole number of at least 1")
    return number


def figure_path(word: str) -> Path:
    """Return the path of a figure that can be written, so that no measurement is lost to a mistyped name.

    Raises:
      argparse.ArgumentTypeError: no such folder, one that cannot be written in, a folder itself, a type of file that
        matplotlib does not write.
    """
    from matplotlib.backend_bases import FigureCanvasBase

    path, kinds = Path(word), FigureCanvasBase.get_supported_filetypes()
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{word!r}: there is no folder {str(path.parent)!r}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{word!r} cannot be written")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{word!r} is a folder; a file is needed")
    if path.suffix[1:].lower() not in kinds:
        raise argparse.ArgumentTypeError(f"{word!r} must end in one of {', '.join(sorted(kinds))}")
    return path
