"""What makes a topology accepted: checks that take any topology and raise AssertionError with a sentence.

`test_battery.py` runs them over the registry; to try one of your own:

    from tests.residual.battery import CHECKS, Entry
    for check in CHECKS.values():
        check(Entry("mine", my_topology()))

Everything is small: three blocks, width 8. What two executions may differ by is round-off, 1e-5 of a value's and
1e-4 of a gradient's size.
"""

import functools
import re
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxblock import Decoder, ExecutionConfig, ModelConfig
from jaxblock.axes import path_name, roles
from jaxblock.residual import History, Topology
from jaxblock.training.config import OptimizerConfig
from jaxblock.training.optimizer import decay_mask, make_optimizer
from tests.residual.given import (
    Entry,
    GivenModel,
    draw,
    given_branch,
    position_wise,
    run_given,
    unrolled_flops,
)
from tests.small import config, tokens

PLAIN = {"norm": "rms_norm", "bias": False, "positions": "none", "feed_forward": "relu"}
DROPOUT = {"attention_dropout": 0.2, "hidden_dropout": 0.2, "branch_dropout": 0.2}
OWN_ROLES = ("connection", "norm")


# ------------------------------------------------------------------ a decoder at a topology's own initial values


@functools.cache
def start(topology: Topology, model_config: ModelConfig) -> tuple[Decoder, Any]:
    """Return a decoder, its connections at their initial values, its other parameters random."""
    model = Decoder(model_config, topology=topology)
    shapes = jax.eval_shape(model.init, jax.random.key(0), tokens(1, 2))["params"]
    given = GivenModel(model_config, topology, given_branch)
    x = jnp.zeros((1, 1, model_config.width))
    own = jax.jit(given.init)(jax.random.key(0), x, jnp.zeros((model_config.sublayers, model_config.width)))
    own = {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(own["params"])}
    rng = np.random.default_rng(0)

    def leaf(path: tuple, x: jax.ShapeDtypeStruct, role: str) -> jax.Array:
        name = path_name(path)
        if name in own:
            return own[name].astype(x.dtype)
        if role == "norm":
            return jnp.ones(x.shape, x.dtype) if name.endswith("scale") else jnp.zeros(x.shape, x.dtype)
        return jnp.asarray(rng.normal(scale=0.35, size=x.shape), x.dtype)

    return model, jax.tree_util.tree_map_with_path(leaf, shapes, roles(shapes))


@functools.cache
def off_start(topology: Topology, model_config: ModelConfig) -> tuple[Decoder, Any]:
    """Return the same with the topology's own parameters moved off their start, so that each matters."""
    model, params = start(topology, model_config)
    rng = np.random.default_rng(1)
    moved = lambda x, role: (  # noqa: E731
        x + jnp.asarray(rng.normal(scale=0.3, size=x.shape), x.dtype) if role in OWN_ROLES else x
    )
    return model, jax.tree.map(moved, params, roles(params))


def objective(model: Decoder, params: Any, tokens_BT: jax.Array, key: Any = None) -> tuple:
    rngs = {} if key is None else {"dropout": key}
    logits_BTV = model.apply({"params": params}, tokens_BT, rngs=rngs)
    return jnp.sum(jnp.sin(logits_BTV)), logits_BTV


@functools.cache
def compiled(model: Decoder) -> Callable:
    return jax.jit(jax.value_and_grad(functools.partial(objective, model), has_aux=True))


def dropout_key(seed: int) -> jax.Array:
    """Return a key of XLA's own generator: its draws compile in a tenth of the time threefry's take."""
    return jax.random.key(seed, impl="unsafe_rbg")


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


# ------------------------------------------------------------------ the checks


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


def check_positions_and_rows_stay_apart(entry: Entry) -> None:
    """With branches that read each position alone, no position and no row sees another."""
    model_config = config(**PLAIN)
    x, weights = draw(2, 5, 8), draw(model_config.sublayers, 8, 8, seed=1)
    model = GivenModel(model_config, entry.topology, position_wise)
    variables = jax.jit(model.init)(jax.random.key(0), x, weights)
    rng = np.random.default_rng(1)  # off their start: a factor of 0 would hide what it multiplies
    variables = jax.tree.map(
        lambda x: x + jnp.asarray(rng.normal(scale=0.3, size=x.shape), x.dtype), variables
    )
    run = jax.jit(lambda x: model.apply(variables, x, weights)[0])
    closed, moved = np.asarray(run(x)), np.asarray(run(x.at[0, 2].add(1.0)))
    touched = np.abs(moved - closed).max(-1) > 0
    assert touched[0, 2], f"{entry}: the closed stream does not depend on its embedding"
    touched[0, 2] = False
    assert not touched.any(), (
        f"{entry}: changing row 0, position 2 changed (row, position) {np.argwhere(touched).tolist()}; a connection "
        "mixes depth and streams, never positions or rows of a batch"
    )


