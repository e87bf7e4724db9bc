"""What may stand in attention's place: an MLP over positions, or convolutions over them."""

from collections.abc import Callable

import flax.linen as nn

from jaxblock.config import ModelConfig
from jaxblock.functional.masks import AttentionPattern
from jaxblock.modules.kernel import unit_gain
from jaxblock.types import Array


class TokenMixer(nn.Module):
    """To be written."""

    config: ModelConfig
    gain: Callable[[str], float] = unit_gain
    """Factor on a kernel's initial values, by role."""
    inner_norm: bool = False
    """Whether the hidden activations have a norm before the last kernel."""

    @nn.compact
    def __call__(self, x_BTD: Array, pattern: AttentionPattern) -> Array:
        """Return the branch's output, [B, T, D] -> [B, T, D] in x's dtype."""
        raise NotImplementedError
