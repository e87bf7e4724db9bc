"""`execution.loss`: in blocks the objective, the step and what is observed are the same; the logits are never made."""

import functools
from typing import Any, cast

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from jaxblock import Decoder, ExecutionConfig
from jaxblock.functional.readout import read_out
from jaxblock.probes import CHEAP
from jaxblock.training.batches import Batch
from jaxblock.training.objectives import evaluation_loss, probed_training_loss
from jaxblock.training.step import first_state, make_probed_step, make_step
from tests.small import built, config, tokens
from tests.small_training import abstract_state, batch, training

KEY = jax.random.key(3, impl="unsafe_rbg")
# Adam divides by the gradient's size; this epsilon keeps it from making a step of what is round-off, as a key's bias.
PLAIN = {"schedule": "constant", "warmup": 0.0, "algorithm": "adamw(epsilon=0.001)"}
RICH = {"z_loss": 0.1, "label_smoothing": 0.1}
WHOLE, BLOCKED = ExecutionConfig(), ExecutionConfig(loss="blocked")
HALF = {"dtype": "bfloat16", "param_dtype": "bfloat16", "stream_dtype": "bfloat16"}


def documents() -> Batch:
    """Return four rows of which two are two documents, and of which 6, 1, 0 and 4 targets are real."""
    tokens_BT, segments_BT = np.asarray(tokens(4, 7)), np.repeat([[0, 0, 0, 1, 1, 1], [2] * 6], 2, axis=0)
    real_BT = np.arange(6)[None] < np.array([[6], [1], [0], [4]])
    return Batch(tokens_BT[:, :-1], tokens_BT[:, 1:], real_BT, segments_BT)


@functools.cache
def after(execution: ExecutionConfig = WHOLE, *, rate: float = 0.03, pieces: int = 1, **model):
    """Return the state and the metrics after one step."""
    run = training(
        execution=execution,
        optimizer={**PLAIN, "learning_rate": rate},
        loss=RICH,
        data={"batch": 4, "accumulation": pieces},
        **model,
    )
    decoder, params = built(run.model, run.execution)
    return jax.jit(make_step(decoder, run))(first_state(decoder, run, params), documents(), KEY)


@pytest.mark.parametrize(
    "changes",
    [
        {"head": "untied", "vocab_multiple": 4, "branch_dropout": 0.3, "pieces": 2},
        pytest.param({"parametrization": "complete_p(base_depth=1, base_width=4)"}, marks=pytest.mark.full),
        pytest.param({"experts": "dropless(experts=3, balance=0.3)"}, marks=pytest.mark.full),
        pytest.param({"residual": "attention_residual", "pieces": 4}, marks=pytest.mark.full),
    ],
    ids=["untied in pieces", "scaled", "experts", "history in pieces"],
)
def test_a_step_is_the_step_of_whole_logits(changes):
    (state, metrics), (wanted, want) = after(BLOCKED, **changes), after(**changes)
    chex.assert_trees_all_close(state.params, wanted.params, rtol=1e-4, atol=1e-5)
    chex.assert_trees_all_close(metrics, want, rtol=1e-5, atol=1e-6)
    assert metrics.tokens == 11
    # Control: a third of the learning rate is another step.
    other = after(rate=0.01, **changes)[0].params["embedding"]["table"]
    assert np.abs(other - wanted.params["embedding"]["table"]).max() > 1e-3


@pytest.mark.full
def test_a_step_in_half_precision_rounds_no_more():
    (_, metrics), (_, want) = after(BLOCKED, **HALF), after(**HALF)
    np.testing.assert_allclose(metrics.loss, want.loss, rtol=1e-5)
    np.testing.assert_allclose(metrics.gradient_norm, want.gradient_norm, rtol=2**-7)


def test_evaluation_and_the_head_are_those_of_the_logits():
    run = training(head="untied", vocab_multiple=4, optimizer=PLAIN)
    (whole, params), (model, same) = built(run.model), built(run.model, BLOCKED)
    chex.assert_trees_all_equal(same, params)
    wanted, found = (jax.jit(evaluation_loss(m, run))(params, documents()) for m in (whole, model))
    chex.assert_trees_all_close(found, wanted, rtol=1e-6)
    assert found.nats == found.total
    given = ({"params": params}, documents().inputs_BT)
    x_BTD, readout = cast(Any, model.apply(*given, method="before_head"))
    logits_BTV = model.apply(*given)
    np.testing.assert_array_equal(read_out(x_BTD, readout), logits_BTV)
    assert readout.matrix is params["head"]["kernel"]


def test_an_observer_sees_what_it_saw():
    run, found = training(loss=RICH), []
    for execution in (WHOLE, BLOCKED):
        model, params = built(run.model, execution)
        found.append(jax.jit(probed_training_loss(model, run, CHEAP))({"params": params}, batch(), None))
    chex.assert_trees_all_close(*found, rtol=1e-5, atol=1e-6)
    assert len(jax.tree.leaves(found[1][1])) > 5  # control: something was observed


@pytest.mark.full
def test_a_probed_step_measures_what_it_measured():
    found = []
    for execution in (WHOLE, BLOCKED):
        run = training(execution=execution, optimizer=PLAIN)
        model, params = built(run.model, execution)
        step = make_probed_step(
            model, run, probed_training_loss(model, run, CHEAP), statistics=(*CHEAP, "gradient", "update")
        )
        found.append(jax.jit(step)(first_state(model, run, params), batch(), KEY)[1:])
    chex.assert_trees_all_close(*found, rtol=1e-4, atol=1e-6)
    assert "stream_gradient" in found[0][1].stream


def largest_array(execution: ExecutionConfig, *, vocab_size: int, evaluation: bool) -> int:
    """Return the number of entries of the largest array that a step or an evaluation makes; nothing is run."""
    run = training(execution=execution, vocab_size=vocab_size)
    model, state = abstract_state(run)
    if evaluation:
        jaxpr = jax.make_jaxpr(evaluation_loss(model, run))(state.params, batch())
    else:
        jaxpr = jax.make_jaxpr(make_step(model, run))(state, batch(), KEY)
    sizes = []

    def walk(jaxpr):
        for equation in jaxpr.eqns:
            sizes.extend(var.aval.size for var in equation.outvars if hasattr(var.aval, "shape"))
            for inner in jaxprs_in_params(equation.params):
                walk(inner)

    walk(jaxpr.jaxpr)
    return max(sizes)


@pytest.mark.parametrize("evaluation", [False, True], ids=["training", "evaluation"])
def test_the_logits_are_never_made(evaluation):
    """Of two times six tokens: a block has one position, two rows of the vocabulary; the head's width is 8."""
    sizes = {"vocab_size": 10**7, "evaluation": evaluation}
    assert largest_array(WHOLE, **sizes) == 2 * 6 * 10**7
    assert largest_array(BLOCKED, **sizes) <= 8 * 10**7


def test_the_default_is_whole_and_other_words_are_refused():
    assert ExecutionConfig().loss == "whole"
    with pytest.raises(ValueError, match=r"execution.loss is 'chunked'; it must be one of blocked, whole"):
        ExecutionConfig(loss="chunked")
    # A decoder's own logits stay what they are.
    model = Decoder(config(), BLOCKED)
    assert jax.eval_shape(
        model.apply, {"params": built(config())[1]}, jnp.zeros((1, 2), jnp.int32)
    ).shape == (1, 2, 11)
