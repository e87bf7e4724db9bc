"""Disks with no room: a checkpoint that does not fit is refused before it is begun, and fails without noise."""

import contextlib
import errno
import gc
import logging
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

_BYTES_PER_ARRAY = 4096
"""Room for what is written about each array, and for the last block of its file."""
_SECONDS_OF_LATE_REPORTS = 1.0
_LATE = "Event loop is closed"


def check_space(folder: Path, sizes: list[int]) -> None:
    """Raise OSError if the disk of a folder has less room than arrays of so many bytes take."""
    needed, free = sum(sizes) + _BYTES_PER_ARRAY * len(sizes), shutil.disk_usage(folder).free
    if free < needed:
        words = f"No space left on device: it takes {needed:,} bytes, and {free:,} are free"
        raise OSError(errno.ENOSPC, words)


@contextlib.contextmanager
def without_late_reports() -> Iterator[None]:
    """Within the context, a failure is raised and not also printed by the threads of TensorStore.

    Orbax closes its event loop at the first array that cannot be written; those still on their way find it closed,
    each with a traceback on stderr, and asyncio logs what nobody asked them for. They are given a second to end before
    the failure is raised.
    """
    hook, unraisable_hook, log = sys.excepthook, sys.unraisablehook, logging.getLogger("asyncio")

    def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if str(error) != _LATE:
            hook(kind, error, trace)

    def unraisablehook(report: Any) -> None:
        if str(report.exc_value) != _LATE:
            unraisable_hook(report)

    disabled, log.disabled = log.disabled, True
    sys.excepthook, sys.unraisablehook = excepthook, unraisablehook
    try:
        yield
    except Exception:
        time.sleep(_SECONDS_OF_LATE_REPORTS)
        gc.collect()  # a future says that nobody asked for its failure when it is forgotten
        raise
    finally:
        sys.excepthook, sys.unraisablehook, log.disabled = hook, unraisable_hook, disabled
