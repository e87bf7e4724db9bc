"""Muon: Newton-Schulz against numpy in float64, each block's matrix on its own, the scales, the rest by AdamW."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from jaxblock.training.config import OptimizerConfig
from jaxblock.training.optimizer import make_optimizer, optimizer_table
from jaxblock.training.optimizer.muon import SCALES, dimension_numbers
from jaxblock.training.optimizer.roles import HIDDEN_KERNELS
from tests.small import built, config
from tests.training.optimizer_reference import (
    GRADIENTS,
    MATRICES,
    SHAPES,
    adam_direction,
    as_params,
    assert_same,
    compiled,
    distances,
    draws,
    flattened,
    nested,
    three_references,
    three_updates,
)

RMS, SPECTRAL, PLAIN = "muon", 'muon(scale="spectral", momentum=0.8)', "muon(nesterov=False, iterations=3)"
KERNELS = [path for path in SHAPES if path.endswith("kernel") and path.startswith("blocks")]


def newton_schulz(x: np.ndarray, iterations: int) -> np.ndarray:
    """Return the iteration on one matrix [inputs, outputs] in float64, multiplied out as it is written."""
    x = x / np.linalg.norm(x)
    for _ in range(iterations):
        a = x @ x.T
        x = 3.4445 * x - 4.7750 * a @ x + 2.0315 * a @ a @ x
    return x


def muon_direction(path: str, *, momentum=0.95, nesterov=True, iterations=5, scale="rms"):
    """Return one layer's direction: kernels of the blocks as matrices, the rest by Adam."""
    name = path.split("/")[-2]
    if path not in KERNELS:
        return adam_direction(0.9, 0.95, 1e-8)
    inputs, outputs = MATRICES[name]
    factor = 0.2 * max(inputs, outputs) ** 0.5 if scale == "rms" else max(1.0, outputs / inputs) ** 0.5

    def direction(g, moments, n):
        mean = moments["mean"] = momentum * moments.get("mean", 0.0) + (1 - momentum) * g
        x = mean
        if nesterov:
            look = momentum * mean / (1 - momentum ** (n + 1))
            x = look + (1 - momentum) * g / (1 - momentum**n)
        return factor * newton_schulz(x.reshape(inputs, outputs), iterations).reshape(g.shape)

    return direction


def reference(**options):
    return three_references(functools.partial(muon_direction, **options))


def test_three_updates_equal_the_reference_written_out_layer_by_layer():
    assert_same(three_updates(RMS), reference(), tolerance=2e-5)


@pytest.mark.parametrize(
    ("text", "options"),
    [
        (SPECTRAL, {"scale": "spectral", "momentum": 0.8}),
        pytest.param(PLAIN, {"nesterov": False, "iterations": 3}, marks=pytest.mark.full),
    ],
)
def test_three_updates_of_the_other_options_equal_the_reference(text, options):
    found = three_updates(text)
    assert_same(found, reference(**options), tolerance=2e-5)
    for name in options:  # control: each option is read
        less = {key: value for key, value in options.items() if key != name}
        assert max(distances(found, reference(**less)).values()) > 1e-3


@functools.cache
def directions() -> dict[str, np.ndarray]:
    """Return the first update's directions of the kernels, without weight decay."""
    optimizer = make_optimizer(OptimizerConfig(algorithm=RMS, weight_decay=0.0, clip=0.0))
    params = as_params(draws(0))
    updates, _ = jax.jit(optimizer.update)(as_params(GRADIENTS[0]), optimizer.init(params), params)
    return {path: -leaf for path, leaf in flattened(updates).items() if path in KERNELS}


def matrices(path: str, leaf: np.ndarray) -> np.ndarray:
    """Return a kernel as its layers' matrices [L, inputs, outputs]."""
    return leaf.reshape(3, *MATRICES[path.split("/")[-2]])


@pytest.mark.parametrize("path", KERNELS)
def test_each_layers_singular_values_are_near_1_before_scaling(path):
    inputs, outputs = MATRICES[path.split("/")[-2]]
    values = np.linalg.svd(
        matrices(path, directions()[path]) / SCALES["rms"](inputs, outputs), compute_uv=False
    )
    assert values.shape == (3, min(inputs, outputs))
    assert values.min() > 0.6
    assert values.max() < 1.25
    raw = np.linalg.svd(matrices(path, GRADIENTS[0][path]), compute_uv=False)
    assert raw.max() / raw.min() > 100  # control: the gradient's are far apart


def optax_muon(leaf: np.ndarray, reduction: tuple[int, ...], outputs: tuple[int, ...]) -> np.ndarray:
    """Return optax's orthogonalised first momentum of one leaf, read with these axes."""
    numbers = optax.contrib.MuonDimensionNumbers(reduction, outputs)
    transform = optax.contrib.scale_by_muon(weight_dimension_numbers={"x": numbers})
    gradient = {"x": jnp.asarray(leaf, jnp.float32)}
    return np.asarray(jax.jit(transform.update)(gradient, transform.init(gradient))[0]["x"])


