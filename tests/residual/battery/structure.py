"""What a connection is: what it reads and writes, what it leaves apart, which of its parameters learn."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxblock import Decoder, ModelConfig
from jaxblock.axes import path_name, roles
from jaxblock.residual import Topology
from jaxblock.training.config import OptimizerConfig
from jaxblock.training.optimizer import decay_mask, make_optimizer
from tests.residual.battery.subject import (
    DROPOUT,
    OWN_ROLES,
    PLAIN,
    compiled,
    off_start,
    start,
)
from tests.residual.given import (
    Entry,
    GivenModel,
    draw,
    given_branch,
    position_wise,
    run_given,
)
from tests.small import config, tokens


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


@functools.cache
def after_two_steps(topology: Topology) -> tuple[Decoder, Any]:
    """Return a decoder two optimizer steps after its topology's start, where a factor of 0 has moved."""
    model, params = start(topology, config(**{**PLAIN, "feed_forward": "gelu"}))
    optimizer = optax.adam(3e-3)
    moments = optimizer.init(params)
    for _ in range(2):
        _, gradients = compiled(model)(params, tokens(), None)
        updates, moments = optimizer.update(gradients, moments, params)
        params = optax.apply_updates(params, updates)
    return model, params


def check_every_own_leaf_matters(entry: Entry) -> None:
    """Every parameter of the topology, moved by up to 0.1, changes the logits, unless it gets no gradient."""
    model, params = after_two_steps(entry.topology)
    silent = [re.compile(row.pattern) for row in entry.topology.no_gradient]
    leaves, structure = jax.tree_util.tree_flatten_with_path(params)
    (_, before), _ = compiled(model)(params, tokens(), None)
    rng = np.random.default_rng(2)
    for i, ((path, leaf), role) in enumerate(zip(leaves, jax.tree.leaves(roles(params)), strict=True)):
        name = path_name(path)
        if role != "connection" or any(pattern.fullmatch(name) for pattern in silent):
            continue
        values = [x for _, x in leaves]
        values[i] = leaf + jnp.asarray(rng.uniform(-0.1, 0.1, leaf.shape), leaf.dtype)
        (_, after), _ = compiled(model)(jax.tree.unflatten(structure, values), tokens(), None)
        assert not np.array_equal(before, after), (
            f"{entry}: {name} moved by up to 0.1 leaves every logit as it was"
        )


def check_every_leaf_learns(entry: Entry) -> None:
    """After two optimizer steps every layer of every leaf has a gradient, except those declared, which have none."""
    model, params = after_two_steps(entry.topology)
    model_config = model.config
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
