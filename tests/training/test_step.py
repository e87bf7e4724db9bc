"""One optimizer step: dtypes, keys, the guard, what is logged, and a program that does not grow with depth."""

import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblock import Decoder, ExecutionConfig
from jaxblock.training.guard import GOOD, NON_FINITE
from jaxblock.training.objectives import evaluation_loss
from jaxblock.training.prepare import init_state
from jaxblock.training.step import make_step
from tests.small_training import (
    Bigram,
    abstract_state,
    batch,
    bigram_params,
    state_of,
    stepper,
    traced_once,
    training,
)

KEY = jax.random.key(7)
BASE = training(optimizer={"schedule": "constant", "warmup": 0.0, "weight_decay": 0.0})
DROPOUT = {"attention_dropout": 0.5, "hidden_dropout": 0.5, "branch_dropout": 0.5}
# Every way in which training's objective differs from the plain loss; the learning rate of B41.
NOISY = training(optimizer={"learning_rate": 0.0}, loss={"z_loss": 0.1, "label_smoothing": 0.2}, **DROPOUT)


def poisoned():
    """Return a batch with one target that does not exist, whose loss is NaN."""
    targets_BT = batch().targets_BT.copy()
    targets_BT[1, 2] = 99
    return batch()._replace(targets_BT=targets_BT)


def dtypes(tree) -> set[str]:
    return {leaf.dtype.name for leaf in jax.tree.leaves(tree)}


# Types -----------------------------------------------------------------------------------------------------


def test_b36_sixty_four_bit_mode_keeps_every_dtype():
    run = training(**DROPOUT, loss={"z_loss": 0.1, "label_smoothing": 0.1})
    with jax.enable_x64(True):
        assert (jnp.arange(3) + 0.5).dtype == jnp.float64  # the mode is on: this is what the fault is made of
        model, state = abstract_state(run)
        after, metrics = jax.eval_shape(make_step(model, run), state, batch(), KEY)
    chex.assert_trees_all_equal_shapes_and_dtypes(after, state)
    assert dtypes(state.params) == {"float32"}
    assert dtypes(state.moments) == {"float32", "int32"}
    assert state.step.dtype == jnp.int32
    assert dtypes(metrics._replace(alarm=metrics.loss)) == {"float32"}


@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_moments_are_float32_whatever_the_parameters(param_dtype):
    run = training(param_dtype=param_dtype, dtype="bfloat16", stream_dtype="bfloat16")
    model, state = abstract_state(run)
    after, _ = jax.eval_shape(make_step(model, run), state, batch(), KEY)
    chex.assert_trees_all_equal_shapes_and_dtypes(after, state)
    assert dtypes(state.params) == {param_dtype}
    assert dtypes(state.moments) == {"float32", "int32"}


def test_b34_bfloat16_compute_leaves_parameters_moments_and_logits_in_float32():
    run = BASE.model_copy(update={"model": training(dtype="bfloat16").model})
    step, state = stepper(run)
    after, metrics = step(state, batch(), KEY)
    assert dtypes(after.params) == {"float32"}
    assert dtypes(after.moments) == {"float32", "int32"}
    assert metrics.alarm == GOOD
    logits_BTV = jax.eval_shape(Decoder(run.model).apply, {"params": state.params}, batch().inputs_BT)
    assert logits_BTV.dtype == jnp.float32
    exact, same_state = stepper(BASE)
    chex.assert_trees_all_equal(state.params, same_state.params)
    want = float(exact(same_state, batch(), KEY)[1].loss)
    assert float(metrics.loss) != want
    assert float(metrics.loss) == pytest.approx(want, rel=0.02)


# Keys ------------------------------------------------------------------------------------------------------


def three_losses(run, key) -> list[float]:
    step, state = stepper(run)
    losses = []
    for _ in range(3):
        state, metrics = step(state, batch(), key)
        losses.append(float(metrics.loss))
    return losses


def test_b41_each_step_drops_other_entries_and_a_rerun_the_same():
    once = three_losses(NOISY, KEY)
    assert len(set(once)) == 3
    assert three_losses(NOISY, KEY) == once
    assert set(three_losses(NOISY, jax.random.key(8))).isdisjoint(once)


def test_b41_control_without_dropout_step_and_key_change_nothing():
    step, state = stepper(BASE)
    losses = {
        float(step(state._replace(step=jnp.int32(number)), batch(), key)[1].loss)
        for number in range(3)
        for key in (KEY, jax.random.key(8))
    }
    assert len(losses) == 1


# The guard -------------------------------------------------------------------------------------------------


def test_a_loss_that_is_not_finite_stops_this_update_and_every_later_one():
    step, state = stepper(BASE)
    before, good = step(state, batch(), KEY)
    assert good.alarm == GOOD
    assert not np.array_equal(before.params["embedding"]["table"], state.params["embedding"]["table"])
    stopped, bad = step(before, poisoned(), KEY)
    assert bad.alarm == NON_FINITE
    assert np.isnan(bad.loss)
    chex.assert_trees_all_equal(stopped._replace(guard=before.guard), before)
    chex.assert_trees_all_equal(stopped.guard._replace(alarm=before.guard.alarm), before.guard)
    later, metrics = step(stopped, batch(), KEY)
    assert np.isfinite(metrics.loss)
    assert metrics.alarm == NON_FINITE
    chex.assert_trees_all_equal(later, stopped)


