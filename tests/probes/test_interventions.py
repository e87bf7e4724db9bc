"""Skipping, reordering and Shapley values against the same done by hand, and where the answer is known."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblock import Decoder
from jaxblock.functional import cross_entropy
from jaxblock.probes.gates import gate_branches
from jaxblock.probes.interventions import (
    gated,
    order_losses,
    reordered,
    repeats,
    shapley_values,
    skip_effects,
    swaps,
)
from jaxblock.probes.stack import Stack, exit_of, run_stack, stack_of
from tests.small import built, config, tokens

KEY, DEPTH, SUBLAYERS = jax.random.key(0), 3, 6


def drawn(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def own_stack(update):
    """Return the stack x + update(p_s, x), p_s a matrix, two sublayers a block."""
    params = 0.4 * drawn(0, DEPTH, 2, 4, 4)
    steps = tuple(lambda p, x, i=i: x + update(p[i], x) for i in range(2))
    return Stack(steps, params, drawn(1, 2, 3, 4))


READS = own_stack(lambda m, x: jnp.tanh(x @ m))
IGNORES = own_stack(lambda m, x: jnp.broadcast_to(m[0], x.shape))


@functools.cache
def compiled(steps):
    return [jax.jit(step) for step in steps]


def updates_without(stack, left_out):
    """Return the updates of a Python loop in which one sublayer is left out, [S, ...] float64."""
    x, found, steps = stack.stream, [], compiled(stack.steps)
    for s in range(SUBLAYERS):
        own = jax.tree.map(lambda leaf, s=s: leaf[s // 2], stack.params)
        y = steps[s % 2](own, x)
        found.append(np.asarray(y, np.float64) - np.asarray(x, np.float64))
        x = x if s == left_out else y
    return np.stack(found)


@pytest.mark.parametrize("kind", ["own", "decoder"])
def test_what_skipping_does_downstream_is_that_of_a_loop(kind):
    stack = READS if kind == "own" else stack_of(*built(config()), tokens())
    found = jax.jit(functools.partial(skip_effects, at_once=4))(stack)
    whole = updates_without(stack, None)
    size = lambda u: np.sqrt(np.square(u).sum((1, 2, 3)))  # noqa: E731
    want = np.stack([size(updates_without(stack, s) - whole) / size(whole) for s in range(SUBLAYERS)])
    np.testing.assert_allclose(found, np.triu(want, 1), rtol=1e-3, atol=1e-4)
    upper = np.asarray(found)[np.triu_indices(SUBLAYERS, 1)]
    assert np.all(upper > 1e-3)  # control: every sublayer is read by all after it


def test_sublayers_that_read_nothing_feel_nothing():
    np.testing.assert_allclose(skip_effects(IGNORES), 0.0, atol=1e-6)  # (x + u) - x is u to round-off


def test_orders():
    np.testing.assert_array_equal(swaps(3), [[1, 0, 2], [0, 2, 1]])
    np.testing.assert_array_equal(repeats(3), [[0, 0, 1, 2], [0, 1, 1, 2], [0, 1, 2, 2]])
    with pytest.raises(ValueError, match="depth is 1"):
        swaps(1)


def test_blocks_that_commute_may_be_swapped_and_others_may_not():
    loss = lambda x: jnp.sum(jnp.sin(x))  # noqa: E731
    for stack, same in ((IGNORES, True), (READS, False)):
        losses = order_losses(stack, loss, np.concatenate([np.arange(DEPTH)[None], swaps(DEPTH)]))
        np.testing.assert_allclose(losses[0], loss(run_stack(stack)), rtol=1e-5)
        assert np.allclose(losses, losses[0], rtol=1e-5) == same


def test_a_repeated_block_runs_twice():
    loss = lambda x: jnp.mean(jnp.sin(x), axis=(1, 2))  # noqa: E731
    losses = order_losses(READS, loss, repeats(DEPTH))
    assert losses.shape == (DEPTH, 2)
    x = READS.stream
    for block in (0, 1, 1, 2):
        for step in READS.steps:
            x = step(READS.params[block], x)
    np.testing.assert_allclose(losses[1], loss(x), rtol=1e-5)
    assert np.abs(losses[0] - losses[1]).max() > 1e-3  # control
    assert reordered(READS, np.array([2])).sublayers == 2


def test_a_models_blocks_in_another_order_are_its_parameters_in_that_order():
    model, params = built(config())
    order = np.array([1, 0, 2])

    @jax.jit
    def run(params):
        stack, read = stack_of(model, params, tokens()), exit_of(model, params, tokens())
        moved = {**params, "blocks": jax.tree.map(lambda x: x[order], params["blocks"])}
        return order_losses(stack, read, order[None])[0], *(
            model.apply({"params": p}, tokens()) for p in (moved, params)
        )

    got, want, plain = run(params)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    assert np.abs(want - plain).max() > 1e-2


def test_orders_of_what_is_not_there_are_refused():
    with pytest.raises(ValueError, match="orders name blocks 0 to 3; there are 0 to 2"):
        order_losses(READS, jnp.sum, np.array([[0, 3]]))
    with pytest.raises(ValueError, match=r"orders is float64 \(1, 2\)"):
        order_losses(READS, jnp.sum, np.array([[0.0, 1.0]]))


def test_gates_of_one_change_nothing_and_of_zero_leave_the_stream():
    np.testing.assert_allclose(
        run_stack(gated(READS, jnp.ones(SUBLAYERS))), run_stack(READS), rtol=1e-5, atol=1e-6
    )
    np.testing.assert_array_equal(run_stack(gated(READS, jnp.zeros(SUBLAYERS))), READS.stream)
    third = jnp.ones(SUBLAYERS).at[3].set(0.0)
    want = READS.stream + updates_without(READS, 3)[[0, 1, 2, 4, 5]].sum(0)
    np.testing.assert_allclose(run_stack(gated(READS, third)), want, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=r"they must be one per sublayer, \(6,\)"):
        gated(READS, jnp.ones(3))


@pytest.mark.full
def test_a_loss_that_is_a_sum_gives_every_gate_its_own_share_without_error():
    weights_S = drawn(2, 5)
    found = shapley_values(lambda g: 3.0 - jnp.dot(g, weights_S), 5, KEY, orders=4, at_once=3)
    np.testing.assert_allclose(found.value_S, weights_S, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found.error_S, 0.0, atol=1e-6)
    pair = shapley_values(lambda g: -g[0] * g[1], 3, KEY, orders=200)
    np.testing.assert_allclose(
        pair.value_S, [0.5, 0.5, 0.0], atol=4 * float(pair.error_S[0])
    )  # a pair shares
    assert np.all(pair.error_S[:2] > 0.01)  # control: where gates act together, orders differ
    assert set(np.unique(pair.marginals_RS)) == {0.0, 1.0}


def test_orders_are_drawn_evenly():
    # The first added takes all of 1 - prod(1 - g): each of three is first in a third of the orders.
    found = shapley_values(lambda g: jnp.prod(1 - g), 3, KEY, orders=600)
    np.testing.assert_allclose(found.value_S, 1 / 3, atol=4 * 0.02)


def test_every_order_of_a_models_gates_takes_off_what_all_take_off():
    model_config = config()
    model, params = Decoder(model_config), built(model_config)[1]

    def loss(params):
        return cross_entropy(model.apply({"params": params}, tokens())[:, :-1], tokens()[:, 1:]).loss

    @jax.jit
    def run(params):
        of = lambda gates_S: loss(gate_branches(model_config, params, gates_S))  # noqa: E731
        found = shapley_values(of, SUBLAYERS, KEY, orders=3, at_once=8)
        return found, of(jnp.zeros(SUBLAYERS)) - of(jnp.ones(SUBLAYERS))

    found, whole = run(params)
    np.testing.assert_allclose(found.marginals_RS.sum(1), np.full(3, whole), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found.value_S.sum(), whole, rtol=1e-4, atol=1e-5)
    assert (
        np.abs(np.diff(found.marginals_RS, axis=0)).max() > 1e-2
    )  # control: orders differ, their sums do not
    assert np.abs(found.marginals_RS[:, :-1].sum(1) - whole).min() > 1e-3
