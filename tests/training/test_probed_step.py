"""A probed step is the training step: the same update, one forward pass, and no trace of it where it is off."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxblock import Decoder, ExecutionConfig
from jaxblock.probes import CHEAP, EVERY, StreamProbe, gradient_profile, open_taps, stream_profile
from jaxblock.training.guard import GOOD, judge, remember
from jaxblock.training.objectives import probed_training_loss, training_loss
from jaxblock.training.optimizer import learning_rate_schedule, make_optimizer
from jaxblock.training.step import (
    StepMetrics,
    TrainState,
    first_state,
    make_probed_step,
    make_step,
    pieces_of,
    probed_gradient,
)
from tests.small import built
from tests.small_training import abstract_state, batch, training

KEY = jax.random.key(7)
# Adam divides by the gradient's size; this epsilon keeps it from making a step of what is round-off, as a key's bias.
PLAIN = {"schedule": "constant", "warmup": 0.0, "algorithm": "adamw(epsilon=0.001)"}
BASE = training(optimizer=PLAIN)
HALVES = training(optimizer=PLAIN, data={"accumulation": 2})
ALL = (*EVERY, "gradient", "update")


def probed(run, statistics=(*CHEAP, "gradient", "update"), model=None):
    model = model or Decoder(run.model, run.execution)
    loss = probed_training_loss(model, run, [name for name in statistics if name in EVERY])
    return make_probed_step(model, run, loss, statistics=statistics)


@functools.cache
def one_step(run, statistics=None):
    """Return the first state, and what one step, probed or not, makes of it."""
    model, params = built(run.model, run.execution)
    state = first_state(model, run, params)
    step = make_step(model, run) if statistics is None else probed(run, statistics)
    return state, jax.jit(step)(state, batch(), KEY)


# Off -------------------------------------------------------------------------------------------------------


def reference_step(model, config):
    """The step as it was before there were probes, written down."""
    optimizer = make_optimizer(config.optimizer, model.labels, scaling=model.scaling)
    schedule = learning_rate_schedule(config.optimizer, config.run.steps)
    loss, pieces = training_loss(model, config), config.data.accumulation

    def gradient(params, batch, key):
        def mean(params):
            result = loss(params, batch, key)
            return result.loss, result

        if pieces == 1:
            return jax.grad(mean, has_aux=True)(params)
        rows = jax.tree.leaves(batch)[0].shape[0]
        split = jax.tree.map(lambda x: jnp.asarray(x).reshape(pieces, -1, *x.shape[1:]), batch)

        def share(params, piece, key):
            result = loss(params, piece, key)
            return result.total / rows, result

        def add(sums, scanned):
            piece, number = scanned
            found = jax.grad(share, has_aux=True)(params, piece, jax.random.fold_in(key, number))
            return jax.tree.map(lambda a, b: a + b.astype(a.dtype), sums, found), None

        shape = jax.eval_shape(
            jax.grad(share, has_aux=True), params, jax.tree.map(lambda x: x[0], split), key
        )
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)), shape)
        (gradients, sums), _ = jax.lax.scan(add, zeros, (split, jnp.arange(pieces)))
        weight = jnp.maximum(sums.weight, 1)
        gradients = jax.tree.map(lambda g: g * (rows / weight), gradients)
        return gradients, sums._replace(loss=sums.total / weight)

    def step(state, batch, key):
        gradients, result = gradient(state.params, batch, jax.random.fold_in(key, state.step))
        norm = optax.tree.norm(gradients).astype(jnp.float32)
        rate = schedule(state.step)
        directions, moments = optimizer.update(gradients, state.moments, state.params)
        updates = jax.tree.map(lambda u: (rate * u).astype(u.dtype), directions)
        params = model.project(optax.apply_updates(state.params, updates))
        parameter_norm = optax.tree.norm(params).astype(jnp.float32)
        mean_loss = result.nats / jnp.maximum(result.weight, 1)
        values_2 = jnp.stack([mean_loss, norm])
        finite = jnp.isfinite(jnp.stack([result.loss, mean_loss, norm, parameter_norm])).all()
        alarm = judge(state.guard, values_2, finite=finite, config=config.guard)
        guard = remember(state.guard, values_2)
        new = TrainState(state.step + 1, state.skipped, params, moments, None, guard)
        kept = jax.tree.map(lambda ours, theirs: jnp.where(alarm == GOOD, ours, theirs), new, state)
        update_norm = optax.tree.norm(updates).astype(jnp.float32)
        metrics = StepMetrics(
            mean_loss, result.loss, norm, update_norm, parameter_norm, rate, result.weight, alarm
        )
        return kept._replace(guard=kept.guard._replace(alarm=alarm)), metrics

    return step


@pytest.mark.parametrize("run", [BASE, HALVES], ids=["whole", "pieces"])
def test_without_probes_the_lowered_step_is_the_one_without_this_feature(run):
    model, state = abstract_state(run)

    def lowered(step):
        return jax.jit(step).lower(state, batch(), KEY).as_text()

    want = lowered(reference_step(model, run))
    assert lowered(make_step(model, run)) == want
    assert lowered(probed(run, ("sizes",))) != want  # control


# On --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "run",
    [
        BASE,
        pytest.param(HALVES, marks=pytest.mark.full),
        pytest.param(
            training(optimizer=PLAIN, residual="attention_residual", execution=ExecutionConfig(remat="full")),
            marks=pytest.mark.full,
        ),
        pytest.param(training(optimizer=PLAIN, hidden_dropout=0.5, residual="ngpt"), marks=pytest.mark.full),
    ],
    ids=["whole", "pieces", "history", "dropout"],
)
def test_the_update_is_the_one_without_probes(run):
    _, (want, want_metrics) = one_step(run)
    _, (got, metrics, _) = one_step(run, ALL)
    close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=5e-6)
    jax.tree.map(close, got, want)
    jax.tree.map(close, metrics, want_metrics)


def test_there_is_one_forward_and_one_backward_pass():
    model, state = abstract_state(BASE)
    plain = jax.jit(make_step(model, BASE)).lower(state, batch(), KEY).as_text()
    count = lambda text: text.count("stablehlo.dot_general")  # noqa: E731
    measured = jax.jit(probed(BASE)).lower(state, batch(), KEY).as_text()
    assert count(measured) == count(plain)
    second = jax.jit(probed(BASE, ("effective_rank",))).lower(state, batch(), KEY).as_text()
    assert count(second) > count(plain)  # control: a product more is seen


def test_what_is_measured_is_the_step_s_own_forward_and_backward_pass():
    state, (_, _, found) = one_step(BASE, ALL)
    model, inputs_BT = Decoder(BASE.model, observe=StreamProbe(EVERY)), jnp.asarray(batch().inputs_BT)
    _, made = jax.jit(lambda p: model.apply({"params": p}, inputs_BT, mutable=["observed"]))(state.params)
    want = stream_profile(made["observed"]).values
    assert set(found.stream) == {*want, "stream_gradient"}
    for name, value in want.items():
        np.testing.assert_allclose(found.stream[name], value, rtol=2e-5, atol=1e-6, err_msg=name)
    loss = probed_training_loss(Decoder(BASE.model), BASE, ())
    given = batch()
    of_variables = lambda variables: loss(variables, given, None)[0].loss  # noqa: E731
    gradient = jax.jit(functools.partial(gradient_profile, BASE.model, of_variables))(state.params)
    np.testing.assert_allclose(found.stream["stream_gradient"], gradient.stream_S, rtol=1e-5)


def test_an_update_is_the_step_the_parameters_make():
    state, (after, _, found) = one_step(BASE, ALL)
    table, moved = (np.float64(s.params["embedding"]["table"]) for s in (state, after))
    rms = lambda x: np.sqrt(np.mean(np.square(x)))  # noqa: E731
    one = found.updates["embedding outside the blocks"]
    np.testing.assert_allclose(one.rms, rms(moved - table), rtol=1e-4)
    np.testing.assert_allclose(one.relative, rms(moved - table) / rms(table), rtol=1e-4)
    kernel, new = (np.float64(s.params["blocks"]["attention"]["query"]["kernel"]) for s in (state, after))
    for block in range(2):
        want = rms(new[block] - kernel[block])
        np.testing.assert_allclose(found.updates["query"].rms[block], want, rtol=1e-4)


@pytest.mark.full
def test_pieces_count_as_the_loss_weighs_them_and_gradients_add_up():
    params = one_step(BASE)[0].params
    loss = probed_training_loss(Decoder(BASE.model), BASE, CHEAP)

    @functools.partial(jax.jit, static_argnames="pieces")
    def measure(params, batch, pieces):
        taps = open_taps(BASE.model)
        return probed_gradient(loss, params, batch, KEY, taps=taps, pieces=pieces)

    ragged = batch()._replace(valid_BT=np.array([[True] * 2 + [False] * 4, [True] * 6]))
    _, result, halves = measure(params, ragged, pieces=2)
    _, whole_result, whole = measure(params, ragged, pieces=1)
    alone = [measure(params, piece, pieces=1)[2] for piece, _ in pieces_of(ragged, KEY, 2)]
    np.testing.assert_allclose(result.loss, whole_result.loss, rtol=1e-6)
    np.testing.assert_allclose(halves["stream_gradient"], whole["stream_gradient"], rtol=1e-5)
    for name in ("stream_rms", "budget_cosine", "branch_gain"):
        want = (2 * alone[0][name] + 6 * alone[1][name]) / 8
        np.testing.assert_allclose(halves[name], want, rtol=1e-5, atol=1e-6)
    unweighted = (alone[0]["stream_rms"] + alone[1]["stream_rms"]) / 2
    assert np.max(np.abs(unweighted / halves["stream_rms"] - 1)) > 1e-4  # control


def test_sublayers_of_a_token_mixer_are_in_order():
    """By name "feed_forward" is before "token_mixer", in the block it is after it."""
    run = training(token_mixer="convolution(size=3)", depth=1, positions="learned")
    model, params = built(run.model, run.execution)
    params = jax.tree.map(lambda x: x, params)
    params["blocks"]["feed_forward"]["down"]["kernel"] *= 0.0
    measured = jax.jit(probed(run, ("gradient",)))(first_state(model, run, params), batch(), KEY)[2]
    before, between, closed = np.asarray(measured.stream["stream_gradient"])
    assert between == pytest.approx(closed, rel=1e-6)  # a feed-forward that writes 0 adds nothing
    assert abs(before / between - 1) > 1e-3
