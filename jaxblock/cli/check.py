"""`jaxblock check`: do activations keep their size as a model gets deeper or wider? Ten steps each, about a minute."""

import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from typing import Annotated, Any

import tyro

from jaxblock.cli.arguments import Action, Flag, asks_for_help
from jaxblock.contracts import check_choice, check_integer

PASSED, NOT_PASSED = 0, 1
SIZES = {"depth": "2,4,8,16,32", "width": "32,64,128,192,256"}
SHOWN = (0, 1, 2, 5, 10)
_OPTIONS = ("sizes", "seeds", "steps", "most_batch", "most_context")
Count = Annotated[str, tyro.conf.arg(metavar="INTEGER")]


@dataclasses.dataclass(frozen=True)
class CheckCommand:
    """Train a config for a few steps at several depths or widths."""

    config: Annotated[str | None, tyro.conf.Positional] = None
    """A TOML file, after the axis. Left out: the built-in defaults, which are configs/quickstart.toml."""
    sizes: Annotated[str | None, tyro.conf.arg(metavar="INTEGERS", help_behavior_hint="")] = None
    """Depths in blocks, or widths, which multiples of the head size must be; a slope needs five. Left out:
    2,4,8,16,32 for depth and 32,64,128,192,256 for width."""
    seeds: Count = "3"
    """Seeds of initial values and dropout, from run.seed on; all train on the first batch of run.seed."""
    steps: Count = "10"
    """Updates, at the peak learning rate from the first one on."""
    most_batch: Count = "4"
    """Rows of the batch, where data.batch has more: the check is to take a minute."""
    most_context: Count = "64"
    """Tokens of a row, where model.context has more, for the same reason."""
    json: Flag = False
    """Print one line of JSON."""


def check(arguments: Sequence[str]) -> Action:
    """Check that activations keep their size: jaxblock check depth|width [CONFIG.toml] [--section.field VALUE]."""
    from jaxblock.cli.config_arguments import parse_with_config, read_config
    from jaxblock.sweeps.coordinate import plan_check, run_check

    if asks_for_help(arguments):
        arguments = ["depth", "--help"]
    axis, rest = _axis(arguments)
    command, overrides = parse_with_config(
        CheckCommand, rest, name="check depth|width", description=check.__doc__, known=_OPTIONS
    )
    config = read_config(command.config, overrides)
    least = config.run.seed
    plan = plan_check(
        _capped(
            config,
            batch=_integer("most_batch", command.most_batch),
            context=_integer("most_context", command.most_context),
        ),
        axis=axis,
        sizes=[_integer("sizes", text) for text in (command.sizes or SIZES[axis]).split(",")],
        seeds=range(least, least + _integer("seeds", command.seeds)),
        steps=_integer("steps", command.steps),
    )

    def act() -> int:
        begun = time.perf_counter()

        def say(size: int) -> None:
            print(f"{axis} {size}: {time.perf_counter() - begun:.0f} s", file=sys.stderr)

        found = run_check(plan, say)
        print(json.dumps(_record(found)) if command.json else _page(found, plan.configs[0]))
        return PASSED if found.verdict == "pass" else NOT_PASSED

    return act


def _axis(arguments: Sequence[str]) -> tuple[str, Sequence[str]]:
    """Return the axis and the words after it; it comes first, so that what follows reads as it does for train."""
    if not arguments or arguments[0].startswith("-"):
        raise ValueError(
            "check needs an axis, depth or width: jaxblock check depth [CONFIG.toml] [--section.field VALUE]"
        )
    check_choice("the axis of check", arguments[0], SIZES)
    return arguments[0], arguments[1:]


def _integer(name: str, text: str) -> int:
    """Return the number a flag's text stands for."""
    try:
        value: Any = int(text)
    except ValueError:
        value = text
    check_integer(f"--{name}", value, least=1)
    return value


def _capped(config: Any, *, batch: int, context: int) -> Any:
    """Return the config with at most so many rows, in one piece, of at most so many tokens."""
    mixer = config.model.token_mixer_choice
    if mixer.name != "attention" and config.model.context > context:
        raise ValueError(
            f"model.token_mixer is {config.model.token_mixer!r} and model.context is {config.model.context}, which "
            f"--most-context would cut to {context}: a mixer of positions is another one there; "
            f"pass --most-context {config.model.context}"
        )
    model = dataclasses.replace(config.model, context=min(config.model.context, context))
    data = config.data.model_copy(update={"batch": min(config.data.batch, batch), "accumulation": 1})
    return config.model_copy(update={"model": model, "data": data})


def _page(found: Any, config: Any) -> str:
    """Return the slopes of every quantity as a table, and the verdict."""
    from jaxblock.sweeps.coordinate_slopes import BAND, FIRST_JUDGED, number, words

    falling = " (logits may fall)" if found.axis == "width" else ""
    times = sorted({t for t in SHOWN if t <= found.steps} | {found.steps})
    rows = [["", *(f"t = {t}" for t in times)]]
    for name in found.rms:
        mark = "* " if name in found.judged else "  "
        rows.append([mark + words(name), *(number(found.slope(name, t).found) for t in times)])
    sizes = ", ".join(str(size) for size in found.sizes)
    lines = [
        f"slope of log rms against log {found.axis}, {sizes}; mean and 95 % t interval of {len(found.seeds)} seeds",
        f"after t updates at learning rate {found.learning_rate:g}, no warm-up; one batch of {config.data.batch} x "
        f"{config.model.context} tokens; {config.model.residual}, {config.model.parametrization}, "
        f"{config.model.initialization}",
        "",
        *("  ".join([row[0].ljust(26), *(cell.rjust(20) for cell in row[1:])]).rstrip() for row in rows),
        "",
        f"* has to be flat, within +-{BAND}, from t = {FIRST_JUDGED} on{falling}; - has no slope",
        *found.sentences(),
    ]
    return "\n".join(lines)


def _record(found: Any) -> dict[str, Any]:
    """Return everything as plain values; what is not finite is null."""
    import numpy as np

    def listed(values: Any) -> Any:
        return (
            [listed(part) for part in values]
            if np.ndim(values)
            else float(values)
            if np.isfinite(values)
            else None
        )

    def fields(slope: Any) -> dict[str, Any]:
        return {**dataclasses.asdict(slope), "found": dataclasses.asdict(slope.found)}

    return {
        "axis": found.axis,
        "sizes": found.sizes,
        "seeds": found.seeds,
        "steps": found.steps,
        "learning_rate": found.learning_rate,
        "verdict": found.verdict,
        "sentences": found.sentences(),
        "judged": found.judged,
        "non_finite": [lost._asdict() for lost in found.non_finite],
        "slopes": [fields(slope) for slope in found.slopes],
        "mean_abs": {name: listed(values) for name, values in found.mean_abs.items()},
        "rms": {name: listed(values) for name, values in found.rms.items()},
    }
