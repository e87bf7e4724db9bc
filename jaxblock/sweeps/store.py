"""The results of a sweep: one SQLite file, written in transactions, readable at any moment, never rewritten.

    DIR/sweep.sqlite       plans, runs, programs, losses, profiles, results, events
    DIR/states/            the newest saved state of each program in training
    DIR/plan.toml          the newest plan
    DIR/report.html ...    what `jaxblock report` makes of it

A program's losses and the name of its state file are written in one transaction, after the file: a kill loses at most
the chunk in flight. Results stay: a run that has one is not run again, under this plan or a later one.
"""

import contextlib
import datetime
import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxblock.sweeps.schema import SCHEMA, SCHEMA_VERSION, LossRow, NoPlanError, PlannedRun, Program, Saved
from jaxblock.sweeps.schema import foreign_store as _foreign
from jaxblock.training.files import replace_bytes

FILE, STATES = "sweep.sqlite", "states"
WAITING, RUNNING, DONE = "waiting", "running", "done"
BUSY_SECONDS = 60.0


class Store:
    """One process's connection to a sweep's folder. Every method is one transaction."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._connection = sqlite3.connect(folder / FILE, timeout=BUSY_SECONDS, isolation_level=None)
        try:
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute("PRAGMA synchronous = FULL")
            self._version()
        except sqlite3.Error:
            self._connection.close()
            raise

    @classmethod
    def create(cls, folder: Path) -> "Store":
        """Open the store of a folder, and make both where they are missing."""
        (folder / STATES).mkdir(parents=True, exist_ok=True)
        store = cls(folder)
        version = store._version()
        if version not in (0, SCHEMA_VERSION):
            store.close()
            raise ValueError(_foreign(folder, version))
        store._connection.executescript(
            f"BEGIN IMMEDIATE; {SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT"
        )
        return store

    @classmethod
    def open(cls, folder: Path) -> "Store":
        """Open the store of a sweep's folder.

        Raises:
          ValueError: the folder holds no sweep, or one of another version of jaxblock.
        """
        if not (folder / FILE).is_file():
            raise ValueError(
                f"{str(folder)!r} holds no sweep (no {FILE}); make one with: jaxblock sweep PLAN.toml"
            )
        try:
            store = cls(folder)
            version = store._version()
        except sqlite3.Error as error:
            raise ValueError(f"{str(folder / FILE)!r} cannot be read as a sweep: {error}") from error
        if version != SCHEMA_VERSION:
            store.close()
            raise ValueError(_foreign(folder, version))
        return store

    @staticmethod
    def has_begun(folder: Path) -> bool:
        """Return whether a folder's file is more than what a sweep leaves that was killed in its first moment."""
        try:
            with contextlib.closing(sqlite3.connect(folder / FILE)) as connection:
                return connection.execute("PRAGMA user_version").fetchone()[0] != 0
        except sqlite3.Error:
            return True  # it is something; `open` says what

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    # Plans -------------------------------------------------------------------------------------------------

    def save_plan(self, plan: Mapping[str, Any], facts: Mapping[str, Any], *, identity: str) -> int:
        """Add a plan, unless the newest one has the same identity; return its number.

        Args:
          plan: its values.
          facts: what is known of it; replaced where the plan is there.
          identity: differs where any of its runs has another id: another axis, another code, other data.
        """
        texts = json.dumps(plan), json.dumps(facts)
        with self._writing() as sql:
            newest = sql.execute("SELECT number, identity FROM plans ORDER BY number DESC LIMIT 1").fetchone()
            if newest is not None and newest[1] == identity:
                sql.execute("UPDATE plans SET plan = ?, facts = ? WHERE number = ?", (*texts, newest[0]))
                return newest[0]
            row = sql.execute(
                "INSERT INTO plans (time, identity, plan, facts) VALUES (?, ?, ?, ?)",
                (now(), identity, *texts),
            )
            return int(row.lastrowid or 0)

    def add_runs(self, plan: int, runs: Sequence[PlannedRun], *, widened: bool = False) -> None:
        """Add runs to a plan, behind those it has; `widened`, where they are not of its axes' product."""
        with self._writing() as sql:
            have = sql.execute("SELECT run FROM planned WHERE plan = ?", (plan,)).fetchall()
            known = {row[0] for row in have}
            new = [run for run in runs if run[0] not in known]
            for position, (run, axes, config, about) in enumerate(new, start=len(have)):
                sql.execute(
                    "INSERT OR IGNORE INTO runs VALUES (?, ?, ?)",
                    (run, json.dumps(config), json.dumps(about)),
                )
                sql.execute(
                    "INSERT INTO planned VALUES (?, ?, ?, ?, ?)",
                    (plan, position, run, json.dumps(axes), widened),
                )

    def widened_axes(self) -> list[dict[str, Any]]:
        """Return the axes of every run that any plan's grids were widened by."""
        return [json.loads(row[0]) for row in self._rows("SELECT DISTINCT axes FROM planned WHERE widened")]

    def newest_plan(self) -> tuple[int, dict[str, Any], dict[str, Any]]:
        """Return the newest plan's number, values and facts.

        Raises:
          NoPlanError: there is none yet.
        """
        row = self._rows("SELECT number, plan, facts FROM plans ORDER BY number DESC LIMIT 1")
        if not row:
            raise NoPlanError(
                f"the sweep in {str(self.folder)!r} has no plan yet: it was ended while it began"
            )
        return row[0][0], json.loads(row[0][1]), json.loads(row[0][2])

    def planned(self, plan: int) -> list[PlannedRun]:
        """Return every run of a plan, in order."""
        rows = self._rows(
            "SELECT run, axes, config, about FROM planned JOIN runs ON id = run WHERE plan = ? ORDER BY position",
            plan,
        )
        return [(run, *(json.loads(text) for text in texts)) for run, *texts in rows]

    def axes_of(self, run: str) -> dict[str, Any]:
        """Return a run's value on every axis of the newest plan that has it."""
        rows = self._rows("SELECT axes FROM planned WHERE run = ? ORDER BY plan DESC LIMIT 1", run)
        return json.loads(rows[0][0]) if rows else {}

    def config(self, run: str) -> dict[str, Any]:
        """Return a run's config as plain values."""
        return json.loads(self._rows("SELECT config FROM runs WHERE id = ?", run)[0][0])

    # Programs ----------------------------------------------------------------------------------------------

    def pending(self, plan: int) -> list[str]:
        """Return the runs of a plan that have neither a result nor a place in an unfinished program, in order."""
        busy = {run for program in self.programs() for run in program.runs}
        rows = self._rows(
            "SELECT run FROM planned WHERE plan = ? AND run NOT IN (SELECT run FROM results) ORDER BY position",
            plan,
        )
        return [row[0] for row in rows if row[0] not in busy]

    def programs(self) -> list[Program]:
        """Return the programs that are not done."""
        rows = self._rows(
            "SELECT number, runs, about, tries, step, file FROM programs WHERE state != ? ORDER BY number",
            DONE,
        )
        return [_program(row) for row in rows]

    def add_programs(self, groups: Sequence[Sequence[str]]) -> None:
        """Add programs that wait for a worker."""
        with self._writing() as sql:
            for runs in groups:
                _add_program(sql, runs, tries=0)

    def reopen(self) -> list[Program]:
        """Let wait again what a killed sweep left running; return those programs. No worker may be alive.

        The sweep was killed, not the program, so it has not been tried.
        """
        with self._writing() as sql:
            rows = sql.execute(
                "SELECT number, runs, about, tries, step, file FROM programs WHERE state = ?", (RUNNING,)
            ).fetchall()
            sql.execute(
                "UPDATE programs SET state = ?, worker = NULL, tries = tries - 1 WHERE state = ?",
                (WAITING, RUNNING),
            )
        return [_program(row) for row in rows]

    def drop_foreign(self, plan: int) -> list[str]:
        """End the unfinished programs that hold a run which is not of this plan; return those runs.

        Their runs' code, data or config is no longer what it was: what they would find belongs to no id.
        """
        ours = {row[0] for row in self._rows("SELECT run FROM planned WHERE plan = ?", plan)}
        foreign = [program for program in self.programs() if not ours.issuperset(program.runs)]
        with self._writing() as sql:
            for program in foreign:
                sql.execute("UPDATE programs SET state = ? WHERE number = ?", (DONE, program.number))
                rows = [(run,) for run in program.runs]
                sql.executemany("DELETE FROM losses WHERE run = ?", rows)
        return [run for program in foreign for run in program.runs if run not in ours]

    def claim(self, worker: int) -> Program | None:
        """Give a waiting program to a worker, by its number; None where none waits."""
        columns = "number, runs, about, tries, step, file"
        with self._writing() as sql:
            row = sql.execute(
                f"SELECT {columns} FROM programs WHERE state = ? ORDER BY number LIMIT 1", (WAITING,)
            ).fetchone()
            if row is None:
                return None
            sql.execute(
                "UPDATE programs SET state = ?, worker = ?, tries = tries + 1 WHERE number = ?",
                (RUNNING, worker, row[0]),
            )
        return _program(row)._replace(tries=row[3] + 1)

    def claimed_by(self, worker: int) -> Program | None:
        """Return the program a worker has."""
        rows = self._rows(
            "SELECT number, runs, about, tries, step, file FROM programs WHERE state = ? AND worker = ?",
            RUNNING,
            worker,
        )
        return _program(rows[0]) if rows else None

    def release(self, program: Program) -> None:
        """Let a program wait for a worker again."""
        with self._writing() as sql:
            sql.execute(
                "UPDATE programs SET state = ?, worker = NULL WHERE number = ?", (WAITING, program.number)
            )

    def halve(self, program: Program, sentence: str) -> None:
        """Put two programs of half the lanes in a program's place, from their beginning."""
        middle = (len(program.runs) + 1) // 2
        with self._writing() as sql:
            for runs in (program.runs[:middle], program.runs[middle:]):
                _add_program(sql, runs, tries=program.tries - 1)
                sql.executemany("DELETE FROM losses WHERE run = ?", [(run,) for run in runs])
            sql.execute("UPDATE programs SET state = ? WHERE number = ?", (DONE, program.number))
            _add_event(sql, "halved_lanes", sentence, program.runs)

    def describe(self, program: Program, about: Mapping[str, Any]) -> None:
        """Keep what was measured of a program."""
        with self._writing() as sql:
            sql.execute("UPDATE programs SET about = ? WHERE number = ?", (json.dumps(about), program.number))

    # What training finds -----------------------------------------------------------------------------------

    def save_profiles(self, moment: str, profiles: Mapping[str, Mapping[str, Any]]) -> None:
        """Keep runs' profiles of a moment, "start" or "end"."""
        rows = [(run, moment, json.dumps(profile)) for run, profile in profiles.items()]
        with self._writing() as sql:
            sql.executemany("INSERT OR REPLACE INTO profiles VALUES (?, ?, ?)", rows)

    def save_chunk(self, program: Program, rows: Sequence[LossRow], saved: "Saved") -> None:
        """Keep the rows (run, step, loss, gradient norm) of a chunk together with the state after it."""
        with self._writing() as sql:
            sql.executemany("INSERT OR REPLACE INTO losses VALUES (?, ?, ?, ?)", rows)
            sql.execute(
                "INSERT OR REPLACE INTO chunks VALUES (?, ?, ?, ?)",
                (program.number, saved.step, saved.steps, saved.seconds),
            )
            sql.execute(
                "UPDATE programs SET step = ?, file = ? WHERE number = ?",
                (saved.step, saved.file, program.number),
            )

    def finish(self, program: Program, results: Mapping[str, Mapping[str, Any]]) -> None:
        """Keep the results of all runs of a program, each with its "outcome"; one that is there stays as it is."""
        rows = [(run, result["outcome"], now(), json.dumps(result)) for run, result in results.items()]
        with self._writing() as sql:
            sql.executemany("INSERT OR IGNORE INTO results VALUES (?, ?, ?, ?)", rows)
            sql.execute(
                "UPDATE programs SET state = ?, worker = NULL, file = NULL WHERE number = ?",
                (DONE, program.number),
            )

    def forget(self, outcomes: Sequence[str]) -> list[str]:
        """Remove the results with these outcomes, so that their runs are made again; return the runs."""
        marks = ", ".join("?" for _ in outcomes)
        with self._writing() as sql:
            rows = sql.execute(
                f"SELECT run FROM results WHERE outcome IN ({marks})", tuple(outcomes)
            ).fetchall()
            sql.executemany("DELETE FROM results WHERE run = ?", rows)
            sql.executemany("DELETE FROM losses WHERE run = ?", rows)
        return [row[0] for row in rows]

    def add_event(self, kind: str, sentence: str, runs: Sequence[str] = ()) -> None:
        """Keep something a reader should know."""
        with self._writing() as sql:
            _add_event(sql, kind, sentence, runs)

    # States ------------------------------------------------------------------------------------------------

    def write_state(self, name: str, data: bytes) -> None:
        """Write a program's state, in one move; `save_chunk` names it as the one to go on from."""
        replace_bytes(self.folder / STATES / name, data)

    def read_state(self, name: str) -> bytes | None:
        """Return what `write_state` wrote, or None where it is missing or cannot be read."""
        try:
            return (self.folder / STATES / name).read_bytes()
        except OSError:
            return None

    def forget_states(self, program: Program, *, but: str = "") -> None:
        """Remove a program's states, all but one."""
        for file in (self.folder / STATES).glob(f"{program.number}-*.npz*"):
            if file.name != but:
                file.unlink(missing_ok=True)

    # Reading -----------------------------------------------------------------------------------------------

    def progress(self) -> list[tuple[Program, str]]:
        """Return every program with its state, in order."""
        rows = self._rows(
            "SELECT number, runs, about, tries, step, file, state FROM programs ORDER BY number"
        )
        return [(_program(row[:-1]), row[-1]) for row in rows]

    def results(self) -> dict[str, dict[str, Any]]:
        """Return the result of every run that has one."""
        return {run: json.loads(text) for run, text in self._rows("SELECT run, result FROM results")}

    def losses(self, run: str) -> list[tuple[int, float | None, float | None]]:
        """Return (step, loss, gradient norm) of a run's steps, in order; None = not finite."""
        return self._rows("SELECT step, loss, gradient_norm FROM losses WHERE run = ? ORDER BY step", run)

    def profiles(self, run: str) -> dict[str, dict[str, Any]]:
        """Return a run's profiles by moment."""
        rows = self._rows("SELECT moment, profile FROM profiles WHERE run = ?", run)
        return {moment: json.loads(text) for moment, text in rows}

    def chunk_seconds(self, program: int) -> list[tuple[int, float]]:
        """Return (steps, seconds) of a program's chunks."""
        return self._rows("SELECT steps, seconds FROM chunks WHERE program = ? ORDER BY step", program)

    def events(self) -> list[tuple[str, str, str, list[str]]]:
        """Return (time, kind, sentence, runs) of every event, in order."""
        rows = self._rows("SELECT time, kind, sentence, runs FROM events ORDER BY number")
        return [(time, kind, sentence, json.loads(runs)) for time, kind, sentence, runs in rows]

    def _rows(self, query: str, *values: Any) -> list[Any]:
        return self._connection.execute(query, values).fetchall()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sqlite3.Cursor]:
        """One transaction: all of it, or nothing."""
        cursor = self._connection.cursor()
        cursor.execute("BEGIN IMMEDIATE")
        try:
            yield cursor
        except BaseException:
            cursor.execute("ROLLBACK")
            raise
        cursor.execute("COMMIT")

    def _version(self) -> int:
        return int(self._rows("PRAGMA user_version")[0][0])


def now() -> str:
    """Return the time, UTC, ISO 8601."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _program(row: Sequence[Any]) -> Program:
    number, runs, about, tries, step, file = row
    return Program(number, tuple(json.loads(runs)), json.loads(about), tries, step, file)


def _add_program(sql: sqlite3.Cursor, runs: Sequence[str], *, tries: int) -> None:
    sql.execute(
        "INSERT INTO programs (runs, about, state, tries, step) VALUES (?, '{}', ?, ?, 0)",
        (json.dumps(list(runs)), WAITING, tries),
    )


def _add_event(sql: sqlite3.Cursor, kind: str, sentence: str, runs: Sequence[str]) -> None:
    sql.execute(
        "INSERT INTO events (time, kind, sentence, runs) VALUES (?, ?, ?, ?)",
        (now(), kind, sentence, json.dumps(list(runs))),
    )
