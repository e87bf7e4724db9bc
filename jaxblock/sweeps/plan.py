"""What a sweep is: a TOML of axes and of the config all runs share -> one checked `TrainConfig` per run.

    [sweep]                              [axes]                                       [run] [model] [data] ...
    name = "depth"                       "model.depth" = [2, 4, 8]                    what all runs share, as in a
    chunk = 50                           "optimizer.learning_rate" = [1e-3, 2e-3]     config of `jaxblock train`

Runs are the product of the axes, the first axis slowest. Any field of the config can be an axis; learning rate,
warm-up and seed are numbers of one compiled program (its lanes), every other axis is a program of its own.
"""

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pydantic

from jaxblock.choices import parse_choice
from jaxblock.contracts import check_choice, check_integer, check_number
from jaxblock.training.config import TrainConfig
from jaxblock.training.config.section import Section
from jaxblock.training.config_file import build_config, check_path, read_config_file

LANE_FIELDS = ("optimizer.learning_rate", "optimizer.warmup", "run.seed")
"""Axes whose values are lanes of one program."""
NOT_READ = (
    "run.name",
    "run.dir",
    "run.log_every",
    "run.evaluate_every",
    "run.checkpoint_every",
    "init.",
    "checkpoint.",
    "watch.",
    "sample.",
)
"""What a sweep has no use for, and a plan may not set."""
OTHER_LOSSES = (
    "run.task",
    "model.vocab_size",
    "data.path",
    "data.mixture",
    "data.separator",
    "data.validation_tokens",
)
"""Axes that would change what a loss is measured on, so that nothing could be compared."""
NO_AXIS = ("probe.every", "probe.statistics")
"""What is measured is the same for every run of a sweep, and changes none."""
CHOICES = (
    "run.task",
    "model.residual",
    "model.positions",
    "model.initialization",
    "model.parametrization",
    "optimizer.algorithm",
    "optimizer.schedule",
)
"""Fields that may say the same in two ways, as "pre_norm" and "pre_norm()"."""
MOST_RUNS = 10_000
SMALLEST, LARGEST = 1e-37, 3e38
"""Bounds of a learning rate: float32's."""


