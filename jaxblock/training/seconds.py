"""Where a run's time goes: compiling, stepping, evaluating, saving."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Seconds:
    """Where a run's time goes."""

    def __init__(self) -> None:
        self.compile = self.step = self.evaluate = self.save = self.loop = 0.0
        self.targets = 0.0

    @contextmanager
    def spent_on(self, name: str) -> Iterator[None]:
        """Add the time of the block to a field."""
        start = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, name, getattr(self, name) + time.perf_counter() - start)

    @property
    def tokens_per_s(self) -> float | None:
        """Real targets per second of stepping, without compiling, evaluating and saving."""
        return self.targets / self.step if self.step else None

    def report(self) -> dict[str, float | None]:
        """Return what the summary says."""
        return {
            "tokens_per_s": self.tokens_per_s,
            "compile_s": self.compile,
            "loop_s": self.loop,
            "step_s": self.step,
            "evaluate_s": self.evaluate,
            "checkpoint_s": self.save,
        }
