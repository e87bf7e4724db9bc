"""The placements of the norm around `x + f(x)`: parameters for the equations of `functional.residual`."""

import flax.linen as nn

from jaxblock.config import ModelConfig
from jaxblock.functional.residual import branch_norm, no_residual, peri_norm, post_norm, pre_norm
from jaxblock.modules.norm import Norm
from jaxblock.types import Array, Branch


class NoResidual(nn.Module):
    """f(norm(x))."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: Array, f: Branch) -> Array:
        """Return the branch alone."""
        norm = Norm(self.config, name="norm")
        return no_residual(x, f, norm)


class PreNorm(nn.Module):
    """x + f(norm(x))."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: Array, f: Branch) -> Array:
        """Return the stream with the branch of its norm added."""
        norm = Norm(self.config, name="norm")
        return pre_norm(x, f, norm)


class PostNorm(nn.Module):
    """norm(x + f(x))."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: Array, f: Branch) -> Array:
        """Return the norm of the sum."""
        norm = Norm(self.config, name="norm")
        return post_norm(x, f, norm)


class PeriNorm(nn.Module):
    """x + norm_out(f(norm_in(x)))."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: Array, f: Branch) -> Array:
        """Return the stream with the normalized branch added."""
        norm_in, norm_out = Norm(self.config, name="norm_in"), Norm(self.config, name="norm_out")
        return peri_norm(x, f, norm_in, norm_out)


class BranchNorm(nn.Module):
    """x + norm(f(x))."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: Array, f: Branch) -> Array:
        """Return the stream with the norm of the branch added."""
        norm = Norm(self.config, name="norm")
        return branch_norm(x, f, norm)
