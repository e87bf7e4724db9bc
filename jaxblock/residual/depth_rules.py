"""Whether initialization, parametrization and topology go together: a branch can move, and is scaled by depth once."""

import dataclasses

from jaxblock.axes import PARAMETERS
from jaxblock.config import ModelConfig
from jaxblock.residual.contract import Topology

BLOCK_KERNELS = tuple(
    dict.fromkeys(
        rule.role
        for rule in PARAMETERS
        if rule.pattern.startswith("blocks/") and rule.pattern.endswith("/kernel")
    )
)
"""Roles a topology's `gain` is asked for."""


def check_depth_rules(config: ModelConfig, topology: Topology) -> None:
    """Raise ValueError where branches would start at 0 for good, be scaled by the depth twice, or to no effect.

    What scales them: a parametrization, the "gpt2" initialization, a topology that is `depth_scaled` or whose `gain`
    on some kernel's initial values changes with depth or width. Nothing: the topology is `scale_free`.
    """
    if topology.zero_start and config.initialization_choice.name == "zero_output":
        raise ValueError(
            f"{_said('initialization', config, topology)}, whose branches must not start at 0: with a factor that "
            "starts at 0 neither ever moves, a step along an output of 0 has no direction, without a skip nothing is "
            'left; with it the initialization must be "plain"'
        )
    scaled = config.parametrization_choice.name != "standard"
    if scaled and topology.scale_free:
        raise ValueError(
            f"{_said('parametrization', config, topology)}, which normalizes the branch's output: a factor on the "
            'branch does nothing there; with it the parametrization must be "standard"'
        )
    base_width = config.parametrization_choice.options.get("base_width", config.width)
    if topology.sums_width and base_width != config.width:
        raise ValueError(
            f"{_said('parametrization', config, topology)}, whose own parameters are summed over the width: no rule "
            f"says how they scale with it; with it base_width must be the model's width, {config.width}"
        )
    if topology.scale_free and config.stochastic_depth_choice.name != "none":
        raise ValueError(
            f"{_said('stochastic_depth', config, topology)}, which normalizes the branch's output: what rows that are "
            'kept are multiplied by to keep the mean does nothing there; with it stochastic_depth must be "none"'
        )
    if topology.project is not None and config.initialization_choice.name == "gpt2":
        raise ValueError(
            f"{_said('initialization', config, topology)}, which projects the kernels, so that what the initialization "
            'divides them by does nothing; with it the initialization must be "plain"'
        )
    rules = {"parametrization": scaled, "initialization": config.initialization_choice.name == "gpt2"}
    for field, allowed in (("parametrization", '"standard"'), ("initialization", '"plain" or "zero_output"')):
        if not rules[field]:
            continue
        role = _scaled_role(config, topology)
        what = f"whose initial {role} kernels are" if role else "whose rule is"
        if role or topology.depth_scaled:
            raise ValueError(
                f"{_said(field, config, topology)}, {what} scaled by the size of the model already: it would count "
                f"twice; with it the {field} must be {allowed}"
            )


def _said(field: str, config: ModelConfig, topology: Topology) -> str:
    return f"model.{field} is {getattr(config, field)!r} and the residual connection is {topology.equation!r}"


def _scaled_role(config: ModelConfig, topology: Topology) -> str | None:
    """Return a role whose gain depends on depth or width; None where there is none."""
    for size, value in (("depth", config.depth), ("width", config.width)):
        other = dataclasses.replace(config, **{size: 2 * value})
        for role in BLOCK_KERNELS:
            if topology.gain(config, role) != topology.gain(other, role):
                return role
    return None
