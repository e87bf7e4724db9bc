"""What the tests of the claims share: one block and one stack compiled once per config, Jacobians, who reads whom."""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxprs_in_params

from jaxblock import Block, Decoder, ExecutionConfig, ModelConfig
from jaxblock.functional import AttentionPattern, attention
from jaxblock.functional.masks import EVERYONE
from jaxblock.models.block import LayerInputs, layer_inputs
from jaxblock.models.stack import StackInputs, run_blocks
from jaxblock.modules import Attention, AttentionInputs, FeedForward
from jaxblock.residual import Topology, topology
from tests.small import built, config, tokens

BATCH, POSITIONS, WIDTH = 2, 6, 8
SHAPE = (BATCH, POSITIONS, WIDTH)
"""The stream of `tests.small`, so that what is compiled for one claim serves the next."""
CAUSAL = AttentionPattern(causal=True)


def draw(*shape: int, seed: int = 0, scale: float = 1.0) -> jax.Array:
    """Return N(0, scale^2) entries, float32, drawn by numpy (compiling a draw takes longer than most tests)."""
    return jnp.asarray(np.random.default_rng(seed).normal(scale=scale, size=shape), jnp.float32)


def stream(*, seed: int = 0) -> jax.Array:
    """Return a stream off zero mean and unit variance, so that no norm is the identity on it."""
    return jnp.asarray(1.5 * np.random.default_rng(seed).normal(size=SHAPE) + 0.5, jnp.float32)


def layer(model_config: ModelConfig, index: int = 0) -> Any:
    """Return the parameters of one block, all off their initial zeros and ones."""
    return one_of(built(model_config)[1]["blocks"], index)


def one_of(stacked: Any, index: int) -> Any:
    """Return one block's parameters out of a stack's; by numpy, as each shape would be compiled."""
    return jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)[index]), stacked)


