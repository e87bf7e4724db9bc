"""What shows a run while it trains: figures, TensorBoard, Weights & Biases, a profile. None of them can stop it."""

import contextlib
import importlib
import sys
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self

from jaxblock.training.config import TrainConfig, WatchConfig
from jaxblock.training.plots import Curves, draw_run
from jaxblock.training.run_folder import RunFolder
from jaxblock.training.watch.hang import HangWatch
from jaxblock.training.watch.profile import Profile
from jaxblock.training.watch.services import Service, TensorBoard, WeightsAndBiases

__all__ = ["Watch", "unwatched"]

PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}
"""Field of the config that asks for a service, which is also the extra to install, and the package it needs."""
FIGURE_SHARE = 0.01
"""Most of a run's time that may go into redrawing its figure."""


class Watch:
    """A context to train in, entered once metrics.jsonl is open; it is told what happens, and shows it.

    A failure in here (a full disk, no network) is said once and counted in `notes`, and the run goes on.

    Args:
      config: the run's.
      folder: the run's; its metrics so far are read when the context is entered.
      baseline: a loss to compare with, drawn into the figure.
      say: gets a line to show; left out, stderr does.
      clock: seconds; left out, the system's.
    """

    def __init__(
        self,
        config: TrainConfig,
        folder: RunFolder,
        *,
        baseline: float | None,
        say: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._config, self._folder, self._baseline = config, folder, baseline
        self._say, self._clock = _to_stderr if say is None else say, clock
        self._curves, self._services = Curves(), dict[str, Service]()
        self._profile = Profile(config.watch, folder.path / "profile")
        self._hang = HangWatch(config.watch.hang_seconds, self._say, clock)
        self._failures: dict[str, tuple[int, str]] = {}
        self._next_figure = clock() + config.watch.figure_seconds

    @staticmethod
    def check(config: TrainConfig) -> None:
        """Raise ValueError where the config asks for what cannot be shown; packages are loaded only if asked for."""
        watch, steps = config.watch, config.run.steps
        for field, asked in (("tensorboard", watch.tensorboard), ("wandb", watch.wandb is not None)):
            if asked:
                _check_package(field)
        if watch.profile_start is not None and watch.profile_start > steps:
            raise ValueError(
                f"watch.profile_start is {watch.profile_start}, but run.steps is {steps}: no step would be traced"
            )

    def __enter__(self) -> Self:
        self._curves.add(self._folder.read_metrics())
        self._hang.__enter__()
        if self._config.watch.tensorboard:
            with self._shielded("tensorboard"):
                self._services["tensorboard"] = TensorBoard(self._folder.path)
        if self._config.watch.wandb is not None:
            with self._shielded("wandb"):
                self._services["wandb"] = WeightsAndBiases(self._config, self._folder.path)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hang.__exit__(kind, error, trace)
        with self._shielded("profile"):
            self._profile.close()
        for name, service in self._services.items():
            with self._shielded(name):
                service.close(failed=kind is not None)
        self._services.clear()

    @property
    def notes(self) -> list[str]:
        """One sentence for each watcher that failed, for the summary."""
        return [
            f"watch: {name} failed {count} time{'s' if count > 1 else ''}, first with {first}"
            for name, (count, first) in self._failures.items()
        ]

    def rows(self, rows: list[dict[str, Any]]) -> None:
        """Take the rows that were just appended to metrics.jsonl."""
        self._curves.add(rows)
        for name, service in self._services.items():
            with self._shielded(name):
                service.write(rows)

    def figure(self) -> None:
        """Redraw plots/run.png if `figure_seconds` have passed, or more where drawing takes over 1 % of the time."""
        wait, start = self._config.watch.figure_seconds, self._clock()
        if not wait or start < self._next_figure:
            return
        with self._shielded("figure"):
            draw_run(self._curves, self._folder.plots, baseline=self._baseline)
        end = self._clock()
        self._next_figure = end + max(wait, (end - start) / FIGURE_SHARE)

    def before_step(self, step: int) -> None:
        """Start the profile where it is time to; `step` is the number this step will have in metrics.jsonl."""
        with self._shielded("profile"):
            self._profile.before_step(step)
        self._hang.started(step)

    def after_step(self, step: int, state: Any) -> None:
        """End the profile where it is time to; `state` is what the step returned, waited for then and only then."""
        with self._shielded("profile"):
            self._profile.after_step(step, state)

    def settled(self, step: int) -> None:
        """Take that the results of all steps up to this one are there."""
        self._hang.ended(step)

    @contextlib.contextmanager
    def _shielded(self, name: str) -> Iterator[None]:
        """Keep a watcher's failure from the run: say the first one, count them all."""
        try:
            yield
        except Exception as error:
            count, first = self._failures.get(name, (0, f"{type(error).__name__}: {error}"))
            self._failures[name] = (count + 1, first)
            if not count:
                self._say(f"watch: {name} failed with {first}; the run goes on, its folder has everything")


def unwatched(config: TrainConfig) -> TrainConfig:
    """Return the config without anything that shows the run, for a process beside the one that does."""
    return config.model_copy(update={"watch": WatchConfig(figure_seconds=0.0)})


def _check_package(field: str) -> None:
    """Raise ValueError unless the package that a field of `watch` needs can be imported."""
    package = PACKAGES[field]
    try:
        importlib.import_module(package)
    except Exception as error:  # a package can be broken in any way
        raise ValueError(
            f"watch.{field} is asked for, but {package} cannot be imported ({error}); install it with: "
            f'pip install "jaxblock[{field}]"'
        ) from error


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr)
