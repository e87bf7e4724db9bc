"""Whether initialization, parametrization and topology go together: a branch can move, and is scaled by depth once."""

import dataclasses

from jaxblock.axes import PARAMETERS
from jaxblock.config import INITIALIZATIONS, ModelConfig
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
    faults = {
        "initialization": _initialization_fault(config, topology, config.initialization_choice.name),
        "parametrization": _parametrization_fault(config, topology),
        "stochastic_depth": None,
    }
    allowed = {"initialization": initializations(config, topology), "parametrization": ("standard",)}
    if topology.scale_free and config.stochastic_depth_choice.name != "none":
        faults["stochastic_depth"] = (
            "normalizes the branch's output: what rows that are kept are multiplied by to keep the mean does nothing "
            "there"
        )
        allowed["stochastic_depth"] = ("none",)
    for field, fault in faults.items():
        if fault is not None:
            names = " or ".join(f'"{name}"' for name in allowed[field])
            raise ValueError(
                f"model.{field} is {getattr(config, field)!r} and the residual connection is {topology.equation!r}, "
                f"which {fault}; with it the {field} must be {names}"
            )


def initializations(config: ModelConfig, topology: Topology) -> tuple[str, ...]:
    """Return the names of the initializations that go with a topology."""
    return tuple(name for name in INITIALIZATIONS if _initialization_fault(config, topology, name) is None)


def _initialization_fault(config: ModelConfig, topology: Topology, initialization: str) -> str | None:
    """Return what is wrong with a topology under an initialization, in words that go on from "which"."""
    if initialization == "zero_output" and topology.refuses_zero_output:
        return f"must not start from branches that write 0: {topology.refuses_zero_output}"
    if initialization != "gpt2":
        return None
    if topology.project is not None:
        return "projects the kernels, so that what the initialization divides them by does nothing"
    return _counts_already(config, topology)


def _parametrization_fault(config: ModelConfig, topology: Topology) -> str | None:
    """Return what is wrong with a topology under the config's parametrization, in words that go on from "which"."""
    name, options = config.parametrization_choice
    if name == "standard":
        return None
    if topology.scale_free:
        return "normalizes the branch's output: a factor on the branch does nothing there"
    if topology.sums_width and options.get("base_width", config.width) != config.width:
        return (
            "sums parameters of its own over the width, and no known rule scales those (where base_width is the "
            f"model's width, {config.width}, none has to)"
        )
    return _counts_already(config, topology)


def _counts_already(config: ModelConfig, topology: Topology) -> str | None:
    role = _scaled_role(config, topology)
    if role is None and not topology.depth_scaled:
        return None
    what = f"scales the initial values of {role} kernels" if role else "has factors that are scaled"
    return f"{what} by the size of the model already: it would count twice"


def _scaled_role(config: ModelConfig, topology: Topology) -> str | None:
    """Return a role whose gain depends on depth or width; None where there is none."""
    # Without the parametrization, whose base may have to be the config's own width.
    plain = dataclasses.replace(config, parametrization="standard")
    for size, value in (("depth", config.depth), ("width", config.width)):
        other = dataclasses.replace(plain, **{size: 2 * value})
        for role in BLOCK_KERNELS:
            if topology.gain(plain, role) != topology.gain(other, role):
                return role
    return None
