"""Who a run is: a hash of its config, of the code that decides its numbers and of its data.

The same run has the same id on every machine; a run whose code or data changed is another one.
"""

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

from jaxblock.sweeps.plan import LANE_FIELDS, NOT_READ
from jaxblock.training.config import TrainConfig

DIGITS = 16
READERS = (
    "cli/",
    "sweeps/statistics/",
    "sweeps/findings/",
    "sweeps/report/",
    "sweeps/analysis.py",
    "sweeps/results.py",
    "sweeps/reading.py",
    "sweeps/progress.py",
    "sweeps/coordinate",
)
"""Code that reads results and makes none: it may change and the results stay."""


@functools.cache
def code_fingerprint() -> str:
    """Return a hash of the package's source files, those that only read results left out."""
    package = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        name = file.relative_to(package).as_posix()
        if not name.startswith(READERS):
            digest.update(f"{name}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()[:DIGITS]


def run_id(config: TrainConfig, *, data: str) -> str:
    """Return the id of a run.

    Args:
      config: the run's.
      data: its corpus's fingerprint.
    """
    return hash_of({"config": _read_values(config), "code": code_fingerprint(), "data": data})


def program_key(config: TrainConfig) -> str:
    """Return a hash that two runs share exactly when they can be lanes of one program."""
    values = {path: value for path, value in _read_values(config).items() if path not in LANE_FIELDS}
    return hash_of(values)


def _read_values(config: TrainConfig) -> dict[str, Any]:
    """Return what decides a run's numbers: path -> value."""
    return {
        f"{section}.{name}": value
        for section, entries in config.values().items()
        for name, value in entries.items()
        if not any(f"{section}.{name}".startswith(prefix) for prefix in NOT_READ)
    }


def hash_of(values: Any) -> str:
    """Return a hash of plain values."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:DIGITS]
