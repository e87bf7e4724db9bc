"""Ctrl-C and SIGTERM as a question the loop asks between steps; a second signal acts at once, as always."""

import signal
from types import FrameType, TracebackType
from typing import Self


class Interrupts:
    """Within the context, the first SIGINT or SIGTERM is remembered instead of raised."""

    def __init__(self) -> None:
        self.signal: int | None = None
        """The signal that came, or None."""

    def __enter__(self) -> Self:
        self._before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        for number in self._before:
            signal.signal(number, self._remember)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    @property
    def exit_code(self) -> int:
        """128 + the signal's number: 130 for Ctrl-C, 143 for SIGTERM; 0 where none came."""
        return 0 if self.signal is None else 128 + self.signal

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
