"""Files that another file names, and files that have an end: no name leads out of a folder, no pipe is waited for."""

import os
from pathlib import Path


def path_inside(folder: Path, name: object, *, where: str) -> Path:
    """Return the path of a regular file that lies in `folder`, under the name that another file gives.

    Args:
      folder: where it lies; it may itself be a link.
      name: what the other file says.
      where: words for that file.

    Raises:
      ValueError: a name that is a path, a link that leads out of the folder, no regular file, none at all.
    """
    is_plain = isinstance(name, str) and name not in ("", ".", "..") and not {*name} & {"/", "\\", "\0"}
    if not is_plain:
        raise ValueError(f"{where} names the file {name!r}; it must be a plain name of a file beside it")
    path = folder / str(name)
    if os.path.dirname(os.path.realpath(path)) != os.path.realpath(folder):
        raise ValueError(f"{path} is a link that leads out of its folder; put the file itself there")
    check_regular(path)
    return path


def is_inside(folder: Path, name: str) -> bool:
    """Whether a path below `folder`, as "d/0", stays below it: no "..", not absolute, no link that leads out."""
    if "\0" in name or ".." in Path(name).parts or Path(name).is_absolute():
        return False
    return Path(os.path.realpath(folder / name)).is_relative_to(os.path.realpath(folder))


def check_regular(path: Path) -> None:
    """Raise ValueError unless this is a regular file or a link to one: a pipe is waited for, a device has no end."""
    try:
        path.stat()
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        raise ValueError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if not path.is_file():
        raise ValueError(f"{path} cannot be read: it is no regular file")


def read_utf8_file(path: Path) -> str:
    """Return a regular file's text; ValueError if it cannot be read or is not UTF-8."""
    check_regular(path)
    try:
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 at byte {error.start}") from error
