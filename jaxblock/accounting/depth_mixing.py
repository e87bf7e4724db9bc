"""FLOPs of the residual connections, per token: what a topology multiplies beside its branches, as it declares them."""

from jaxblock.choices import parse_choice
from jaxblock.config import ModelConfig
from jaxblock.residual import REGISTRY, topology


def depth_mixing_flops(config: ModelConfig) -> int | None:
    """Return the forward FLOPs per token of all connections; None where no formula is known."""
    if parse_choice("model.residual", config.residual).name not in REGISTRY:  # one of the caller's own
        return None
    flops = topology(config.residual).flops
    return None if flops is None else flops(config)
