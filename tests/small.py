"""A model small enough to compile in a second, shared by the tests."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxblock import Decoder, ExecutionConfig, ModelConfig
from jaxblock.residual import REGISTRY, Topology

CONNECTIONS = sorted(REGISTRY)
KINDS = (
    "none",
    "pre_norm",
    "post_norm",
    "peri_norm",
    "branch_norm",
    "dense_former",
    "attention_residual",
    "block_attention_residual",
)
"""Where a test is about how a stack is run rather than about each topology: the battery goes through all of those."""
SCANNED = ExecutionConfig()
SIZES = {"vocab_size": 11, "context": 8, "depth": 3, "width": 8, "heads": 2}


def config(**changes: Any) -> ModelConfig:
    """Return the small config with some fields changed."""
    return ModelConfig(**{**SIZES, **changes})


def tokens(batch: int = 2, length: int = 6, *, seed: int = 0, vocab_size: int = 11) -> jax.Array:
    """Return random token ids [B, T]."""
    return jnp.asarray(np.random.default_rng(seed).integers(0, vocab_size, (batch, length)), jnp.int32)


def carried(scan: Any) -> list[Any]:
    """Return the shapes that a scan's equation carries: what it returns as its body does, with no axis in front."""
    inner = getattr(scan.params["jaxpr"], "jaxpr", scan.params["jaxpr"]).outvars
    pairs = zip(scan.outvars, inner, strict=True)
    return [after.aval for after, each in pairs if after.aval.shape == each.aval.shape]


@functools.cache
def built(
    model_config: ModelConfig,
    execution: ExecutionConfig = SCANNED,
    topology: Topology | None = None,
) -> tuple[Decoder, Any]:
    """Return a decoder and parameters off their initial zeros and ones, so that every leaf matters.

    The values are numpy's: compiling `init` takes longer than most tests.
    """
    model = Decoder(model_config, execution, topology)
    shapes = jax.eval_shape(model.init, jax.random.key(0), tokens(1, 2))["params"]
    draw = np.random.default_rng(0)

    def leaf(path: tuple, x: jax.ShapeDtypeStruct) -> jax.Array:
        name = path[-1].key
        scale = 0.35 if name in ("kernel", "table") else 0.1
        return jnp.asarray(draw.normal(scale=scale, size=x.shape) + (name in ("scale", "gate")), x.dtype)

    return model, jax.tree_util.tree_map_with_path(leaf, shapes)