def test_a_gradient_that_is_not_finite_stops_too():
    """A finite loss whose gradient overflows: the squares of gradients of 1e25 are beyond float32."""
    run = training()
    params = jax.tree.map(lambda leaf: leaf * 0.0, bigram_params())
    params["head"]["kernel"] = params["head"]["kernel"] + 1e25 * jnp.arange(11.0)[None]
    state = state_of(run, params)
    after, metrics = jax.jit(make_step(Bigram(), run))(state, batch(), KEY)
    assert np.isfinite(metrics.loss)
    assert not np.isfinite(metrics.gradient_norm)
    assert metrics.alarm == NON_FINITE
    chex.assert_trees_all_equal(after.params, params)


# Learning --------------------------------------------------------------------------------------------------


def test_one_batch_is_learnt_by_heart_with_one_trace():
    """`stepper` fails at a second trace."""
    step, state = stepper(BASE)
    losses = []
    for number in range(1, 101):
        state, metrics = step(state, batch(), KEY)
        losses.append(float(metrics.loss))
        assert int(state.step) == number
    assert losses[0] > 2
    assert losses[-1] < 0.1


def test_a_second_trace_would_be_noticed():
    run = training()
    step = traced_once(make_step(Bigram(), run))
    state, _ = step(state_of(run, bigram_params()), batch(), KEY)
    state, _ = step(state, batch(seed=1), KEY)
    with pytest.raises(AssertionError, match="traced 2 times"):
        step(state, jax.tree.map(lambda x: x[:1], batch()), KEY)


# Loss and objective ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("z_loss", "smoothing"), [(0.0, 0.0), (0.1, 0.0), (0.0, 0.2)])
def test_z_loss_and_smoothing_move_the_objective_and_not_the_loss(z_loss, smoothing):
    run = training(loss={"z_loss": z_loss, "label_smoothing": smoothing})
    params = bigram_params()
    _, metrics = jax.jit(make_step(Bigram(), run))(state_of(run, params), batch(), KEY)
    table_VD, kernel_DV = (np.float64(leaf) for leaf in jax.tree.leaves(params))
    valid_BT = batch().valid_BT
    logits_NV = table_VD[batch().inputs_BT[valid_BT]] @ kernel_DV
    log_z_N = np.log(np.exp(logits_NV).sum(1))
    log_p_NV = logits_NV - log_z_N[:, None]
    nats = -log_p_NV[np.arange(11), batch().targets_BT[valid_BT]].mean()
    objective = (1 - smoothing) * nats - smoothing * log_p_NV.mean() + z_loss * (log_z_N**2).mean()
    np.testing.assert_allclose(metrics.loss, nats, rtol=1e-5)
    np.testing.assert_allclose(metrics.objective, objective, rtol=1e-5)
    assert (abs(objective - nats) > 1e-2) == bool(z_loss or smoothing)


def test_evaluation_is_the_plain_loss_without_dropout_smoothing_and_z_loss():
    step, state = stepper(NOISY)
    result = jax.jit(evaluation_loss(Decoder(NOISY.model), NOISY))(state.params, batch())
    assert float(result.loss) == pytest.approx(float(result.nats / result.weight), rel=1e-6)
    assert float(result.weight) == 11
    plain, same_state = stepper(BASE)
    chex.assert_trees_all_equal(state.params, same_state.params)
    assert float(result.loss) == pytest.approx(float(plain(same_state, batch(), KEY)[1].loss), rel=1e-5)
    noisy = step(state, batch(), KEY)[1]
    assert abs(float(result.loss) / float(noisy.loss) - 1) > 1e-3
    assert abs(float(result.loss) / float(noisy.objective) - 1) > 1e-3


# Depth -----------------------------------------------------------------------------------------------------


def lines(depth: int, unroll: int = 1, *, compiled: bool = False) -> int:
    """Return the lines of the step's text: as it is given to the compiler, or as it comes out."""
    run = training(depth=depth, execution=ExecutionConfig(scan_unroll=unroll))
    model, state = abstract_state(run)
    lowered = jax.jit(make_step(model, run)).lower(state, batch(), KEY)
    return len(str(lowered.compile().as_text() if compiled else lowered.as_text()).splitlines())


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.full)])
def test_b101_the_step_does_not_grow_with_depth(compiled):
    """What the compiler reads and what it writes: its seconds go by them, and no test here takes a time."""
    shallow = lines(4, compiled=compiled)
    assert abs(lines(48, compiled=compiled) / shallow - 1) < 0.05
    assert lines(4, unroll=4, compiled=compiled) > 1.1 * shallow  # the measure sees a program that does


def test_the_first_state_is_projected_as_later_ones_are():
    """nGPT's kernels are unit vectors before the first step, too."""

    class Halved(Bigram):
        def project(self, params):
            return jax.tree.map(lambda x: x / 2, params)

    task = types.SimpleNamespace(model=Halved(), init=lambda key: bigram_params())
    state = init_state(task, BASE, KEY)  # pyright: ignore[reportArgumentType]
    chex.assert_trees_all_close(state.params, jax.tree.map(lambda x: x / 2, bigram_params()))