def check_causal(entry: Entry) -> None:
    """Changing a token leaves every logit before it bitwise as it was, and moves its own."""
    model, params = off_start(entry.topology, config(**PLAIN, **DROPOUT))
    run = compiled(model)
    before = np.asarray(run(params, tokens(), None)[0][1])
    changed = tokens().at[:, 3].set((tokens()[:, 3] + 1) % 11)
    after = np.asarray(run(params, changed, None)[0][1])
    assert np.array_equal(before[:, :3], after[:, :3]), f"{entry}: a later token changed earlier logits"
    assert not np.array_equal(before[:, 3], after[:, 3]), f"{entry}: logits ignore their own token"


def check_zero_branch(entry: Entry) -> None:
    """Branches that return 0 give what the entry declares."""
    for norm in ("rms_norm", "layer_norm"):
        model_config = config(**{**PLAIN, "norm": norm})
        x = draw(2, 3, 8)
        closed, _ = run_given(entry, model_config, given_branch, x, jnp.zeros((model_config.sublayers, 8)))
        want = entry.topology.zero_branch(model_config, x)
        np.testing.assert_allclose(
            closed,
            want,
            rtol=1e-5,
            atol=1e-6,
            err_msg=f"{entry}: with zero branches the closed stream is not what `zero_branch` declares "
            "(left out, it is the embedding)",
        )


def check_scale_free(entry: Entry) -> None:
    """Branches twice as large change the closed stream, unless it is declared that they do not."""
    model_config = config(**PLAIN, norm_epsilon=1e-12)
    x, given = draw(2, 3, 8), draw(model_config.sublayers, 8, seed=1)
    model = GivenModel(model_config, entry.topology, given_branch)
    variables = jax.jit(model.init)(jax.random.key(0), x, given)
    rng = np.random.default_rng(1)  # off their start: a factor of 0 would hide what it multiplies
    variables = jax.tree.map(
        lambda x: x + jnp.asarray(rng.normal(scale=0.3, size=x.shape), x.dtype), variables
    )
    run = jax.jit(lambda given: model.apply(variables, x, given)[0])
    same = bool(jnp.allclose(run(given), run(2.0 * given), rtol=1e-4, atol=1e-5))
    assert same == entry.topology.scale_free, (
        f"{entry}: branches twice as large {'leave the closed stream as it was' if same else 'change it'}, and it "
        f"declares scale_free = {entry.topology.scale_free}"
    )


def check_depth_scaled(entry: Entry) -> None:
    """The first sublayer writes with factors that depend on the number of blocks exactly where that is declared."""
    reads = []
    for depth in (2, 4):
        model_config = config(**PLAIN, norm_epsilon=1.0, depth=depth, width=16)
        sources = jnp.eye(16)[: model_config.sublayers + 1] * 2.0**-30
        _, found = run_given(entry, model_config, given_branch, sources[0].reshape(1, 1, -1), sources[1:])
        reads.append(np.asarray(found["read_1"][0]).ravel() * 2.0**30)
    changes = not np.allclose(*reads, rtol=1e-5, atol=1e-6)
    assert changes == entry.topology.depth_scaled, (
        f"{entry}: what the second sublayer reads {'depends' if changes else 'does not depend'} on the number of "
        f"blocks, and it declares depth_scaled = {entry.topology.depth_scaled}"
    )


def check_flops(entry: Entry) -> None:
    """The declared FLOPs are multiplied, and little else: norms, activations and single factors are the slack."""
    if entry.topology.flops is None:
        return
    for changes in ({"depth": 12, "width": 64}, {"depth": 3, "width": 64, "wiring": "parallel"}):
        model_config = config(**PLAIN, **changes)
        declared, counted = entry.topology.flops(model_config), unrolled_flops(entry.topology, model_config)
        per_number = held_numbers(entry.topology, model_config) * (model_config.sublayers + 1)
        assert declared <= counted <= 1.6 * declared + 40 * per_number, (
            f"{entry}: declares {declared} FLOPs per token; a loop that reads what exists has {counted}"
        )


def held_numbers(topology: Topology, model_config: ModelConfig) -> int:
    """Return the numbers per token that a stream holds from block to block, histories not among them."""
    stream = jax.eval_shape(lambda x: topology.open(model_config, x), jnp.zeros((1, 1, model_config.width)))
    nodes = jax.tree.leaves(stream, is_leaf=lambda node: isinstance(node, History))
    return max(model_config.width, sum(node.size for node in nodes if not isinstance(node, History)))


