"""What mixes positions costs: parameters of one block, FLOPs per token of all.

attention      2 D^2 + 2 D G K                products a token, and scores
mlp            2 F D                          over T positions, each for D channels: 2 T F D for T tokens
convolution    2 Y X D^2                      taps that fall outside the grid counted
"""

from jaxblock.config import ModelConfig
from jaxblock.functional.token_mixing import tap_count


def mixing_parameters(config: ModelConfig) -> int:
    """Return the parameters of one block's token mixer, norms not counted."""
    width, kv_width = config.width, config.num_kv_heads * config.head_dim
    name, options = config.token_mixer_choice
    if name == "mlp":
        biases = options["hidden"] + config.context if config.bias else 0
        return 2 * config.context * options["hidden"] + biases
    if name == "convolution":
        return _products(config) + (2 * width if config.bias else 0)
    biases = 2 * width + 2 * kv_width if config.bias else 0
    learned = 2 if config.value_residual_choice.name == "learned" else 0
    return _products(config) + biases + learned


def projection_flops(config: ModelConfig) -> int:
    """Return the forward FLOPs per token of all blocks' token mixers, scores not counted."""
    return 2 * config.depth * _products(config)


def score_flops(config: ModelConfig, keys: float) -> float:
    """Return the forward FLOPs per token of one block's q k^T and weights v over so many keys a query.

    0 where no attention is.
    """
    return 4 * config.width * keys if config.token_mixer_choice.name == "attention" else 0.0


def _products(config: ModelConfig) -> int:
    """Return the multiply-adds per token of one block's kernels; the weights of these kernels, but for an MLP's."""
    width, kv_width = config.width, config.num_kv_heads * config.head_dim
    name, options = config.token_mixer_choice
    if name == "mlp":
        return 2 * options["hidden"] * width
    if name == "convolution":
        rows, columns = tap_count(options["size"], options["rows"])
        return 2 * rows * columns * width * width
    return 2 * width * width + 2 * width * kv_width
