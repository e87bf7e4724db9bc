"""What a sweep says while it runs: a bar of optimizer steps in a terminal, a line per finished program elsewhere."""

import time
from types import TracebackType
from typing import Self

import rich.console
import rich.progress

from jaxblock.sweeps.plan import LANE_FIELDS
from jaxblock.sweeps.schema import Program
from jaxblock.sweeps.store import DONE, Store


class SweepProgress:
    """Report to stderr what the workers put into the store."""

    def __init__(self, store: Store):
        self._store, self._start = store, time.perf_counter()
        self._console = rich.console.Console(stderr=True, highlight=False)
        self._said: set[int] = {program.number for program, state in store.progress() if state == DONE}
        self._names: dict[int, str] = {}
        self._bar: rich.progress.Progress | None = None
        self._task = rich.progress.TaskID(0)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            columns = ("{task.completed:.0f}/{task.total:.0f} runs", rich.progress.BarColumn())
            elapsed = rich.progress.TimeElapsedColumn()
            bar = rich.progress.Progress(*columns, "{task.description}", elapsed, console=self._console)
            bar.start()
            self._task = bar.add_task("starting")
            self._bar = bar
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.update()
        if self._bar is not None:
            self._bar.stop()

    def say(self, text: str) -> None:
        """Print a line."""
        self._console.print(text, markup=False, soft_wrap=True)

    def update(self) -> None:
        """Look into the store and report what is new."""
        progress = self._store.progress()
        done = [program for program, state in progress if state == DONE]
        if self._bar is not None:
            running = [program for program, state in progress if state == "running"]
            words = "; ".join(f"{self._name(program)} at step {program.step}" for program in running)
            runs = sum(len(program.runs) for program, _ in progress)
            finished = sum(len(program.runs) for program in done)
            self._bar.update(
                self._task, completed=finished, total=runs, description=words or "between programs"
            )
        for program in done:
            if program.number not in self._said:
                self._said.add(program.number)
                left = sum(len(other.runs) for other, state in progress if state != DONE)
                seconds = time.perf_counter() - self._start
                runs = f"{len(program.runs)} runs of {self._name(program)}"
                self.say(f"after {seconds:.0f} s: {runs} have ended; {left} runs to go")

    def _name(self, program: Program) -> str:
        """Return what a program's runs share, as "model.depth = 4, model.residual = pre_norm"."""
        if program.number not in self._names:
            axes = self._store.axes_of(program.runs[0])
            shared = [f"{path} = {value}" for path, value in axes.items() if path not in LANE_FIELDS]
            self._names[program.number] = ", ".join(shared) or "the only program"
        return self._names[program.number]
