"""One optimizer step as a pure function: batch -> loss -> gradients -> update, guarded against bad steps.

g = sum over pieces of the batch of grad(total) / real targets        (accumulation: the pieces' order of sums)
params <- project(params + rate * direction(g))                       unless the guard raises an alarm
average <- d average + (1 - d) params,  d = min(decay, (1 + n) / (10 + n)) after n updates
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxblock.axes import constrain
from jaxblock.functional.losses import CrossEntropy
from jaxblock.models.observation import TAPS
from jaxblock.probes import open_taps, stream_gradient, stream_profile
from jaxblock.probes.updates import ParameterUpdate, update_profile
from jaxblock.training.config import TrainConfig
from jaxblock.training.guard import GOOD, Guard, judge, open_guard, remember
from jaxblock.training.objectives import Loss, ProbedLoss, training_loss
from jaxblock.training.optimizer import Tuned, learning_rate_schedule, make_optimizer
from jaxblock.types import Array, Params


class TrainState(NamedTuple):
    """Everything a run carries from step to step; the keys follow from the run's key and `step`."""

    step: Array
    """Updates made, int32."""
    skipped: Array
    """Batches passed over, int32: the next step reads batch `step + skipped`."""
    params: Params
    moments: optax.OptState
    """The optimizer's state."""
    average: Params | None
    """Moving average of the parameters, float32; None where none is kept."""
    guard: Guard


class StepMetrics(NamedTuple):
    """Scalars of one step, float32 but for `alarm`."""

    loss: Array
    """Cross entropy, nats per real target; without z-loss and smoothing."""
    objective: Array
    """What was minimised, z-loss and smoothing included."""
    gradient_norm: Array
    """Global norm of the gradient, before clipping."""
    update_norm: Array
    """Global norm of the update, learning rate included."""
    parameter_norm: Array
    """Global norm of the parameters, after the update."""
    learning_rate: Array
    """The learning rate applied."""
    tokens: Array
    """Real targets."""
    alarm: Array
    """0 where the update was applied, else why it was not (`guard.NAMES`), int32."""


class Measured(NamedTuple):
    """What a probed step measures besides, at the parameters before its update; float32."""

    stream: dict[str, Array]
    """Statistic -> [S], sublayers in order; "stream_gradient" is [S + 1], the closed stream last."""
    updates: dict[str, ParameterUpdate]
    """Of the parameters, by role; {} where it is not asked for."""


Step = Callable[[TrainState, Any, Array], tuple[TrainState, StepMetrics]]
ProbedStep = Callable[[TrainState, Any, Array], tuple[TrainState, StepMetrics, Measured]]


def first_state(model: Any, config: TrainConfig, params: Params) -> TrainState:
    """Return the state before the first step for given parameters, which a topology may project, as after each step."""
    params = model.project(params)
    moments = make_optimizer(config.optimizer, model.labels, scaling=model.scaling).init(params)
    average = None
    if config.optimizer.average:
        average = jax.tree.map(lambda x: jnp.array(x, jnp.float32), params)
    step, skipped = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)
    return TrainState(step, skipped, params, moments, average, open_guard(config.guard))


def make_step(
    model: Any,
    config: TrainConfig,
    loss: Loss | None = None,
    *,
    tuned: Tuned | None = None,
    rows_axis: str | None = None,
) -> Step:
    """Return the step `(state, batch, key) -> (state, metrics)`; jit it with the state donated.

    `key` is the run's: each step folds its number in, so no two steps drop the same entries.

    Args:
      model: what is trained; its `labels`, `scaling` and `project` are read.
      config: the run.
      loss: of a batch; left out, the next-token loss of `model`.
      tuned: peak learning rate and warm-up in place of the config's; traced or vmapped, one program has many.
      rows_axis: name of the mapped axis (pmap, shard_map) over which the batch's rows are split; left out, none is.
    """
    loss, advance = loss or training_loss(model, config), _advance(model, config, tuned)

    def unobserved(params: Params, batch: Any, key: Array | None) -> tuple[CrossEntropy, Mapping[str, Any]]:
        return loss(params, batch, key), {}

    def step(state: TrainState, batch: Any, key: Array) -> tuple[TrainState, StepMetrics]:
        dropout_key = jax.random.fold_in(key, state.step)
        pieces = config.data.accumulation
        gradients, (result, _) = gradient_of(
            unobserved, state.params, batch, dropout_key, pieces=pieces, rows_axis=rows_axis
        )
        kept, metrics, _ = advance(state, gradients, result)
        return kept, metrics

    return step


