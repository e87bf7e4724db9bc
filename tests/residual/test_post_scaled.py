"""DeepNorm, KEEL, Mix-LN and Sub-LN: stacks against float64 loops, published tables, initial values, limits."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblock import Decoder
from jaxblock.axes import path_name, roles
from jaxblock.functional import residual
from jaxblock.functional.norms import layer_norm, rms_norm
from jaxblock.residual import Topology, topology
from jaxblock.residual.depth_rules import BLOCK_KERNELS
from jaxblock.residual.mix_norm import post_blocks
from tests.residual.battery import CHECKS
from tests.residual.given import Entry, GivenModel, draw, position_wise
from tests.residual.test_scaled import Rule, assert_stack_equals_float64, norm, stack_in_float64
from tests.small import built, config, tokens

RULES: dict[str, Rule] = {
    "deep_norm": lambda x, f, own, block, S: norm(S**0.25 * x + f(x), own["norm"]),
    "keel": lambda x, f, own, block, S: norm(S * x + f(norm(x, own["norm_in"])), own["norm_out"]),
    # The first block of three.
    "mix_norm(post=0.5)": lambda x, f, own, block, S: (
        norm(x + f(x), own["norm"]) if block <= 1 else x + f(norm(x, own["norm"]))
    ),
    "sub_norm": lambda x, f, own, block, S: x + f(norm(x, own["norm"])),
}
TABLE = {
    2: (1.4142, 0.5),
    6: (1.8612, 0.3799),
    12: (2.2134, 0.3195),
    24: (2.6321, 0.2686),
    48: (3.1302, 0.2259),
}
TABLE |= {100: (3.7606, 0.188), 1000: (6.6874, 0.1057)}
"""Blocks -> (alpha, beta), section 3.8 of the reference."""


@pytest.mark.parametrize(
    "name", ["keel", "mix_norm(post=0.5)", pytest.param("deep_norm", marks=pytest.mark.full)]
)
def test_stack_equals_float64_off_the_start(name):
    assert_stack_equals_float64(name, RULES[name])


@pytest.mark.full
@pytest.mark.parametrize("name", RULES)
def test_stack_equals_float64_in_parallel_with_rms_norm(name):
    assert_stack_equals_float64(name, RULES[name], wiring="parallel", norm="rms_norm")


def test_the_reference_tells_the_rules_apart():
    """The negative control of the tests above, and KEEL's alpha is not DeepNorm's."""
    own = {"scale": np.linspace(0.5, 1.5, 8), "bias": np.linspace(-0.2, 0.2, 8)}
    place = jax.tree.map(lambda leaf: np.stack([leaf] * 3), {"norm": own, "norm_in": own, "norm_out": own})
    params = {"blocks": {"attention_connection": place, "feed_forward_connection": place}}
    rules = RULES | {"keel by the root": lambda x, f, own, block, S: RULES["keel"](x, f, own, block, S**0.25)}
    x, weights = draw(2, 3, 8), draw(6, 8, 8, seed=1)
    values = [stack_in_float64(rule, config(), params, x, weights) for rule in rules.values()]
    for value in values:
        assert sum(np.allclose(value, other, atol=1e-2) for other in values) == 1


# ------------------------------------------------------------------ limits, function against function


def f(h: jax.Array) -> jax.Array:
    return jnp.sin(2.0 * h) + h[..., ::-1] ** 2


EXACT = functools.partial(layer_norm, epsilon=1e-12)


def test_deep_norm_with_alpha_1_is_post_norm():
    """Invariant 16, bitwise; alpha 1.1 is not."""
    x = draw(2, 3, 8)
    want = residual.post_norm(x, f, layer_norm)
    np.testing.assert_array_equal(residual.deep_norm(x, f, layer_norm, 1.0), want)
    assert not np.allclose(residual.deep_norm(x, f, layer_norm, 1.1), want, atol=1e-3)


def test_deep_norm_is_post_norm_with_a_smaller_branch():
    """Invariant 16: norm(alpha x + u) = norm(x + u / alpha); not norm(x + u alpha)."""
    x, alpha = draw(2, 3, 8), 2.5
    got = residual.deep_norm(x, f, EXACT, alpha)
    smaller = residual.post_norm(x, lambda h: f(h) / alpha, EXACT)
    np.testing.assert_allclose(got, smaller, rtol=1e-5, atol=1e-5)
    assert not np.allclose(got, residual.post_norm(x, lambda h: f(h) * alpha, EXACT), atol=1e-2)


def test_keel_without_its_first_norm_is_deep_norm():
    """Invariant 18, bitwise: with alpha 1 post-norm; with the norm it is another function."""
    x = draw(2, 3, 8)
    keel = functools.partial(residual.keel, x, f, lambda h: h, layer_norm)
    np.testing.assert_array_equal(keel(1.0), residual.post_norm(x, f, layer_norm))
    np.testing.assert_array_equal(keel(6.0), residual.deep_norm(x, f, layer_norm, 6.0))
    normed = residual.keel(x, f, layer_norm, layer_norm, 1.0)
    assert not np.allclose(normed, keel(1.0), atol=1e-2)


@pytest.mark.parametrize("norm_of", [layer_norm, rms_norm])
def test_the_stream_leaves_normalized(norm_of):
    """Invariant 13: variance 1 (RMS 1), mean 0 (layer norm), from any stream; pre-norm's does not."""
    x, exact = 30.0 * draw(2, 3, 8) + 5.0, functools.partial(norm_of, epsilon=1e-12)

    def is_normalized(y: jax.Array) -> bool:
        mean_fits = norm_of is rms_norm or np.allclose(y.mean(-1), 0.0, atol=1e-5)
        return bool(mean_fits and np.allclose((y**2).mean(-1), 1.0, rtol=1e-5))

    assert is_normalized(residual.deep_norm(x, f, exact, 1.7))
    assert is_normalized(residual.keel(x, f, exact, exact, 8.0))
    assert is_normalized(residual.mix_norm(x, f, exact, jnp.array(True)))
    assert not is_normalized(residual.mix_norm(x, f, exact, jnp.array(False)))
    assert not is_normalized(residual.pre_norm(x, f, exact))


