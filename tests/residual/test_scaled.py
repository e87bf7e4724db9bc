"""Factors on branches: whole stacks against float64 loops, and what holds exactly at the start and off it."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblock import Decoder, ModelConfig
from jaxblock.axes import Label, labelled, path_name
from jaxblock.functional import residual
from jaxblock.functional.norms import layer_norm, rms_norm
from jaxblock.modules import scaling
from jaxblock.residual import topology
from jaxblock.residual.rezero import rezero
from tests.residual.battery import CHECKS
from tests.residual.given import Entry, GivenModel, draw, position_wise
from tests.small import config, tokens

SUBLAYERS = {"serial": ("attention_connection", "feed_forward_connection"), "parallel": ("connection",)}
Rule = Callable[[np.ndarray, Callable, dict, int, int], np.ndarray]
"""(x, f, the sublayer's parameters, number of the block from 1, number of sublayers) -> x."""

RULES: dict[str, Rule] = {
    "branch_scale(value=0.3)": lambda x, f, own, block, S: x + 0.3 * f(norm(x, own["norm"])),
    "learned_scale": lambda x, f, own, block, S: x + own["scale"] * f(norm(x, own["norm"])),
    "layer_scale": lambda x, f, own, block, S: x + own["scale"] * f(norm(x, own["norm"])),
    "rezero": lambda x, f, own, block, S: x + own["alpha"] * f(x),
    "rezero(share='block')": lambda x, f, own, block, S: x + own["shared"]["alpha"][block - 1] * f(x),
    "rezero(norm='pre')": lambda x, f, own, block, S: x + own["alpha"] * f(norm(x, own["norm"])),
    "residual_multiplier(base_depth=2, alpha=0.5)": lambda x, f, own, block, S: (
        x + np.sqrt(2 / 3) * f(norm(x, own["norm"]))
    ),
    "layer_norm_scaling": lambda x, f, own, block, S: x + f(norm(x, own["norm"]) / np.sqrt(block)),
}
OFTEN = ("rezero(share='block')", "layer_norm_scaling")
"""Run by default: the rules that ask for their place; the others' factors are tested without a stack as well."""


def norm(x: np.ndarray, own: dict, epsilon: float = 1e-5) -> np.ndarray:
    """Return layer norm, or RMS norm where there is no bias, in float64."""
    centred = x - x.mean(-1, keepdims=True) if "bias" in own else x
    y = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + epsilon)
    return own["scale"] * y + own.get("bias", 0.0)


def off_start(name: str, model_config: ModelConfig) -> tuple[GivenModel, Any, jax.Array, jax.Array]:
    """Return a stack of a topology around given branches, random parameters, an embedding and branch weights."""
    model = GivenModel(model_config, topology(name), position_wise)
    x, weights = draw(2, 3, 8), draw(model_config.sublayers, 8, 8, seed=1)
    shapes = jax.eval_shape(model.init, jax.random.key(0), x, weights)["params"]
    rng = np.random.default_rng(2)
    leaf = lambda shape: jnp.asarray(0.7 + 0.3 * rng.normal(size=shape.shape), shape.dtype)  # noqa: E731
    return model, jax.tree.map(leaf, shapes), x, weights


def stack_in_float64(rule: Rule, model_config: ModelConfig, params: Any, x: Any, weights: Any) -> np.ndarray:
    """Return the closed stream: a loop over blocks and sublayers, written from the equation."""
    wide = lambda tree: jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), tree)  # noqa: E731
    params, x, weights = wide(params), wide(x), wide(weights)
    sublayer = 0
    for block in range(model_config.depth):
        for place in SUBLAYERS[model_config.wiring]:
            own = jax.tree.map(lambda leaf, i=block: leaf[i], params["blocks"].get(place, {}))
            own["shared"] = params.get("shared")
            f = lambda h, s=sublayer: np.tanh(h @ weights[s])  # noqa: E731
            x = rule(x, f, own, block + 1, model_config.sublayers)
            sublayer += 1
    return x


def assert_stack_equals_float64(name: str, rule: Rule, **changes: Any) -> None:
    model_config = config(**changes)
    model, params, x, weights = off_start(name, model_config)
    got = jax.jit(lambda *given: model.apply({"params": given[0]}, *given[1:])[0])(params, x, weights)
    want = stack_in_float64(rule, model_config, params, x, weights)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-5)