def measured_mixing(entry: Entry, model_config: ModelConfig) -> np.ndarray:
    """Return the depth-mixing matrix [S + 1, S + 1].

    Source i (embedding, then each branch output) is 2^-30 times the i-th unit vector, so that coordinate i of what
    a sublayer reads is its weight; with an epsilon of 1 a norm is the identity at that size.
    """
    sources = jnp.eye(model_config.sublayers + 1, model_config.width) * 2.0**-30
    closed, reads = run_given(entry, model_config, given_branch, sources[0].reshape(1, 1, -1), sources[1:])
    per_block = [reads[f"read_{j}"] for j in range(len(reads_of(reads)))]
    rows = jnp.stack(per_block, axis=1).reshape(model_config.sublayers, -1)
    table = jnp.concatenate([rows, closed.reshape(1, -1)]) * 2.0**30
    return np.asarray(table)[:, : model_config.sublayers + 1]


def reads_of(collected: dict) -> list[str]:
    return [name for name in collected if name.startswith("read_")]


def check_mixing_matrix(entry: Entry) -> None:
    """What each sublayer reads of what was written before it is the declared table."""
    for wiring in ("serial", "parallel"):
        model_config = config(**PLAIN, norm_epsilon=1.0, wiring=wiring)
        if entry.topology.mixing is not None:
            np.testing.assert_allclose(
                measured_mixing(entry, model_config),
                entry.topology.mixing(model_config),
                rtol=1e-6,
                atol=1e-7,
                err_msg=f"{entry}: not the declared depth-mixing matrix",
            )


def check_parameter_count(entry: Entry) -> None:
    """The parameters a topology adds are as many as its formula says."""
    if entry.topology.parameters is None:
        return
    for changes in ({}, {"norm": "rms_norm", "depth": 5}, {"wiring": "parallel", "bias": False, "width": 16}):
        model_config = config(**changes)
        model = Decoder(model_config, topology=entry.topology)
        shapes = jax.eval_shape(model.init, jax.random.key(0), tokens(1, 2))["params"]
        own = [
            leaf.size
            for leaf, role in zip(jax.tree.leaves(shapes), jax.tree.leaves(roles(shapes)), strict=True)
            if role in OWN_ROLES
        ]
        want = entry.topology.parameters(model_config)
        assert sum(own) == want, f"{entry} with {changes}: {sum(own)} parameters, its formula gives {want}"


def check_reduces_to(entry: Entry) -> None:
    """At its initial values it is the topology it says it reduces to, in logits and the body's gradients."""
    from jaxblock.residual import topology

    if entry.topology.reduces_to is None:
        return
    model_config = config(**PLAIN, norm_epsilon=1e-12)
    model, params = start(entry.topology, model_config)
    plain, plain_params = start(topology(entry.topology.reduces_to), model_config)
    values = {path_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(params)}
    # The body is the entry's; norms, whatever their names, start as norms do.
    plain_params = jax.tree_util.tree_map_with_path(
        lambda path, x, role: x if role in OWN_ROLES else values[path_name(path)],
        plain_params,
        roles(plain_params),
    )
    (_, got), gradients = compiled(model)(params, tokens(), None)
    (_, want), want_gradients = compiled(plain)(plain_params, tokens(), None)
    message = f"{entry} at its start is not {entry.topology.reduces_to}"
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5, err_msg=message)
    found = {path_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(gradients)}
    for path, want_leaf in jax.tree_util.tree_leaves_with_path(want_gradients):
        size = float(jnp.abs(want_leaf).max())
        name = path_name(path)
        if name in found:
            np.testing.assert_allclose(found[name], want_leaf, atol=2e-5 * size, err_msg=f"{message}: {name}")


def check_every_leaf_learns(entry: Entry) -> None:
    """After two optimizer steps every layer of every leaf has a gradient, except those declared, which have none."""
    model_config = config(**{**PLAIN, "feed_forward": "gelu"})
    model, params = start(entry.topology, model_config)
    optimizer = optax.adam(3e-3)
    moments = optimizer.init(params)
    for _ in range(2):
        _, gradients = compiled(model)(params, tokens(), None)
        updates, moments = optimizer.update(gradients, moments, params)
        params = optax.apply_updates(params, updates)
    _, gradients = compiled(model)(params, tokens(), None)
    listed = [(re.compile(row.pattern), row) for row in entry.topology.no_gradient]
    used = set()
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradients):
        name = path_name(path)
        slices = list(enumerate(leaf)) if name.startswith("blocks/") else [(None, leaf)]
        for block, part in slices:
            rows = [
                row
                for pattern, row in listed
                if pattern.fullmatch(name)
                and (row.block is None or row.block % model_config.depth == (block or 0))
            ]
            used.update(rows)
            largest = float(jnp.abs(part).max())
            where = f"{entry}: {name}" + ("" if block is None else f" of block {block}")
            if rows:
                assert largest == 0.0, f"{where} is declared to get no gradient and gets {largest}"
            else:
                assert largest > 0.0, f"{where} gets no gradient, and `no_gradient` does not list it"
    unused = [row.pattern for _, row in listed if row not in used]
    assert not unused, f"{entry}: `no_gradient` lists {unused}, which match no parameter"


