"""Many runs trained at once: one compiled program whose lanes differ in seed, learning rate and warm-up.

    state, metrics = scan over K batches of vmap over lanes of step(state, batch, key; learning rate, warm-up)

Lanes of one seed read the same batches and start from the same parameters, as their single runs would. A lane whose
loss, gradient or parameters are not finite is frozen by the step's own guard and disturbs no other. On CPU the
initial values and the profile, which run once or twice, are compiled without optimization.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxblock.accounting import tree_bytes
from jaxblock.modules.intermediates import recorded_branches
from jaxblock.parallel.memory import program_bytes
from jaxblock.probes import open_taps
from jaxblock.probes import stream_profile as observed_profile
from jaxblock.training.config import TrainConfig
from jaxblock.training.optimizer import Tuned
from jaxblock.training.prepare import Keys, init_state, run_keys
from jaxblock.training.probing import open_probing
from jaxblock.training.step import StepMetrics, TrainState, make_step, probed_gradient
from jaxblock.training.task import Score, Task
from jaxblock.types import Array, Params

_OFF = {"xla_backend_optimization_level": 0}


class Lane(NamedTuple):
    """What tells the lanes of a program apart."""

    seed: int
    learning_rate: float
    warmup: float

    @classmethod
    def of(cls, config: TrainConfig) -> "Lane":
        """Return the lane of a run's config."""
        return cls(config.run.seed, config.optimizer.learning_rate, config.optimizer.warmup)


class StreamProfile(NamedTuple):
    """Root mean squares of one batch's stream, float32."""

    stream: Array
    """Before the first block and after each, [L + 1]; [0] where the stream is not one array."""
    branches: Array
    """Of each branch's output, in order, [S]."""
    logits: Array


