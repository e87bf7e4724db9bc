"""Post-norm that trains at any depth: the stream counts alpha times in the sum that is normalized.

deep_norm   norm(alpha x + f(x)),  alpha = S^(1/4)                            (arXiv 2203.00555, decoder of N = S / 2)
            kernels of values, attention's output and the feed-forward start (4 S)^(-1/4) times as large
keel        norm_out(alpha x + f(norm_in(x))),  alpha = S                                       (arXiv 2601.19895)

S sublayers. The papers count serial stacks, S = 2 L, hence (2 L)^(1/4) and (8 L)^(-1/4); a parallel block is one
sublayer here. Both leave the stream normalized: there is no final norm. Against DeepNorm's paper: the gain is on this
library's 1 / sqrt(fan_in), theirs on Xavier's normal values; and a gated feed-forward's gate starts with it too (the
paper has none).
"""

import dataclasses
from collections.abc import Callable

import flax.linen as nn
import numpy as np

from jaxblock.config import ModelConfig
from jaxblock.functional import residual
from jaxblock.functional.norms import layer_norm, rms_norm
from jaxblock.modules.norm import Norm
from jaxblock.residual.contract import Topology
from jaxblock.residual.declarations import GAIN_OF_ZERO, no_flops, norm_parameters, passes
from jaxblock.types import Array, Branch

GAIN_ROLES = frozenset({"value", "output", "gate", "up", "down"})
"""Kernels whose initial values are scaled: a branch is linear in them, and not in queries and keys."""


class DeepNorm(nn.Module):
    """norm(alpha * x + f(x))."""

    config: ModelConfig
    alpha: float

    @nn.compact
    def __call__(self, x: Array, f: Branch) -> Array:
        """Return the norm of the weighted sum."""
        norm = Norm(self.config, name="norm")
        return residual.deep_norm(x, f, norm, self.alpha)


class Keel(nn.Module):
    """norm_out(alpha * x + f(norm_in(x)))."""

    config: ModelConfig
    alpha: float

    @nn.compact
    def __call__(self, x: Array, f: Branch) -> Array:
        """Return the norm of the weighted sum, its branch reading a norm of its own."""
        norm_in, norm_out = Norm(self.config, name="norm_in"), Norm(self.config, name="norm_out")
        return residual.keel(x, f, norm_in, norm_out, self.alpha)


def deep_norm() -> Topology:
    """Return DeepNorm, as for a decoder alone."""

    def gain(config: ModelConfig, role: str) -> float:
        return (4 * config.sublayers) ** -0.25 if role in GAIN_ROLES else 1.0

    rule = _post_scaled(
        DeepNorm,
        lambda config: config.sublayers**0.25,
        "norm(S^(1/4) x + f(x))",
        "arXiv 2203.00555",
        norms=1,
        advice="half of pre-norm's learning rate in DepthBench (arXiv 2609.32534); a module whose kernels miss the "
        "gain made it diverge",
    )
    return dataclasses.replace(rule, gain=gain, refuses_zero_output=GAIN_OF_ZERO)


def keel() -> Topology:
    """Return KEEL."""
    return _post_scaled(
        Keel,
        lambda config: float(config.sublayers),
        "norm(S x + f(norm(x)))",
        "arXiv 2601.19895",
        norms=2,
        advice="a sublayer moves the stream by about 1 / S of its size, and bfloat16's steps are 1/256 to 1/128 of it: "
        'in deep stacks keep stream_dtype = "float32"',
    )


def repeated_norm(config: ModelConfig, x: Array, times: int, factor: float = 1.0) -> Array:
    """Return what is left of x after x <- norm(factor * x), so many times, with the norm's initial parameters."""
    norm = rms_norm if config.norm == "rms_norm" else layer_norm
    for _ in range(times):
        x = norm(factor * x, epsilon=config.norm_epsilon)
    return x


def _post_scaled(
    connection: Callable[..., nn.Module],
    alpha: Callable[[ModelConfig], float],
    equation: str,
    source: str,
    *,
    norms: int,
    advice: str,
) -> Topology:
    """Return the record of either rule, which has so many norms per sublayer."""

    def connect(config: ModelConfig, *, name: str | None = None) -> nn.Module:
        return connection(config, alpha(config), name=name)

    def mixing(config: ModelConfig) -> np.ndarray:
        """Return alpha^(steps between source and reader)."""
        reader, source = np.indices((config.sublayers + 1,) * 2)
        return np.where(source <= reader, alpha(config) ** np.maximum(reader - source, 0), 0.0)

    return Topology(
        connect,
        equation,
        source,
        final_norm=False,
        parameters=lambda config: norm_parameters(config, norms * config.sublayers),
        mixing=mixing,
        zero_branch=lambda config, x: repeated_norm(config, x, config.sublayers, alpha(config)),
        depth_scaled=True,
        flops=no_flops,
        traffic=passes(2 + norms),
        advice=advice,
    )
