"""Every dtype on the way from tokens to loss, as the table in `jaxblock.types` says, and none but those."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest

from jaxblock import Decoder, ExecutionConfig
from jaxblock.functional.losses import cross_entropy
from jaxblock.modules.intermediates import COLLECTION
from jaxblock.residual import REGISTRY
from tests.small import config, tokens

HALF = {"dtype": "bfloat16", "norm": "rms_norm", "feed_forward": "swiglu"}
STATISTICS = ("rsqrt", "sqrt", "exp", "log", "cumsum", "argmax")
"""What norms, softmax and loss are made of; SwiGLU's sigmoid is `logistic`."""


def equations(jaxpr) -> Iterator[jax.extend.core.JaxprEqn]:
    """Yield every equation, those of scans, checkpoints and conditionals included."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for part in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(part, "jaxpr", part)
                if hasattr(inner, "eqns"):
                    yield from equations(inner)


def half_statistics(function, *arguments) -> set[str]:
    """Return the statistics that are computed in half precision."""
    closed = jax.make_jaxpr(function)(*arguments)
    return {
        equation.primitive.name
        for equation in equations(closed.jaxpr)
        if equation.primitive.name in STATISTICS
        and any(var.aval.dtype in (jnp.bfloat16, jnp.float16) for var in equation.invars)
    }


@functools.cache
def traced(residual: str, stream: str, attention: str = "xla"):
    """Return the model and its abstract parameters."""
    settings = config(residual=residual, stream_dtype=stream, **HALF)
    model = Decoder(settings, ExecutionConfig(attention=attention))
    return model, jax.eval_shape(model.init, jax.random.key(0), tokens())["params"]


@pytest.mark.parametrize("residual", sorted(REGISTRY))
@pytest.mark.parametrize("stream", ["float32", "bfloat16"])
def test_b34_stream_branches_and_logits_have_their_documented_types(residual, stream):
    model, params = traced(residual, stream)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {"float32"}
    logits, collected = jax.eval_shape(
        lambda p: model.apply({"params": p}, tokens(), mutable=[COLLECTION]), params
    )
    assert logits.dtype == jnp.float32
    found = collected[COLLECTION]
    for name, leaf in found["blocks"].items():
        if name.startswith("resid"):
            assert leaf.dtype == stream, name
        if name.endswith(("_in", "_out")):
            assert {x.dtype for x in jax.tree.leaves(leaf)} == {jnp.dtype(jnp.bfloat16)}, name
    assert found["resid_final"].dtype == stream


@pytest.mark.parametrize("attention", ["xla", "blocked"])
@pytest.mark.parametrize("stream", ["float32", "bfloat16"])
def test_statistics_are_float32_forward_and_backward(stream, attention):
    model, params = traced("pre_norm", stream, attention)

    def loss(params):
        logits_BTV = model.apply({"params": params}, tokens())
        return cross_entropy(logits_BTV, tokens(seed=1)).loss

    assert half_statistics(jax.value_and_grad(loss), params) == set()


def test_control_a_softmax_in_half_precision_is_noticed():
    x = jnp.ones((2, 3), jnp.bfloat16)
    assert half_statistics(jax.nn.softmax, x) == {"exp"}
    assert half_statistics(jax.jit(lambda x: jax.lax.rsqrt((x * x).mean(-1))), x) == {"rsqrt"}
