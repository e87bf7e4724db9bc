"""What a worker asks of a sweep's store, whether it opens the file or another machine does.

SQLite's file must lie on a disk of the machine that writes it. A worker elsewhere asks a process there, which owns the
store: `remote_ledger` asks, `answer` answers; what carries the question is whoever's it is.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

from jaxblock.sweeps.schema import LossRow, Program, Saved

Ask = Callable[[str, tuple, dict[str, Any]], Any]
"""(method, arguments, keyword arguments) -> what the method returns."""


class Ledger(Protocol):
    """What `jaxblock.sweeps.store.Store` is to a worker; see there."""

    def newest_plan(self) -> tuple[int, dict[str, Any], dict[str, Any]]:
        """Return the newest plan's number, values and facts."""
        ...

    def config(self, run: str) -> dict[str, Any]:
        """Return a run's config as plain values."""
        ...

    def claim(self, worker: int) -> Program | None:
        """Give a waiting program to a worker; None where none waits."""
        ...

    def release(self, program: Program) -> None:
        """Let a program wait for a worker again."""
        ...

    def halve(self, program: Program, sentence: str) -> None:
        """Put two programs of half the lanes in a program's place."""
        ...

    def describe(self, program: Program, about: Mapping[str, Any]) -> None:
        """Keep what was measured of a program."""
        ...

    def save_profiles(self, moment: str, profiles: Mapping[str, Mapping[str, Any]]) -> None:
        """Keep runs' profiles of a moment."""
        ...

    def save_chunk(self, program: Program, rows: Sequence[LossRow], saved: Saved) -> None:
        """Keep the rows of a chunk together with the name of the state after it."""
        ...

    def finish(self, program: Program, results: Mapping[str, Mapping[str, Any]]) -> None:
        """Keep the results of all runs of a program."""
        ...

    def add_event(self, kind: str, sentence: str, runs: Sequence[str] = ()) -> None:
        """Keep something a reader should know."""
        ...

    def losses(self, run: str) -> list[tuple[int, float | None, float | None]]:
        """Return (step, loss, gradient norm) of a run's steps."""
        ...

    def chunk_seconds(self, program: int) -> list[tuple[int, float]]:
        """Return (steps, seconds) of a program's chunks."""
        ...

    def write_state(self, name: str, data: bytes) -> None:
        """Write a program's state."""
        ...

    def read_state(self, name: str) -> bytes | None:
        """Return what `write_state` wrote, or None."""
        ...

    def forget_states(self, program: Program, *, but: str = "") -> None:
        """Remove a program's states, all but one."""
        ...


ASKED = tuple(name for name in vars(Ledger) if not name.startswith("_"))
"""The methods that may be asked for."""


def remote_ledger(ask: Ask) -> Ledger:
    """Return a ledger whose every method is asked of another process."""
    return cast(Ledger, _Remote(ask))


def answer(ledger: Ledger, method: str, arguments: tuple, named: Mapping[str, Any]) -> Any:
    """Return what a method of the ledger returns.

    Raises:
      ValueError: there is no such method to be asked.
    """
    if method not in ASKED:
        raise ValueError(f"a ledger is asked for {method!r}; it answers: {', '.join(ASKED)}")
    return getattr(ledger, method)(*arguments, **named)


class _Remote:
    def __init__(self, ask: Ask):
        self._ask = ask

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in ASKED:
            raise AttributeError(name)
        return functools.partial(self._call, name)

    def _call(self, name: str, *arguments: Any, **named: Any) -> Any:
        return self._ask(name, arguments, named)
