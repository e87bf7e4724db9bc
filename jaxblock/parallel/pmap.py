"""The mean loss over real targets and its gradient, where rows lie on many devices; the one file with `jax.pmap`.

    W = sum_d w_d        loss = sum_d total_d / W        gradient = sum_d grad(total_d / W)

with total_d and w_d the summed loss and the number of real targets of device d. Weights are added before anything
is divided: the mean of the devices' means is a different number wherever their numbers of targets differ.

Three forms, one result: `mean_and_gradient` as it is; the same under `jax.jit`, given arrays that `meshes` has
placed; and `pmap_mean_and_gradient`, in which the sums over devices are written out.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jaxblock.contracts import check_integer
from jaxblock.functional.dropout import ROWS_AXIS
from jaxblock.functional.losses import mean_over_targets
from jaxblock.parallel.meshes import rows_per_device
from jaxblock.types import Array, Params

LossSums = Callable[[Params, Any], tuple[Array, Array]]
"""(params, batch) -> (summed loss, number of real targets); the batch is a pytree of arrays [B, ...].

Rows must not see each other. A key that is closed over is the same on every device under `pmap`: `functional.dropout`
drops with it what one device would, other draws need one key per row, in the batch.
"""


class TargetMean(NamedTuple):
    """The loss of a whole batch, wherever its rows lie."""

    loss: Array
    """Mean per real target; 0 when there is none."""
    weight: Array
    """Number of real targets."""
    gradient: Params
    """Gradient of `loss`, in the parameters' dtypes."""


MeanAndGradient = Callable[[Params, Any], TargetMean]


def mean_and_gradient(loss_sums: LossSums) -> MeanAndGradient:
    """Return `(params, batch) -> TargetMean`, a pure function; jit it, on one device or with sharded arrays."""
    return _mean_and_gradient(loss_sums, add=lambda sums: sums)


def pmap_mean_and_gradient(loss_sums: LossSums, devices: int) -> MeanAndGradient:
    """Return the same function, compiled by `jax.pmap` over `devices` of this process.

    It takes what `mean_and_gradient` takes, the parameters once and the batch with all its rows in one axis, and
    splits the rows itself. What it returns lies whole on every device.

    Raises ValueError: more devices than there are; when called, rows that do not divide by the devices.
    """
    check_integer("devices", devices, least=1, most=jax.local_device_count())
    local = _mean_and_gradient(loss_sums, add=functools.partial(jax.lax.psum, axis_name=ROWS_AXIS))
    mapped = jax.pmap(local, axis_name=ROWS_AXIS, in_axes=(None, 0), out_axes=None)

    def run(params: Params, batch: Any) -> TargetMean:
        rows = rows_per_device(batch, devices)
        return mapped(params, jax.tree.map(lambda x: x.reshape(devices, rows, *x.shape[1:]), batch))

    return run


def pmap_program(step: Callable[..., Any], devices: int) -> Any:
    """Return `step(state, batch, key)`, which sums over ROWS_AXIS, mapped over `devices`: a jitted function.

    State and key are given once and what is returned is whole on every device; the batch is what `stack_rows` returns.
    """
    return jax.pmap(
        step,
        axis_name=ROWS_AXIS,
        in_axes=(None, 0, None),
        out_axes=None,
        devices=jax.local_devices()[:devices],
    )


def stack_rows(batch: Any, devices: int, *, pieces: int = 1) -> Any:
    """Return a batch, leaves [B, ...], as leaves [devices, B / devices, ...].

    Of a batch that is computed in pieces each device gets an equal part of every piece, in the order of the pieces.
    """
    rows_per_device(batch, devices * pieces)

    def split(x: Any) -> Any:
        parts = x.reshape(pieces, devices, -1, *x.shape[1:]).swapaxes(0, 1)
        return parts.reshape(devices, -1, *x.shape[1:])

    return jax.tree.map(split, batch)


def _mean_and_gradient(loss_sums: LossSums, *, add: Callable[[Any], Any]) -> MeanAndGradient:
    """`add` sums a pytree over the devices."""

    def run(params: Params, batch: Any) -> TargetMean:
        def share(params: Params) -> tuple[Array, Array]:
            total, weight = loss_sums(params, batch)
            # The only sum over devices inside the derivative, so it must have none of its own.
            weight = add(jax.lax.stop_gradient(weight))
            return mean_over_targets(total, weight), weight

        # Dividing before differentiating keeps the gradient's scale, and its dtypes, those of one device.
        (loss, weight), gradient = jax.value_and_grad(share, has_aux=True)(params)
        return TargetMean(add(loss), weight, add(gradient))

    return run
