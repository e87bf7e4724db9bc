"""A stack is one function however it is run: scan, loop, remat, for values, gradients and dropout.

What holds for every topology is in the battery (`tests/residual`); here is what belongs to the stack.
"""

import functools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblock import Decoder, ExecutionConfig
from jaxblock.config import REMAT_POLICIES
from jaxblock.functional.masks import AttentionPattern
from jaxblock.models import Block, LayerInputs, StackInputs, init_blocks, run_blocks
from jaxblock.modules import AttentionInputs, Dropout
from jaxblock.residual import topology
from tests.small import KINDS, built, config, tokens

# Few parameters and few kinds of operations: what is compared is how the stack is run.
DROPOUT = {
    "depth": 2,
    "attention_dropout": 0.2,
    "hidden_dropout": 0.2,
    "branch_dropout": 0.2,
    "norm": "rms_norm",
    "bias": False,
    "positions": "none",
    "feed_forward": "relu",
}
LOOP = ExecutionConfig(scan_unroll=2)


def dropout_key(seed):
    """Return a key of XLA's own generator: its draws compile in a tenth of the time threefry's take."""
    return jax.random.key(seed, impl="unsafe_rbg")


def objective(model, params, tokens_BT, key=None):
    rngs = {} if key is None else {"dropout": key}
    logits_BTV = model.apply({"params": params}, tokens_BT, rngs=rngs)
    return jnp.sum(jnp.sin(logits_BTV)), logits_BTV


@functools.cache
def compiled(model):
    return jax.jit(jax.value_and_grad(functools.partial(objective, model), has_aux=True))


def assert_equal_runs(residual, execution, key, **changes):
    model_config = config(residual=residual, **changes)
    model, params = built(model_config)
    (_, want), want_gradients = compiled(model)(params, tokens(), key)
    (_, got), gradients = compiled(Decoder(model_config, execution))(params, tokens(), key)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    chex.assert_trees_all_close(gradients, want_gradients, rtol=1e-4, atol=1e-5)
    return want


@pytest.mark.parametrize("key", [None, 3], ids=["plain", "dropout"])
def test_loop_equals_scan(key):
    rngs = None if key is None else dropout_key(key)
    assert_equal_runs("pre_norm", LOOP, rngs, **DROPOUT)


@pytest.mark.parametrize("remat", [name for name in REMAT_POLICIES if name != "none"])
@pytest.mark.parametrize("residual", ["pre_norm", pytest.param("attention_residual", marks=pytest.mark.full)])
def test_remat_equals_none(residual, remat):
    assert_equal_runs(residual, ExecutionConfig(remat=remat), dropout_key(3), **DROPOUT)


@pytest.mark.full
@pytest.mark.parametrize("residual", KINDS)
@pytest.mark.parametrize("wiring", ["serial", "parallel"])
@pytest.mark.parametrize("unroll", [1, 2])
@pytest.mark.parametrize("remat", REMAT_POLICIES)
def test_every_execution_equals_scan(residual, wiring, unroll, remat):
    execution = ExecutionConfig(scan_unroll=unroll, remat=remat)
    assert_equal_runs(residual, execution, dropout_key(3), wiring=wiring, **DROPOUT)


@pytest.mark.full
@pytest.mark.parametrize(
    "execution",
    [
        pytest.param(ExecutionConfig(scan_unroll=2), marks=pytest.mark.full),
        ExecutionConfig(attention="blocked"),
    ],
)
def test_partial_unroll_and_blocked_attention_equal_scan(execution):
    assert_equal_runs(
        "pre_norm", execution, None, wiring="parallel", feed_forward="swiglu", kv_heads=1, depth=3
    )


def test_vmap_over_seeds_initialises_each_as_alone():
    model = Decoder(config(depth=2))

    def init(key):
        return model.init(key, tokens())["params"]

    keys = jax.random.split(jax.random.key(5), 2)
    stacked = jax.jit(jax.vmap(init))(keys)
    chex.assert_trees_all_close(jax.tree.map(lambda x: x[1], stacked), jax.jit(init)(keys[1]), rtol=1e-6)


