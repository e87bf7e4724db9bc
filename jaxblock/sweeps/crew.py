"""The worker processes of a sweep: how many there are, and what is done when one dies."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from jaxblock.sweeps.outcomes import Outcome
from jaxblock.sweeps.plan import SweepConfig
from jaxblock.sweeps.schema import Program
from jaxblock.sweeps.store import Store
from jaxblock.sweeps.worker import REFUSED, fail


class SweepError(Exception):
    """A sweep cannot go on; a sentence that says why."""


class Crew(Protocol):
    """Workers that end with the context, and with this process whatever becomes of it."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...
    def is_at_work(self) -> bool:
        """Look after the workers; return whether any is left.

        Raises:
          SweepError: workers die before they have a program, or have not the sweep's code or data.
        """
        ...


class LocalCrew:
    """Processes of this machine that end with the context, and with this process whatever becomes of it."""

    def __init__(self, store: Store, sweep: SweepConfig, *, say: Callable[[str], None]):
        self._store, self._sweep, self._say = store, sweep, say
        self._workers: list[subprocess.Popen] = []
        self._idle_deaths = 0

    def __enter__(self) -> Self:
        for _ in range(min(self._sweep.workers, len(self._store.programs()))):
            self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._workers:
            worker.kill()  # what it has saved is what its program goes on from
        for worker in self._workers:
            worker.communicate()  # waits, and closes the pipe

    def is_at_work(self) -> bool:
        """Start another worker for each that died."""
        for worker in [worker for worker in self._workers if worker.poll() is not None]:
            self._workers.remove(worker)
            worker.communicate()  # closes the pipe
            if worker.returncode:
                self._bury(worker)
                if len(self._workers) < len(self._store.programs()):
                    self._start()
        return bool(self._workers)

    def _start(self) -> None:
        # The very package that this process runs, whatever stands in the working folder or is installed.
        paths = [str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        command = [sys.executable, "-P", "-m", "jaxblock.sweeps.worker", str(self._store.folder)]
        # A session of its own: Ctrl-C in the terminal is the runner's to answer.
        self._workers.append(
            subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, env=environment)
        )

    def _bury(self, worker: subprocess.Popen) -> None:
        """Settle what a dead worker left behind."""
        program, code = self._store.claimed_by(worker.pid), worker.returncode
        if code == REFUSED:
            raise SweepError(
                "a worker found other code or data than the sweep was started with; it said which"
            )
        how = f"was killed ({signal.Signals(-code).name})" if code < 0 else f"ended with exit code {code}"
        if program is not None:
            settle(self._store, self._sweep, program, how, say=self._say)
            return
        self._idle_deaths += 1
        if code > 0 or self._idle_deaths > self._sweep.attempts:
            raise SweepError(f"a worker process {how} and had no program; what it printed says why")
        self._say(f"a worker {how} between two programs; another one is started")


def settle(
    store: Store, sweep: SweepConfig, program: Program, how: str, *, say: Callable[[str], None]
) -> None:
    """Let a program whose worker died be tried again, or give it up; `how` says what happened to the worker."""
    words = (
        f"the worker of program {program.number} {how} after step {program.step} ({len(program.runs)} runs)"
    )
    if program.tries < sweep.attempts:
        sentence = f"{words}; another worker goes on from there"
        store.release(program)
    else:
        sentence = f"{words}, try {program.tries} of {sweep.attempts}; given up"
        fail(store, program, Outcome("killed", sentence), steps=program.step)
    store.add_event("worker_killed", sentence, program.runs)
    say(sentence)
