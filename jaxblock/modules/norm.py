"""The norm a config names, with its parameters: y = scale * (x - mean) / sqrt(var + epsilon) + bias, or RMSNorm."""

import flax.linen as nn
import jax.numpy as jnp

from jaxblock.config import ModelConfig
from jaxblock.functional.norms import layer_norm, rms_norm
from jaxblock.types import Array


class Norm(nn.Module):
    """LayerNorm or RMSNorm over the last axis; statistics in float32, result in x's dtype."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Return the normalized stream, [..., D] -> [..., D]."""
        dtype = jnp.dtype(self.config.param_dtype)
        scale = self.param("scale", nn.initializers.ones, x.shape[-1:], dtype)
        if self.config.norm == "rms_norm":
            return rms_norm(x, scale, epsilon=self.config.norm_epsilon)
        bias = None
        if self.config.bias:
            bias = self.param("bias", nn.initializers.zeros, x.shape[-1:], dtype)
        return layer_norm(x, scale, bias, epsilon=self.config.norm_epsilon)
