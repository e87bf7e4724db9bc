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

    def newest_plan(self) -> tuple[int, dict[str, Any], dict[str, Any]]: ...
    def config(self, run: str) -> dict[str, Any]: ...
    def claim(self, worker: int) -> Program | None: ...
    def release(self, program: Program) -> None: ...
    def halve(self, program: Program, sentence: str) -> None: ...
    def describe(self, program: Program, about: Mapping[str, Any]) -> None: ...
    def save_profiles(self, moment: str, profiles: Mapping[str, Mapping[str, Any]]) -> None: ...
    def save_chunk(self, program: Program, rows: Sequence[LossRow], saved: Saved) -> None: ...
    def finish(self, program: Program, results: Mapping[str, Mapping[str, Any]]) -> None: ...
    def add_event(self, kind: str, sentence: str, runs: Sequence[str] = ()) -> None: ...
    def losses(self, run: str) -> list[tuple[int, float | None, float | None]]: ...
    def chunk_seconds(self, program: int) -> list[tuple[int, float]]: ...
    def write_state(self, name: str, data: bytes) -> None: ...
    def read_state(self, name: str) -> bytes | None: ...
    def forget_states(self, program: Program, *, but: str = "") -> None: ...


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