def zeroed(params: Any, *paths: str) -> Any:
    """Return the parameters with everything under "attention/output" (and the like) set to 0."""

    def leaf(path: tuple, x: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return jnp.asarray(np.zeros_like(x)) if any(name.startswith(f"{prefix}/") for prefix in paths) else x

    return jax.tree_util.tree_map_with_path(leaf, params)


@functools.cache
def started() -> Any:
    """Return the small model's initial parameters under `initialization = "zero_output"`."""
    init = Decoder(config(initialization="zero_output")).init
    return jax.jit(lambda key: init(key, tokens(1, 2))["params"])(jax.random.key(0))


def count(tree: Any) -> int:
    """Return the number of entries of all leaves."""
    return sum(math.prod(x.shape) for x in jax.tree.leaves(tree))


def rms(x: jax.Array | np.ndarray) -> np.ndarray:
    """Return the root mean square over the last axis, in float64."""
    return np.sqrt(np.square(np.asarray(x, np.float64)).mean(-1))


# Parts of a model, as pure functions ---------------------------------------------------------------------------------


def apply_block(
    model_config: ModelConfig,
    params: Any,
    x_BTD: jax.Array,
    pattern: AttentionPattern = EVERYONE,
    key: Any = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return the stream after one block, not jitted, and what was recorded on the way."""
    module = Block(model_config, ExecutionConfig(), topology(model_config.residual))
    rngs = {} if key is None else {"dropout": key}
    after, kept = module.apply(
        {"params": params},
        x_BTD,
        AttentionInputs(pattern),
        LayerInputs(),
        rngs=rngs,
        mutable=["intermediates"],
    )
    return after, kept["intermediates"]


@functools.cache
def block(model_config: ModelConfig) -> Callable:
    """Return `apply_block` of a config, jitted: (params, x, pattern, key) -> (stream, intermediates)."""
    return jax.jit(functools.partial(apply_block, model_config))


@functools.cache
def stack(model_config: ModelConfig, own_topology: Topology | None = None) -> Callable:
    """Return (stacked params, x, pattern) -> (stream, intermediates [L, ...]) of the blocks alone, jitted."""
    module = Block(
        model_config, ExecutionConfig(), own_topology or topology(model_config.residual), parent=None
    )

    def run(
        params: Any, x_BTD: jax.Array, pattern: AttentionPattern
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        inputs = StackInputs(AttentionInputs(pattern), layer_inputs(model_config))
        after, kept = run_blocks(
            module,
            params,
            x_BTD,
            inputs,
            dropout_key=None,
            execution=ExecutionConfig(),
            collect=("intermediates",),
        )
        return after, kept["intermediates"]

    return jax.jit(run)


@functools.cache
def model(model_config: ModelConfig) -> Callable:
    """Return (params, tokens) -> (logits, intermediates) of the decoder, jitted."""

    def run(params: Any, tokens_BT: jax.Array) -> tuple[jax.Array, dict[str, Any]]:
        logits, kept = Decoder(model_config).apply({"params": params}, tokens_BT, mutable=["intermediates"])
        return logits, kept["intermediates"]

    return jax.jit(run)


@jax.jit
def attend(params: Any, x_BTD: jax.Array, pattern: AttentionPattern = EVERYONE) -> jax.Array:
    """Return the attention module alone, of the small config; `params` are a block's."""
    module = Attention(config(), ExecutionConfig())
    return module.apply({"params": params["attention"]}, x_BTD, AttentionInputs(pattern))


@jax.jit
def feed(params: Any, x_BTD: jax.Array) -> jax.Array:
    """Return the feed-forward module alone, of the small config; `params` are a block's."""
    return FeedForward(config()).apply({"params": params["feed_forward"]}, x_BTD)


compiled_attention = jax.jit(attention, static_argnames="implementation")
"""`functional.attention`, jitted."""


@jax.jit
def weights(
    q_BTHK: jax.Array, k_BTHK: jax.Array, pattern: AttentionPattern = EVERYONE, **options: Any
) -> jax.Array:
    """Return attention's weights [B, H, T, T], read off by values that are the unit vectors: needs K = T."""
    unit_BTHK = jnp.broadcast_to(jnp.eye(k_BTHK.shape[1])[None, :, None], k_BTHK.shape)
    return attention(q_BTHK, k_BTHK, unit_BTHK, pattern, **options).swapaxes(1, 2)


@jax.jit
def batch_norm(x_BTD: jax.Array) -> jax.Array:
    """Normalize each feature over batch and positions: the control that does not look at a token alone."""
    centred = x_BTD - jnp.mean(x_BTD, axis=(0, 1), keepdims=True)
    return centred * jax.lax.rsqrt(jnp.mean(jnp.square(centred), axis=(0, 1), keepdims=True) + 1e-5)


# Measures ------------------------------------------------------------------------------------------------------------


def square_jacobian(f: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Return d f(x) / d x as one square matrix over all entries of x."""
    return jax.jacfwd(f)(x).reshape(x.size, x.size)


def readers(f: Callable[[jax.Array], jax.Array], x_TD: jax.Array) -> np.ndarray:
    """Return a boolean [T, T]: whether one bit of f's output at position t moves when position s is replaced.

    f maps [B, T, D] to [B, T, D]; every replacement is a row of one batch, so both sides run the same program.
    """
    positions = x_TD.shape[0]
    same_STD = jnp.broadcast_to(x_TD, (positions, *x_TD.shape))
    index = jnp.arange(positions)
    changed_STD = same_STD.at[index, index].set(draw(*x_TD.shape, seed=99))
    compiled = jax.jit(f)
    return np.any(np.asarray(compiled(changed_STD)) != np.asarray(compiled(same_STD)), axis=-1).T


def equations(jaxpr: Any) -> Iterator[Any]:
    """Yield every equation of a jaxpr, those inside its equations included."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


def stream_adds(model_config: ModelConfig) -> list[tuple[tuple[int, ...], ...]]:
    """Return the operand shapes of the additions that take the stream itself and make the next one, in order."""
    params, x_BTD = layer(model_config), jax.ShapeDtypeStruct((*SHAPE[:2], model_config.width), jnp.float32)
    jaxpr = jax.make_jaxpr(lambda x_BTD: apply_block(model_config, params, x_BTD)[0])(x_BTD).jaxpr
    (current,) = jaxpr.invars
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "add" and any(operand is current for operand in equation.invars):
            found.append(tuple(operand.aval.shape for operand in equation.invars))
            (current,) = equation.outvars
    assert not found or jaxpr.outvars[0] is current
    return found


def product_flops(f: Callable, *arguments: Any) -> int:
    """Return the floating point operations of f's matrix products, 2 m n k each, from its jaxpr."""
    total = 0
    for equation in equations(jax.make_jaxpr(f)(*arguments).jaxpr):
        if equation.primitive.name == "dot_general":
            contracted, _ = equation.params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            total += 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[i] for i in contracted[0])
    return total
