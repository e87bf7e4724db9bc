"""What a sweep found, as plain records: the store makes them, statistics and report read them and nothing else.

One `Result` is one training run, a lane of a program that trained several at once. Depth is always said in blocks L;
`sublayers` is S. Losses are nats per target.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

OUTCOMES: Mapping[str, str] = {
    "ok": "trained to the end",
    "plateau": "trained to the end, and the training loss fell by less than 1 % of where it began",
    "diverged": "trained to the end, and the training loss ended above where it began, or back above a uniform guess",
    "non_finite": "a loss, gradient or parameter was not finite, and the run stopped there",
    "out_of_memory": "does not fit in memory, even alone",
    "killed": "its worker process died as often as a program may be tried",
    "error": "its program failed, or took longer than it may",
    "missing": "not run yet",
}
"""Every run has exactly one; only `missing` may change."""
FAILED = ("diverged", "non_finite")
"""Outcomes that count as divergence; `out_of_memory`, `killed`, `error` and `missing` are no evidence either way."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The residual stream of one batch, before (`start`) or after (`end`) training; root mean squares, float."""

    stream: tuple[float, ...]
    """rms of the stream before the first sublayer and after each block, [L + 1]; () where it is not one array."""
    branches: tuple[float, ...]
    """rms of each branch's output, in order, [S]."""
    logits: float


@dataclass(frozen=True, kw_only=True)
class Result:
    """One training run of a sweep."""

    id: str
    """Hash of config, code and data: the same run has the same one on every machine."""
    axes: Mapping[str, Any]
    """Value of every axis of the plan by its config path, as {"model.depth": 4, "run.seed": 0}."""
    depth: int
    sublayers: int
    width: int
    residual: str
    initialization: str
    parametrization: str
    learning_rate: float
    """Peak."""
    warmup: float
    """Fraction of the steps."""
    seed: int
    planned_steps: int

    outcome: str = "missing"
    """A key of `OUTCOMES`."""
    reason: str = ""
    """One sentence where the outcome is not ok, as "the loss was not finite at step 12"."""
    steps: int = 0
    """Optimizer steps made."""
    val_loss: float | None = None
    """Validation loss after the last step; None where there is none or it is not finite."""
    val_error: float | None = None
    """Standard error of `val_loss` over the validation batches: noise of the evaluation, not of the training."""
    val_losses: tuple[float, ...] = ()
    """Mean loss of each validation batch, for paired comparisons; () where there is none."""
    losses: tuple[tuple[int, float], ...] = ()
    """(step, training loss of that batch), thinned to at most 200 points, the first and the last among them."""
    first_loss: float | None = None
    """Training loss of the first batch, before any update."""
    last_loss: float | None = None
    """Mean training loss over the last tenth of the steps."""
    still_falling: float | None = None
    """Slope of the training loss over the last tenth of the steps, nats per 1,000 steps; None with under 10 of them."""
    first_gradient_norm: float | None = None
    """Global gradient norm at the first step, before clipping."""
    last_gradient_norm: float | None = None
    """Median of the global gradient norm over the last tenth of the steps."""
    start: Profile | None = None
    end: Profile | None = None
    probe: Mapping[str, tuple[float | None, ...]] = field(default_factory=dict)
    """Statistics of [probe] along the sublayers after the last update made, on the first validation batch: name -> [S],
    None where not finite; {} where nothing was measured."""

    parameters: Mapping[str, int] = field(default_factory=dict)
    """"blocks", "non_embedding" and "total"."""
    flops_per_token: Mapping[str, float] = field(default_factory=dict)
    """Training FLOPs per token by convention (`jaxblock.accounting.flop_conventions`)."""
    lanes: int = 0
    """Runs trained at once by the program this one was a lane of."""
    compile_s: float | None = None
    step_s: float | None = None
    """Seconds of one step of the whole program, median over its chunks; divide by `lanes` for one run's share."""
    program_bytes: int | None = None
    """Compiled program's arguments, results and temporaries, all lanes."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened on the way and that a reader should know."""

    time: str
    """UTC, ISO 8601."""
    kind: str
    """"worker_killed", "halved_lanes", "resumed", "interrupted", "grid_extended", "error"."""
    sentence: str
    """What happened, to which program, and what was done."""
    runs: tuple[str, ...] = ()
    """Ids of the runs concerned."""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A plan and everything known about it."""

    name: str
    plan: Mapping[str, Any]
    """The plan file's values: [sweep], [axes] and the sections of the config all runs share."""
    axes: Mapping[str, tuple[Any, ...]]
    """Values of each axis, in the plan's order."""
    fixed: Mapping[str, Any]
    """Config path -> value, of every hyperparameter that no axis varies."""
    results: tuple[Result, ...]
    """One per run of the plan, in the plan's order, missing ones too."""
    events: tuple[Event, ...]
    environment: Mapping[str, Any]
    """Versions, device, cores, code and data fingerprints, load average."""
    tokens_per_step: int
    uniform_loss: float
    """Loss of guessing every token alike, log of the vocabulary."""
    baseline_loss: float | None = None
    """Loss of the task's baseline on the same validation data, where it was computed."""
    baseline: str = ""
