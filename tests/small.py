"""A model small enough to compile in a second, shared by the tests."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxblock import Decoder, ExecutionConfig, ModelConfig
from jaxblock.residual import REGISTRY

CONNECTIONS = sorted(REGISTRY)
SIZES = {"vocab_size": 11, "context": 8, "depth": 3, "width": 8, "heads": 2}


def config(**changes: Any) -> ModelConfig:
    """Return the small config with some fields changed."""
    return ModelConfig(**{**SIZES, **changes})


def tokens(batch: int = 2, length: int = 6, *, seed: int = 0, vocab_size: int = 11) -> jax.Array:
    """Return random token ids [B, T]."""
    return jnp.asarray(np.random.default_rng(seed).integers(0, vocab_size, (batch, length)), jnp.int32)


@functools.cache
def built(model_config: ModelConfig, execution: ExecutionConfig = ExecutionConfig()) -> tuple[Decoder, Any]:
    """Return a decoder and its parameters, moved off their initial zeros and ones so that every leaf matters."""
    model = Decoder(model_config, execution)
    params = jax.jit(model.init)(jax.random.key(0), tokens())["params"]
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    moved = [x + 0.1 * jax.random.normal(key, x.shape, x.dtype) for x, key in zip(leaves, keys, strict=True)]
    return model, jax.tree.unflatten(structure, moved)
