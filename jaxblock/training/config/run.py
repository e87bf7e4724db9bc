"""Where a run lives, what it starts from, what it keeps, when it stops itself, what it shows."""

from collections.abc import Mapping
from typing import Any

import pydantic

from jaxblock.choices import Choice, resolve
from jaxblock.contracts import check_choice, check_file_name, check_integer, check_number
from jaxblock.models.classifier import POOLINGS
from jaxblock.training.config.section import Section

TASKS: Mapping[str, Mapping[str, Any]] = {"language_model": {}, "classifier": {"pooling": "mean"}}
ACTIONS = ("stop", "skip", "rewind")


class RunConfig(Section):
    """Where a run lives, how long it is, what it writes when."""

    name: str = "quickstart"
    """Names the run's folder, runs/NAME-TIME, when dir is left out."""
    dir: str | None = None
    """The run's folder; it must not exist."""
    task: str = "language_model"
    """What is learned: language_model, or classifier(pooling="mean", "first" or "last")."""
    steps: int = 2300
    """Number of optimizer steps."""
    seed: int = 0
    """Decides initial parameters, order of the data, dropout and the sample."""
    log_every: int = 20
    """Steps between progress lines; metrics.jsonl has every step."""
    evaluate_every: int = 2300
    """Steps between evaluations of the whole validation slice; the last step is always evaluated."""
    checkpoint_every: int = 500
    """Steps between checkpoints; the last step is always saved."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> "RunConfig":
        for name in ("steps", "log_every", "evaluate_every", "checkpoint_every"):
            check_integer(f"run.{name}", getattr(self, name), least=1)
        check_integer("run.seed", self.seed, least=0, most=2**32 - 1)
        is_path = "/" in self.name or "\\" in self.name or self.name.startswith(".")
        if not self.name or is_path or not self.name.isprintable():
            raise ValueError(f"run.name is {self.name!r}; it must be a plain file name")
        check_file_name("run.name", self.name)
        if self.dir is not None:
            check_file_name("run.dir", self.dir)
        task = self.task_choice
        if task.name == "classifier":
            check_choice("run.task: pooling", task.options["pooling"], POOLINGS)
        return self

    @property
    def task_choice(self) -> Choice:
        """`task`, parsed, with its defaults filled in."""
        return resolve("run.task", self.task, TASKS)


class InitConfig(Section):
    """What the parameters are before the first step."""

    from_run: str | None = pydantic.Field(default=None, alias="from")
    """Folder of a run whose newest checkpoint's weights are the start, with a new optimizer. Left out: drawn anew."""
    weights: str = "last"
    """Which of that run's weights: last (its parameters) or average (their moving average, if it kept one)."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> "InitConfig":
        if self.from_run == "":
            raise ValueError("init.from is empty; it must name the folder of a run, or be left out")
        if self.from_run is not None:
            check_file_name("init.from", self.from_run)
        check_choice("init.weights", self.weights, ("last", "average"))
        return self


class CheckpointConfig(Section):
    """Which checkpoints stay on disk; the newest always does."""

    keep_latest: int = 2
    """The newest so many."""
    keep_best: int = 0
    """Also the so many with the lowest validation loss."""
    keep_every: int = 0
    """Also those whose step is a multiple of this; 0 = none for that reason."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> "CheckpointConfig":
        check_integer("checkpoint.keep_latest", self.keep_latest, least=1)
        check_integer("checkpoint.keep_best", self.keep_best, least=0)
        check_integer("checkpoint.keep_every", self.keep_every, least=0)
        return self


class GuardConfig(Section):
    """What happens at a bad step: stop (exit code 3), skip (pass over its batch, the state untouched), or rewind
    (the newest checkpoint before it, every batch since then passed over)."""

    non_finite: str = "stop"
    """At a loss, gradient or parameter that is not finite: stop, skip or rewind."""
    spike: str = "ignore"
    """At a spike of the loss or the gradient norm: ignore, stop, skip or rewind."""
    deviations: float = 6.0
    """A spike is so many standard deviations above the mean of the last `window` good steps."""
    window: int = 128
    """Steps the mean and the deviation are taken over; spikes are looked for once half of them are there."""
    limit: int = 10
    """Bad steps in a row (without `window` good ones between) that skip or rewind may pass over; the next one stops."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> "GuardConfig":
        check_choice("guard.non_finite", self.non_finite, ACTIONS)
        check_choice("guard.spike", self.spike, ("ignore", *ACTIONS))
        check_number("guard.deviations", self.deviations, above=0.0)
        check_integer("guard.window", self.window, least=4)
        check_integer("guard.limit", self.limit, least=1)
        return self


class WatchConfig(Section):
    """What shows a run while it trains, besides its own folder."""

    figure_seconds: float = 60.0
    """Least time between redrawings of plots/run.png while the run trains; 0 = only at the end."""
    tensorboard: bool = False
    """Also write every step to RUN/tensorboard (needs jaxblock[tensorboard])."""
    wandb: str | None = None
    """Also log to this Weights & Biases project (needs jaxblock[wandb])."""
    profile_start: int | None = None
    """First step of a `jax.profiler` trace, written to RUN/profile. Left out: no trace."""
    profile_steps: int = 5
    """Steps the trace covers."""
    hang_seconds: float = 600.0
    """A step that has not ended after so many seconds is named on stderr, once; the run goes on. 0 = never."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> "WatchConfig":
        check_number("watch.figure_seconds", self.figure_seconds, least=0.0)
        if self.wandb == "":
            raise ValueError("watch.wandb is empty; it must name a project, or be left out")
        if self.profile_start is not None:
            check_integer("watch.profile_start", self.profile_start, least=1)
        check_integer("watch.profile_steps", self.profile_steps, least=1)
        check_number("watch.hang_seconds", self.hang_seconds, least=0.0)
        return self


class SampleConfig(Section):
    """The continuation drawn at the end of a run."""

    prompt: str | None = None
    """Text to continue, or token ids separated by spaces for token shards. Left out: the validation slice's start."""
    length: int = 400
    """Tokens to draw."""
    temperature: float = 0.8
    """0 = greedy."""
    top_k: int | None = None
    """Draw among the k likeliest tokens. Left out: among all."""
    top_p: float | None = None
    """Draw among the likeliest tokens that hold this probability. Left out: among all."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> "SampleConfig":
        if self.prompt == "":
            raise ValueError("sample.prompt is empty; it must hold at least one character")
        check_integer("sample.length", self.length, least=1)
        check_number("sample.temperature", self.temperature, least=0.0)
        if self.top_k is not None:
            check_integer("sample.top_k", self.top_k, least=1)
        if self.top_p is not None:
            check_number("sample.top_p", self.top_p, above=0.0, most=1.0)
        return self
