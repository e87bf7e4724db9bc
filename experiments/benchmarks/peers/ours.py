"""jaxblock: the step that `jaxblock train` compiles, guard, metrics and schedule included, with its state donated."""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

from experiments.benchmarks.contest import Job, timed
from experiments.benchmarks.peers.device import peak_bytes, random_tokens
from experiments.benchmarks.sizes import sizes_of


class Built(NamedTuple):
    """A step that is not compiled yet, and what it is called with."""

    model: Any
    config: Any
    step: Any
    """Jitted, its state donated: (state, batch, key) -> (state, metrics)."""
    state: Any
    batch: Any
    key: Any


def build(options: Mapping[str, Any]) -> Built:
    """Return the step of the sizes, residual, stream_dtype, scan_unroll, remat, attention and loss in `options`."""
    import jax
    import jax.numpy as jnp

    from jaxblock import Decoder, ExecutionConfig, ModelConfig
    from jaxblock.training.batches import Batch
    from jaxblock.training.config import DataConfig, TrainConfig
    from jaxblock.training.host_memory import keep_freed_memory
    from jaxblock.training.step import first_state, make_step

    sizes = sizes_of(options)
    execution = ExecutionConfig(
        **{name: options[name] for name in ("scan_unroll", "remat", "attention", "loss")}
    )
    config = TrainConfig(
        model=ModelConfig(
            vocab_size=sizes.vocab,
            context=sizes.seq,
            depth=sizes.depth,
            width=sizes.width,
            heads=sizes.heads,
            residual=options["residual"],
            dtype=sizes.dtype,
            stream_dtype=options["stream_dtype"],
        ),
        execution=execution,
        data=DataConfig(batch=sizes.batch),
    )
    keep_freed_memory()
    model = Decoder(config.model, config.execution)
    inputs_BT, targets_BT = random_tokens(sizes)
    arrays: Any = (inputs_BT, targets_BT, jnp.ones_like(inputs_BT, bool), None)
    params = jax.jit(model.init)(jax.random.key(0), inputs_BT[:1])["params"]
    state = jax.jit(functools.partial(first_state, model, config))(params)
    step = jax.jit(make_step(model, config), donate_argnums=0)
    return Built(model, config, step, state, Batch(*arrays), jax.random.key(1))


def prepare(options: Mapping[str, Any]) -> Job:
    """Return the compiled step of `build`."""
    import jax

    _, _, jitted, state, batch, key = build(options)
    compiled = jitted.lower(state, batch, key).compile()

    def step() -> float:
        nonlocal state
        state, metrics = compiled(state, batch, key)
        return float(metrics.loss)

    device = jax.devices()[0]
    facts = {"platform": device.platform, "device_kind": device.device_kind, "jax": jax.__version__}
    return Job(timed(step), facts, peak_bytes)
