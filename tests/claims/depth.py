"""What the claims of seeds 002, 003 and 004 share: chains of scalar sublayers, real sizes, counts from jaxprs."""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxblock import Decoder, ExecutionConfig, ModelConfig
from jaxblock.axes import path_name
from jaxblock.functional.masks import AttentionPattern
from jaxblock.models import Block, LayerInputs
from jaxblock.modules import AttentionInputs
from jaxblock.residual import topology
from tests.small import built, tokens

SIX = {
    "gpt2_small": (12, 768, 12),
    "gpt2_medium": (24, 1024, 16),
    "gpt2_large": (36, 1280, 20),
    "gpt2_xl": (48, 1600, 25),
    "llama2_70b": (80, 8192, 64),
    "gpt3": (96, 12288, 96),
}
"""Blocks, width and heads of the six real models, the smallest and the largest of which the seed names."""

# ------------------------------------------------------------------ chains of sublayers by the rules themselves


def identity(h: Any) -> Any:
    """A norm that does nothing."""
    return h


def scaled(s: float) -> Callable:
    """Return the linear branch f(h) = s h."""
    return lambda h: s * h


def chain(rule: Callable, branches: Iterable[Callable], *norms: Callable) -> Callable:
    """Return x -> x after one sublayer per branch, each connected by `rule`; without norms, by the identity."""
    branches = list(branches)

    def run(x: Any) -> Any:
        for f in branches:
            x = rule(x, f, *(norms or (identity,)))
        return x

    return run


def slope(f: Callable, at: float = 1.0) -> float:
    """Return the derivative of a scalar function, by reverse mode."""
    return float(jax.grad(f)(jnp.float32(at)))


# ------------------------------------------------------------------ parameters and values of whole decoders


def real(name: str, **changes: Any) -> ModelConfig:
    """Return one of the six sizes: GPT-2's vocabulary, no biases, no position table, unless changed."""
    depth, width, heads = SIX[name]
    fields = {
        "vocab_size": 50257,
        "context": 1024,
        "depth": depth,
        "width": width,
        "heads": heads,
        "bias": False,
        "positions": "none",
    }
    return ModelConfig(**{**fields, **changes})


@functools.cache
def abstract(config: ModelConfig) -> Any:
    """Return the shapes and dtypes of all parameters; nothing is computed or allocated."""
    tokens_BT = jax.ShapeDtypeStruct((1, 2), jnp.int32)
    return jax.eval_shape(Decoder(config).init, jax.random.key(0), tokens_BT)["params"]


def abstract_block(config: ModelConfig) -> Any:
    """Return the shapes and dtypes of one block's parameters."""
    blocks = abstract(config)["blocks"]
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), blocks)


def entries(config: ModelConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Return every parameter's shape by path."""
    return {path_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(abstract(config))}


def count(config: ModelConfig, pattern: str = "") -> int:
    """Return the number of parameters whose path matches the regular expression somewhere."""
    return sum(math.prod(leaf.shape) for path, leaf in entries(config).items() if re.search(pattern, path))


def edited(params: Any, pattern: str, change: Callable[[jax.Array], jax.Array]) -> Any:
    """Return the parameters with `change` applied where the path matches; it must match somewhere."""
    paths = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    assert any(re.search(pattern, path) for path in paths), f"{pattern} matches none of {paths}"
    return jax.tree_util.tree_map_with_path(
        lambda path, x: change(x) if re.search(pattern, path_name(path)) else x, params
    )


def row(blocks: Any, index: int) -> Any:
    """Return the parameters of one block of a stack."""
    return jax.tree.map(lambda x: x[index], blocks)


def silenced(params: Any) -> Any:
    """Return the parameters with every branch writing zeros."""
    return edited(params, "attention/output|feed_forward/down", jnp.zeros_like)


def unit_norms(params: Any) -> Any:
    """Return the parameters with every norm's scale 1 and bias 0."""
    plain = edited(params, r"norm\w*/scale$", jnp.ones_like)
    return edited(plain, r"norm\w*/bias$", jnp.zeros_like)


@functools.cache
def forward(config: ModelConfig) -> Callable:
    """Return (params, tokens) -> (logits, intermediates), compiled once per config."""
    model = Decoder(config)

    def run(params: Any, tokens_BT: jax.Array) -> tuple:
        logits, made = model.apply({"params": params}, tokens_BT, mutable=["intermediates"])
        return logits, made["intermediates"]

    return jax.jit(run)


def values(config: ModelConfig, params: Any = None, tokens_BT: jax.Array | None = None) -> tuple:
    """Return logits and intermediates as numpy, for parameters off their zeros unless others are given."""
    params = built(config)[1] if params is None else params
    return jax.tree.map(np.asarray, forward(config)(params, tokens() if tokens_BT is None else tokens_BT))


def root_mean_square(x: Any) -> np.ndarray:
    """Return the root mean square over the last axis in float64."""
    return np.sqrt(np.mean(np.square(np.asarray(x, np.float64)), axis=-1))


# ------------------------------------------------------------------ what a traced function consists of


def equations(jaxpr: Any) -> Iterator[Any]:
    """Yield the equations of a jaxpr in order, those of inner functions in the place of their call."""
    for equation in jaxpr.eqns:
        inner = [x for x in equation.params.values() if hasattr(x, "jaxpr") or hasattr(x, "eqns")]
        for part in inner:
            yield from equations(getattr(part, "jaxpr", part))
        if not inner:
            yield equation


def stream_like(config: ModelConfig, length: int) -> jax.ShapeDtypeStruct:
    """Return the shape of a stream of one row."""
    return jax.ShapeDtypeStruct((1, length, config.width), jnp.float32)


def run_block(
    config: ModelConfig, params: Any, x_BTD: Any, *, rule: Callable[[Any, Callable], Any] | None = None
) -> Any:
    """Apply one causal block, its sublayers connected by the config's topology or by a rule `(x, f) -> x`."""
    own = topology(config.residual)
    if rule is not None:
        own = dataclasses.replace(own, connection=lambda config, *, name: rule)
    block = Block(config, ExecutionConfig(), own)
    inputs = AttentionInputs(AttentionPattern(causal=True))
    return block.apply({"params": params}, x_BTD, inputs, LayerInputs())


def product_flops(f: Callable, *arguments: Any) -> int:
    """Return the FLOPs of all matrix products of `f` on arguments of these shapes, a multiply-add counted as 2."""
    total = 0
    for equation in equations(jax.make_jaxpr(f)(*arguments).jaxpr):
        assert equation.primitive.name not in ("scan", "while", "cond"), "count a body, not a loop"
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            sizes = equation.invars[0].aval.shape
            total += 2 * equation.outvars[0].aval.size * math.prod(sizes[axis] for axis in contracted)
    return total


def full_width_operations(f: Callable, width: int, *arguments: Any) -> int:
    """Return how many additions, subtractions, multiplications and squares `f` does on vectors of this width."""
    total = 0
    for equation in equations(jax.make_jaxpr(f)(*arguments).jaxpr):
        name = equation.primitive.name
        sizes = [x.aval.size for x in (*equation.invars, *equation.outvars)]
        if name in ("add", "sub", "mul", "square", "reduce_sum") and width in sizes:
            total += width
    return total
