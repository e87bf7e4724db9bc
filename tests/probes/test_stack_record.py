"""A stack as a record is the model cut at its sublayers: run in order and read by its exit, it is the model."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblock import Decoder
from jaxblock.config import ExecutionConfig
from jaxblock.functional.masks import AttentionPattern
from jaxblock.models import Classifier, Encoder
from jaxblock.models.block import Block, layer_inputs
from jaxblock.modules import AttentionInputs
from jaxblock.probes.jacobians import gains
from jaxblock.probes.stack import Stack, exit_of, inner_product, run_stack, scan_steps, stack_of, whole_blocks
from jaxblock.residual import REGISTRY, topology
from tests.small import built, config, tokens

READS_MORE = {
    "dense_former",
    "attention_residual",
    "block_attention_residual",
    "muddformer",
    "lime",
    "unet",
}
VALID = jnp.arange(6)[None] < jnp.array([[6], [4]])


def logits_twice(model, params, **changes):
    """Return the model's output, and that of its stack and its exit, from one program."""

    @jax.jit
    def run(params):
        stack = stack_of(model, params, tokens(), **changes)
        return model.apply({"params": params}, tokens(), **changes), exit_of(
            model, params, tokens(), **changes
        )(run_stack(stack))

    return run(params)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "pre_norm" else pytest.mark.full)
        for name in REGISTRY
        if name not in READS_MORE
    ],
)
def test_sublayers_in_order_and_the_exit_are_the_model(name):
    model, params = built(config(residual=name))
    want, got = logits_twice(model, params)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    assert np.isfinite(got).all()


VARIANTS = {
    "padding, windows, rope": {"positions": "rope", "window": (2, 0), "residual": "layer_norm_scaling"},
    "parallel, experts": {"wiring": "parallel", "experts": "dropless(experts=2, active=1)"},
    "token mixer": {"token_mixer": "convolution"},
}


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_so_it_is_for_what_a_block_may_hold(changes):
    model, params = built(config(**changes))
    want, got = logits_twice(model, params, valid_BT=VALID)
    np.testing.assert_allclose(np.where(VALID[..., None], got - want, 0.0), 0.0, atol=1e-5)


def test_an_encoder_and_a_classifier_see_both_sides():
    model_config = config(bias=False)
    params = built(model_config)[1]
    head = jnp.asarray(np.random.default_rng(0).normal(size=(8, 3)), jnp.float32)
    classifier = Classifier(model_config, classes=3)
    want, got = logits_twice(classifier, {**params, "classifier": {"kernel": head}}, valid_BT=VALID)
    np.testing.assert_allclose(got, want, atol=1e-5)
    causal, both = jax.jit(
        lambda p: [run_stack(stack_of(kind(model_config), p, tokens())) for kind in (Decoder, Encoder)]
    )(params)
    assert np.abs(causal[:, 0] - both[:, 0]).max() > 1e-3  # control: the mask is not the decoder's


def test_other_orders_of_the_steps_are_other_models():
    model, params = built(config())
    stack = stack_of(model, params, tokens())
    turned = Stack(stack.steps[::-1], stack.params, stack.stream)
    assert np.abs(run_stack(stack) - run_stack(turned)).max() > 1e-2


@pytest.mark.parametrize("name", REGISTRY)
def test_every_topology_has_a_stack_with_jacobians_or_none(name):
    model = Decoder(config(residual=name))
    params = jax.eval_shape(model.init, jax.random.key(0), tokens())["params"]

    def found(params):
        stack = stack_of(model, params, tokens())
        return None if stack is None else gains(stack, jax.random.key(0), samples=2)

    made = jax.eval_shape(found, params)
    assert (made is None) == (name in READS_MORE)
    assert all(leaf.shape == (6,) for leaf in jax.tree.leaves(made))


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in REGISTRY if name not in READS_MORE])
def test_the_jacobians_of_every_topology_with_a_stack_are_finite(name):
    model, params = built(config(residual=name))
    found = jax.jit(lambda p: gains(stack_of(model, p, tokens()), jax.random.key(0), samples=2))(params)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found))
    assert np.all(found.update.value > 0)


def test_a_value_residual_reads_more_than_the_stream():
    model, params = built(config(value_residual="fixed"))
    assert stack_of(model, params, tokens()) is None


def test_it_is_computed_in_float32_whatever_the_model_is():
    model, params = built(config(dtype="bfloat16", stream_dtype="bfloat16"))
    stack = stack_of(model, params, tokens())
    assert stack.stream.dtype == jnp.float32
    want = run_stack(stack_of(built(config())[0], params, tokens()))
    np.testing.assert_array_equal(run_stack(stack), want)