def make_probed_step(
    model: Any,
    config: TrainConfig,
    loss: ProbedLoss,
    *,
    statistics: Sequence[str],
    tuned: Tuned | None = None,
) -> ProbedStep:
    """Return the same step with what is measured on its way: one forward and one backward pass, as without.

    Args:
      model: as in `make_step`.
      config: the run.
      loss: of a batch, with what its model observes.
      statistics: "gradient" and "update" are looked for; the others are the loss's.
      tuned: as in `make_step`.
    """
    advance = _advance(model, config, tuned)
    taps = open_taps(config.model) if "gradient" in statistics else None

    def step(state: TrainState, batch: Any, key: Array) -> tuple[TrainState, StepMetrics, Measured]:
        dropout_key = jax.random.fold_in(key, state.step)
        gradients, result, stream = probed_gradient(
            loss, state.params, batch, dropout_key, taps=taps, pieces=config.data.accumulation
        )
        kept, metrics, updates = advance(state, gradients, result)
        moved = update_profile(updates, state.params) if "update" in statistics else {}
        return kept, metrics, Measured(stream, moved)

    return step


def probed_gradient(
    loss: ProbedLoss,
    params: Params,
    batch: Any,
    key: Array | None,
    *,
    taps: Mapping[str, Any] | None,
    pieces: int = 1,
) -> tuple[Params, CrossEntropy, dict[str, Array]]:
    """Return the gradient, the loss, and the statistics over depth as in `Measured.stream`.

    Of a batch in pieces, a statistic is the mean over the pieces, each weighted by its real targets; the norm of the
    stream's gradient is that of the whole batch. Without a real target a mean is NaN.

    Args:
      loss: of a batch, with what its model observes.
      params: where.
      batch: of the step, whole.
      key: for dropout; None = off.
      taps: from `open_taps`; None = the stream's gradient is not measured.
      pieces: how many the batch is computed in.
    """
    variables = {"params": params} if taps is None else {"params": params, TAPS: taps}
    gradients, (result, observed) = gradient_of(loss, variables, batch, key, pieces=pieces)
    stream = dict(stream_profile(observed).values) if observed else {}
    if taps is not None:
        stream["stream_gradient"] = stream_gradient(gradients[TAPS])
    return gradients["params"], result, stream


def _advance(
    model: Any, config: TrainConfig, tuned: Tuned | None
) -> Callable[[TrainState, Params, CrossEntropy], tuple[TrainState, StepMetrics, Params]]:
    """Return what follows the gradient: (state, gradient, loss) -> the state after it, metrics and updates."""
    optimizer = make_optimizer(config.optimizer, model.labels, scaling=model.scaling)
    schedule = learning_rate_schedule(config.optimizer, config.run.steps, tuned=tuned)

    def advance(
        state: TrainState, gradients: Params, result: CrossEntropy
    ) -> tuple[TrainState, StepMetrics, Params]:
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
        average = move_average(state.average, params, state.step, decay=config.optimizer.average)
        # A mean of points on a sphere lies inside it; what is saved has to be a model as the topology means it.
        average = None if average is None else model.project(average)
        guard = remember(state.guard, values_2)
        new = TrainState(state.step + 1, state.skipped, params, moments, average, guard)
        # A select per leaf fuses into the update, and the last good state is always there to be saved.
        kept = jax.tree.map(lambda ours, theirs: jnp.where(alarm == GOOD, ours, theirs), new, state)
        metrics = StepMetrics(
            loss=mean_loss,
            objective=result.loss,
            gradient_norm=norm,
            update_norm=optax.tree.norm(updates).astype(jnp.float32),
            parameter_norm=parameter_norm,
            learning_rate=rate,
            tokens=result.weight,
            alarm=alarm,
        )
        return kept._replace(guard=kept.guard._replace(alarm=alarm)), metrics, updates

    return advance


