"""What mixes positions costs: parameters of one block, FLOPs per token of all."""

from jaxblock.config import ModelConfig


def mixing_parameters(config: ModelConfig) -> int:
    """Return the parameters of one block's attention, norms not counted."""
    width, kv_width = config.width, config.num_kv_heads * config.head_dim
    biases = 2 * width + 2 * kv_width if config.bias else 0
    learned = 2 if config.value_residual_choice.name == "learned" else 0
    return 2 * width * width + 2 * width * kv_width + biases + learned


def projection_flops(config: ModelConfig) -> int:
    """Return the forward FLOPs per token of all blocks' query, key, value and output products."""
    width, kv_width = config.width, config.num_kv_heads * config.head_dim
    return 2 * config.depth * (2 * width * width + 2 * width * kv_width)


def score_flops(config: ModelConfig, keys: float) -> float:
    """Return the forward FLOPs per token of one block's q k^T and weights v over so many keys a query."""
    return 4 * config.width * keys