def test_a_block_runs_the_branch_it_is_told_and_no_other():
    model_config = config()
    own = jax.tree.map(lambda x: x[0], built(model_config)[1]["blocks"])
    layer = jax.tree.map(lambda x: x[0], layer_inputs(model_config))
    x_BTD = jnp.asarray(np.random.default_rng(1).normal(size=(1, 3, 8)), jnp.float32)
    inputs = AttentionInputs(AttentionPattern(causal=True))

    @functools.partial(jax.jit, static_argnums=0)
    def run(only, x):
        block = Block(model_config, ExecutionConfig(), topology("pre_norm"), only=only)
        return block.apply({"params": own}, x, inputs, layer)

    both = run("feed_forward", run("attention", x_BTD))
    np.testing.assert_allclose(run(None, x_BTD), both, rtol=1e-6, atol=1e-6)
    moved = x_BTD.at[0, 0].add(1.0)
    assert np.all(run("feed_forward", moved)[0, 1:] == run("feed_forward", x_BTD)[0, 1:])
    assert np.any(run("attention", moved)[0, 1:] != run("attention", x_BTD)[0, 1:])
    with pytest.raises(ValueError, match=r"Block\.only is 'mlp'; the branches of this block are"):
        run("mlp", x_BTD)


class Own(nn.Module):
    """A sublayer of somebody else's."""

    @nn.compact
    def __call__(self, x):
        return x + jnp.tanh(nn.Dense(4)(x))


def own_stack(depth=3):
    draw = np.random.default_rng(0)
    flax = {"Dense_0": {"kernel": draw.normal(size=(depth, 4, 4)), "bias": draw.normal(size=(depth, 4))}}
    params = {"w_LDD": draw.normal(size=(depth, 4, 4)), "flax": flax}
    params = jax.tree.map(lambda x: jnp.asarray(0.5 * x, jnp.float32), params)
    steps = (lambda p, x: x + x @ p["w_LDD"], lambda p, x: Own().apply({"params": p["flax"]}, x))
    return Stack(steps, params, jnp.asarray(draw.normal(size=(2, 3, 4)), jnp.float32))


def test_an_own_stack_is_visited_as_a_python_loop_would():
    stack = own_stack()
    x, want = stack.stream, []
    for block in range(3):
        own = jax.tree.map(lambda leaf, block=block: leaf[block], stack.params)
        for step in stack.steps:
            want.append(x)
            x = step(own, x)
    after, before_S = scan_steps(stack, lambda f, x, _: (f(x), x), stack.stream)
    np.testing.assert_allclose(before_S, want, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(after, x, rtol=1e-6, atol=1e-6)
    blocks = whole_blocks(stack)
    assert (stack.sublayers, blocks.sublayers, stack.depth, stack.size) == (6, 3, 3, 24)
    np.testing.assert_allclose(run_stack(blocks), x, rtol=1e-6, atol=1e-6)


def test_going_back_each_sublayer_is_given_its_own():
    stack = own_stack()
    _, before_S = scan_steps(stack, lambda f, x, _: (f(x), x), stack.stream)
    visited, again_S = scan_steps(
        stack,
        lambda f, seen, x: (seen.at[1:].set(seen[:-1]).at[0].set(x[0, 0, 0]), f(x)),
        jnp.zeros(6),
        given=before_S,
        reverse=True,
    )
    np.testing.assert_array_equal(visited, before_S[:, 0, 0, 0])  # the first sublayer was the last visited
    np.testing.assert_allclose(again_S[:-1], before_S[1:], rtol=1e-6, atol=1e-6)


def test_a_stack_is_a_pytree_that_jit_takes():
    stack = own_stack()
    np.testing.assert_allclose(jax.jit(run_stack)(stack), run_stack(stack), rtol=1e-6, atol=1e-6)


def test_stacks_that_cannot_be_scanned_are_refused():
    x, keep = jnp.ones((1, 2, 4)), lambda p, x: x
    with pytest.raises(ValueError, match=r"Stack\.steps is empty"):
        run_stack(Stack((), {"w": jnp.ones(3)}, x))
    with pytest.raises(ValueError, match=r"leading axes \[\(2,\), \(3,\)\]"):
        run_stack(Stack((keep,), {"w": jnp.ones(3), "v": jnp.ones(2)}, x))
    with pytest.raises(ValueError, match="every leaf must be"):
        run_stack(Stack((keep,), {}, x))
    with pytest.raises(ValueError, match="floating"):
        run_stack(Stack((keep,), {"w": jnp.ones(3)}, jnp.ones((1, 2), jnp.int32)))
    with pytest.raises(ValueError, match="step 1 of the stack was given a stream of"):
        run_stack(Stack((keep, lambda p, x: x[..., :2]), {"w": jnp.ones(3)}, x))


def test_an_inner_product_sums_leaves_in_float32():
    a = {"x": jnp.full((2, 300), 1.0, jnp.bfloat16), "y": jnp.full((2, 1), 2.0)}
    np.testing.assert_array_equal(inner_product(a, a, axes=1), [304.0, 304.0])
    assert jnp.bfloat16(256.0) + jnp.bfloat16(1.0) == 256.0  # control: its own dtype would not get there
