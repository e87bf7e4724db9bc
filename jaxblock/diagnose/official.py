"""Step 8: every part beside Flax's own layer with the same parameters, in float32 and without dropout. Products are
taken in full float32 precision, whatever the process's own: TF32 and bfloat16 passes would look like a fault.

norm            flax.linen.RMSNorm, LayerNorm
attention       flax.linen.MultiHeadDotProductAttention, key and value heads repeated; for it the model's
                positions, window, soft cap and value residual are left out, which it does not have
feed-forward    flax.linen.Dense, with the activation of jax.nn
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxblock.config import ExecutionConfig, ModelConfig
from jaxblock.diagnose.finding import FAIL, PASS, Control, Finding
from jaxblock.diagnose.subject import Subject, as_float, quick
from jaxblock.functional.masks import AttentionPattern
from jaxblock.modules import Attention, AttentionInputs, FeedForward, Norm
from jaxblock.types import Array, Params

CLOSE = 1e-4
"""Relative root mean square of a difference."""
PRECISION = "highest"
"""Of every product, theirs and ours."""
ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "relu": jax.nn.relu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "silu": jax.nn.silu,
    "glu": jax.nn.sigmoid,
    "geglu": lambda x: jax.nn.gelu(x, approximate=False),
    "swiglu": jax.nn.silu,
}


def official_layers(subject: Subject) -> Finding:
    """Compare block 0's parts with Flax's own."""
    config = subject.exact.config
    blocks = jax.tree.map(lambda x: x[0], dict(subject.stirred["blocks"]))
    x_BTD = jnp.asarray(np.random.default_rng(0).normal(size=(2, 8, config.width)), jnp.float32)
    found = {"norm": _norm(config, x_BTD, epsilon=config.norm_epsilon)}
    if "attention" in blocks:
        found["attention"] = _attention(config, blocks["attention"], x_BTD, causal=subject.causal)
    if "feed_forward" in blocks:
        found["feed-forward"] = _feed_forward(config, blocks["feed_forward"], x_BTD)
    worst = max(found, key=lambda name: found[name] if np.isfinite(found[name]) else np.inf)
    error = found[worst]
    wrong = [_norm(config, x_BTD, epsilon=0.1)]
    if "attention" in blocks:
        wrong.append(_attention(config, blocks["attention"], x_BTD, causal=subject.causal, other_mask=True))
    if "feed_forward" in blocks:
        wrong.append(_feed_forward(config, blocks["feed_forward"], x_BTD, activate=jnp.tanh))
    bare = min(wrong)
    left_out = "" if len(found) == 3 else " (the model's other parts have no layer of Flax's to stand beside)"
    return Finding(
        PASS if error < CLOSE else FAIL,
        f"{', '.join(found)} beside Flax's own layers, products in {PRECISION} precision: at most {error:.2g} apart "
        f"({worst}){left_out}",
        error,
        f"below {CLOSE:g}",
        Control("an epsilon of 0.1, the other mask, tanh for the activation: least", bare, not bare < CLOSE),
        f"the equation of the {worst}: epsilon, the axis of the statistics, scale of the scores, mask, activation",
    )


def _norm(config: ModelConfig, x_BTD: Array, *, epsilon: float) -> float:
    draw = np.random.default_rng(1)
    rms = config.norm == "rms_norm"
    names = ("scale",) if rms or not config.bias else ("scale", "bias")
    params = {name: jnp.asarray(1 + 0.3 * draw.normal(size=config.width), jnp.float32) for name in names}
    flax = nn.RMSNorm(epsilon=epsilon) if rms else nn.LayerNorm(epsilon=epsilon, use_bias="bias" in params)
    return _apart(
        lambda x: Norm(config).apply({"params": params}, x),
        lambda x: flax.apply({"params": params}, x),
        x_BTD,
    )


def _attention(
    config: ModelConfig, params: Params, x_BTD: Array, *, causal: bool, other_mask: bool = False
) -> float:
    plain = {"positions": "none", "window": (), "soft_cap": None, "value_residual": "none"}
    config = dataclasses.replace(config, **plain)
    params = {name: value for name, value in params.items() if name != "value_mix"}
    inner = "inner_norm" in params
    if inner:  # Flax's has no norm there: both are then compared without
        params = {name: value for name, value in params.items() if name != "inner_norm"}
    module = Attention(config, ExecutionConfig(), parent=None)
    inputs = AttentionInputs(AttentionPattern(causal=causal))
    official = nn.MultiHeadDotProductAttention(
        num_heads=config.heads, qkv_features=config.width, out_features=config.width, use_bias=config.bias
    )
    group = config.heads // config.num_kv_heads
    repeated = lambda x: jnp.repeat(x, group, axis=-2)  # noqa: E731
    theirs = {
        "query": params["query"],
        "key": jax.tree.map(repeated, params["key"]),
        "value": jax.tree.map(repeated, params["value"]),
        "out": params["output"],
    }
    mask = nn.make_causal_mask(jnp.ones(x_BTD.shape[:2])) if causal != other_mask else None
    return _apart(
        lambda x: module.apply({"params": params}, x, inputs),
        lambda x: official.apply({"params": theirs}, x, mask=mask),
        x_BTD,
    )


def _feed_forward(
    config: ModelConfig, params: Params, x_BTD: Array, *, activate: Callable[[Array], Array] | None = None
) -> float:
    params = {name: value for name, value in params.items() if name != "inner_norm"}
    activate = activate or ACTIVATIONS[config.feed_forward]

    def dense(name: str, x: Array) -> Array:
        kernel = params[name]["kernel"]
        layer = nn.Dense(kernel.shape[-1], use_bias="bias" in params[name])
        made: Any = layer.apply({"params": params[name]}, x)
        return made

    def official(x: Array) -> Array:
        hidden = dense("up", x)
        hidden = activate(dense("gate", x)) * hidden if config.gated else activate(hidden)
        return dense("down", hidden)

    return _apart(lambda x: FeedForward(config, parent=None).apply({"params": params}, x), official, x_BTD)


def _apart(ours: Callable, theirs: Callable, x_BTD: Array) -> float:
    """Return rms(ours - theirs) / rms(theirs)."""

    def distance(x: Array) -> Array:
        a, b = ours(x), theirs(x)
        return jnp.sqrt(jnp.mean(jnp.square(a - b)) / jnp.mean(jnp.square(b)))

    with jax.default_matmul_precision(PRECISION):
        return as_float(quick(distance)(x_BTD))
