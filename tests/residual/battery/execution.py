"""However a stack is run, it is the same function: loop, remat, derivative, jit, vmap, half precision."""

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jaxblock import Decoder, ExecutionConfig
from jaxblock.axes import path_name
from tests.residual.battery.subject import (
    DROPOUT,
    PLAIN,
    compiled,
    dropout_key,
    objective,
    off_start,
    start,
)
from tests.residual.given import (
    Entry,
)
from tests.small import config, tokens


def assert_same_run(entry: Entry, execution: ExecutionConfig, **changes: Any) -> None:
    """Assert that an execution gives the scan's logits and gradients, dropout on."""
    model_config = config(**PLAIN, **DROPOUT, **changes)
    model, params = off_start(entry.topology, model_config)
    (_, want), want_gradients = compiled(model)(params, tokens(), dropout_key(3))
    other = Decoder(model_config, execution, entry.topology)
    (_, got), gradients = compiled(other)(params, tokens(), dropout_key(3))
    message = f"{entry}: {execution} differs from a plain scan"
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5, err_msg=message)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(want_gradients), jax.tree.leaves(gradients), strict=True
    ):
        size = max(float(jnp.abs(a).max()), 1e-1)
        np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-5 * size, err_msg=f"{message}: {path_name(path)}")


def check_loop_equals_scan(entry: Entry) -> None:
    """A loop over the layers is the scan, dropout included."""
    assert_same_run(entry, ExecutionConfig(scan_unroll=3))


def check_remat_equals_none(entry: Entry) -> None:
    """Recomputing a whole layer changes nothing."""
    assert_same_run(entry, ExecutionConfig(remat="full"))


def check_plain_derivative_equals_reverse(entry: Entry) -> None:
    """The two derivatives of the loop over depth agree, at another depth than the other checks'."""
    assert_same_run(entry, ExecutionConfig(history="plain"), depth=5)


def check_parallel_wiring(entry: Entry) -> None:
    """One sublayer per block, scanned and looped."""
    assert_same_run(entry, ExecutionConfig(scan_unroll=3), wiring="parallel")


def check_one_block(entry: Entry) -> None:
    """A stack of one block works, and has a finite gradient."""
    model, params = off_start(entry.topology, config(**PLAIN, depth=1))
    _, gradients = compiled(model)(params, tokens(), None)
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(gradients)), f"{entry}: not finite"


def check_jit_equals_eager(entry: Entry) -> None:
    """Compiled and op by op: the same logits."""
    model, params = off_start(entry.topology, config(**PLAIN, **DROPOUT))
    (_, jitted), _ = compiled(model)(params, tokens(), None)
    _, eager = objective(model, params, tokens())
    np.testing.assert_allclose(
        eager, jitted, rtol=1e-5, atol=1e-5, err_msg=f"{entry}: jit differs from eager"
    )


def check_vmap_equals_each_alone(entry: Entry) -> None:
    """Two parameter sets as lanes of one program, values and gradients."""
    model, params = off_start(entry.topology, config(**PLAIN, **DROPOUT))
    both = [params, jax.tree.map(lambda x: 1.1 * x, params)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *both)
    run = jax.vmap(jax.value_and_grad(functools.partial(objective, model), has_aux=True), in_axes=(0, None))
    (_, logits), gradients = jax.jit(run)(stacked, tokens())
    for i, alone in enumerate(both):
        (_, want), want_gradients = compiled(model)(alone, tokens(), None)
        message = f"{entry}: lane {i} differs"
        np.testing.assert_allclose(logits[i], want, rtol=1e-5, atol=1e-5, err_msg=message)
        lane = jax.tree.map(lambda x, i=i: x[i], gradients)
        chex.assert_trees_all_close(lane, want_gradients, rtol=1e-3, atol=1e-4)
    assert not np.allclose(logits[0], logits[1])


def check_finite_in_bfloat16_at_100_blocks(entry: Entry) -> None:
    """Forward and gradient, stream and branches in bfloat16."""
    model_config = config(**PLAIN, depth=100, dtype="bfloat16", stream_dtype="bfloat16")
    model, params = start(entry.topology, model_config)
    (_, logits), gradients = compiled(model)(params, tokens(), None)
    assert logits.dtype == jnp.float32
    assert bool(jnp.isfinite(logits).all()), f"{entry}: logits not finite"
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradients):
        assert bool(jnp.isfinite(leaf).all()), f"{entry}: the gradient of {path_name(path)} is not finite"


def check_traced_once(entry: Entry) -> None:
    """Other values of the same shapes meet the compiled program."""
    model, params = off_start(entry.topology, config(**PLAIN, **DROPOUT))
    traces = []

    @jax.jit
    def run(params: Any, tokens_BT: jax.Array) -> jax.Array:
        traces.append(1)
        return model.apply({"params": params}, tokens_BT)

    run(params, tokens())
    run(jax.tree.map(lambda x: 1.1 * x, params), tokens(seed=1))
    assert len(traces) == 1, f"{entry}: traced {len(traces)} times"
