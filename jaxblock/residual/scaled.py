"""A factor on the branch: a constant, a learned number, a learned number per channel, or a power of the depth.

branch_scale         x + c f(norm(x)), c constant                                                 (arXiv 1602.07261)
learned_scale        x + c f(norm(x)), c one learned number per sublayer                          (arXiv 2002.10444)
layer_scale          x + c * f(norm(x)), c learned, one per channel and sublayer: LayerScale      (arXiv 2103.17239)
residual_multiplier  x + (L / base_depth)^-alpha f(norm(x)), L blocks                 (arXiv 2505.01618, 2310.02244)

LayerScale's paper starts c by depth (0.1 up to 18 blocks, 1e-5 at 24, 1e-6 beyond); here the start is an option, as
those depths were of image classifiers. The first two sources are of convolutional networks. `residual_multiplier` is
the forward part alone of CompleteP (alpha = 1) and Depth-muP (alpha = 1/2): `model.parametrization` has the same
factor with the optimizer's part.
"""

import functools
from collections.abc import Callable

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from jaxblock.config import ModelConfig
from jaxblock.contracts import check_integer, check_number
from jaxblock.functional import residual
from jaxblock.functional.parametrization import complete_p
from jaxblock.modules.norm import Norm
from jaxblock.residual.contract import Topology
from jaxblock.residual.declarations import (
    ZERO_TIMES_ZERO,
    additive_mixing,
    no_flops,
    norm_parameters,
    passes,
)
from jaxblock.types import Array, Branch


class BranchScale(nn.Module):
    """x + value * f(norm(x)), value a constant."""

    config: ModelConfig
    value: float

    @nn.compact
    def __call__(self, x: Array, f: Branch) -> Array:
        """Return the stream with so many times the branch added."""
        norm = Norm(self.config, name="norm")
        return residual.scaled_branch(x, f, norm, self.value)


class LearnedScale(nn.Module):
    """x + scale * f(norm(x)), scale a parameter: one number."""

    config: ModelConfig
    start: float

    @nn.compact
    def __call__(self, x: Array, f: Branch) -> Array:
        """Return the stream with the scaled branch added."""
        norm = Norm(self.config, name="norm")
        start = nn.initializers.constant(self.start)
        scale = self.param("scale", start, (), jnp.dtype(self.config.param_dtype))
        return residual.scaled_branch(x, f, norm, scale)


class LayerScale(nn.Module):
    """x + scale * f(norm(x)), scale a parameter: one number per channel."""

    config: ModelConfig
    start: float

    @nn.compact
    def __call__(self, x: Array, f: Branch) -> Array:
        """Return the stream with the scaled branch added."""
        norm = Norm(self.config, name="norm")
        start = nn.initializers.constant(self.start)
        scale = self.param("scale", start, (self.config.width,), jnp.dtype(self.config.param_dtype))
        return residual.scaled_branch(x, f, norm, scale)


def scaled_mixing(config: ModelConfig, scale: float) -> np.ndarray:
    """Return the mixing matrix of x + scale * u: every sublayer reads the embedding once, branches `scale` times."""
    table = additive_mixing(config)
    table[:, 1:] *= scale
    return table


def branch_scale(value: float = 1.0) -> Topology:
    """Return pre-norm with a constant factor on every branch.

    Args:
      value: the factor, above 0.
    """
    check_number("model.residual: value", value, above=0.0)
    return Topology(
        functools.partial(BranchScale, value=value),
        f"x + {value:g} f(norm(x))",
        "arXiv 1602.07261",
        parameters=_parameters(lambda config: 0),
        reduces_to="pre_norm" if value == 1 else None,
        mixing=functools.partial(scaled_mixing, scale=value),
        flops=no_flops,
        traffic=passes(4),
        advice="below 1 the branches' kernels get a gradient smaller by the factor, which AdamW does not notice: its "
        "steps then change the stream by so much less",
    )


def learned_scale(start: float = 1.0) -> Topology:
    """Return pre-norm with one learned factor per sublayer.

    Args:
      start: its initial value, at least 0.
    """
    return _learned(
        LearnedScale,
        "x + c f(norm(x)), c learned, a number",
        "arXiv 2002.10444",
        start,
        channels=False,
    )


def layer_scale(start: float = 0.1) -> Topology:
    """Return LayerScale: pre-norm with one learned factor per sublayer and channel.

    Args:
      start: its initial value, at least 0.
    """
    return _learned(
        LayerScale, "x + c * f(norm(x)), c learned, per channel", "arXiv 2103.17239", start, channels=True
    )


def residual_multiplier(base_depth: int = 8, alpha: float = 1.0) -> Topology:
    """Return pre-norm with the branch factor of CompleteP or Depth-muP, and nothing else of them.

    Args:
      base_depth: the number of blocks at which the factor is 1.
      alpha: the exponent, from 0 to 1: 1 is CompleteP's, 0.5 Depth-muP's.
    """
    check_integer("model.residual: base_depth", base_depth, least=1)
    check_number("model.residual: alpha", alpha, least=0.0, most=1.0)

    def factor(config: ModelConfig) -> float:
        return complete_p(config.depth / base_depth, 1.0, alpha=alpha).branch

    def connection(config: ModelConfig, *, name: str | None = None) -> nn.Module:
        return BranchScale(config, factor(config), name=name)

    return Topology(
        connection,
        f"x + (L / {base_depth})^-{alpha:g} f(norm(x))",
        "arXiv 2505.01618",
        parameters=_parameters(lambda config: 0),
        reduces_to="pre_norm" if alpha == 0 else None,
        mixing=lambda config: scaled_mixing(config, factor(config)),
        depth_scaled=alpha != 0,
        flops=no_flops,
        traffic=passes(4),
        advice="the forward part alone: for a learning rate that holds over depths use model.parametrization instead, "
        "which also scales learning rates and AdamW's epsilon; never both, nor with the gpt2 initialization",
    )


def _learned(
    connection: Callable[..., nn.Module], equation: str, source: str, start: float, *, channels: bool
) -> Topology:
    """Return the record of a learned factor, one per sublayer or one per channel of each."""
    check_number("model.residual: start", start, least=0.0)
    return Topology(
        functools.partial(connection, start=start),
        equation,
        source,
        parameters=_parameters(lambda config: config.sublayers * (config.width if channels else 1)),
        reduces_to="pre_norm" if start == 1 else None,
        mixing=functools.partial(scaled_mixing, scale=start),
        refuses_zero_output=ZERO_TIMES_ZERO if start == 0 else "",
        flops=no_flops,
        traffic=passes(4),
        advice="LayerScale's paper starts at 0.1 up to 18 blocks, at 1e-5 with 24, at 1e-6 beyond; a small start needs "
        'branches that do not start at 0: initialization = "plain"',
    )


def _parameters(own: Callable[[ModelConfig], int]) -> Callable[[ModelConfig], int]:
    """Return the formula of pre-norm's norms, the final one included, and so many parameters more."""
    return lambda config: norm_parameters(config, config.sublayers + 1) + own(config)