def test_dropout_differs_by_key_by_layer_and_is_off_without_one():
    model, params = built(config(**DROPOUT))
    plain, once, again, other = (
        compiled(model)(params, tokens(), key)[0][1]
        for key in (None, dropout_key(1), dropout_key(1), dropout_key(2))
    )
    np.testing.assert_array_equal(once, again)
    assert not np.allclose(once, other)
    assert not np.allclose(once, plain)


def test_each_layer_and_each_site_draws_its_own_mask():
    """With equal layers and a branch that returns its input, each layer's drop pattern shows in the stream."""

    class DropBlock(nn.Module):
        @nn.compact
        def __call__(self, stream, inputs, layer):
            ones = jnp.ones(stream.shape[:1])
            masks = [Dropout(0.5, name=site)(ones) for site in ("first", "second")]
            here = jax.nn.one_hot(layer.window, 4)
            return stream + here[None, :, None] * jnp.stack(masks, -1)[:, None]

    layers = LayerInputs(window=jnp.arange(4))
    stream, _ = run_blocks(
        DropBlock(),
        {"none": jnp.zeros((4, 1))},
        jnp.zeros((64, 4, 2)),
        StackInputs(None, layers),
        dropout_key=jax.random.key(0),
        execution=ExecutionConfig(),
    )
    masks = np.asarray(stream).transpose(1, 2, 0).reshape(8, 64)
    assert set(np.unique(masks)) <= {0.0, 2.0}
    assert len({tuple(mask) for mask in masks}) == 8


def test_layer_starts_as_the_block_alone_would():
    block = Block(config(), ExecutionConfig(), topology("pre_norm"))
    stream, attention = jnp.zeros((1, 1, 8)), AttentionInputs(AttentionPattern(causal=True))
    inputs = StackInputs(attention, LayerInputs())
    stacked = jax.jit(lambda key: init_blocks(block, key, stream, inputs, depth=3))(jax.random.key(9))
    alone = jax.jit(lambda key: block.init(key, stream, attention, LayerInputs())["params"])
    for i, key in enumerate(jax.random.split(jax.random.key(9), 3)):
        # Equal, so the spread has not met the depth axis: a fan-in of 3 * 8 would show.
        chex.assert_trees_all_close(jax.tree.map(lambda x, i=i: x[i], stacked), alone(key), rtol=1e-6)


def test_alternating_windows_are_scanned_and_equal_the_loop():
    changes = {"positions": "none", "depth": 2}
    got = assert_equal_runs("pre_norm", LOOP, None, window=(2, 0), **changes)
    model, params = built(config(**changes))
    (_, unlimited), _ = compiled(model)(params, tokens(), None)
    assert not np.allclose(got, unlimited)


@pytest.mark.parametrize("scan", [1, 2])
@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_b38_every_combination_of_scan_remat_dropout_initialises_and_runs(scan, remat, rate):
    model_config = config(branch_dropout=rate, depth=2)
    model = Decoder(model_config, ExecutionConfig(scan_unroll=scan, remat=remat))
    reference, params = built(model_config)
    chex.assert_trees_all_equal_shapes(
        jax.eval_shape(model.init, jax.random.key(0), tokens())["params"], params
    )

    @jax.jit
    def steps(params, key):
        training = jax.value_and_grad(functools.partial(objective, model), has_aux=True)
        return training(params, tokens(), key), objective(model, params, tokens())

    ((trained, _), gradients), (evaluated, _) = steps(params, dropout_key(1))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))
    want = objective(reference, params, tokens())[0]
    np.testing.assert_allclose(evaluated, want, rtol=1e-5)
    # The control: at a rate above 0 the training step's is another number.
    assert np.allclose(trained, want, rtol=1e-5) == (rate == 0.0)