def check_moves_from_zero_output(entry: Entry) -> None:
    """Branches whose last kernels are 0 (initialization "zero_output") get a gradient, or that start is refused."""
    if entry.topology.refuses_zero_output:
        return
    model, params = start(entry.topology, config(**{**PLAIN, "feed_forward": "gelu"}))
    last = lambda role: role in ("output", "down")  # noqa: E731
    params = jax.tree.map(lambda x, role: jnp.zeros_like(x) if last(role) else x, params, roles(params))
    _, gradients = compiled(model)(params, tokens(), None)
    for (path, leaf), role in zip(
        jax.tree_util.tree_leaves_with_path(gradients), jax.tree.leaves(roles(params)), strict=True
    ):
        assert not last(role) or jnp.any(leaf), (
            f"{entry}: {path_name(path)} starts at 0 with the initialization zero_output and gets no gradient there: a "
            "factor that starts at 0 too? Say why in `refuses_zero_output`"
        )


def check_weight_decay_leaves_it_alone(entry: Entry) -> None:
    """Without a gradient, an AdamW step moves no parameter of a topology that its labels do not ask to decay."""
    _, params = off_start(entry.topology, config(**PLAIN))
    labels = entry.topology.labels
    optimizer = make_optimizer(OptimizerConfig(weight_decay=0.5), labels)
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = jax.jit(lambda: optimizer.update(zeros, optimizer.init(params), params))()
    for (path, update), role, decays in zip(
        jax.tree_util.tree_leaves_with_path(updates),
        jax.tree.leaves(roles(params)),
        jax.tree.leaves(decay_mask(params, labels)),
        strict=True,
    ):
        moved = bool(jnp.any(update != 0))
        assert moved == decays, f"{entry}: {path_name(path)}: decayed {moved}, labelled {decays}"
        if role in OWN_ROLES and not labels:
            assert not moved, f"{entry}: weight decay moved {path_name(path)}"


def gradient_memory(topology: Topology, depth: int, execution: ExecutionConfig) -> int:
    """Return bytes of temporaries of the compiled gradient at width 128, 128 tokens."""
    model_config = config(**PLAIN, depth=depth, width=128, context=64)
    model = Decoder(model_config, execution, topology)
    tokens_BT = jax.ShapeDtypeStruct((2, 64), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens_BT)["params"]
    gradient = jax.jit(jax.grad(lambda params, tokens_BT: objective(model, params, tokens_BT)[0]))
    return gradient.lower(params, tokens_BT).compile().memory_analysis().temp_size_in_bytes


def memory_exponent(topology: Topology, depths: tuple[int, ...], **execution: Any) -> float:
    """Return p of bytes = c * L^p."""
    sizes = [gradient_memory(topology, depth, ExecutionConfig(**execution)) for depth in depths]
    return float(np.polyfit(np.log(depths), np.log(sizes), 1)[0])


def check_memory_is_linear(entry: Entry) -> None:
    """The gradient's temporaries grow at most as the depth."""
    exponent = memory_exponent(entry.topology, (8, 32))
    assert exponent <= 1.1, f"{entry}: gradient memory grows as L^{exponent:.2f}"


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


CHEAP: dict[str, Callable[[Entry], None]] = {
    "positions_and_rows_stay_apart": check_positions_and_rows_stay_apart,
    "causal": check_causal,
    "zero_branch": check_zero_branch,
    "mixing_matrix": check_mixing_matrix,
    "parameter_count": check_parameter_count,
    "weight_decay_leaves_it_alone": check_weight_decay_leaves_it_alone,
}
CHECKS: dict[str, Callable[[Entry], None]] = {
    **CHEAP,
    "loop_equals_scan": check_loop_equals_scan,
    "remat_equals_none": check_remat_equals_none,
    "plain_derivative_equals_reverse": check_plain_derivative_equals_reverse,
    "parallel_wiring": check_parallel_wiring,
    "one_block": check_one_block,
    "jit_equals_eager": check_jit_equals_eager,
    "vmap_equals_each_alone": check_vmap_equals_each_alone,
    "reduces_to": check_reduces_to,
    "scale_free": check_scale_free,
    "depth_scaled": check_depth_scaled,
    "flops": check_flops,
    "every_leaf_learns": check_every_leaf_learns,
    "moves_from_zero_output": check_moves_from_zero_output,
    "memory_is_linear": check_memory_is_linear,
    "finite_in_bfloat16_at_100_blocks": check_finite_in_bfloat16_at_100_blocks,
    "traced_once": check_traced_once,
}
