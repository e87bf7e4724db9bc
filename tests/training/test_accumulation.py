"""A batch in pieces is the batch: weighted by real targets, summed in float32, the same update to round-off."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblock import Decoder
from jaxblock.training.batches import Batch
from jaxblock.training.config import DataConfig
from jaxblock.training.step import make_step
from tests.claims.claims import equations
from tests.small import carried, tokens
from tests.small_training import Bigram, bigram_params, state_of, stepper, training

KEY = jax.random.key(3)
# A rule whose update is linear in the gradient's scale would hide a wrong weight less than Adam's sign: no clip.
PLAIN = {"schedule": "constant", "warmup": 0.0, "clip": 0.0, "algorithm": "adamw(epsilon=1.0)"}


def ragged(rows: int = 8) -> Batch:
    """Return rows with 6, 1, 5, 2, ... real targets: the mean of the rows' means is another number."""
    tokens_BT = np.asarray(tokens(rows, 7))
    real_B = np.resize([6, 1, 5, 2, 0, 6, 1, 4], rows)
    return Batch(tokens_BT[:, :-1], tokens_BT[:, 1:], np.arange(6)[None] < real_B[:, None], None)


def after(pieces: int, *, model=None, **changes):
    run = training(data={"batch": 8, "accumulation": pieces}, optimizer=PLAIN, **changes)
    if model is not None:
        step, state = jax.jit(make_step(model, run)), state_of(run, bigram_params())
    else:
        step, state = stepper(run)
    return step(state, ragged(), KEY)


@pytest.mark.parametrize("pieces", [pytest.param(2, marks=pytest.mark.full), 8])
def test_pieces_give_the_update_of_the_whole(pieces):
    whole, metrics = after(1, model=Bigram(), loss={"z_loss": 0.1, "label_smoothing": 0.1})
    parts, same = after(pieces, model=Bigram(), loss={"z_loss": 0.1, "label_smoothing": 0.1})
    chex.assert_trees_all_close(parts.params, whole.params, rtol=1e-5, atol=1e-7)
    chex.assert_trees_all_close(same, metrics, rtol=1e-5)
    assert metrics.tokens == same.tokens == 25


def test_control_the_mean_of_the_pieces_means_is_another_update():
    """What weighting by rows would give: each row's own mean, averaged."""
    run = training(data={"batch": 1}, optimizer=PLAIN)
    params, rows = bigram_params(), ragged()
    step = jax.jit(make_step(Bigram(), run))
    losses = []
    for row in range(8):
        _, metrics = step(state_of(run, params), jax.tree.map(lambda x, i=row: x[i : i + 1], rows), KEY)
        losses.append(float(metrics.loss))
    _, whole = after(1, model=Bigram())
    assert abs(np.mean(losses) / float(whole.loss) - 1) > 0.05


@pytest.mark.full
def test_the_decoder_in_pieces():
    whole, metrics = after(1)
    parts, same = after(4)
    chex.assert_trees_all_close(parts.params, whole.params, rtol=1e-4, atol=1e-6)
    chex.assert_trees_all_close(same, metrics, rtol=1e-4)


@pytest.mark.parametrize("master", ["float32", pytest.param("bfloat16", marks=pytest.mark.full)])
def test_b61_half_precision_gradients_are_summed_in_float32(master):
    """Two pieces in bfloat16 compute; the control: over bfloat16 parameters the sums are not of their dtype."""
    run = training(
        data={"batch": 8, "accumulation": 2}, optimizer=PLAIN, dtype="bfloat16", param_dtype=master, depth=1
    )
    step, state = stepper(run)
    shapes = sorted(leaf.shape for leaf in jax.tree.leaves(state.params))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state.params)} == {master}
    (sums,) = [
        carried(equation)
        for equation in equations(jax.make_jaxpr(make_step(Decoder(run.model), run))(state, ragged(), KEY))
        if equation.primitive.name == "scan" and equation.params["length"] == 2
    ]
    assert {aval.dtype for aval in sums} == {jnp.dtype(jnp.float32)}
    assert sorted(aval.shape for aval in sums if aval.ndim) == shapes
    new, metrics = step(state, ragged(), KEY)
    assert new.params["embedding"]["table"].dtype == master
    assert np.isfinite(metrics.gradient_norm)


@pytest.mark.full
@pytest.mark.full
def test_dropout_differs_from_piece_to_piece():
    """Eight equal rows: with one mask for all pieces, every piece would have the same loss."""
    run = training(
        data={"batch": 2, "accumulation": 2}, optimizer={**PLAIN, "learning_rate": 0.0}, branch_dropout=0.5
    )
    step, state = stepper(run)
    one = jax.tree.map(lambda x: x[:1].repeat(2, 0), ragged())
    both = float(step(state, one, KEY)[1].loss)
    alone = training(data={"batch": 1}, optimizer={**PLAIN, "learning_rate": 0.0}, branch_dropout=0.5)
    step, state = stepper(alone)
    single = float(step(state, jax.tree.map(lambda x: x[:1], one), KEY)[1].loss)
    assert both != pytest.approx(single, rel=1e-4)


def test_pieces_must_divide_the_batch():
    with pytest.raises(
        ValueError, match=r"data.accumulation is 3 and data.batch is 8; it must divide the batch"
    ):
        DataConfig(batch=8, accumulation=3)
