"""What a topology costs: parameters, FLOPs and compiled memory are what it declares."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxblock import Decoder, ExecutionConfig, ModelConfig
from jaxblock.axes import roles
from jaxblock.residual import History, Topology
from tests.residual.battery.subject import (
    OWN_ROLES,
    PLAIN,
    objective,
)
from tests.residual.given import (
    Entry,
    unrolled_flops,
)
from tests.small import config, tokens


def check_parameter_count(entry: Entry) -> None:
    """The parameters a topology adds are as many as its formula says."""
    if entry.topology.parameters is None:
        return
    for changes in ({}, {"norm": "rms_norm", "depth": 5}, {"wiring": "parallel", "bias": False, "width": 16}):
        model_config = config(**changes)
        model = Decoder(model_config, topology=entry.topology)
        shapes = jax.eval_shape(model.init, jax.random.key(0), tokens(1, 2))["params"]
        own = [
            leaf.size
            for leaf, role in zip(jax.tree.leaves(shapes), jax.tree.leaves(roles(shapes)), strict=True)
            if role in OWN_ROLES
        ]
        want = entry.topology.parameters(model_config)
        assert sum(own) == want, f"{entry} with {changes}: {sum(own)} parameters, its formula gives {want}"


def check_flops(entry: Entry) -> None:
    """The declared FLOPs are multiplied, and little else: norms, activations and single factors are the slack."""
    if entry.topology.flops is None:
        return
    for changes in ({"depth": 12, "width": 64}, {"depth": 3, "width": 64, "wiring": "parallel"}):
        model_config = config(**PLAIN, **changes)
        declared, counted = entry.topology.flops(model_config), unrolled_flops(entry.topology, model_config)
        per_number = held_numbers(entry.topology, model_config) * (model_config.sublayers + 1)
        assert declared <= counted <= 1.6 * declared + 40 * per_number, (
            f"{entry}: declares {declared} FLOPs per token; a loop that reads what exists has {counted}"
        )


def held_numbers(topology: Topology, model_config: ModelConfig) -> int:
    """Return the numbers per token that a stream holds from block to block, histories not among them."""
    stream = jax.eval_shape(lambda x: topology.open(model_config, x), jnp.zeros((1, 1, model_config.width)))
    nodes = jax.tree.leaves(stream, is_leaf=lambda node: isinstance(node, History))
    return max(model_config.width, sum(node.size for node in nodes if not isinstance(node, History)))


def gradient_memory(topology: Topology, depth: int, execution: ExecutionConfig) -> int:
    """Return bytes of temporaries of the compiled gradient at width 128, 128 tokens."""
    model_config = config(**PLAIN, depth=depth, width=128, context=64)
    model = Decoder(model_config, execution, topology)
    tokens_BT = jax.ShapeDtypeStruct((2, 64), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens_BT)["params"]
    gradient = jax.jit(jax.grad(lambda params, tokens_BT: objective(model, params, tokens_BT)[0]))
    return gradient.lower(params, tokens_BT).compile().memory_analysis().temp_size_in_bytes


def memory_exponent(topology: Topology, depths: tuple[int, ...], **execution: Any) -> float:
    """Return p of bytes = c * L^p."""
    sizes = [gradient_memory(topology, depth, ExecutionConfig(**execution)) for depth in depths]
    return float(np.polyfit(np.log(depths), np.log(sizes), 1)[0])


def check_memory_is_linear(entry: Entry) -> None:
    """The gradient's temporaries grow at most as the depth."""
    exponent = memory_exponent(entry.topology, (8, 32))
    assert exponent <= 1.1, f"{entry}: gradient memory grows as L^{exponent:.2f}"
