"""One optimizer step: dtypes, keys, the guard, what is logged, and a program that does not grow with depth."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblock import Decoder, ExecutionConfig
from jaxblock.training.batches import Batch
from jaxblock.training.config import LossConfig, OptimizerConfig, RunConfig, TrainConfig
from jaxblock.training.step import init_state, make_evaluation, make_step
from tests.small import config, tokens

KEY = jax.random.key(7)


def train_config(*, steps=10, optimizer=None, loss=None, execution=None, **model):
    return TrainConfig(
        run=RunConfig(steps=steps),
        model=config(**model),
        execution=execution or ExecutionConfig(),
        optimizer=optimizer or OptimizerConfig(),
        loss=loss or LossConfig(),
    )


@functools.cache
def ready(made: TrainConfig):
    """Return the jitted step and the first state of a config."""
    model = Decoder(made.model, made.execution)
    state = jax.jit(functools.partial(init_state, model, made))(jax.random.key(0))
    return jax.jit(make_step(model, made)), state


def batch(seed=0, *, bad=False):
    tokens_BT = np.asarray(tokens(2, 7, seed=seed))
    targets_BT = tokens_BT[:, 1:].copy()
    if bad:
        targets_BT[0, 0] = 99  # no such id: the loss is NaN
    return Batch(tokens_BT[:, :-1], targets_BT, np.ones((2, 6), bool), None)


def test_b36_sixty_four_bit_mode_keeps_every_dtype():
    made = train_config(depth=1)
    with jax.enable_x64(True):
        model = Decoder(made.model)
        state = jax.jit(functools.partial(init_state, model, made))(jax.random.key(0))
        after, metrics = jax.jit(make_step(model, made))(state, batch(), KEY)
        chex.assert_trees_all_equal_dtypes(state, after)
        for leaf in jax.tree.leaves((after.params, after.moments)):
            assert leaf.dtype in (jnp.float32, jnp.int32)
        assert all(x.dtype == jnp.float32 for x in metrics if x.dtype != jnp.bool_)


def test_b41_each_step_drops_other_entries_and_a_rerun_the_same():
    made = train_config(optimizer=OptimizerConfig(learning_rate=0.0), branch_dropout=0.5)
    step, first = ready(made)

    def three_losses(key):
        state, losses = first, []
        for _ in range(3):
            state, metrics = step(state, batch(), key)
            losses.append(float(metrics.loss))
        return losses

    once = three_losses(KEY)
    assert len(set(once)) == 3
    assert three_losses(KEY) == once
    assert three_losses(jax.random.key(8)) != once


def test_without_dropout_and_learning_rate_the_losses_are_equal():
    """The control of B41: it is the key that makes them differ."""
    step, state = ready(train_config(optimizer=OptimizerConfig(learning_rate=0.0)))
    state, once = step(state, batch(), KEY)
    _, again = step(state, batch(), KEY)
    assert float(once.loss) == float(again.loss)


def test_non_finite_loss_stops_every_later_update():
    step, state = ready(train_config())
    state, good = step(state, batch(), KEY)
    assert bool(good.healthy)
    stopped, bad = step(state, batch(bad=True), KEY)
    assert not bad.healthy
    assert np.isnan(bad.loss)
    chex.assert_trees_all_equal(stopped._replace(healthy=state.healthy), state)
    later, metrics = step(stopped, batch(), KEY)
    assert not metrics.healthy
    chex.assert_trees_all_equal(later, stopped)


def test_overfits_one_batch():
    optimizer = OptimizerConfig(learning_rate=0.02, schedule="constant", weight_decay=0.0)
    made = train_config(steps=200, optimizer=optimizer, width=16, depth=2)
    step, state = ready(made)
    for _ in range(200):
        state, metrics = step(state, batch(), KEY)
    assert float(metrics.loss) < 0.1


def test_bfloat16_compute_keeps_float32_parameters_and_stream():
    made = train_config(dtype="bfloat16", width=16)
    step, state = ready(made)
    after, metrics = step(state, batch(), KEY)
    chex.assert_trees_all_equal_dtypes(state, after)
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(after.params))
    assert bool(metrics.healthy)
    exact, _ = ready(train_config(width=16))
    _, reference = exact(state, batch(), KEY)
    assert float(metrics.loss) != float(reference.loss)
    assert float(metrics.loss) == pytest.approx(float(reference.loss), rel=0.02)


def test_z_loss_and_smoothing_move_the_objective_and_not_the_loss():
    _, state = ready(train_config())
    plain = ready(train_config())[0](state, batch(), KEY)[1]
    assert float(plain.objective) == pytest.approx(float(plain.loss), rel=1e-6)
    for loss in (LossConfig(z_loss=0.1), LossConfig(label_smoothing=0.1)):
        metrics = ready(train_config(loss=loss))[0](state, batch(), KEY)[1]
        assert float(metrics.loss) == pytest.approx(float(plain.loss), rel=1e-6)
        assert abs(float(metrics.objective) - float(plain.objective)) > 1e-3


def test_evaluation_is_the_plain_loss_without_dropout():
    made = train_config(loss=LossConfig(z_loss=0.1), branch_dropout=0.5)
    _, state = ready(made)
    evaluate = jax.jit(make_evaluation(Decoder(made.model), made))
    result = evaluate(state.params, batch())
    assert float(result.total) == float(result.nats)
    plain = ready(train_config())[0](state, batch(), KEY)[1]
    assert float(result.nats / result.weight) == pytest.approx(float(plain.loss), rel=1e-5)


def test_separate_documents_drop_the_seam_and_change_the_loss():
    step, state = ready(train_config())
    joined = batch()
    segments_BT = np.asarray([[1, 1, 1, 2, 2, 2]] * 2, np.int32)
    separate = joined._replace(segments_BT=segments_BT, valid_BT=np.asarray([[1, 1, 0, 1, 1, 1]] * 2, bool))
    _, whole = step(state, joined, KEY)
    _, parts = step(state, separate, KEY)
    assert int(whole.tokens) == 12
    assert int(parts.tokens) == 10
    assert float(whole.loss) != float(parts.loss)


def lowered_size(depth, execution=ExecutionConfig()):
    made = train_config(depth=depth, execution=execution)
    model = Decoder(made.model, made.execution)
    state = jax.eval_shape(functools.partial(init_state, model, made), KEY)
    return len(jax.jit(make_step(model, made)).lower(state, batch(), KEY).as_text())


def test_lowered_step_does_not_grow_with_depth():
    shallow = lowered_size(4)
    assert abs(lowered_size(48) - shallow) / shallow < 0.05
    unrolled = [lowered_size(depth, ExecutionConfig(scan_unroll=depth)) for depth in (2, 6)]
    assert unrolled[1] > 1.2 * unrolled[0]


def test_step_is_traced_once():
    made = train_config()
    traced = chex.assert_max_traces(make_step(Decoder(made.model), made), n=1)
    step, state = jax.jit(traced), ready(made)[1]
    for seed in range(3):
        state, _ = step(state, batch(seed), KEY)
    assert int(state.step) == 3