@pytest.mark.parametrize("name", ["deep_norm", "keel"])
def test_zero_branches_leave_the_normalized_embedding(name):
    """Invariant 5: norm(alpha x) = norm(x), and once normalized it stays as it is."""
    x = draw(2, 3, 8)
    rules = {
        "deep_norm": lambda x, f: residual.deep_norm(x, f, EXACT, 1.7),
        "keel": lambda x, f: residual.keel(x, f, EXACT, EXACT, 8.0),
    }
    once = rules[name](x, jnp.zeros_like)
    np.testing.assert_allclose(once, EXACT(x), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(rules[name](once, jnp.zeros_like), once, rtol=1e-5, atol=1e-6)
    assert not np.allclose(once, x, atol=1e-2)


def test_mix_norm_is_both_rules():
    """Invariant 15 for one sublayer, bitwise, values and derivatives in a scale of the norm."""
    x = draw(2, 3, 8)

    def run(rule: Any, scale: jax.Array) -> jax.Array:
        return rule(x, f, lambda h: layer_norm(h, scale))

    def derivative(rule: Any, scale: jax.Array) -> jax.Array:
        return jax.grad(lambda scale: jnp.sum(jnp.sin(run(rule, scale))))(scale)

    scale = jnp.linspace(0.5, 1.5, 8)
    for post, rule in ((True, residual.post_norm), (False, residual.pre_norm)):
        mixed = functools.partial(residual.mix_norm, post=jnp.array(post))
        np.testing.assert_array_equal(run(mixed, scale), run(rule, scale))
        np.testing.assert_allclose(derivative(mixed, scale), derivative(rule, scale), rtol=1e-5, atol=1e-5)
    assert not np.allclose(run(residual.post_norm, scale), run(residual.pre_norm, scale), atol=1e-2)


def stack(name: str) -> jax.Array:
    """Return the closed stream, before any final norm, at norms that are not at their start."""
    model_config = config()
    model = GivenModel(model_config, topology(name), position_wise)
    scale = {"norm": {"scale": 1 + 0.3 * draw(3, 8, seed=3), "bias": 0.3 * draw(3, 8, seed=4)}}
    params = {"blocks": {"attention_connection": scale, "feed_forward_connection": scale}}
    x, weights = draw(2, 3, 8), draw(6, 8, 8, seed=1)
    return jax.jit(lambda x: model.apply({"params": params}, x, weights)[0])(x)


@pytest.mark.full
@pytest.mark.parametrize(("post", "name"), [("0.0", "pre_norm"), ("1.0", "post_norm")])
def test_a_mixed_stack_of_one_kind_is_that_rules(post, name):
    """Invariant 15 for a stack; before the final norm, which post_norm does not have."""
    np.testing.assert_allclose(stack(f"mix_norm(post={post})"), stack(name), rtol=1e-6, atol=1e-6)
    assert topology(f"mix_norm(post={post})").final_norm
    assert not np.allclose(stack("mix_norm(post=0.5)"), stack(name), atol=1e-2)


@pytest.mark.parametrize(
    ("post", "depth", "blocks"),
    [(0.25, 12, 3), (0.25, 24, 6), (0.25, 3, 0), (0.0, 9, 0), (1.0, 7, 7), (0.29, 100, 29), (0.57, 100, 57)],
)
def test_the_number_of_post_norm_blocks(post, depth, blocks):
    """floor(post L), where 0.29 * 100 = 28.999999999999996 is 29."""
    assert post_blocks(config(depth=depth), post) == blocks


# ------------------------------------------------------------------ published numbers and initial values


@pytest.mark.parametrize("depth", TABLE)
def test_deep_norms_published_table(depth):
    """Invariant 16, to 4 decimals; a parallel block counts as one sublayer."""
    rule, alpha, beta = topology("deep_norm"), *TABLE[depth]
    for model_config in (config(depth=depth), config(depth=2 * depth, wiring="parallel")):
        assert rule.connection(model_config).alpha == pytest.approx(alpha, abs=5.1e-5)
        assert rule.gain(model_config, "value") == pytest.approx(beta, abs=5.1e-5)
        assert topology("keel").connection(model_config).alpha == 2 * depth


@pytest.mark.parametrize("name", ["deep_norm", "sub_norm"])
def test_the_gain_is_for_the_kernels_a_branch_is_linear_in(name):
    rule, model_config = topology(name), config(depth=7)
    gain = {"deep_norm": 56**-0.25, "sub_norm": math.sqrt(math.log(14))}[name]
    for role in BLOCK_KERNELS:
        want = gain if role in ("value", "output", "gate", "up", "down") else 1.0
        assert rule.gain(model_config, role) == pytest.approx(want, rel=1e-12), role
    assert {"query", "key", "router"} <= set(BLOCK_KERNELS)


@functools.cache
def initial(rule: Topology) -> Any:
    """Return a decoder's initial parameters; drawn by XLA's generator, which compiles in a tenth of the time."""
    model = Decoder(config(feed_forward="swiglu", depth=2, norm="rms_norm"), topology=rule)
    key = jax.random.key(0, impl="unsafe_rbg")
    return jax.jit(model.init)(key, tokens(1, 2))["params"]


@pytest.mark.parametrize("name", ["deep_norm", pytest.param("sub_norm", marks=pytest.mark.full)])
def test_the_gain_reaches_exactly_its_kernels_of_a_decoder(name):
    """Invariant 16: against a copy with gain 1, same key: ratio of standard deviations beta, or exactly 1."""
    rule = topology(name)
    plain = initial(dataclasses.replace(rule, gain=lambda config, role: 1.0))
    beta = {"deep_norm": 16**-0.25, "sub_norm": math.sqrt(math.log(4))}[name]
    scaled = []
    for (path, got), want, role in zip(
        jax.tree_util.tree_leaves_with_path(initial(rule)),
        jax.tree.leaves(plain),
        jax.tree.leaves(roles(plain)),
        strict=True,
    ):
        if role in ("value", "output", "gate", "up", "down"):
            assert float(jnp.std(got) / jnp.std(want)) == pytest.approx(beta, rel=1e-5), path_name(path)
            scaled.append(path_name(path))
        else:
            np.testing.assert_array_equal(got, want, err_msg=path_name(path))
    kernels = (
        "attention/value",
        "attention/output",
        "feed_forward/gate",
        "feed_forward/up",
        "feed_forward/down",
    )
    assert sorted(scaled) == sorted(f"blocks/{name}/kernel" for name in kernels)


def test_inner_norms_make_sub_norms_branches_free_of_the_scale_before_them():
    """Invariant 14's relative: values and up kernels ten times as large change nothing (relu, no bias, epsilon tiny);
    the kernels behind the inner norms, and pre-norm's, do change the logits."""
    model_config = config(norm="rms_norm", bias=False, feed_forward="relu", norm_epsilon=1e-12, depth=2)

    def changes(name: str, *factors: str) -> bool:
        model, params = built(model_config, topology=topologies[name])
        tens = jax.tree.map(lambda x, role: 10.0 * x if role in factors else x, params, roles(params))
        run = _logits(model)
        return not np.allclose(run(params), run(tens), rtol=1e-4, atol=1e-4)

    topologies = {name: topology(name) for name in ("sub_norm", "pre_norm")}
    assert not changes("sub_norm", "value", "up")
    assert changes("sub_norm", "output", "down")
    assert changes("pre_norm", "value", "up")


@functools.cache
def _logits(model: Decoder) -> Any:
    return jax.jit(lambda params: model.apply({"params": params}, tokens()))


@pytest.mark.parametrize(
    "changes", [{"norm": "layer_norm"}, {"bias": False}, {"feed_forward": "swiglu", "hidden": 5}]
)
def test_sub_norms_inner_norms_are_counted(changes):
    model_config = config(**changes)
    shapes = jax.eval_shape(
        Decoder(model_config, topology=topology("sub_norm")).init, jax.random.key(0), tokens(1, 2)
    )["params"]
    norms = [
        leaf.size
        for leaf, role in zip(jax.tree.leaves(shapes), jax.tree.leaves(roles(shapes)), strict=True)
        if role == "norm"
    ]
    assert sum(norms) == topology("sub_norm").parameters(model_config)
    assert sum(norms) > topology("pre_norm").parameters(model_config)


# ------------------------------------------------------------------ mixing, types, options


def test_mixing_tables_by_hand():
    """Invariant 1: alpha to the number of norms between source and reader."""
    parallel = config(depth=2, wiring="parallel")
    np.testing.assert_allclose(topology("keel").mixing(parallel), [[1, 0, 0], [2, 1, 0], [4, 2, 1]])
    alpha = 2**0.25
    want = [[1, 0, 0], [alpha, 1, 0], [alpha**2, alpha, 1]]
    np.testing.assert_allclose(topology("deep_norm").mixing(parallel), want)
    np.testing.assert_allclose(topology("mix_norm").mixing(parallel), np.tri(3))


@pytest.mark.parametrize("check", ["depth_scaled", pytest.param("mixing_matrix", marks=pytest.mark.full)])
def test_a_false_declaration_fails_the_battery(check):
    liar = dataclasses.replace(topology("keel"), depth_scaled=False, mixing=topology("deep_norm").mixing)
    with pytest.raises(AssertionError, match="liar: "):
        CHECKS[check](Entry("liar", liar))


def test_in_bfloat16_the_sum_reaches_the_norm_in_float32():
    """200 x + u in bfloat16 would lose all of a u below 1/2; what is normalized still has it."""
    x, u = jnp.full((1, 1, 8), 1.0, jnp.bfloat16), jnp.full((1, 1, 8), 0.25, jnp.bfloat16)
    seen = []
    keep = lambda h: seen.append(h) or h  # noqa: E731
    after = residual.keel(x, lambda h: u, lambda h: h, keep, 200.0)
    assert after.dtype == jnp.bfloat16
    np.testing.assert_array_equal(seen[0], jnp.full((1, 1, 8), 200.25))
    np.testing.assert_array_equal(
        (jnp.bfloat16(200.0) * x + u).astype(jnp.float32), jnp.full((1, 1, 8), 200.0)
    )


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "mix_norm(post=-0.1)",
            "model.residual: post is -0.1; it must be a finite number at least 0.0 and at most",
        ),
        (
            "mix_norm(post=1.5)",
            "model.residual: post is 1.5; it must be a finite number at least 0.0 and at most 1.0",
        ),
        ("deep_norm(alpha=2.0)", "model.residual: 'deep_norm' has no option 'alpha'; its options: none"),
    ],
)
def test_a_bad_option_is_named(text, sentence):
    with pytest.raises(ValueError, match=f"^{sentence}"):
        topology(text)
