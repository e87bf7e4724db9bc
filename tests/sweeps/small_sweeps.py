"""Plans small enough to run in seconds, shared by the tests of the sweeps."""

import contextlib
import copy
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxblock.sweeps.ledger import Ledger, answer, remote_ledger
from jaxblock.sweeps.plan import Plan, build_plan
from jaxblock.sweeps.store import Store

VALUES: dict[str, Any] = {
    "sweep": {"name": "small", "chunk": 4, "extend": 0},
    "axes": {"optimizer.learning_rate": [1e-3, 1e-2], "run.seed": [0, 1]},
    "run": {"steps": 8},
    "model": {
        "vocab_size": 256,
        "context": 8,
        "depth": 1,
        "width": 8,
        "heads": 1,
        "hidden": 8,
        "bias": False,
    },
    "data": {"batch": 2, "validation_tokens": 64},
}


def text_file(folder: Path) -> Path:
    """A text of 2,600 bytes, so that no test reads the standard library."""
    path = folder / "text.txt"
    path.write_bytes(b"".join(bytes([97 + (7 * i * i + i // 3) % 26]) for i in range(2600)))
    return path


def values(folder: Path, **changes: dict[str, Any]) -> dict[str, Any]:
    """Return a plan's values with entries of some sections changed (None takes one out) and axes replaced."""
    found = copy.deepcopy(VALUES)
    found["data"]["path"] = str(text_file(folder))
    for section, entries in changes.items():
        merged = {**({} if section == "axes" else found.get(section, {})), **entries}
        found[section] = {name: value for name, value in merged.items() if value is not None}
    return found


def plan(folder: Path, **changes: dict[str, Any]) -> Plan:
    return build_plan(values(folder, **changes))


def through_bytes(store: Store) -> Ledger:
    """A ledger whose questions and answers go as bytes, as between machines."""

    def ask(method, arguments, named):
        method, arguments, named = pickle.loads(pickle.dumps((method, arguments, named)))
        return pickle.loads(pickle.dumps(answer(store, method, arguments, named)))

    return remote_ledger(ask)


def when_saved(folder: Path, *, after_step: int, then: Callable[[int], None]) -> None:
    """Call `then` with the worker of a program that has saved so many steps; give up after three minutes."""
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        time.sleep(0.05)
        try:
            store = Store.open(folder)
        except ValueError:  # not there yet
            continue
        with contextlib.closing(store):
            rows = store._rows(
                "SELECT worker FROM programs WHERE state = 'running' AND step >= ?", after_step
            )
        if rows:
            then(rows[0][0])
            return
