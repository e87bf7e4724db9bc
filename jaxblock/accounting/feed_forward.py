"""What the feed-forward costs: parameters of one block, FLOPs per token of all.

A mixture of E experts holds E feed-forwards and a router [D, E]; a token runs through its active ones and the router.
"""

from jaxblock.config import ModelConfig


def feed_forward_parameters(config: ModelConfig) -> int:
    """Return the parameters of one block's feed-forward, or of all its experts and the router, norms not counted."""
    if config.experts_choice.name == "none":
        return _one_parameters(config)
    experts = config.experts_choice.options["experts"]
    return experts * _one_parameters(config) + config.width * experts


def idle_parameters(config: ModelConfig) -> int:
    """Return the parameters of all blocks that a token does not meet: those of the experts it is not sent to."""
    if config.experts_choice.name == "none":
        return 0
    options = config.experts_choice.options
    return config.depth * (options["experts"] - options["active"]) * _one_parameters(config)


def feed_forward_flops(config: ModelConfig) -> int:
    """Return the forward FLOPs per token of all blocks' feed-forwards: with experts, of the active ones and the router.

    Slots that stay empty, and choices that are dropped, are not looked at.
    """
    one = (3 if config.gated else 2) * config.width * config.num_hidden
    if config.experts_choice.name == "none":
        return 2 * config.depth * one
    options = config.experts_choice.options
    return 2 * config.depth * (options["active"] * one + config.width * options["experts"])


def _one_parameters(config: ModelConfig) -> int:
    """Return the parameters of one feed-forward."""
    width, hidden = config.width, config.num_hidden
    inner = (2 if config.gated else 1) * hidden
    biases = inner + width if config.bias else 0
    return inner * width + hidden * width + biases
