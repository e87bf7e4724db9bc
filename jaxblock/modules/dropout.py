"""Dropout that is on exactly when a "dropout" key is passed to `apply`; every site draws its own key."""

import flax.linen as nn

from jaxblock.functional.dropout import drop_rows, dropout
from jaxblock.types import Array


class Dropout(nn.Module):
    """Drop entries at `rate` and scale the rest by 1 / (1 - rate)."""

    rate: float

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Return x with entries dropped, or x itself without a key or at rate 0."""
        return dropout(x, self.rate, site_key(self, self.rate))


class DropRows(nn.Module):
    """Drop whole rows of a branch's output at a rate that may be traced: stochastic depth."""

    @nn.compact
    def __call__(self, x: Array, rate: Array | None) -> Array:
        """Return x with rows dropped, or x itself without a key or a rate."""
        if rate is None or not self.has_rng("dropout"):
            return x
        return drop_rows(x, rate, self.make_rng("dropout"))


def site_key(module: nn.Module, rate: float) -> Array | None:
    """Return the key of one dropout site (it depends on the module's path), or None where dropout is off."""
    if rate == 0.0 or not module.has_rng("dropout"):
        return None
    return module.make_rng("dropout")