def gradient_of(
    loss: ProbedLoss,
    variables: Any,
    batch: Any,
    key: Array | None,
    *,
    pieces: int,
    rows_axis: str | None = None,
) -> tuple[Any, tuple[CrossEntropy, Mapping[str, Any]]]:
    """Return the gradient of the mean loss over real targets, and the loss, of a batch in pieces.

    What the loss observes is averaged over the pieces, weighted by their real targets. The "gradient" of taps is a
    squared norm, and that of the whole batch the sum of the pieces'. With a `rows_axis` each device of that axis has
    its rows, and all get the sums over all rows.
    """
    if pieces == 1 and rows_axis is None:

        def mean(variables: Any) -> tuple[Array, tuple[CrossEntropy, Mapping[str, Any]]]:
            result, observed = loss(variables, batch, key)
            return result.loss, (result, observed)

        return jax.grad(mean, has_aux=True)(variables)

    rows = jax.tree.leaves(batch)[0].shape[0]
    split = _split(batch, pieces)

    def share(variables: Any, piece: Any, key: Array | None) -> tuple[Array, tuple[CrossEntropy, Any]]:
        # A sum, as the number of real targets is known only at the end; divided by the rows to keep its scale.
        result, observed = loss(variables, piece, key)
        return result.total / rows, (result, jax.tree.map(lambda x: result.weight * x, observed))

    def add(sums: Any, scanned: tuple[Any, Array]) -> tuple[Any, None]:
        piece, number = scanned
        own_key = key if key is None or pieces == 1 else jax.random.fold_in(key, number)
        found = jax.grad(share, has_aux=True)(variables, piece, own_key)
        return jax.tree.map(lambda a, b: a + b.astype(a.dtype), sums, found), None

    def zeros(x: Any) -> Array:
        return jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32))

    first = jax.tree.map(lambda x: x[0], split)
    shape = jax.eval_shape(jax.grad(share, has_aux=True), variables, first, key)
    sums, _ = jax.lax.scan(add, jax.tree.map(zeros, shape), (split, jnp.arange(pieces)))
    if rows_axis is not None:
        sums = jax.lax.psum(sums, rows_axis)
    gradients, (sums, observed) = sums
    weight = jnp.maximum(sums.weight, 1)
    taps = gradients.pop(TAPS, None) if isinstance(gradients, dict) else None
    gradients = jax.tree.map(lambda g: g * (rows / weight), gradients)
    if taps is not None:  # squares
        gradients[TAPS] = jax.tree.map(lambda g: g * (rows / weight) ** 2, taps)
    observed = jax.tree.map(lambda x: x / sums.weight, observed)
    return gradients, (sums._replace(loss=sums.total / weight), observed)


def _split(batch: Any, pieces: int) -> Any:
    """Return the batch's rows in pieces, every leaf [pieces, B / pieces, ...]."""

    def split(x: Any) -> Array:
        # On a mesh each piece's rows, not the pieces, lie on the devices.
        return constrain(
            jnp.asarray(x).reshape(pieces, -1, *x.shape[1:]), None, "batch", *(None,) * (x.ndim - 1)
        )

    return jax.tree.map(split, batch)


def pieces_of(batch: Any, key: Array, pieces: int) -> list[tuple[Any, Array]]:
    """Return the batches a step computes one after the other, each with its dropout key."""
    if pieces == 1:
        return [(batch, key)]
    split = _split(batch, pieces)
    return [(jax.tree.map(lambda x, i=i: x[i], split), jax.random.fold_in(key, i)) for i in range(pieces)]


def move_average(average: Params | None, params: Params, updates: Array, *, decay: float) -> Params | None:
    """Return the moving average after an update; early on it forgets faster, so that the start leaves no trace.

    The decay rises as (1 + n) / (10 + n) until it reaches `decay`, as in TensorFlow's ExponentialMovingAverage.
    """
    if average is None:
        return None
    n = updates.astype(jnp.float32)
    kept = jnp.minimum(decay, (1.0 + n) / (10.0 + n))
    return jax.tree.map(lambda a, p: a + (1.0 - kept) * (p.astype(a.dtype) - a), average, params)


def averaged_weights(state: TrainState) -> Params:
    """Return the moving average in the parameters' dtypes, or the parameters where no average is kept."""
    if state.average is None:
        return state.params
    return jax.tree.map(lambda a, p: a.astype(p.dtype), state.average, state.params)
