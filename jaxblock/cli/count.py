"""`jaxblock count`: what a config costs, before it is run and without allocating anything."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Annotated, Any

import tyro

from jaxblock.cli.arguments import Action, Flag


@dataclasses.dataclass(frozen=True)
class CountCommand:
    """Count parameters, FLOPs and bytes of a config."""

    config: Annotated[str | None, tyro.conf.Positional] = None
    """A TOML file. Left out: the built-in defaults, which are configs/quickstart.toml."""
    json: Flag = False
    """Print one line of JSON."""


def count(arguments: Sequence[str]) -> Action:
    """Count parameters, FLOPs and bytes: jaxblock count [CONFIG.toml] [--section.field VALUE]."""
    from jaxblock.cli.config_arguments import parse_with_config, read_config
    from jaxblock.cli.count_page import page

    command, overrides = parse_with_config(CountCommand, arguments, name="count", description=count.__doc__)
    counted = figures(read_config(command.config, overrides))

    def act() -> int:
        print(json.dumps(counted) if command.json else page(counted))
        return 0

    return act


def figures(config: Any) -> dict[str, Any]:
    """Return every number of a `TrainConfig`: plain values, FLOPs per token, memory in bytes.

    Raises:
      ValueError: a model that cannot be built, or a task that trains another.
    """
    from jaxblock.accounting import abstract_parameters, count_parameters, flop_conventions, flop_parts
    from jaxblock.accounting.feed_forward import idle_parameters

    if config.run.task_choice.name != "language_model":
        raise ValueError(
            f"run.task is {config.run.task!r}; jaxblock count counts language models: a classifier's size depends on "
            "its data"
        )
    params, length = abstract_parameters(config.model), config.model.context
    number = count_parameters(params)
    conventions = {row.name: row._asdict() for row in flop_conventions(config.model)}
    return {
        "parameters": {
            "blocks": number.blocks,
            "non_embedding": number.non_embedding,
            "total": number.total,
            "active": number.total - idle_parameters(config.model),
            **number._asdict(),
        },
        "flops_per_token": {
            "length": length,
            "forward_parts": flop_parts(config.model)._asdict(),
            "conventions": conventions,
        },
        "bytes": _bytes(config, params),
    }


def _bytes(config: Any, params: Any) -> dict[str, Any]:
    """Return the bytes of a training step, activations by remat policy, and of one sequence's key/value cache."""
    import jax

    from jaxblock.accounting import kept_bytes, kv_cache_bytes, tree_bytes
    from jaxblock.config import REMAT_POLICIES
    from jaxblock.models import Decoder
    from jaxblock.training.step import first_state

    model, rows = Decoder(config.model), config.data.batch // config.data.accumulation
    state = jax.eval_shape(lambda params: first_state(model, config, params), params)
    length, kept = config.model.context, {}
    for remat in REMAT_POLICIES:
        execution = dataclasses.replace(config.execution, remat=remat)
        found = kept_bytes(config.model, execution, params, batch=rows, length=length)
        kept[remat] = {"per_block": found.per_block, "total": found.total, **found._asdict()}
    held = {
        "parameters": tree_bytes(params),
        "gradients": tree_bytes(params),
        "optimizer": tree_bytes(state.moments),
        "average": tree_bytes(state.average),
    }
    remat = config.execution.remat
    return {
        **held,
        "rows": rows,
        "length": length,
        "remat": remat,
        "loss": config.execution.loss,
        "kept_for_backward": kept,
        "training_step": sum(held.values()) + kept[remat]["total"],
        "kv_cache_one_sequence": kv_cache_bytes(config.model, 1, length),
    }