CASES = [pytest.param(n, marks=() if n in OFTEN else (pytest.mark.full,)) for n in RULES]


@pytest.mark.parametrize("name", CASES)
def test_stack_equals_float64_off_the_start(name):
    assert_stack_equals_float64(name, RULES[name])


@pytest.mark.full
@pytest.mark.parametrize("name", RULES)
def test_stack_equals_float64_in_parallel_with_rms_norm(name):
    assert_stack_equals_float64(name, RULES[name], wiring="parallel", norm="rms_norm")


def test_the_reference_tells_the_rules_apart():
    """The negative control of the two tests above: on one set of parameters all rules differ."""
    model_config = config()
    own = {
        "norm": {"scale": np.ones(8), "bias": np.zeros(8)},
        "scale": np.linspace(0.5, 2.0, 8),
        "alpha": 0.4,
    }
    params = {place: jax.tree.map(lambda leaf: np.stack([leaf] * 3), own) for place in SUBLAYERS["serial"]}
    params = {"blocks": params, "shared": {"alpha": np.array([0.1, 0.2, 0.9])}}
    x, weights = draw(2, 3, 8), draw(6, 8, 8, seed=1)
    values = {
        name: stack_in_float64(rule, model_config, params, x, weights)
        for name, rule in RULES.items()
        if name != "learned_scale"  # given numbers per channel it is layer_scale
    }
    for value in values.values():
        assert sum(np.allclose(value, other, atol=1e-2) for other in values.values()) == 1


# ------------------------------------------------------------------ invariants


def f(h: jax.Array) -> jax.Array:
    return jnp.sin(2.0 * h) + h[..., ::-1] ** 2


EXACT = functools.partial(layer_norm, epsilon=1e-12)
UPDATES = {
    "scaled_branch": lambda x: residual.scaled_branch(x, f, EXACT, jnp.linspace(0.1, 1.0, 8)) - x,
    "layer_norm_scaling": lambda x: residual.layer_norm_scaling(x, f, EXACT, 3) - x,
    "rezero": lambda x: residual.rezero(x, f, 0.3) - x,
}


@pytest.mark.parametrize(
    ("name", "free"), [("scaled_branch", True), ("layer_norm_scaling", True), ("rezero", False)]
)
def test_what_a_normed_branch_adds_does_not_depend_on_the_streams_scale(name, free):
    """Invariant 12; ReZero, without a norm, is the negative control."""
    x = draw(2, 3, 8)
    same = np.allclose(UPDATES[name](x), UPDATES[name](5.0 * x), rtol=1e-4, atol=1e-5)
    assert same == free


@pytest.mark.parametrize(
    "name", ["branch_scale", "learned_scale", "layer_scale", "rezero", "layer_norm_scaling"]
)
def test_zero_branches_leave_the_embedding_off_the_start(name):
    """Invariant 5, bitwise and for any factor; branches of ones do not."""
    x = draw(2, 3, 8)
    rules = {
        "rezero": lambda f: residual.rezero(x, f, 0.7),
        "layer_norm_scaling": lambda f: residual.layer_norm_scaling(x, f, layer_norm, 4),
    }
    rule = rules.get(name, lambda f: residual.scaled_branch(x, f, layer_norm, jnp.full((8,), 0.7)))
    np.testing.assert_array_equal(rule(jnp.zeros_like), x)
    assert not np.allclose(rule(jnp.ones_like), x)


def test_block_1_of_layer_norm_scaling_is_pre_norm():
    """Invariant 15, bitwise; block 2 is not."""
    x = draw(2, 3, 8)
    want = residual.pre_norm(x, f, layer_norm)
    first = residual.layer_norm_scaling(x, f, layer_norm, jnp.int32(1))
    np.testing.assert_array_equal(first, want)
    assert not np.allclose(residual.layer_norm_scaling(x, f, layer_norm, jnp.int32(2)), want, atol=1e-2)