class SweepConfig(Section):
    """How a plan is run; nothing here changes a result, but for `extend`, which adds runs."""

    name: str
    """Names the sweep in its report."""
    chunk: int = 50
    """Optimizer steps between two saves of a program: what a kill loses at most."""
    lanes: int = 32
    """Most runs that one program trains at once; fewer where memory has no room for them."""
    memory_gib: float | None = None
    """Memory that all workers together may use. Left out: 80 % of the device's."""
    workers: int = 1
    """Worker processes; each trains one program at a time."""
    attempts: int = 2
    """How often a program is tried when its worker dies or fails."""
    extend: int = 2
    """How often an arm's learning rates are widened by one value while its best one lies at their edge."""
    head_dim: int | None = None
    """K, for an axis over model.width: the number of heads is then width / head_dim. Left out: heads as given."""
    seconds: float | None = None
    """Longest time one program may train, compilation not counted; its runs are then `error`. Left out: no limit."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> "SweepConfig":
        if not self.name.strip():
            raise ValueError("sweep.name is empty; it must name the sweep")
        for name in ("chunk", "lanes", "workers", "attempts"):
            check_integer(f"sweep.{name}", getattr(self, name), least=1)
        check_integer("sweep.extend", self.extend, least=0, most=20)
        if self.head_dim is not None:
            check_integer("sweep.head_dim", self.head_dim, least=1)
        for name in ("memory_gib", "seconds"):
            if getattr(self, name) is not None:
                check_number(f"sweep.{name}", getattr(self, name), above=0.0)
        return self


class Run(NamedTuple):
    """One run of a plan."""

    axes: dict[str, Any]
    """Config path -> value, of every axis."""
    config: TrainConfig


class Plan(NamedTuple):
    """A checked plan."""

    sweep: SweepConfig
    axes: dict[str, tuple[Any, ...]]
    shared: dict[str, dict[str, Any]]
    """Sections of the config all runs share, as the file has them."""

    def values(self) -> dict[str, Any]:
        """Return plain values, what a plan file holds."""
        axes = {path: list(values) for path, values in self.axes.items()}
        return {"sweep": self.sweep.model_dump(exclude_none=True), "axes": axes, **self.shared}

    def config(self, axes: Mapping[str, Any]) -> TrainConfig:
        """Return the checked config of the run with these values.

        Raises:
          ValueError: what is wrong with them.
        """
        overrides = dict(axes)
        if self.sweep.head_dim is not None and "model.width" in axes:
            overrides["model.heads"] = _heads(axes["model.width"], self.sweep.head_dim)
        return build_config(self.shared, overrides)

    def runs(self) -> tuple[Run, ...]:
        """Return all runs, in order.

        Raises:
          ValueError: values that make no config; the sentence names the run.
        """
        found = []
        for values in itertools.product(*self.axes.values()):
            axes = dict(zip(self.axes, values, strict=True))
            try:
                found.append(Run(axes, self.config(axes)))
            except ValueError as error:
                words = ", ".join(f"{path} = {value!r}" for path, value in axes.items())
                raise ValueError(f"the run with {words}: {error}") from error
        return tuple(found)


def read_plan(path: Path) -> Plan:
    """Return a plan file, checked, every run's config included.

    Raises:
      ValueError: a file that cannot be read, an unknown section, axis or value, a run that has no valid config.
    """
    return build_plan(read_config_file(path))


def build_plan(values: Mapping[str, Any]) -> Plan:
    """Return the checked plan of a file's values.

    Raises:
      ValueError: as `read_plan`.
    """
    known = ("sweep", "axes", *TrainConfig.model_fields)
    for section, entries in values.items():
        check_choice("section of the plan", section, known)
        if not isinstance(entries, dict):
            raise ValueError(f"{section} is {entries!r}; it must be a section, [{section}]")
    if "sweep" not in values:
        raise ValueError('the plan has no section [sweep]; it needs one with a name, as in name = "depth"')
    sweep = _sweep_section(values["sweep"])
    axes = _axes(values.get("axes", {}))
    if sweep.head_dim is not None and "model.width" not in axes:
        raise ValueError("sweep.head_dim is given, and model.width is no axis; heads are then model.heads")
    if sweep.head_dim is not None and ("model.heads" in axes or "heads" in values.get("model", {})):
        raise ValueError("sweep.head_dim decides model.heads, which the plan gives as well; leave one out")
    shared = {name: dict(entries) for name, entries in values.items() if name not in ("sweep", "axes")}
    for path in [f"{section}.{name}" for section, entries in shared.items() for name in entries]:
        _check_read(path)
        if path in axes:
            raise ValueError(f"{path} is an axis and also given in its section; leave one out")
    plan = Plan(sweep, axes, shared)
    seen: dict[str, Run] = {}
    for run in plan.runs():
        check_run(run)
        other = seen.setdefault(_canonical(run.config), run)
        if other is not run:
            differing = [path for path in axes if run.axes[path] != other.axes[path]] or list(axes)
            both = " and ".join(repr(one.axes[differing[0]]) for one in (other, run))
            raise ValueError(f"axis {differing[0]!r} has {both}, which are the same; once is enough")
    return plan


def _sweep_section(entries: Mapping[str, Any]) -> SweepConfig:
    for name in entries:
        check_choice("field of [sweep]", name, SweepConfig.model_fields)
    if "name" not in entries:
        raise ValueError("sweep.name is missing; it names the sweep in its report")
    try:
        return SweepConfig.model_validate_json(json.dumps(entries, default=str))
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        if first["type"] == "value_error":
            raise ValueError(str(first.get("ctx", {})["error"])) from error
        wanted = first["msg"].replace("Input should be ", "it must be ")
        raise ValueError(f"sweep.{first['loc'][0]} is {first['input']!r}; {wanted}") from error


def _axes(entries: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Return the axes, checked one by one; values are checked by the configs they make."""
    if not entries:
        raise ValueError('the plan has no [axes]; it needs at least one, as in "model.depth" = [2, 4, 8]')
    axes, runs = {}, 1
    for path, values in entries.items():
        if isinstance(values, dict):
            raise ValueError(
                f'axis {path!r} is a table; an axis is written with quotes, as in "model.depth" = [2, 4]'
            )
        check_path(path, "axis")
        _check_read(path)
        if path in OTHER_LOSSES:
            raise ValueError(
                f"{path} is an axis, and runs that differ in it have losses on other data or other tokens, which "
                "cannot be compared; make a sweep of each"
            )
        if path in NO_AXIS:
            raise ValueError(
                f"{path} is an axis, and what is measured changes no run; give it once, in the section [probe]"
            )
        if not isinstance(values, list) or not values:
            raise ValueError(f"axis {path!r} is {values!r}; it must be a list of at least one value")
        texts = [json.dumps(value, sort_keys=True, default=str) for value in values]
        twice = next((text for text in texts if texts.count(text) > 1), None)
        if twice is not None:
            raise ValueError(
                f"axis {path!r} has the value {twice} {texts.count(twice)} times; once is enough"
            )
        axes[path] = tuple(values)
        runs *= len(values)
    if runs > MOST_RUNS:
        raise ValueError(f"the axes make {runs:,} runs; a sweep has at most {MOST_RUNS:,}")
    return axes


