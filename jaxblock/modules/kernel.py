"""The weights of a dense product y = x W + b, their initial scale set by the role the kernel plays."""

import math
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxblock.config import ModelConfig
from jaxblock.contracts import check_number
from jaxblock.functional.initial_values import normal, standard_deviation
from jaxblock.types import Array


def unit_gain(role: str) -> float:
    """Return 1: no role's initial values are scaled."""
    return 1.0


def kernel_init(
    config: ModelConfig, role: str, *, fan_in: int, gain: float = 1.0
) -> nn.initializers.Initializer:
    """Return the initializer of a kernel or table with this role and fan-in, its values multiplied by `gain`."""
    rule, options = config.initialization_choice
    std = gain * standard_deviation(
        rule, role, fan_in=fan_in, blocks=config.depth, std=options.get("std", 0.0)
    )

    def init(
        key: Array, shape: tuple[int, ...], dtype: jax.typing.DTypeLike = jnp.float32, out_sharding=None
    ):
        del out_sharding  # part of Flax's initializer protocol; sharding comes from the rules table
        return normal(key, shape, dtype, std=std)

    return init


class Kernel(nn.Module):
    """Declare the weights of one dense product and return them: the arithmetic is `functional.dense`.

    Parameters: `kernel` [*in, *out] and, where the config has biases, `bias` [*out], both in `param_dtype`.
    `axes` is the number of axes that are inputs; before them may stand `batch` axes of a batch of kernels, as of
    experts, which no fan-in counts: `kernel` [*batch, *in, *out], `bias` [*batch, *out].
    """

    config: ModelConfig
    role: str
    shape: tuple[int, ...]
    axes: int = 1
    batch: int = 0
    gain: Callable[[str], float] = unit_gain
    """Factor on the initial values, by role."""

    @nn.compact
    def __call__(self) -> tuple[Array, Array | None]:
        """Return (kernel, bias); the bias is None where the config has none."""
        dtype = jnp.dtype(self.config.param_dtype)
        gain = float(self.gain(self.role))
        check_number(f"gain of role {self.role!r}", gain, least=0.0)
        batch, inputs, outputs = self._parts()
        init = kernel_init(self.config, self.role, fan_in=math.prod(inputs), gain=gain)
        kernel = self.param("kernel", init, self.shape, dtype)
        if not self.config.bias:
            return kernel, None
        return kernel, self.param("bias", nn.initializers.zeros, batch + outputs, dtype)

    def _parts(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Return the shape's axes of the batch, inputs and outputs."""
        first, last = self.batch, self.batch + self.axes
        return self.shape[:first], self.shape[first:last], self.shape[last:]
