"""The placements of the norm around `x + f(x)`: parameters and records for the equations of `functional.residual`."""

from collections.abc import Callable

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from jaxblock.config import ModelConfig
from jaxblock.functional import residual
from jaxblock.functional.norms import layer_norm, rms_norm
from jaxblock.modules.norm import Norm
from jaxblock.residual.contract import Topology
from jaxblock.residual.declarations import additive_mixing, no_flops, norm_parameters, passes
from jaxblock.types import Array, Branch


class NoResidual(nn.Module):
    """f(norm(x))."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: Array, f: Branch) -> Array:
        """Return the branch alone."""
        norm = Norm(self.config, name="norm")
        return residual.no_residual(x, f, norm)


class PreNorm(nn.Module):
    """x + f(norm(x))."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: Array, f: Branch) -> Array:
        """Return the stream with the branch of its norm added."""
        norm = Norm(self.config, name="norm")
        return residual.pre_norm(x, f, norm)


class PostNorm(nn.Module):
    """norm(x + f(x))."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: Array, f: Branch) -> Array:
        """Return the norm of the sum."""
        norm = Norm(self.config, name="norm")
        return residual.post_norm(x, f, norm)


class PeriNorm(nn.Module):
    """x + norm_out(f(norm_in(x)))."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: Array, f: Branch) -> Array:
        """Return the stream with the normalized branch added."""
        norm_in, norm_out = Norm(self.config, name="norm_in"), Norm(self.config, name="norm_out")
        return residual.peri_norm(x, f, norm_in, norm_out)


class BranchNorm(nn.Module):
    """x + norm(f(x))."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: Array, f: Branch) -> Array:
        """Return the stream with the norm of the branch added."""
        norm = Norm(self.config, name="norm")
        return residual.branch_norm(x, f, norm)


def none() -> Topology:
    """Return the control without a skip."""
    return Topology(
        NoResidual,
        "f(norm(x))",
        "control, no skip",
        parameters=_norms(1, final=True),
        mixing=lambda config: np.eye(config.sublayers + 1),
        zero_branch=lambda config, x: jnp.zeros_like(x),
        refuses_zero_output="without a skip nothing would be left of the embedding",
        flops=no_flops,
        traffic=passes(2),
    )


def pre_norm() -> Topology:
    """Return the placement that keeps the identity path: the default."""
    return Topology(
        PreNorm,
        "x + f(norm(x))",
        "arXiv 2002.04745",
        parameters=_norms(1, final=True),
        reduces_to="pre_norm",
        mixing=additive_mixing,
        flops=no_flops,
        traffic=passes(4),
    )


def post_norm() -> Topology:
    """Return the placement of the first Transformer."""

    def zero_branch(config: ModelConfig, x: Array) -> Array:
        norm = rms_norm if config.norm == "rms_norm" else layer_norm
        for _ in range(config.sublayers):
            x = norm(x, epsilon=config.norm_epsilon)
        return x

    return Topology(
        PostNorm,
        "norm(x + f(x))",
        "arXiv 1706.03762",
        final_norm=False,
        parameters=_norms(1, final=False),
        mixing=additive_mixing,
        zero_branch=zero_branch,
        flops=no_flops,
        traffic=passes(3),
    )


def peri_norm() -> Topology:
    """Return the placement with a norm at both ends of the branch."""
    return Topology(
        PeriNorm,
        "x + norm(f(norm(x)))",
        "arXiv 2502.02732",
        parameters=_norms(2, final=True),
        mixing=additive_mixing,
        scale_free=True,
        flops=no_flops,
        traffic=passes(4),
    )


def branch_norm() -> Topology:
    """Return OLMo 2's placement."""
    return Topology(
        BranchNorm,
        "x + norm(f(x))",
        "arXiv 2501.00656",
        parameters=_norms(1, final=True),
        mixing=additive_mixing,
        scale_free=True,
        flops=no_flops,
        traffic=passes(3),
    )


def _norms(per_sublayer: int, *, final: bool) -> Callable[[ModelConfig], int]:
    """Return the parameter formula of a placement."""
    return lambda config: norm_parameters(config, per_sublayer * config.sublayers + final)
