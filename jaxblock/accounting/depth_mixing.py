"""FLOPs of the residual connections, per token: what a topology multiplies beside its branches, as it declares them."""

from jaxblock.config import ModelConfig
from jaxblock.residual import topology


def depth_mixing_flops(config: ModelConfig) -> int | None:
    """Return the forward FLOPs per token of all connections; None for a topology that declares no formula."""
    flops = topology(config.residual).flops
    return None if flops is None else flops(config)