def test_a_rezero_stack_is_the_identity_and_only_alpha_learns():
    """Invariant 19: stream and input Jacobian at the start; with alpha = 0.1 neither holds and branches learn."""
    model_config = config(depth=2)
    model, params, x, weights = off_start("rezero", model_config)
    x = x[:1, :1]

    def loss(params: Any, x: jax.Array, weights: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(model.apply({"params": params}, x, weights)[0]))

    closed = lambda params, x: model.apply({"params": params}, x, weights)[0].reshape(8)  # noqa: E731
    both = jax.jit(
        lambda params: (
            closed(params, x),
            jax.jacrev(closed, argnums=1)(params, x),
            jax.grad(loss, argnums=(0, 2))(params, x, weights),
        )
    )
    value, jacobian, (alphas, branches) = both(jax.tree.map(jnp.zeros_like, params))
    np.testing.assert_array_equal(value, x.reshape(8))
    np.testing.assert_array_equal(jacobian.reshape(8, 8), np.eye(8))
    assert not np.any(branches)
    assert all(np.all(leaf != 0) for leaf in jax.tree.leaves(alphas))
    value, jacobian, (_, branches) = both(jax.tree.map(lambda leaf: jnp.full_like(leaf, 0.1), params))
    assert np.abs(value - x.reshape(8)).max() > 1e-2
    assert np.abs(jacobian.reshape(8, 8) - np.eye(8)).max() > 1e-2
    assert np.all(np.abs(branches).max(axis=(1, 2)) > 0)


def test_equal_channels_of_layer_scale_are_a_constant():
    """Invariant 20, bitwise; unequal channels are no constant."""
    x = draw(2, 3, 8)
    want = residual.scaled_branch(x, f, layer_norm, 0.3)
    np.testing.assert_array_equal(residual.scaled_branch(x, f, layer_norm, jnp.full((8,), 0.3)), want)
    np.testing.assert_array_equal(residual.scaled_branch(x, f, layer_norm, jnp.float32(0.3)), want)
    ramp = residual.scaled_branch(x, f, layer_norm, jnp.linspace(0.2, 0.4, 8))
    assert not np.allclose(ramp, want, atol=1e-3)


def test_layer_scale_folds_into_the_last_kernel():
    """Invariant 20: c * (z W) = z (W diag(c)); the other side of W is another function."""
    x, kernel, scale = draw(2, 3, 8), draw(8, 8, seed=1), draw(8, seed=2)
    branch = lambda kernel: lambda h: jnp.tanh(h) @ kernel  # noqa: E731
    want = residual.scaled_branch(x, branch(kernel), rms_norm, scale)
    columns, rows = kernel * scale.reshape(1, 8), kernel * scale.reshape(8, 1)
    np.testing.assert_allclose(residual.pre_norm(x, branch(columns), rms_norm), want, rtol=1e-5, atol=1e-6)
    assert not np.allclose(residual.pre_norm(x, branch(rows), rms_norm), want, atol=1e-2)


@pytest.mark.parametrize("alpha", [1.0, 0.5, 0.0])
def test_the_multiplier_is_the_parametrizations(alpha):
    """Invariant 21: 1 at the base depth, m_L^-alpha elsewhere, the number complete_p multiplies branches with."""
    rule = topology(f"residual_multiplier(base_depth=3, alpha={alpha})")
    for depth in (3, 6, 12):
        text = f"complete_p(base_depth=3, base_width=8, alpha={alpha})"
        want = scaling(config(depth=depth, parametrization=text)).branch
        found = rule.connection(config(depth=depth)).value
        assert found == want == pytest.approx((depth / 3) ** -alpha)


def test_mixing_tables_by_hand():
    """Invariant 1: what is declared, for two blocks, written out; the battery measures it."""
    small, half = config(depth=2), np.sqrt(0.5)
    np.testing.assert_allclose(
        topology("layer_norm_scaling").mixing(small),
        [
            [1, 0, 0, 0, 0],
            [1, 1, 0, 0, 0],
            [half, half, half, 0, 0],
            [half, half, half, half, 0],
            [1, 1, 1, 1, 1],
        ],
    )
    quarter = [[1, 0, 0], [1, 0.25, 0], [1, 0.25, 0.25]]
    parallel = config(depth=2, wiring="parallel")
    np.testing.assert_allclose(
        topology("residual_multiplier(base_depth=1, alpha=1)").mixing(parallel)[2], [1, 0.5, 0.5]
    )
    for name in ("branch_scale(value=0.25)", "layer_scale(start=0.25)", "learned_scale(start=0.25)"):
        np.testing.assert_allclose(topology(name).mixing(parallel), quarter)
    np.testing.assert_allclose(topology("rezero").mixing(parallel), [[1, 0, 0]] * 3)


