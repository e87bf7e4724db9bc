"""What the combinator holds every connection to: one call of the branch, an unchanged stream, dtypes kept apart."""

import functools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblock import Decoder, ExecutionConfig, ModelConfig
from jaxblock.residual import PreNorm, Topology, residual
from tests.small import CONNECTIONS, config, tokens

FEW = ("pre_norm", "post_norm", "layer_norm_scaling", "dense_former", "hyper_connections", "ngpt")
"""Checked by default: the placements, a float32 factor, a history, several streams, a projection."""
X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 8)), jnp.float32)


class ReadsTwice:
    def __call__(self, x, f):
        return x + f(x) + f(x)


class NeverReads:
    def __call__(self, x, f):
        return x + x


class ChangesShape:
    def __call__(self, x, f):
        return (x + f(x))[:, :1]


class ChangesDtype:
    def __call__(self, x, f):
        return (x + f(x)).astype(jnp.bfloat16)


class DropsStream:
    def __call__(self, streams, f):
        return {"first": streams["first"] + f(streams["first"])}


class KeepsStreams:
    def __call__(self, streams, f):
        return {**streams, "first": streams["first"] + f(streams["first"])}


def connect(connection, stream, dtype="float32", branch=jnp.sin):
    return residual(connection, stream, branch, dtype=dtype)


@pytest.mark.parametrize(
    ("connection", "stream", "sentence"),
    [
        (ReadsTwice(), X, "ReadsTwice called its branch twice; it must call f exactly once"),
        (NeverReads(), X, "NeverReads never called its branch; it must call f exactly once"),
        (ChangesShape(), X, r"ChangesShape was given a stream of .*\(2, 3, 8\).* and returned .*\(2, 1, 8\)"),
        (ChangesDtype(), X, "ChangesDtype was given a stream of .*float32.* and returned .*bfloat16"),
        (
            DropsStream(),
            {"first": X, "second": X},
            "DropsStream was given a stream of .*second.* and returned",
        ),
    ],
    ids=lambda value: type(value).__name__ if callable(value) else "",
)
def test_a_rule_that_breaks_the_contract_is_refused_by_name(connection, stream, sentence):
    with pytest.raises(ValueError, match=sentence):
        connect(connection, stream)


def test_a_rule_that_keeps_the_contract_is_not_refused():
    after = connect(KeepsStreams(), {"first": X, "second": X})
    np.testing.assert_allclose(after["first"], X + jnp.sin(X), rtol=1e-6)
    np.testing.assert_array_equal(after["second"], X)


def test_refused_inside_a_model_and_before_any_compile():
    model = Decoder(config(), topology=Topology(lambda _, name: ReadsTwice(), "x + 2 f(x)", "a test"))
    with pytest.raises(ValueError, match="ReadsTwice called its branch twice"):
        jax.eval_shape(model.init, jax.random.key(0), tokens())


def test_a_branch_that_changes_the_shape_is_refused():
    with pytest.raises(AssertionError):
        connect(KeepsStreams(), {"first": X}, branch=lambda h: h[:, :1])


@pytest.mark.parametrize("compute", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("stream", ["float32", "bfloat16"])
def test_branch_computes_in_its_dtype_and_the_stream_keeps_its_own(stream, compute):
    read = []

    def branch(h):
        read.append(h.dtype.name)
        return jnp.sin(h)

    x = {"first": X.astype(stream)}
    after = connect(KeepsStreams(), x, compute, branch)
    assert read == [compute]
    chex.assert_trees_all_equal_dtypes(after, x)


def test_a_float32_scale_would_lift_the_stream_and_is_refused():
    """The fault of B34 itself, as a control: the combinator does not repair a rule's promotion, it names it."""

    class Scaled:
        def __call__(self, x, f):
            return x + jnp.ones(8, jnp.float32).reshape(1, 1, 8) * f(x)

    with pytest.raises(ValueError, match=r"Scaled was given a stream of .*bfloat16.* and returned .*float32"):
        connect(Scaled(), X.astype("bfloat16"))
    connect(Scaled(), X)


SEEN: list[str] = []


class Watched(nn.Module):
    """Pre-norm that writes down the dtype of the stream and of the normalized array, at run time, per sublayer."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x, f):
        jax.debug.callback(lambda x: SEEN.append(x.dtype.name), x)
        return PreNorm(self.config, name="inner")(x, f)


@functools.cache
def watched_dtypes(stream: str, compute: str, unroll: int) -> tuple[list[str], str]:
    """Return the dtype of the stream that enters each sublayer, and of the logits; parameters are float32."""
    model = Decoder(
        config(stream_dtype=stream, dtype=compute),
        ExecutionConfig(scan_unroll=unroll),
        Topology(Watched, "x + f(norm(x))", "a test"),
    )
    params = jax.eval_shape(model.init, jax.random.key(0), tokens())["params"]
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {"float32"}
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), params)
    SEEN.clear()
    logits = jax.block_until_ready(jax.jit(model.apply)({"params": zeros}, tokens()))
    jax.effects_barrier()
    return list(SEEN), logits.dtype.name


@pytest.mark.parametrize("unroll", [1, 3], ids=["scanned", "unrolled"])
@pytest.mark.parametrize(("stream", "compute"), [("float32", "bfloat16"), ("bfloat16", "bfloat16")])
def test_b34_every_block_is_entered_in_the_streams_dtype(stream, compute, unroll):
    seen, logits = watched_dtypes(stream, compute, unroll)
    print(f"stream {stream}, compute {compute}: {seen}")
    assert seen == [stream] * 6
    assert logits == "float32"


@pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=pytest.mark.full) for name in CONNECTIONS]
)
@pytest.mark.parametrize("wiring", ["serial", pytest.param("parallel", marks=pytest.mark.full)])
def test_b34_holds_for_every_connection(name, wiring):
    """By abstract evaluation: a stream whose dtype changed would not pass the scan, nor the combinator."""
    for stream, compute in (("float32", "bfloat16"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")):
        for params in ("float32", "bfloat16"):
            model = Decoder(
                config(residual=name, wiring=wiring, stream_dtype=stream, dtype=compute, param_dtype=params)
            )
            logits, _ = jax.eval_shape(model.init_with_output, jax.random.key(0), tokens())
            assert logits.dtype == jnp.float32
