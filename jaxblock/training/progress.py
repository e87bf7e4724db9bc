"""What a run says while it runs: a bar with loss, speed and time left in a terminal, plain lines elsewhere."""

import time
from types import TracebackType
from typing import Self

import rich.console
import rich.progress


class Progress:
    """Report steps of a run to stderr, so that stdout stays free for results."""

    def __init__(self, *, steps: int, done: int, unit: str = "tokens", quiet: bool = False):
        """`unit` is what a run's targets are called; a quiet one says nothing, as beside a process that does."""
        self._unit = unit
        self._console = rich.console.Console(stderr=True, highlight=False, quiet=quiet)
        self._steps, self._done, self._start = steps, done, time.perf_counter()
        self._bar: rich.progress.Progress | None = None
        self._task = rich.progress.TaskID(0)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            columns = ("step", "{task.completed:.0f}/{task.total:.0f}", rich.progress.BarColumn())
            bar = rich.progress.Progress(
                *columns, "{task.description}", rich.progress.TimeRemainingColumn(), console=self._console
            )
            bar.start()
            self._task = bar.add_task("compiling", total=self._steps, completed=self._done)
            self._bar = bar
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, text: str) -> None:
        """Print a line."""
        self._console.print(text, markup=False, soft_wrap=True)

    def step(
        self, step: int, *, loss: float, tokens_per_s: float, model_flops_utilisation: float | None = None
    ) -> None:
        """Report that `step` updates are done; utilisation where it is known."""
        words = f"loss {loss:.4f}  {tokens_per_s:,.0f} {self._unit}/s"
        if model_flops_utilisation is not None:
            words += f"  {100 * model_flops_utilisation:.1f} % of peak"
        if self._bar is not None:
            self._bar.update(self._task, completed=step, description=words)
            return
        per_step = (time.perf_counter() - self._start) / max(step - self._done, 1)
        left = round(per_step * (self._steps - step))
        self.say(f"step {step}/{self._steps}  {words}  {left // 60}:{left % 60:02d} left")
