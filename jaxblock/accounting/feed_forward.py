"""What the feed-forward costs: parameters of one block, FLOPs per token of all."""

from jaxblock.config import ModelConfig


def feed_forward_parameters(config: ModelConfig) -> int:
    """Return the parameters of one block's feed-forward, norms not counted."""
    width, hidden = config.width, config.num_hidden
    inner = (2 if config.gated else 1) * hidden
    biases = inner + width if config.bias else 0
    return inner * width + hidden * width + biases


def feed_forward_flops(config: ModelConfig) -> int:
    """Return the forward FLOPs per token of all blocks' feed-forwards."""
    kernels = 3 if config.gated else 2
    return 2 * config.depth * kernels * config.width * config.num_hidden
