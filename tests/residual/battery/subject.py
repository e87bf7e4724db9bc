"""What is checked: a decoder at a topology's own initial values, and off them; its loss and gradient, compiled once."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxblock import Decoder, ModelConfig
from jaxblock.axes import path_name, roles
from jaxblock.residual import Topology
from tests.residual.given import (
    GivenModel,
    given_branch,
)
from tests.small import tokens

PLAIN = {"norm": "rms_norm", "bias": False, "positions": "none", "feed_forward": "relu"}
DROPOUT = {"attention_dropout": 0.2, "hidden_dropout": 0.2, "branch_dropout": 0.2}
OWN_ROLES = ("connection", "norm")


@functools.cache
def start(topology: Topology, model_config: ModelConfig) -> tuple[Decoder, Any]:
    """Return a decoder, its connections at their initial values, its other parameters random."""
    model = Decoder(model_config, topology=topology)
    shapes = jax.eval_shape(model.init, jax.random.key(0), tokens(1, 2))["params"]
    given = GivenModel(model_config, topology, given_branch)
    x = jnp.zeros((1, 1, model_config.width))
    own = jax.jit(given.init)(jax.random.key(0), x, jnp.zeros((model_config.sublayers, model_config.width)))
    own = {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(own["params"])}
    rng = np.random.default_rng(0)

    def leaf(path: tuple, x: jax.ShapeDtypeStruct, role: str) -> jax.Array:
        name = path_name(path)
        if name in own:
            return own[name].astype(x.dtype)
        if role == "norm":
            return jnp.ones(x.shape, x.dtype) if name.endswith("scale") else jnp.zeros(x.shape, x.dtype)
        return jnp.asarray(rng.normal(scale=0.35, size=x.shape), x.dtype)

    return model, jax.tree_util.tree_map_with_path(leaf, shapes, roles(shapes))


@functools.cache
def off_start(topology: Topology, model_config: ModelConfig) -> tuple[Decoder, Any]:
    """Return the same with the topology's own parameters moved off their start, so that each matters."""
    model, params = start(topology, model_config)
    rng = np.random.default_rng(1)
    moved = lambda x, role: (  # noqa: E731
        x + jnp.asarray(rng.normal(scale=0.3, size=x.shape), x.dtype) if role in OWN_ROLES else x
    )
    return model, jax.tree.map(moved, params, roles(params))


def objective(model: Decoder, params: Any, tokens_BT: jax.Array, key: Any = None) -> tuple:
    rngs = {} if key is None else {"dropout": key}
    logits_BTV = model.apply({"params": params}, tokens_BT, rngs=rngs)
    return jnp.sum(jnp.sin(logits_BTV)), logits_BTV


@functools.cache
def compiled(model: Decoder) -> Callable:
    return jax.jit(jax.value_and_grad(functools.partial(objective, model), has_aux=True))


def dropout_key(seed: int) -> jax.Array:
    """Return a key of XLA's own generator: its draws compile in a tenth of the time threefry's take."""
    return jax.random.key(seed, impl="unsafe_rbg")
