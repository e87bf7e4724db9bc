"""A step that does not end, named: by a thread, since the one that waits for a device can do nothing else."""

import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Self


class HangWatch:
    """Say once of a step that it has not ended after `seconds`, and where the thread that trains stands.

    Steps are started ahead of their results, so the step that hangs is the one named or an earlier one whose numbers
    have not come yet: both are named. Nothing is stopped: what is slow and not stuck goes on.

    Args:
      seconds: 0 = never.
      say: gets the sentence.
      clock: seconds.
    """

    def __init__(
        self, seconds: float, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ):
        self._seconds, self._say, self._clock = seconds, say, clock
        self._step: int | None = None
        self._ended, self._since, self._said = 0, clock(), False
        self._thread = threading.get_ident()
        self._stop = threading.Event()
        self._watcher: threading.Thread | None = None

    def __enter__(self) -> Self:
        if self._seconds:
            self._watcher = threading.Thread(target=self._watch, name="hang watch", daemon=True)
            self._watcher.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._watcher is not None:
            self._watcher.join()

    def started(self, step: int) -> None:
        """Take that a step is started now."""
        self._step, self._since, self._said = step, self._clock(), False

    def ended(self, step: int) -> None:
        """Take that the results of all steps up to this one are there; what comes next is no step."""
        self._ended, self._step = step, None

    def look(self) -> None:
        """Say of the step that runs, once, that it has not ended, if it is time to."""
        step, waited = self._step, self._clock() - self._since
        if step is None or self._said or waited < self._seconds:
            return
        self._said = True
        first = self._ended + 1
        which = f"step {step}" if step == first else f"step {step} (or one of those since {first})"
        self._say(f"watch: {which} has not ended after {waited:.0f} s; the run waits {self._place()}")

    def _place(self) -> str:
        """Return where the training thread stands, as "in FILE:LINE, NAME"."""
        frame = sys._current_frames().get(self._thread)
        if frame is None:
            return "in a thread that is gone"
        last = traceback.extract_stack(frame)[-1]
        return f"in {last.filename}:{last.lineno}, {last.name}"

    def _watch(self) -> None:
        while not self._stop.wait(min(self._seconds / 4, 10.0)):
            self.look()
