"""Every residual topology by its config name: one line each, options are the keyword arguments of its factory."""

import inspect
from collections.abc import Callable, Mapping

from jaxblock.config import check_options, parse_choice
from jaxblock.contracts import check_choice
from jaxblock.residual.placements import BranchNorm, NoResidual, PeriNorm, PostNorm, PreNorm
from jaxblock.residual.topology import Topology

REGISTRY: Mapping[str, Callable[..., Topology]] = {
    "none": lambda: Topology(NoResidual, "f(norm(x))", "control, no skip"),
    "pre_norm": lambda: Topology(PreNorm, "x + f(norm(x))", "arXiv 2002.04745"),
    "post_norm": lambda: Topology(PostNorm, "norm(x + f(x))", "arXiv 1706.03762", final_norm=False),
    "peri_norm": lambda: Topology(PeriNorm, "x + norm(f(norm(x)))", "arXiv 2502.02732"),
    "branch_norm": lambda: Topology(BranchNorm, "x + norm(f(x))", "arXiv 2501.00656"),
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
    defaults = {name: option.default for name, option in inspect.signature(factory).parameters.items()}
    return factory(**check_options("model.residual", choice, defaults))