def test_a_wrong_mixing_table_fails_the_battery():
    liar = dataclasses.replace(topology("layer_norm_scaling"), mixing=topology("pre_norm").mixing)
    with pytest.raises(AssertionError, match="not the declared depth-mixing matrix"):
        CHECKS["mixing_matrix"](Entry("liar", liar))


@pytest.mark.parametrize(
    ("text", "reduces"),
    [
        ("branch_scale", "pre_norm"),
        ("branch_scale(value=0.99)", None),
        ("learned_scale", "pre_norm"),
        ("learned_scale(start=0.1)", None),
        ("layer_scale", None),
        ("layer_scale(start=1)", "pre_norm"),
        ("residual_multiplier", None),
        ("residual_multiplier(alpha=0)", "pre_norm"),
    ],
)
def test_it_reduces_to_pre_norm_exactly_where_the_factor_is_1(text, reduces):
    assert topology(text).reduces_to == reduces
    assert topology(text).depth_scaled == (text == "residual_multiplier")


# ------------------------------------------------------------------ types and options


RULES_WITH_A_FACTOR = {
    "scaled_branch": lambda x, f: residual.scaled_branch(x, f, rms_norm, jnp.linspace(0.1, 1.0, 8)),
    "rezero": lambda x, f: residual.rezero(x, f, jnp.float32(0.37)),
    "layer_norm_scaling": lambda x, f: residual.layer_norm_scaling(x, f, rms_norm, 3),
}


@pytest.mark.parametrize("name", RULES_WITH_A_FACTOR)
def test_a_float32_factor_leaves_the_streams_type(name):
    seen = []
    branch = lambda h: seen.append(h.dtype) or h  # noqa: E731
    after = RULES_WITH_A_FACTOR[name](draw(2, 3, 8).astype(jnp.bfloat16), branch)
    assert (after.dtype, *seen) == (jnp.bfloat16, jnp.bfloat16)


def test_the_sum_is_rounded_once():
    """In bfloat16 it is the float32 sum, rounded; rounding the product too would differ."""
    x, u = draw(64, 3, 8).astype(jnp.bfloat16), draw(64, 3, 8, seed=1).astype(jnp.bfloat16)
    wide = x.astype(jnp.float32) + jnp.float32(0.37) * u.astype(jnp.float32)
    got = residual.rezero(x, lambda h: u, 0.37)
    np.testing.assert_array_equal(got, wide.astype(jnp.bfloat16))
    assert np.any(x + (0.37 * u) != got)


def test_factors_are_a_number_or_one_per_channel():
    with pytest.raises(AssertionError):
        residual.scaled_branch(draw(2, 3, 8), f, layer_norm, jnp.ones((2, 8)))


@pytest.mark.parametrize("share", ["sublayer", "block"])
def test_the_advised_label_finds_every_alpha(share):
    own = dataclasses.replace(rezero(share=share), labels=(Label(".*/alpha", learning_rate=0.1),))
    model = Decoder(config(), topology=own)
    shapes = jax.eval_shape(model.init, jax.random.key(0), tokens(1, 2))["params"]
    found = labelled(shapes, own.labels)
    leaves = jax.tree_util.tree_leaves_with_path(found, is_leaf=lambda node: isinstance(node, Label))
    names = [path_name(path) for path, _ in leaves]
    assert len(names) == (1 if share == "block" else 2)
    assert all(name.endswith("/alpha") for name in names)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("branch_scale(value=0.0)", "value is 0.0; it must be a finite number above 0.0"),
        ("branch_scale(value=1e999)", "value is inf; it must be a finite number above 0.0"),
        ("learned_scale(start=-1.0)", "start is -1.0; it must be a finite number at least 0.0"),
        ("layer_scale(start=-0.1)", "start is -0.1; it must be a finite number at least 0.0"),
        ("rezero(norm='post')", "norm is 'post'; it must be one of none, pre"),
        ("rezero(share='stack')", "share is 'stack'; it must be one of block, sublayer"),
        ("residual_multiplier(base_depth=0)", "base_depth is 0; it must be a whole number of at least 1"),
        (
            "residual_multiplier(alpha=1.5)",
            "alpha is 1.5; it must be a finite number at least 0.0 and at most 1.0",
        ),
    ],
)
def test_a_bad_option_is_named(text, sentence):
    with pytest.raises(ValueError, match=f"^model.residual: {sentence}"):
        topology(text)
