"""What 8 devices give; run by test_eight_devices.py, which has them simulated. Prints one JSON object.

By hand, from the repository root:

    XLA_FLAGS=--xla_force_host_platform_device_count=8 JAX_PLATFORMS=cpu python -m tests.parallel.eight_devices
"""

import json
import re
import sys
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxblock import Decoder
from jaxblock.functional import mean_over_targets
from jaxblock.parallel import (
    TargetMean,
    data_mesh,
    mean_and_gradient,
    pmap_mean_and_gradient,
    replicate,
    shard_batch,
)
from jaxblock.parallel.pmap import MeanAndGradient
from jaxblock.training.optimizer import make_optimizer
from tests.parallel.ragged import loss_sums_of, ragged_batch
from tests.small import built, config
from tests.small_training import training

DEVICES, ROWS, STEPS = 8, 16, 3
RATE, OPTIMIZER = 0.03, make_optimizer(training().optimizer)


@jax.jit
def start(params: Any) -> optax.OptState:
    return OPTIMIZER.init(params)


@jax.jit
def update(gradient: Any, moments: optax.OptState, params: Any) -> tuple[Any, optax.OptState]:
    updates, moments = OPTIMIZER.update(gradient, moments, params)
    return optax.apply_updates(params, optax.tree.scale(RATE, updates)), moments


def train(gradient: MeanAndGradient, params: Any, batch: Any) -> tuple[list[float], Any]:
    """Return the losses before each AdamW step, and the parameters after the last."""
    losses, moments = [], start(params)
    for _ in range(STEPS):
        result = gradient(params, batch)
        params, moments = update(result.gradient, moments, params)
        losses.append(float(result.loss))
    return losses, params


def model_of(residual: str) -> tuple[Decoder, Any]:
    """Return the small model without biases.

    Without RoPE a key bias has a gradient of round-off only, of which Adam makes steps of full size.
    """
    return built(config(residual=residual, depth=2, bias=False, norm="rms_norm", feed_forward="relu"))


def trained(residual: str) -> dict[str, Any]:
    """Return losses and differences from one device of three steps in each form, and what the compiler made."""
    (model, params), batch, mesh = model_of(residual), ragged_batch(ROWS), data_mesh()
    loss_sums = loss_sums_of(model)
    jitted = jax.jit(mean_and_gradient(loss_sums))
    everywhere, shards = replicate(params, mesh), shard_batch(batch, mesh)
    sharded = jitted.lower(everywhere, shards).compile()

    losses, wanted = train(jitted, params, batch)
    results = {
        "jit": train(sharded, everywhere, shards),
        "pmap": train(pmap_mean_and_gradient(loss_sums, DEVICES), everywhere, batch),
    }
    report: dict[str, Any] = {"one": losses, "collectives": collectives(sharded.as_text() or "")}
    for form, (losses, params) in results.items():
        report[form] = {
            "losses": losses,
            "parameters": difference(params, wanted),
            "whole_on": sorted({whole_on(leaf) for leaf in jax.tree.leaves(params)}),
        }
    return report


def collectives(program: str) -> list[str]:
    names = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
    return sorted(set(re.findall(rf"({names})(?:-start)?\(", program)))


def difference(params: Any, wanted: Any) -> float:
    """Return the largest difference of any parameter."""
    pairs = zip(jax.tree.leaves(params), jax.tree.leaves(wanted), strict=True)
    return max(float(np.abs(np.asarray(x) - np.asarray(y)).max()) for x, y in pairs)


def whole_on(leaf: jax.Array) -> int:
    """Return the number of devices that hold the whole array; 0 when it is split."""
    return len(leaf.sharding.device_set) if leaf.sharding.is_fully_replicated else 0


def placed() -> dict[str, Any]:
    """Return where the rows of the batch lie."""
    batch = ragged_batch(ROWS)
    shards = jax.tree.leaves(shard_batch(batch, data_mesh()))
    pieces = [leaf.addressable_shards for leaf in shards]
    return {
        "devices": [len({piece.device for piece in leaf}) for leaf in pieces],
        "shapes": sorted({piece.data.shape for leaf in pieces for piece in leaf}),
        "rows": [sorted(piece.index[0].start or 0 for piece in leaf) for leaf in pieces],
        "weights": batch.valid_BT.reshape(DEVICES, -1).sum(axis=1).tolist(),
    }


