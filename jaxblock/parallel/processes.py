"""Several processes of one run: how they find each other, and what they agree on.

Each process has its devices, reads its rows of every batch and runs the same program; the first one, the main process,
writes the run's folder. The one module that touches `jax.distributed` and `multihost_utils`.
"""

import contextlib
import os
import sys
import traceback
import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple, NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxblock.contracts import check_integer

LOST_AFTER = 30
"""Seconds without a sign of life after which a process counts as lost and the others end."""


class Group(NamedTuple):
    """How a process finds the others."""

    coordinator: str | None = None
    """HOST:PORT of the main process; None = from the environment."""
    processes: int | None = None
    """How many there are; None = from the environment."""
    process: int | None = None
    """Which this one is, from 0; None = from the environment."""


def check_group(group: Group) -> None:
    """Raise ValueError unless the three are given together, and fit, or none is."""
    given = [name for name, value in group._asdict().items() if value is not None]
    if len(given) not in (0, len(group)):
        missing = [f"--{name}" for name in Group._fields if name not in given]
        raise ValueError(f"--{given[0]} is given without {' and '.join(missing)}; all three are, or none")
    if not given:
        return
    check_integer("--processes", group.processes, least=1)
    check_integer("--process", group.process, least=0, most=(group.processes or 1) - 1)
    host, _, port = str(group.coordinator).rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ValueError(f"--coordinator is {group.coordinator!r}; it must be HOST:PORT, as in 10.0.0.1:8476")


def join(group: Group, *, timeout: int = 300) -> None:
    """Wait until all processes are there; before anything else of JAX.

    Raises:
      ValueError: the group does not fit, nothing in the environment names one, or not all came in `timeout` seconds.
    """
    check_group(group)
    try:
        jax.distributed.initialize(
            coordinator_address=group.coordinator,
            num_processes=group.processes,
            process_id=group.process,
            initialization_timeout=timeout,
            heartbeat_timeout_seconds=LOST_AFTER,
        )
    except (RuntimeError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"the processes did not find each other: {reason}; under SLURM, Open MPI or on a TPU the environment says "
            "how, elsewhere --coordinator HOST:PORT --processes N --process I do"
        ) from error


def several() -> bool:
    """Return whether the run has more than one process."""
    return jax.process_count() > 1


@contextlib.contextmanager
def leaving() -> Iterator[None]:
    """Within the context, an exception ends this process at once where there are others, exit code 1.

    Python's own way out would wait for the others, and they for this process. Without its signs of life they end
    after LOST_AFTER seconds.
    """
    try:
        yield
    except Exception:
        if jax.process_count() == 1:
            raise
        traceback.print_exc()
        leave(1)


def leave(code: int) -> NoReturn:
    """End this process at once, without waiting for the others."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def is_main() -> bool:
    """Return whether this is the process that writes."""
    return jax.process_index() == 0


def largest(value: int) -> int:
    """Return the largest of the processes' values; every process must ask."""
    if jax.process_count() == 1:
        return value
    return int(np.max(multihost_utils.process_allgather(np.int32(value))))


def of_main(value: int) -> int:
    """Return the main process's value; every process must ask."""
    if jax.process_count() == 1:
        return value
    return int(multihost_utils.broadcast_one_to_all(np.int32(value)))


def sums(values: Sequence[int]) -> list[int]:
    """Return the sums mod 2^64 of the processes' values; every process must ask, with as many."""
    if jax.process_count() == 1 or not values:
        return list(values)
    halves = np.asarray([[value >> 32, value & 0xFFFFFFFF] for value in values], np.uint32)
    gathered = multihost_utils.process_allgather(halves).astype(object)
    return [int(high * 2**32 + low) % 2**64 for high, low in gathered.sum(0)]


@contextlib.contextmanager
def together(what: str) -> Iterator[None]:
    """Within the context every process does its part, or none goes on; no process may meet another in it.

    Raises:
      ValueError: in a process that did its part, where another did not.
    """
    try:
        yield
    except Exception:
        largest(1)
        raise
    if largest(0):
        raise ValueError(f"another process {what}; it says why")


def check_same(what: str, words: str) -> None:
    """Raise ValueError, in every process, unless all give the same words; every process must ask.

    Args:
      what: what the words describe, as in "config".
    """
    own = zlib.crc32(words.encode()) >> 1  # 31 bits
    differs = own != of_main(own)
    if largest(differs):
        where = "this process has another" if differs else "another process has another"
        raise ValueError(f"{where} {what} than process 0; all must be given the same")


def meet(name: str) -> None:
    """Wait until every process is here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)
