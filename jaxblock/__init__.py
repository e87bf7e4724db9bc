"""Transformer blocks as pure functions of JAX arrays: residual topologies, training, depth scaling.

Importing this loads jax, flax and chex, nothing more; `jaxblock.training` brings the rest when it is imported.
"""

from jaxblock import functional, residual
from jaxblock.config import ExecutionConfig, ModelConfig
from jaxblock.models import (
    Block,
    Cache,
    Classifier,
    Decoder,
    Encoder,
    generate,
    init_cache,
    predict,
    prefill,
    stream,
)
from jaxblock.version import __version__

__all__ = [
    "Block",
    "Cache",
    "Classifier",
    "Decoder",
    "Encoder",
    "ExecutionConfig",
    "ModelConfig",
    "__version__",
    "functional",
    "generate",
    "init_cache",
    "predict",
    "prefill",
    "residual",
    "stream",
]
