"""The placements of the norm around a branch: values against numpy, the zero branch, and what the Jacobian keeps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblock.functional import residual
from jaxblock.functional.norms import layer_norm, rms_norm
from jaxblock.residual import BranchNorm, NoResidual, PeriNorm, PostNorm, PreNorm
from tests.small import config

RULES = {
    "none": (residual.no_residual, NoResidual, ("norm",)),
    "pre_norm": (residual.pre_norm, PreNorm, ("norm",)),
    "post_norm": (residual.post_norm, PostNorm, ("norm",)),
    "peri_norm": (residual.peri_norm, PeriNorm, ("norm_in", "norm_out")),
    "branch_norm": (residual.branch_norm, BranchNorm, ("norm",)),
}
FORMULAS = {
    "none": lambda x, f, n: f(n(x)),
    "pre_norm": lambda x, f, n: x + f(n(x)),
    "post_norm": lambda x, f, n: n(x + f(x)),
    "peri_norm": lambda x, f, n, m: x + m(f(n(x))),
    "branch_norm": lambda x, f, n: x + n(f(x)),
}
NORMS = {"layer_norm": layer_norm, "rms_norm": rms_norm}
SHAPE = (2, 3, 8)


def draw(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


WEIGHT = draw(8, 8, seed=1)


def branch(h, xp):
    """A nonlinear branch that mixes positions and channels, in numpy (float64) or jax.numpy."""
    return xp.sin(h @ xp.asarray(WEIGHT, h.dtype)) + h[:, ::-1] ** 2


def norm_parameters(name: str, norm: str) -> dict:
    """Return parameters of each norm of a rule, none of them at its start of one or zero."""
    parts = ("scale", "bias") if norm == "layer_norm" else ("scale",)
    return {
        place: {part: draw(8, seed=10 * i + j) + 2 * (part == "scale") for j, part in enumerate(parts)}
        for i, place in enumerate(RULES[name][2])
    }


def reference_norm(norm: str, parameters: dict, x: np.ndarray) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True) if norm == "layer_norm" else x
    y = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    return parameters["scale"] * y + parameters.get("bias", 0.0)


def float32(tree):
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", RULES)
def test_rule_equals_float64(name, norm):
    rule, module, _ = RULES[name]
    parameters, x = norm_parameters(name, norm), draw(*SHAPE, seed=0)
    norms = [functools.partial(reference_norm, norm, place) for place in parameters.values()]
    want = FORMULAS[name](x, lambda h: branch(h, np), *norms)
    bound = [functools.partial(NORMS[norm], **float32(place), epsilon=1e-5) for place in parameters.values()]
    got = rule(float32(x), lambda h: branch(h, jnp), *bound)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-5)
    shell = module(config(norm=norm)).apply(
        {"params": float32(parameters)}, float32(x), lambda h: branch(h, jnp)
    )
    np.testing.assert_array_equal(shell, got)


def test_no_two_rules_are_the_same_function():
    """The negative control of the test above: every formula would fail in another's place."""
    x, values = draw(*SHAPE, seed=0), {}
    for name in RULES:
        norms = [
            functools.partial(reference_norm, "layer_norm", p)
            for p in norm_parameters(name, "layer_norm").values()
        ]
        values[name] = FORMULAS[name](x, lambda h: branch(h, np), *norms)
    for name in RULES:
        assert sum(np.allclose(values[name], other, atol=1e-2) for other in values.values()) == 1


@pytest.mark.parametrize("name", RULES)
def test_zero_branch_gives_the_documented_result(name):
    x = float32(draw(*SHAPE, seed=0))
    connection = RULES[name][1](config())
    after, variables = connection.init_with_output(jax.random.key(0), x, jnp.zeros_like)
    want = {"none": jnp.zeros_like(x), "post_norm": layer_norm(x)}.get(name, x)
    np.testing.assert_array_equal(after, want)
    kept = connection.apply(variables, x, lambda h: 1e-3 * h)
    assert not np.array_equal(kept, want)


@pytest.mark.parametrize("name", ["peri_norm", "branch_norm"])
def test_a_norm_after_the_branch_adds_its_bias_to_a_zero_branch(name):
    x, parameters = float32(draw(*SHAPE, seed=0)), float32(norm_parameters(name, "layer_norm"))
    last = RULES[name][2][-1]
    after = RULES[name][1](config()).apply({"params": parameters}, x, jnp.zeros_like)
    np.testing.assert_allclose(after, x + parameters[last]["bias"].reshape(1, 1, -1), rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "want"),
    [
        # f(h) = a h with a = 0.25 and a "norm" n(x) = x^2 / 2, so that n'(x) = x: every factor of the chain shows.
        ("none", lambda x, a: a * x),
        ("pre_norm", lambda x, a: 1 + a * x),
        ("post_norm", lambda x, a: (x + a * x) * (1 + a)),
        ("peri_norm", lambda x, a: 1 + (a * x**2 / 2) * a * x),
        ("branch_norm", lambda x, a: 1 + (a * x) * a),
    ],
)
def test_derivative_of_a_scalar_linear_branch(name, want):
    x, a = 3.0, 0.25
    rule, _, places = RULES[name]
    norms = [lambda h: h**2 / 2] * len(places)
    assert float(jax.grad(lambda x: rule(x, lambda h: a * h, *norms))(x)) == pytest.approx(
        want(x, a), rel=1e-6
    )


@pytest.mark.parametrize("name", ["pre_norm", "peri_norm", "branch_norm"])
def test_jacobian_is_the_identity_plus_the_branch(name):
    """Seed 000: d x' / d x = I + J, with J the Jacobian of what is added; a zero branch leaves exactly I."""
    rule, _, places = RULES[name]
    norms = [layer_norm] * len(places)
    x = float32(draw(8, seed=4)).reshape(1, 1, 8)
    added = {
        "pre_norm": lambda x: jnp.sin(layer_norm(x)),
        "peri_norm": lambda x: layer_norm(jnp.sin(layer_norm(x))),
        "branch_norm": lambda x: layer_norm(jnp.sin(x)),
    }[name]
    got, alone = (jax.jacfwd(f)(x).reshape(8, 8) for f in (lambda x: rule(x, jnp.sin, *norms), added))
    np.testing.assert_allclose(got, np.eye(8) + alone, rtol=1e-5, atol=1e-6)
    zero = jax.jacfwd(lambda x: rule(x, jnp.zeros_like, *norms))(x)
    np.testing.assert_array_equal(zero.reshape(8, 8), np.eye(8))


def test_post_norm_has_no_identity_path():
    """The norm's Jacobian takes two directions out of the stream: a constant, and the stream's own (nearly)."""
    x = float32(draw(8, seed=4)).reshape(1, 1, 8)
    jacobian = jax.jacfwd(lambda x: residual.post_norm(x, jnp.zeros_like, layer_norm))(x).reshape(8, 8)
    np.testing.assert_allclose(jacobian, jax.jacfwd(layer_norm)(x).reshape(8, 8), rtol=1e-6)
    singular = np.linalg.svd(np.asarray(jacobian), compute_uv=False)
    assert (singular > 1e-3).sum() == 6
    pre = jax.jacfwd(lambda x: residual.pre_norm(x, jnp.zeros_like, layer_norm))(x).reshape(8, 8)
    assert (np.linalg.svd(np.asarray(pre), compute_uv=False) > 1e-3).sum() == 8
