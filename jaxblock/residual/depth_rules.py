"""Whether a rule for depth and a topology go together: a branch is scaled by depth once, and to some effect."""

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
    """Raise ValueError where a parametrization that scales branches would count twice, or do nothing.

    Twice: the topology's `gain` on some kernel's initial values changes with depth or width. Nothing: it is
    `scale_free`.
    """
    if config.parametrization_choice.name == "standard":
        return
    prefix = f"model.parametrization is {config.parametrization!r} and the residual connection is {topology.equation!r}"
    if topology.scale_free:
        raise ValueError(
            f"{prefix}, which normalizes the branch's output: a factor on the branch does nothing there; "
            'with it the parametrization must be "standard"'
        )
    for size, value in (("depth", config.depth), ("width", config.width)):
        other = dataclasses.replace(config, **{size: 2 * value})
        for role in BLOCK_KERNELS:
            if topology.gain(config, role) != topology.gain(other, role):
                raise ValueError(
                    f"{prefix}, whose initial {role} kernels are scaled by the {size} already: it would count twice; "
                    'with it the parametrization must be "standard"'
                )
