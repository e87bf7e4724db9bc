"""A lane is its single run, and whatever its neighbours do it is the same to the bit."""

import functools

import jax
import numpy as np
import pytest

from jaxblock.sweeps.lanes import Lane, LaneProgram, least_bytes
from jaxblock.training.config_file import build_config
from jaxblock.training.prepare import TASKS, init_state, run_keys
from jaxblock.training.step import make_step
from tests.sweeps.small_sweeps import plan

STEPS = 20
LANES = (Lane(0, 1e-3, 0.0), Lane(1, 1e-3, 0.5), Lane(1, 3e-4, 0.0))


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    axes = {"run.seed": [0]}
    changes = {"model": {"hidden_dropout": 0.1}, "run": {"steps": STEPS}, "axes": axes}
    config = plan(tmp_path_factory.mktemp("lanes"), **changes).runs()[0].config
    task = TASKS["language_model"](config)
    program = LaneProgram(task, config, LANES)
    return config, task, program, trained(program)


def trained(program):
    """Return (losses [steps, lanes], final state), trained in chunks of half the steps."""
    state, losses = program.first_state(), []
    for start in (0, STEPS // 2):
        state, metrics = program.run(state, start, STEPS // 2)
        losses.append(jax.device_get(metrics.loss))
    return np.concatenate(losses), jax.device_get(state)


@pytest.mark.parametrize(
    "lane", [1, pytest.param(0, marks=pytest.mark.full), pytest.param(2, marks=pytest.mark.full)]
)
def test_a_lane_equals_its_single_run(small, lane):
    config, _, _, (losses, state) = small
    seed, rate, warmup = LANES[lane]
    values = config.values()
    values["run"]["seed"] = seed
    values["optimizer"] |= {"learning_rate": rate, "warmup": warmup}
    alone = build_config(values)
    task = TASKS["language_model"](alone)
    keys = run_keys(seed)
    single = jax.jit(functools.partial(init_state, task, alone))(keys.init)
    step = jax.jit(make_step(task.model, alone, task.loss))
    for number in range(STEPS):
        single, metrics = step(single, task.train[number], keys.dropout)
        assert abs(float(metrics.loss) - losses[number, lane]) <= 1e-5
    ours = jax.tree.map(lambda x: x[lane], state.params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-4), ours, single.params)


def test_lanes_of_other_settings_differ(small):
    losses = small[3][0]
    assert abs(losses[0] - losses[1]).max() > 1e-3
    assert abs(losses[1] - losses[2]).max() > 1e-5


@pytest.fixture(scope="module")
def wild(small):
    """The same program with another lane in the middle, which diverges."""
    config, task, _, _ = small
    return trained(LaneProgram(task, config, (LANES[0], Lane(1, 1e30, 0.0), LANES[2])))


def test_a_diverging_neighbour_changes_no_bit(small, wild):
    (losses, state), (wild_losses, wild_state) = small[3], wild
    assert wild_state.guard.alarm.tolist() == [0, 1, 0]
    assert int(wild_state.step[1]) < STEPS
    for lane in (0, 2):
        assert wild_losses[:, lane].tobytes() == losses[:, lane].tobytes()
        ours, theirs = (
            [leaf[lane].tobytes() for leaf in jax.tree.leaves(s.params)] for s in (wild_state, state)
        )
        assert ours == theirs


def test_a_frozen_lane_keeps_its_last_good_parameters(wild):
    state = wild[1]
    assert all(np.isfinite(leaf[1]).all() for leaf in jax.tree.leaves(state.params))
    assert np.isfinite(wild[0][:, 1]).all()  # the parameters were what was not finite, and they were not kept


@pytest.mark.full
def test_the_profile_is_the_stream_of_each_lane(small):
    _, task, program, (_, state) = small
    found = program.profile(state.params)
    batch = next(iter(task.validation))
    for lane in range(len(LANES)):
        params = jax.tree.map(lambda x, lane=lane: x[lane], state.params)
        logits, collected = jax.jit(lambda p: task.forward(p, batch, None))(params)
        blocks = collected["blocks"]
        rms = lambda x: float(np.sqrt(np.square(np.asarray(x, np.float64)).mean()))  # noqa: E731
        wanted = [rms(blocks["resid_pre"][0]), rms(collected["resid_final"])]
        np.testing.assert_allclose(found.stream[lane], wanted, rtol=1e-5)
        branches = [rms(blocks["attention_out"][0]), rms(blocks["feed_forward_out"][0])]
        np.testing.assert_allclose(found.branches[lane], branches, rtol=1e-5)
        np.testing.assert_allclose(found.logits[lane], rms(logits), rtol=1e-5)


def test_every_validation_target_counts_once(small):
    _, task, program, (_, state) = small
    scores = program.scores(state.params)
    targets = sum(int(batch.valid_BT.sum()) for batch in task.validation)
    assert scores.weight.sum(0).tolist() == [targets] * len(LANES)


def test_the_least_bytes_are_below_what_is_compiled(small):
    config, task, program, _ = small
    assert 0 < len(LANES) * least_bytes(task, config) <= program.compiled_bytes(STEPS // 2)
