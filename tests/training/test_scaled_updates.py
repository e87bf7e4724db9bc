"""AdamW with the factors of depth and width: each leaf's update in float64, the decoder's first step, the log."""

import dataclasses
import functools

import chex
import jax
import numpy as np
import pytest

from jaxblock import Decoder
from jaxblock.axes import parameter_rule
from jaxblock.functional import Scaling, complete_p
from jaxblock.training.config import OptimizerConfig
from jaxblock.training.optimizer import make_optimizer, optimizer_table
from jaxblock.training.step import first_state, make_step
from tests.small import built, config
from tests.small_training import abstract_state, batch, stepper, training
from tests.training.optimizer_reference import (
    DECAYED,
    GRADIENTS,
    LABELS,
    adam_direction,
    as_params,
    assert_same,
    distances,
    draws,
    flattened,
    moved,
)

KEY = jax.random.key(0)
SCALING = Scaling(
    branch=7.0,
    logits=7.0,
    table_gain=7.0,
    hidden_rate=0.5,
    vector_rate=0.7,
    hidden_decay=3.0,
    block_epsilon=0.1,
)
OPTIONS = {"algorithm": "adamw(beta1=0.8, beta2=0.9, epsilon=0.05)", "clip": 0.0, "weight_decay": 0.3}


@functools.cache
def three_updates(scaling: Scaling) -> dict[str, np.ndarray]:
    """Return the parameters after three updates of rate 0.1."""
    optimizer = make_optimizer(OptimizerConfig(**OPTIONS, role_rates={"up": 0.25}), LABELS, scaling=scaling)
    update, params = jax.jit(optimizer.update), as_params(draws(0))
    state = optimizer.init(params)
    for gradient in GRADIENTS:
        updates, state = update(as_params(gradient), state, params)
        params = moved(params, updates, 0.1)
    return flattened(params)


def three_references(scaling: Scaling) -> dict[str, np.ndarray]:
    """Return the same in float64, with every path's treatment spelt out."""
    params = draws(0)
    for path in params:
        in_blocks = path.startswith("blocks/")
        hidden = in_blocks and path.endswith("/kernel")
        factor = {"blocks/feed_forward/up/kernel": 0.25, "shared/queries": 0.5}.get(path, 1.0)
        if in_blocks:
            factor *= scaling.hidden_rate if hidden else scaling.vector_rate
        decayed = any(path.endswith(end) for end in DECAYED) or path == "shared/queries"
        decay = 0.3 * decayed * (scaling.hidden_decay if hidden else 1.0)
        direction = adam_direction(0.8, 0.9, 0.05 * (scaling.block_epsilon if in_blocks else 1.0))
        moments: dict = {}
        for n, gradients in enumerate(GRADIENTS, start=1):
            d = direction(gradients[path], moments, n)
            params[path] = params[path] - 0.1 * factor * (d + decay * params[path])
    return params


def test_three_updates_of_every_leaf_equal_the_reference():
    found = three_updates(SCALING)
    assert_same(found, three_references(SCALING))
    assert_same(three_updates(Scaling()), three_references(Scaling()))
    for name in (
        "hidden_rate",
        "vector_rate",
        "hidden_decay",
        "block_epsilon",
    ):  # control: each factor is read
        apart = distances(found, three_references(SCALING._replace(**{name: 1.0})))
        touched = {path for path, distance in apart.items() if distance > 1e-3}
        assert touched, name
        assert all(path.startswith("blocks/") for path in touched), name


def test_factors_of_the_forward_pass_do_not_reach_the_optimizer():
    assert_same(
        three_updates(SCALING._replace(branch=0.1, logits=0.1, table_gain=3.0)),
        three_updates(SCALING),
        tolerance=0.0,
    )


def test_the_state_is_the_standard_one():
    """A checkpoint of either has the same tree."""
    params = as_params(draws(0))
    plain, scaled = (make_optimizer(OptimizerConfig(), scaling=s).init(params) for s in (Scaling(), SCALING))
    chex.assert_trees_all_equal(plain, scaled)


@pytest.mark.parametrize("algorithm", ["lion", "adafactor", "muon"])
def test_another_algorithm_is_refused_where_anything_is_scaled(algorithm):
    config = OptimizerConfig(algorithm=algorithm)
    with pytest.raises(ValueError, match="the algorithm must be adamw"):
        make_optimizer(config, scaling=SCALING)
    make_optimizer(config, scaling=complete_p(1.0, 1.0))


