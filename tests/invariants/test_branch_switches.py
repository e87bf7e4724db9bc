"""Branches scaled and switched off: by exactly the gain, in every bit, and with the result each topology declares."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblock.axes import path_name, roles
from jaxblock.functional.norms import layer_norm
from jaxblock.invariants import (
    probe_zero_branches,
    scale_branches,
    switch_block,
    switch_exit,
    zero_branches,
)
from tests.small import KINDS, built, config, tokens

X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 4, 8)), jnp.float32)


@functools.cache
def block(residual: str):
    """Return (x, attention gain, feed-forward gain) -> x of the first block, compiled once."""
    model, params = built(config(residual=residual))
    apply = jax.jit(switch_block(model))
    return lambda x, attention, feed_forward: np.asarray(apply(params, x, attention, feed_forward))


def at_start(residual: str):
    """Return a model whose norms and connections are as they start, and everything else is off its start."""
    model, params = built(config(residual=residual))

    def leaf(path, x, role):
        name = path_name(path)
        if role not in ("norm", "connection"):
            return x
        return jnp.ones_like(x) if name.endswith("scale") else jnp.zeros_like(x)

    return model, jax.tree_util.tree_map_with_path(leaf, params, roles(params))


@functools.cache
def zero_report(residual: str):
    model = built(config(residual=residual))[0]
    return jax.jit(lambda params: probe_zero_branches(model, params, tokens()))


def test_scaled_are_exactly_the_last_maps_of_the_branches():
    params = built(config())[1]
    scaled = scale_branches(params, attention=3.0, feed_forward=5.0)
    found = {}
    for (path, before), after in zip(
        jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(scaled), strict=True
    ):
        if not np.array_equal(before, after):
            found[path_name(path)] = float(np.median(after / before))
    by_role = {
        path_name(path): {"output": 3.0, "down": 5.0}[role]
        for path, role in jax.tree_util.tree_leaves_with_path(roles(params))
        if role in ("output", "down")
    }
    assert found == pytest.approx({**by_role, **{k.replace("kernel", "bias"): v for k, v in by_role.items()}})


def test_a_branch_returns_the_gain_times_what_it_did():
    model, params = built(config())
    outputs = jax.jit(
        lambda params: model.apply({"params": params}, tokens(), mutable=["intermediates"])[1][
            "intermediates"
        ]
    )
    before = outputs(params)["blocks"]
    after = outputs(scale_branches(params, attention=4.0, feed_forward=1.0))["blocks"]
    # The first block's attention reads the same stream; 4 is a power of two, so nothing is rounded.
    np.testing.assert_array_equal(after["attention_out"][0], 4.0 * before["attention_out"][0])
    assert not np.array_equal(after["feed_forward_out"][0], before["feed_forward_out"][0])


@pytest.mark.parametrize("residual", KINDS)
def test_s2_12_zero_branches_give_what_the_topology_declares(residual):
    params = at_start(residual)[1]
    report = zero_report(residual)(params)
    exact = residual in (
        "none",
        "pre_norm",
        "peri_norm",
        "branch_norm",
    )  # what comes back is 0 or the embedding
    assert report.error < 1e-6
    assert report.equal or not exact


@pytest.mark.parametrize("residual", ["post_norm", "peri_norm", "branch_norm"])
def test_norm_parameters_off_their_start_are_seen(residual):
    """The control: a bias behind the branch, or a scale on the path, and the result is another."""
    report = zero_report(residual)(built(config(residual=residual))[1])
    assert not report.equal
    assert report.error > 0.05


def test_s2_12_without_branches_the_logits_are_the_head_of_the_embeddings_norm():
    model, params = built(config(positions="none", head="untied"))
    x = params["embedding"]["table"][tokens()]
    norm = params["final_norm"]
    want = layer_norm(x, norm["scale"], norm["bias"]) @ params["head"]["kernel"]
    run = jax.jit(lambda params: model.apply({"params": params}, tokens()))
    np.testing.assert_allclose(run(zero_branches(params)), want, rtol=1e-5, atol=1e-6)
    assert np.abs(run(params) - want).max() > 0.1


def test_s0_21_zero_branches_leave_the_stream_or_its_norm():
    np.testing.assert_array_equal(block("pre_norm")(X, 0.0, 0.0), X)
    norms = built(config(residual="post_norm"))[1]["blocks"]
    want = X
    for name in ("attention_connection", "feed_forward_connection"):
        want = layer_norm(want, *(norms[name]["norm"][part][0] for part in ("scale", "bias")))
    np.testing.assert_allclose(block("post_norm")(X, 0.0, 0.0), want, rtol=1e-6, atol=1e-6)
    assert np.abs(want - X).max() > 0.1


def test_s1_40_one_branch_off_leaves_the_other_sublayer():
    """x + f(norm(x)) of the one that is left: off one after the other, nothing is left; together, more than the sum."""
    both, attention, feed = (
        block("pre_norm")(X, *gains) - X for gains in ((1.0, 1.0), (1.0, 0.0), (0.0, 1.0))
    )
    params = built(config())[1]
    own = jax.tree.map(lambda leaf: leaf[0], params["blocks"]["feed_forward"])
    norm = jax.tree.map(lambda leaf: leaf[0], params["blocks"]["feed_forward_connection"]["norm"])
    hidden = layer_norm(X, norm["scale"], norm["bias"]) @ own["up"]["kernel"] + own["up"]["bias"].reshape(
        1, 1, -1
    )
    want = jax.nn.gelu(hidden, approximate=False) @ own["down"]["kernel"] + own["down"]["bias"].reshape(
        1, 1, -1
    )
    np.testing.assert_allclose(feed, want, rtol=1e-4, atol=1e-5)
    assert min(np.abs(attention).max(), np.abs(both - attention - feed).max()) > 1e-2


def test_s2_18_post_norms_exit_is_normalized_and_pre_norms_is_raw():
    def statistics(residual):
        model, params = at_start(residual)
        y = np.asarray(jax.jit(switch_block(model))(params, X, 1.0, 1.0), np.float64)
        return np.abs(y.mean(-1)).max(), np.abs(np.sqrt((y**2).mean(-1)) - 1).max()

    mean, rms = statistics("post_norm")
    assert max(mean, rms) < 1e-4
    mean, rms = statistics("pre_norm")
    assert min(mean, rms) > 0.1


def test_what_has_no_such_branches_or_no_single_stream_is_refused():
    with pytest.raises(ValueError, match="no attention/output and feed_forward/down kernels"):
        zero_branches({"dense": {"kernel": X}})
    model, _ = built(config(residual="attention_residual"))
    with pytest.raises(ValueError, match="is not one array that a block alone carries on"):
        switch_block(model)
    with pytest.raises(ValueError, match="block is 3; it must be a whole number of at most 2"):
        switch_block(built(config())[0], block=3)


def test_the_exit_of_a_tied_model_is_its_own_at_scale_one():
    model, params = built(config(positions="none"))
    got = jax.jit(switch_exit(model, tokens()))(params, 1.0)
    want = jax.jit(lambda params: model.apply({"params": params}, tokens()))(zero_branches(params))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
