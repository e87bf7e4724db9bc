"""A mixture of experts in the feed-forward's place: parameters around `functional.experts`."""

from collections.abc import Callable

import flax.linen as nn

from jaxblock.config import ModelConfig
from jaxblock.modules.kernel import unit_gain
from jaxblock.types import Array

ROUTING = "routing"
"""The collection to which experts give their load-balance loss and token counts, where the caller made it mutable."""


class Experts(nn.Module):
    """To be written."""

    config: ModelConfig
    gain: Callable[[str], float] = unit_gain
    """Factor on a kernel's initial values, by role."""

    @nn.compact
    def __call__(self, x_BTD: Array, valid_BT: Array | None) -> Array:
        """Return the branch's output, [B, T, D] -> [B, T, D] in x's dtype."""
        raise NotImplementedError