def test_an_epsilon_that_leaves_float32_is_refused():
    config = OptimizerConfig(algorithm="adamw(epsilon=1e-36)")
    with pytest.raises(ValueError, match="epsilon, in the blocks"):
        make_optimizer(config, scaling=complete_p(100.0, 1.0))
    make_optimizer(config, scaling=complete_p(100.0, 1.0, scale_epsilon=False))


# A decoder ---------------------------------------------------------------------------------------------------------


def run_of(text: str, **changes):
    options = {
        "algorithm": "adamw(epsilon=1e-20)",
        "schedule": "constant",
        "warmup": 0.0,
        "weight_decay": 0.0,
        "clip": 0.0,
    }
    return training(depth=4, parametrization=text, optimizer={**options, **changes}, head="untied")


@pytest.mark.full  # every leaf's three updates are compared with float64 above
@pytest.mark.parametrize("alpha", [0.5, 1.0])
def test_the_first_step_of_every_entry_is_its_rate(alpha):
    """With a tiny epsilon Adam's first direction is the gradient's sign: |update| = 0.03 times the leaf's factor."""
    run = run_of(f"complete_p(base_depth=1, base_width=2, alpha={alpha})")
    step, state = stepper(run)
    after, metrics = step(state, batch(), KEY)
    assert metrics.alarm == 0
    before = flattened(state.params)
    of_depth = 4.0 ** (alpha - 1.0)
    seen = set()
    for path, leaf in flattened(after.params).items():
        change = np.abs(np.float64(leaf) - np.float64(before[path]))
        rule = parameter_rule(path)
        factor = 1.0
        if path.startswith("blocks/"):
            factor = of_depth * (0.25 if path.endswith("/kernel") else 1.0)
        touched = change[change > 0]
        assert touched.size > 0.25 * change.size, path
        np.testing.assert_allclose(touched, 0.03 * factor, rtol=1e-3, atol=1e-6, err_msg=path)
        seen.add((rule.role, factor))
    assert {role for role, _ in seen} >= {"query", "up", "bias", "norm", "embedding", "position", "head"}
    assert ("norm", 1.0) in seen  # the final norm


@pytest.mark.full
def test_pieces_give_the_update_of_the_whole():
    """Gradient accumulation knows nothing of the factors."""
    run = run_of("complete_p(base_depth=1, base_width=2)", algorithm="adamw(epsilon=1.0)")
    pieces = run.model_copy(update={"data": training(data={"accumulation": 2}).data})
    (whole, _), (parts, _) = (step(state, batch(), KEY) for step, state in (stepper(run), stepper(pieces)))
    chex.assert_trees_all_close(parts.params, whole.params, rtol=1e-5, atol=1e-6)


def lowered_step(text: str) -> tuple[str, str]:
    """Return the program of a whole training step, and that of the first state."""
    run = training(parametrization=text)
    model, state = abstract_state(run)
    start = jax.jit(lambda params: first_state(model, run, params)).lower(state.params)
    return jax.jit(make_step(model, run)).lower(state, batch(), KEY).as_text(), start.as_text()


def test_at_the_base_a_training_step_is_the_standard_program():
    """The very same text, so any number of steps gives the same bits."""
    standard = lowered_step("standard")
    assert lowered_step("complete_p(base_depth=2, base_width=8, alpha=0.5)") == standard
    other_step, other_start = lowered_step("depth_mup(base_depth=1)")
    assert other_step != standard[0]
    assert other_start == standard[1]


def test_the_log_lists_the_factors():
    model_config = config(depth=4, parametrization="complete_p(base_depth=1, base_width=4, alpha=0.5)")
    model, (_, params) = (
        Decoder(model_config),
        built(dataclasses.replace(model_config, parametrization="standard")),
    )
    plain = optimizer_table(OptimizerConfig(), params, model.labels).split("\n")
    found = optimizer_table(OptimizerConfig(), params, model.labels, scaling=model.scaling).split("\n")
    assert found[:2] == plain
    kernels = "down 1,024, key 256, output 256, query 256, up 1,024, value 256"
    assert found[2:] == [
        f"learning rate times 0.25 on: {kernels}",
        "learning rate times 0.5 on: bias 288, norm 128",
        f"weight decay times 2 on: {kernels}",
        "epsilon times 0.25 on: bias 288, down 1,024, key 256, norm 128, output 256, query 256, up 1,024, value 256",
    ]
    assert optimizer_table(OptimizerConfig(), params, model.labels, scaling=Scaling()).split("\n") == plain
