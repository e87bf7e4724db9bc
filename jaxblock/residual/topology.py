"""The contract of a residual connection, as a record of what a topology is made of.

A connection is a Linen module `(x, f) -> x` that calls the branch `f` exactly once:

    class PreNorm(nn.Module):
        config: ModelConfig

        @nn.compact
        def __call__(self, x, f):
            norm = Norm(self.config, name="norm")
            return x + f(norm(x))
"""

from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn


class Topology(NamedTuple):
    """One residual topology: how a sublayer is connected, and what closes the stream."""

    connection: Callable[..., nn.Module]
    """(config, name=...) -> the module `(x, f) -> x` of one sublayer."""
    equation: str
    """The rule in one line."""
    source: str
    """Where it was published."""
    final_norm: bool = True
    """Whether the stream still needs a norm after the last block: exactly when the rule leaves it unnormalized."""
