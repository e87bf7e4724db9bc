"""A case: files, a command over them, and what came of it: accepted, refused in one sentence, or broken."""

import contextlib
import io
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from jaxblock.training.config import TrainConfig

CONFIG = "case.toml"
MOST_CHARACTERS = 2000
ROOT = Path(__file__).resolve().parents[2]
SUBJECTS = tuple(f"{section}." for section in TrainConfig.model_fields)
"""A refusal says what it is about: a section of the config, a file or flag of the command, the device."""


class Link(NamedTuple):
    """A symbolic link."""

    target: str


class Folder(NamedTuple):
    """An empty folder."""


class Pipe(NamedTuple):
    """A named pipe that nobody writes to."""


Entry = bytes | Link | Folder | Pipe


@dataclass(frozen=True)
class Case:
    """One input of the command."""

    kind: str
    """config or data."""
    words: str
    """What was done to a good input."""
    arguments: tuple[str, ...]
    files: Mapping[str, Entry]
    runs: bool = False
    """Whether it is run, once it is accepted, and not only prepared."""

    def write(self, folder: Path) -> None:
        """Write its files into an empty folder."""
        for name, entry in self.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(entry, bytes):
                path.write_bytes(entry)
            elif isinstance(entry, Link):
                path.symlink_to(entry.target)
            elif isinstance(entry, Pipe):
                os.mkfifo(path)
            else:
                path.mkdir(exist_ok=True)

    def show(self) -> dict[str, object]:
        """Return the case for a person who repeats it."""
        files = {
            name: repr(entry if not isinstance(entry, bytes) or len(entry) < 1500 else entry[:1500] + b" ...")
            for name, entry in self.files.items()
        }
        return {"words": self.words, "arguments": list(self.arguments), "files": files}


@dataclass(frozen=True)
class Outcome:
    """What came of a case."""

    name: str
    """accepted, refused, stopped (by the run's own guard, exit code 3) or broken."""
    fault: str = ""
    """What is broken; cases of equal faults are one kind."""
    details: str = field(default="", compare=False)


class TooLong(BaseException):
    """No answer in time; no handler of ordinary errors may take it for one."""


def try_here(case: Case, folder: Path, *, seconds: int = 100) -> Outcome:
    """Give the case to the command inside this process."""
    from jaxblock.cli import COMMANDS
    from jaxblock.cli.arguments import refuse

    before = _entries(folder)
    told, shown = io.StringIO(), io.StringIO()
    code: int | None = None
    try:
        quiet = contextlib.redirect_stdout(shown), contextlib.redirect_stderr(told)
        with _inside(folder), _limited(seconds), quiet[0], quiet[1]:
            try:
                act = COMMANDS[case.arguments[0]](case.arguments[1:])
                code = act() if case.runs else 0
            except ValueError as error:
                code = refuse(error)
    except TooLong:
        return Outcome("broken", f"no answer in {seconds} s")
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)
        ours = [frame for frame in where if "jaxblock" in frame.filename] or list(where)
        at = f"{Path(ours[-1].filename).name}:{ours[-1].name}"
        return Outcome("broken", f"{type(error).__name__} in {at}", traceback.format_exc()[-3000:])
    return _judge(case, code, told.getvalue(), sorted(_entries(folder) - before))


def try_apart(case: Case, folder: Path, *, seconds: int = 300) -> Outcome:
    """Give the case to the command in a process of its own."""
    before = _entries(folder)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "jaxblock.cli", *case.arguments]
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        return Outcome("broken", f"no answer in {seconds} s")
    told = done.stderr.decode("utf-8", "replace")
    return _judge(case, done.returncode, told, sorted(_entries(folder) - before))


def reduce_case(case: Case, outcome: Outcome, folder: Path, *, seconds: float = 60.0) -> Case:
    """Return the case with every line of its config left out, and every file, that its fault does not need."""
    stop = time.monotonic() + seconds

    def still(smaller: Case) -> bool:
        return time.monotonic() < stop and try_here(smaller, fresh(folder, smaller)) == outcome

    for name in list(case.files):
        smaller = replace(case, files={other: case.files[other] for other in case.files if other != name})
        case = smaller if name != CONFIG and still(smaller) else case
    text = case.files.get(CONFIG, b"")
    lines = text.splitlines(keepends=True) if isinstance(text, bytes) else []
    if CONFIG not in case.files:
        return case
    for line in reversed(list(lines)):
        fewer = [other for other in lines if other is not line]
        smaller = replace(case, files={**case.files, CONFIG: b"".join(fewer)})
        if still(smaller):
            case, lines = smaller, fewer
    return case


def fresh(folder: Path, case: Case) -> Path:
    """Return the folder, empty but for the case's files."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    case.write(folder)
    return folder


def _judge(case: Case, code: int | None, told: str, new: Sequence[str]) -> Outcome:
    if code in (0, 3):
        if "Traceback" in told:
            return Outcome("broken", "a traceback of a run that went on", told[-3000:])
        return Outcome("accepted" if code == 0 else "stopped")
    if code != 2:
        return Outcome("broken", f"exit code {code}", told[-3000:])
    lines = told.splitlines()
    if len(lines) != 1 or "Traceback" in told or not lines[0].startswith("jaxblock: "):
        return Outcome("broken", "a refusal that is not one line", told[-3000:])
    if new:
        return Outcome("broken", "a refusal that leaves files behind", f"{new}: {told}")
    if len(told) > MOST_CHARACTERS or not lines[0].isprintable():
        return Outcome("broken", "a refusal that is too long or does not print", told[:3000])
    if not _says_what(told, case):
        return Outcome("broken", "a refusal that does not say what it is about", told)
    return Outcome("refused", details=told)


def _says_what(told: str, case: Case) -> bool:
    names = {part for name in case.files for part in Path(name).parts if part.isprintable()}
    others = (
        "config",
        "flag",
        "argument",
        "section",
        "--",
        "GiB",
        "vocab_size",
        "prompt",
        "tokenizer",
        "labelled",
    )
    return any(name in told for name in (*SUBJECTS, *others, *names, "no-such", "is not a run"))


def _entries(folder: Path) -> set[str]:
    found = set()
    for root, folders, names in os.walk(folder):
        found |= {os.path.join(root, name) for name in (*folders, *names)}
    return found


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@contextlib.contextmanager
def _limited(seconds: int) -> Iterator[None]:
    def stop(number: int, frame: object) -> None:
        raise TooLong

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
