"""Every residual topology by its config name: one line each, options are the keyword arguments of its factory."""

import inspect
from collections.abc import Callable, Mapping

from jaxblock.choices import check_options, parse_choice
from jaxblock.contracts import check_choice
from jaxblock.residual.attention_residual import attention_residual
from jaxblock.residual.block_attention_residual import block_attention_residual
from jaxblock.residual.contract import Topology
from jaxblock.residual.dense_former import dense_former
from jaxblock.residual.placements import branch_norm, none, peri_norm, post_norm, pre_norm

REGISTRY: Mapping[str, Callable[..., Topology]] = {
    "none": none,
    "pre_norm": pre_norm,
    "post_norm": post_norm,
    "peri_norm": peri_norm,
    "branch_norm": branch_norm,
    "dense_former": dense_former,
    "attention_residual": attention_residual,
    "block_attention_residual": block_attention_residual,
}


def topology(text: str, registry: Mapping[str, Callable[..., Topology]] = REGISTRY) -> Topology:
    """Return the topology that "name(option=1)" names.

    Args:
      text: a config's `residual`.
      registry: where names are looked up; pass your own mapping to try a connection without touching this file.

    Raises:
      ValueError: an unknown name or option, with the nearest valid one.
    """
    choice = parse_choice("model.residual", text)
    check_choice("model.residual", choice.name, registry)
    factory = registry[choice.name]
    options = inspect.signature(factory).parameters.values()
    unset = [str(option) for option in options if option.default is inspect.Parameter.empty]
    if unset:
        raise ValueError(
            f"the factory of {choice.name!r} has {', '.join(unset)} without a default; an option is a keyword with one"
        )
    defaults = {option.name: option.default for option in options}
    return factory(**check_options("model.residual", choice, defaults))