def mean_of_means(residual: str) -> list[float]:
    """Return the losses of three steps where each device divides by its own weight: the fault."""
    (model, params), batch = model_of(residual), ragged_batch(ROWS)
    loss_sums = loss_sums_of(model)

    def local(params: Any, shard: Any) -> TargetMean:
        mean = lambda params: mean_over_targets(*loss_sums(params, shard))  # noqa: E731
        loss, gradient = jax.lax.pmean(jax.value_and_grad(mean)(params), "devices")
        return TargetMean(loss, jnp.zeros(()), gradient)

    over = jax.jit(jax.vmap(local, in_axes=(None, 0), out_axes=None, axis_name="devices"))
    return train(over, params, jax.tree.map(lambda x: x.reshape(DEVICES, -1, *x.shape[1:]), batch))[0]


def padded(rows: int) -> dict[str, float]:
    """Return the loss of some rows: one after the other, and as 8 rows, padded with no targets, on 4 devices."""
    (model, params), batch, mesh = model_of("pre_norm"), ragged_batch(rows), data_mesh(jax.devices()[:4])
    loss_sums = jax.jit(loss_sums_of(model))
    each = [loss_sums(params, jax.tree.map(lambda x: x[i : i + 1], batch)) for i in range(rows)]  # noqa: B023
    filled = jax.tree.map(lambda x: np.pad(x, ((0, 8 - rows), (0, 0))), batch)
    total, weight = loss_sums(replicate(params, mesh), shard_batch(filled, mesh))
    alone = sum(float(total) for total, _ in each) / sum(float(weight) for _, weight in each)
    return {"alone": alone, "padded": float(total / weight), "weight": float(weight)}


def refusals() -> dict[str, str]:
    """Return what is said to 6 rows on 4 devices, and to more devices than there are."""
    model, params = model_of("pre_norm")
    loss_sums, batch = loss_sums_of(model), ragged_batch(6)
    calls = {
        "jit": lambda: shard_batch(batch, data_mesh(jax.devices()[:4])),
        "pmap": lambda: pmap_mean_and_gradient(loss_sums, 4)(params, batch),
        "devices": lambda: pmap_mean_and_gradient(loss_sums, 9),
    }
    return {name: sentence(call) for name, call in calls.items()}


def sentence(call: Any) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return "not refused"


def dropped() -> dict[str, float]:
    """Return the loss of a rule that drops half its entries: keys in the batch, and one key closed over."""
    keys_B, mask_B = jax.random.split(jax.random.key(0), ROWS), np.ones(ROWS, bool)
    params = {"scale": jnp.arange(1.0, 5.0)}

    def kept(key: jax.Array, params: Any) -> jax.Array:
        return jnp.sum(params["scale"] * jax.random.bernoulli(key, shape=(4,)))

    def by_row(params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
        keys_B, mask_B = batch
        return jnp.sum(jax.vmap(kept, in_axes=(0, None))(keys_B, params)), jnp.sum(mask_B)

    def closed_over(params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
        keys_B = jax.random.split(jax.random.key(0), batch[1].shape[0])
        return by_row(params, (keys_B, batch[1]))

    batch = (keys_B, mask_B)
    return {
        "one": float(jax.jit(mean_and_gradient(by_row))(params, batch).loss),
        "by_row": float(pmap_mean_and_gradient(by_row, DEVICES)(params, batch).loss),
        "closed_over": float(pmap_mean_and_gradient(closed_over, DEVICES)(params, batch).loss),
    }


def main() -> None:
    warnings.simplefilter("error")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_default_matmul_precision", "highest")
    report = {
        "devices": jax.device_count(),
        "placed": placed(),
        "refusals": refusals(),
        "trained": {residual: trained(residual) for residual in sys.argv[1:]},
        "mean_of_means": mean_of_means("pre_norm"),
        "padded": {str(rows): padded(rows) for rows in (3, 6)},
        "dropped": dropped(),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
