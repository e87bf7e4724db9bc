"""Highway: a gate per channel says how much of the branch replaces the stream.

x' = (1 - g) x + g f(norm(x)),  g = sigmoid(x W + b),  W [D, D] and b [D] per sublayer          (arXiv 1505.00387)

The paper draws W and has no norm. Here W starts at 0 and the branch reads a norm of the stream: the gate's start is
the constant sigmoid(bias) for every input, and what each sublayer reads is a known sum of embedding and branch
outputs, its weights adding up to 1.
"""

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from jaxblock.config import ModelConfig
from jaxblock.contracts import check_number
from jaxblock.functional.residual_updates import carry_gate, gated_sum
from jaxblock.modules import Norm
from jaxblock.residual.contract import Topology
from jaxblock.residual.declarations import norm_parameters, passes
from jaxblock.types import Array, Branch


class Highway(nn.Module):
    """(1 - g) x + g f(norm(x))."""

    config: ModelConfig
    bias: float

    @nn.compact
    def __call__(self, x: Array, f: Branch) -> Array:
        """Return the stream, of each channel a part replaced by the branch."""
        width, dtype = self.config.width, jnp.dtype(self.config.param_dtype)
        norm = Norm(self.config, name="norm")
        kernel = self.param("gate_kernel", nn.initializers.zeros, (width, width), dtype)
        bias = self.param("gate_bias", nn.initializers.constant(self.bias), (width,), dtype)
        return gated_sum(x, f(norm(x)), carry_gate(x, kernel, bias))


def highway(bias: float = -2.0) -> Topology:
    """Return the highway connection.

    Args:
      bias: where b starts; below 0 the stream is carried rather than replaced. -2 is a gate of 0.119.
    """
    check_number("model.residual: bias", bias)
    gate = float(np.exp(-np.logaddexp(0.0, -bias)))  # sigmoid(bias), no overflow

    def connection(config: ModelConfig, *, name: str) -> nn.Module:
        return Highway(config, bias, name=name)

    def parameters(config: ModelConfig) -> int:
        gates = config.sublayers * (config.width**2 + config.width)
        return gates + norm_parameters(config, config.sublayers + 1)

    def mixing(config: ModelConfig) -> np.ndarray:
        steps = np.arange(config.sublayers + 1)
        distance = np.maximum(steps[:, None] - steps, 0)
        written = np.where(steps == 0, 1.0, gate)
        return np.tri(len(steps)) * written * (1.0 - gate) ** distance

    return Topology(
        connection,
        "(1 - g) x + g f(norm(x)), g = sigmoid(x W + b)",
        "arXiv 1505.00387",
        parameters=parameters,
        mixing=mixing,
        zero_branch=lambda config, x: x * (1.0 - gate) ** config.sublayers,
        sums_width=True,
        flops=lambda config: 2 * config.width**2 * config.sublayers,
        traffic=passes(4),
        advice="what was written s sublayers ago has weight g (1 - g)^s: the deeper the stack, the lower the bias; the "
        "paper starts it at -1 to -3",
    )