LOOPED = ("query", "output")


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=() if path.split("/")[-2] in LOOPED else pytest.mark.full) for path in KERNELS],
)
def test_a_stacked_kernel_moves_as_its_layers_do_unstacked(path):
    """Scan and loop: layer by layer, optax's plain two-dimensional Muon on the unstacked matrix."""
    inputs, outputs = MATRICES[path.split("/")[-2]]
    loop = np.stack([optax_muon(layer, (0,), (1,)) for layer in matrices(path, GRADIENTS[0][path])]) * SCALES[
        "rms"
    ](inputs, outputs)
    np.testing.assert_allclose(matrices(path, directions()[path]), loop, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("path", "reduction", "outputs"),
    [
        ("blocks/attention/query/kernel", (0, 1), (2, 3)),  # the leaf as one matrix
        ("blocks/attention/output/kernel", (1,), (2, 3)),  # read like a query
        # optax's default axes; every head on its own; another leaf as one matrix
        pytest.param("blocks/attention/query/kernel", (0,), (1,), marks=pytest.mark.full),
        pytest.param("blocks/attention/query/kernel", (1,), (3,), marks=pytest.mark.full),
        pytest.param("blocks/feed_forward/up/kernel", (0, 1), (2,), marks=pytest.mark.full),
    ],
)
def test_control_wrong_dimension_numbers_move_elsewhere(path, reduction, outputs):
    wrong = matrices(path, optax_muon(GRADIENTS[0][path], reduction, outputs))
    right = matrices(path, directions()[path])
    wrong, right = (x / np.linalg.norm(x) for x in (wrong, right))
    assert np.abs(wrong - right).max() > 0.02


def test_every_hidden_kernel_of_a_model_has_its_fans_as_its_axes_are_named():
    """The table by role agrees with the logical axes of jaxblock.axes, in which width is what meets the stream."""
    _, params = built(config(heads=4, kv_heads=2, feed_forward="swiglu"))
    sizes = {"query": (8, 8), "key": (8, 4), "value": (8, 4), "output": (8, 8)}
    kernels = {
        path: leaf
        for path, leaf in flattened(params).items()
        if path.endswith("kernel") and path.startswith("blocks")
    }
    assert {path.split("/")[-2] for path in kernels} == set(HIDDEN_KERNELS)
    numbers = dimension_numbers(nested(kernels))
    for path, leaf in kernels.items():
        group, role = path.split("/")[1:3]
        found = numbers["blocks"][group][role]["kernel"]
        fans = [
            math.prod(leaf.shape[axis] for axis in axes) for axes in (found.reduction_axis, found.output_axis)
        ]
        hidden = leaf.size // 3 // 8
        assert tuple(fans) == sizes.get(role, (hidden, 8) if role == "down" else (8, hidden)), path
        used = {axis % leaf.ndim for axis in (*found.reduction_axis, *found.output_axis)}
        assert used == set(range(1, leaf.ndim)), path


def test_the_scales():
    """rms: every direction's rms is 0.2, whatever the shape."""
    for path, direction in directions().items():
        rms = np.sqrt((matrices(path, direction) ** 2).mean(axis=(1, 2)))
        np.testing.assert_allclose(rms, 0.2, rtol=0.25, err_msg=path)
    assert SCALES["spectral"](4, 16) == 2
    assert SCALES["spectral"](16, 4) == 1
    assert SCALES["rms"](4, 16) == SCALES["rms"](16, 4) == 0.8


def test_zero_gradients_give_a_zero_direction_with_and_without_momentum():
    optimizer = compiled(RMS)
    params = as_params({path: 0 * leaf for path, leaf in draws(0).items()})
    updates, state = optimizer.update(params, optimizer.init(params), params)
    updates, _ = optimizer.update(params, state, params)
    for path, leaf in flattened(updates).items():
        assert (leaf == 0).all(), path


def test_a_runs_log_says_which_roles_are_orthogonalised():
    _, params = built(config())
    lines = optimizer_table(OptimizerConfig(algorithm="muon"), params).split("\n")
    assert lines[2:] == [
        "orthogonalised by Muon: down 768, key 192, output 192, query 192, up 768, value 192",
        "moved by AdamW: bias 216, embedding 88, norm 112, position 64",
    ]
    assert len(optimizer_table(OptimizerConfig(), params).split("\n")) == 2


def test_the_state_holds_momenta_and_counts_and_no_constants():
    state = jax.eval_shape(compiled(RMS).init, as_params(draws(0)))
    shapes = sorted(leaf.shape for leaf in jax.tree.leaves(state))
    others = [shape for path, shape in SHAPES.items() if path not in KERNELS]
    assert shapes == sorted([(), (), *(SHAPES[path] for path in KERNELS), *others, *others])