def _check_read(path: str) -> None:
    """Raise ValueError for a field that a sweep does not read."""
    if any(path == name or (name.endswith(".") and path.startswith(name)) for name in NOT_READ):
        raise ValueError(f"{path} is set in the plan, and a sweep does not read it; leave it out")


def check_run(run: Run) -> None:
    """Raise ValueError for what a config may say and a lane cannot do."""
    config = run.config
    rate = config.optimizer.learning_rate
    if not SMALLEST <= rate <= LARGEST:
        raise ValueError(
            f"optimizer.learning_rate is {rate}; it must be above 0 in a sweep, whose basins lie on a logarithmic "
            f"axis, and a float32: from {SMALLEST:g} to {LARGEST:g}"
        )
    if config.guard.non_finite != "stop" or config.guard.spike != "ignore":
        raise ValueError(
            "guard.non_finite must be stop and guard.spike ignore in a sweep: another answer would give "
            "its lanes different data"
        )
    if config.probe.every and "update" in config.probe.statistics:
        raise ValueError(
            f"probe.statistics is {list(config.probe.statistics)}; in a sweep it must be without 'update': runs are "
            "measured after their last step, when nothing is updated"
        )
    if config.optimizer.average:
        raise ValueError(
            f"optimizer.average is {config.optimizer.average}; a sweep evaluates the parameters themselves, so it "
            "must be 0"
        )


def notes_of(plan: Plan) -> tuple[str, ...]:
    """Return what a field means in a sweep, where it is another thing than in a single run."""
    every = plan.shared["probe"]["every"] if "every" in plan.shared.get("probe", {}) else 0
    if not every:
        return ()
    return (
        f"probe.every is {every}: in a sweep every run is measured once, after its last step, on the first "
        "validation batch; any number above 0 means that",
    )


def _canonical(config: TrainConfig) -> str:
    """Return a text that two configs share exactly when they are the same run."""
    values = {
        f"{section}.{name}": value
        for section, entries in config.values().items()
        for name, value in entries.items()
    }
    for path in CHOICES:
        name, options = parse_choice(path, values[path])
        values[path] = [name, sorted(options.items())]
    values["optimizer.learning_rate"] = float(np.float32(values["optimizer.learning_rate"]))
    return json.dumps(values, sort_keys=True)


def _heads(width: Any, head_dim: int) -> Any:
    """Return the number of heads of a width."""
    if not isinstance(width, int) or isinstance(width, bool):
        return 1  # the width itself is refused by the config
    if width % head_dim:
        raise ValueError(
            f"model.width is {width} and sweep.head_dim is {head_dim}; it must divide every width"
        )
    return width // head_dim
