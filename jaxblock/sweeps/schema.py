"""The tables of a sweep's store, and the records that go in and come out."""

from pathlib import Path
from typing import Any, NamedTuple

SCHEMA_VERSION = 1
SCHEMA = """
CREATE TABLE IF NOT EXISTS plans (number INTEGER PRIMARY KEY, time TEXT, identity TEXT, plan TEXT, facts TEXT);
CREATE TABLE IF NOT EXISTS planned (plan INTEGER, position INTEGER, run TEXT, axes TEXT, widened INTEGER,
    PRIMARY KEY (plan, position));
CREATE TABLE IF NOT EXISTS runs (id TEXT PRIMARY KEY, config TEXT, about TEXT);
CREATE TABLE IF NOT EXISTS programs (number INTEGER PRIMARY KEY, runs TEXT, about TEXT, state TEXT, worker INTEGER,
    tries INTEGER, step INTEGER, file TEXT);
CREATE TABLE IF NOT EXISTS losses (run TEXT, step INTEGER, loss REAL, gradient_norm REAL, PRIMARY KEY (run, step))
    WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS chunks (program INTEGER, step INTEGER, steps INTEGER, seconds REAL,
    PRIMARY KEY (program, step));
CREATE TABLE IF NOT EXISTS profiles (run TEXT, moment TEXT, profile TEXT, PRIMARY KEY (run, moment));
CREATE TABLE IF NOT EXISTS results (run TEXT PRIMARY KEY, outcome TEXT, time TEXT, result TEXT);
CREATE TABLE IF NOT EXISTS events (number INTEGER PRIMARY KEY, time TEXT, kind TEXT, sentence TEXT, runs TEXT);
"""

PlannedRun = tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]
"""(id, axes, config, about) of a run."""
LossRow = tuple[str, int, float | None, float | None]
"""(run, step, loss, gradient norm); None = not finite."""


class Program(NamedTuple):
    """Runs that are trained at once."""

    number: int
    runs: tuple[str, ...]
    """Ids, one a lane, in the order of the lanes."""
    about: dict[str, Any]
    """What was measured of it: lanes, compile_s, program_bytes."""
    tries: int
    """How often a worker has begun it."""
    step: int
    """Steps that are saved."""
    file: str | None
    """Name of the state's file; None before the first save."""


class NoPlanError(ValueError):
    """A sweep was ended before its plan was saved."""


class Saved(NamedTuple):
    """A chunk that is done and saved."""

    step: int
    """Steps made so far."""
    steps: int
    """Steps of the chunk."""
    seconds: float
    file: str


def foreign_store(folder: Path, version: int) -> str:
    """Return the sentence that refuses a store of another version; 0 is none yet."""
    if not version:
        return (
            f"the sweep in {str(folder)!r} has no plan yet: it is just beginning, or was ended while it began"
        )
    return (
        f"the sweep in {str(folder)!r} has version {version} of the store and this jaxblock reads version "
        f"{SCHEMA_VERSION}; use the jaxblock that made it, or another --store"
    )