class LaneProgram:
    """The compiled functions of one config for a fixed set of lanes; every array has a leading lane axis."""

    def __init__(self, task: Task, config: TrainConfig, lanes: Sequence[Lane]):
        self.task, self.config, self.lanes = task, config, tuple(lanes)
        self._keys: Keys = jax.tree.map(
            lambda *keys: jnp.stack(keys), *(run_keys(lane.seed) for lane in self.lanes)
        )
        steps = config.run.steps
        self._tuned = Tuned(
            jnp.asarray([lane.learning_rate for lane in self.lanes], jnp.float32),
            # As a whole number of updates: a traced fraction would round a tie in float32.
            jnp.asarray([round(lane.warmup * steps) / steps for lane in self.lanes], jnp.float32),
        )
        self._batches = {seed: task.batches(seed) for seed in {lane.seed for lane in self.lanes}}
        self._chunks: dict[int, jax.stages.Compiled] = {}

    def first_state(self) -> TrainState:
        """Return the state of every lane before its first step."""
        init = functools.partial(init_state, self.task, self.config)
        return jax.jit(jax.vmap(init), compiler_options=_cheap())(self._keys.init)

    def like(self) -> TrainState:
        """Return the state's shapes and dtypes, nothing allocated."""
        init = functools.partial(init_state, self.task, self.config)
        return jax.eval_shape(jax.vmap(init), self._keys.init)

    def run(self, state: TrainState, start: int, steps: int) -> tuple[TrainState, StepMetrics]:
        """Return the state `steps` steps after `start`, and their metrics, [steps, lanes]; `state` is donated."""
        return self._compiled(steps)(state, self._read(start, steps), self._keys.dropout, self._tuned)

    def compiled_bytes(self, steps: int) -> int:
        """Return the bytes of the program of a chunk: arguments, results and temporaries, what is donated once.

        0 where the backend does not say.
        """
        return program_bytes(self._compiled(steps))

    def scores(self, params: Params) -> Score:
        """Return the sums of every validation batch, [batches, lanes]."""
        score = jax.jit(jax.vmap(self.task.score, in_axes=(0, None)))
        found = [jax.device_get(score(params, batch)) for batch in self.task.validation]
        return jax.tree.map(lambda *sums: np.stack(sums), *found)

    def profile(self, params: Params) -> StreamProfile:
        """Return the stream of the first validation batch, one lane after the other: it is all kept at once."""
        batch = next(iter(self.task.validation))

        def measure(params: Params) -> StreamProfile:
            logits, collected = self.task.forward(params, batch, None)
            return stream_profile(logits, collected)

        one_by_one = jax.jit(lambda params: jax.lax.map(measure, params), compiler_options=_cheap())
        return jax.device_get(one_by_one(params))

    def probe(self, params: Params) -> dict[str, Array]:
        """Return the statistics of [probe] on the first validation batch: name -> [lanes, S], the gradient's [S + 1].

        Without dropout, one lane after the other; what the topology's stream has not is not there.
        """
        batch, shapes = next(iter(self.task.validation)), self.like().params
        one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), shapes)
        probing = open_probing(self.task, self.config, one)
        taps = open_taps(self.config.model) if "gradient" in probing.statistics else None

        def measure(params: Params) -> dict[str, Array]:
            if taps is not None:
                return probed_gradient(probing.loss, params, batch, None, taps=taps)[2]
            _, observed = probing.loss({"params": params}, batch, None)
            return dict(observed_profile(observed).values) if observed else {}

        one_by_one = jax.jit(lambda params: jax.lax.map(measure, params), compiler_options=_cheap())
        return jax.device_get(one_by_one(params))

    def _compiled(self, steps: int) -> jax.stages.Compiled:
        """Compile a chunk, once for each length."""
        if steps not in self._chunks:
            chunk = jax.jit(self._chunk, donate_argnums=0)
            batches = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self._read(0, steps))
            self._chunks[steps] = chunk.lower(self.like(), batches, self._keys.dropout, self._tuned).compile()
        return self._chunks[steps]

    def _chunk(
        self, state: TrainState, batches: Any, keys: Array, tuned: Tuned
    ) -> tuple[TrainState, StepMetrics]:
        def lane(state: TrainState, batch: Any, key: Array, tuned: Tuned) -> tuple[TrainState, StepMetrics]:
            step = make_step(self.task.model, self.config, self.task.loss, tuned=tuned)
            return step(state, batch, key)

        def step(state: TrainState, batch: Any) -> tuple[TrainState, StepMetrics]:
            return jax.vmap(lane)(state, batch, keys, tuned)

        return jax.lax.scan(step, state, batches)

    def _read(self, start: int, steps: int) -> Any:
        """Return the batches of some steps, every leaf [steps, lanes, ...]."""

        def of_step(number: int) -> Any:
            by_seed = {seed: batches[number] for seed, batches in self._batches.items()}
            return jax.tree.map(lambda *rows: np.stack(rows), *(by_seed[lane.seed] for lane in self.lanes))

        return jax.tree.map(lambda *rows: np.stack(rows), *map(of_step, range(start, start + steps)))


def stream_profile(logits: Array, collected: dict[str, Any]) -> StreamProfile:
    """Return the root mean squares of what a forward pass recorded (see `jaxblock.models.Block`)."""
    blocks = collected["blocks"]
    branches_SL = jnp.stack([_rms(blocks[f"{name}_out"]) for name in recorded_branches(collected)])
    stream = jnp.zeros(0)
    if "resid_pre" in blocks:
        stream = jnp.concatenate([_rms(blocks["resid_pre"]), _rms(collected["resid_final"][None])])
    return StreamProfile(stream, branches_SL.T.reshape(-1), _rms(logits[None])[0])


def least_bytes(task: Task, config: TrainConfig) -> int:
    """Return the least that training one lane needs: its state, before and after, and the stream before each block.

    A lower bound that costs no compilation; `LaneProgram.compiled_bytes` is exact.
    """
    state = jax.eval_shape(functools.partial(init_state, task, config), run_keys(0).init)
    model, rows = config.model, config.data.batch // config.data.accumulation
    itemsize = jnp.dtype(model.stream_dtype).itemsize
    return 2 * tree_bytes(state) + rows * model.context * model.width * model.depth * itemsize


def _rms(x: Array) -> Array:
    """Return the root mean square over all axes but the first."""
    return jnp.sqrt(jnp.square(x.astype(jnp.float32)).mean(tuple(range(1, x.ndim))))


def _cheap() -> dict[str, Any] | None:
    return _OFF if jax.default_backend() == "cpu" else None
