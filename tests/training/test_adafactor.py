"""Adafactor: the two algorithms of its paper in float64, factors and clipping layer by layer, the size of its state."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxblock.training.config import OptimizerConfig
from jaxblock.training.optimizer import make_optimizer
from tests.training.optimizer_reference import (
    GRADIENTS,
    MATRICES,
    SHAPES,
    as_params,
    assert_same,
    compiled,
    distances,
    draws,
    flattened,
    nested,
    shapes_of,
    three_references,
    three_updates,
)

PLAIN, OTHER = "adafactor", "adafactor(decay=0.5, epsilon=0.1, clipping=0.7)"
FANS = {**{f"{name}/kernel": fans for name, fans in MATRICES.items()}, "head/kernel": (6, 7)}
FANS["embedding/table"] = (7, 6)


def fans_of(path: str) -> tuple[int, int] | None:
    """Return inputs and outputs of a matrix, None for any other parameter."""
    return FANS.get("/".join(path.split("/")[-2:]))


def adafactor_direction(path: str, *, decay=0.8, epsilon=1e-30, clipping=1.0):
    """Return one layer's direction: algorithm 4 (with sums, as it is written) or 5, then the clipping."""
    fans = fans_of(path)

    def direction(g, moments, n):
        beta = 1 - n**-decay

        def averaged(name, new):
            moments[name] = beta * moments.get(name, 0.0) + (1 - beta) * new
            return moments[name]

        if fans:
            square = g.reshape(fans) ** 2 + epsilon
            rows, columns = averaged("rows", square.sum(1)), averaged("columns", square.sum(0))
            v = (np.outer(rows, columns) / rows.sum()).reshape(g.shape)
        else:
            v = averaged("v", g**2 + epsilon)
        u = g / np.sqrt(v)
        return u / max(1.0, np.sqrt((u**2).mean()) / clipping)

    return direction


def test_three_updates_equal_the_reference_written_out_layer_by_layer():
    assert_same(three_updates(PLAIN), three_references(adafactor_direction))


def test_every_option_is_read():
    options = {"decay": 0.5, "epsilon": 0.1, "clipping": 0.7}
    found = three_updates(OTHER)
    assert_same(found, three_references(functools.partial(adafactor_direction, **options)))
    for name in options:
        less = {key: value for key, value in options.items() if key != name}
        others = three_references(functools.partial(adafactor_direction, **less))
        assert max(distances(found, others).values()) > 1e-3, name


@functools.cache
def first_query_direction() -> np.ndarray:
    """Return the second update's direction of the query kernel, without weight decay, as matrices [L, D, H K]."""
    path = "blocks/attention/query/kernel"
    optimizer = make_optimizer(OptimizerConfig(algorithm=PLAIN, weight_decay=0.0, clip=0.0))
    params = {"blocks": nested({path.removeprefix("blocks/"): jnp.zeros(SHAPES[path])})}
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for gradient in GRADIENTS[:2]:
        updates, state = update(nested({path: jnp.asarray(gradient[path], jnp.float32)}), state, params)
    return -flattened(updates)[path].reshape(3, 6, 8)


def optax_direction(gradients: list[np.ndarray]) -> np.ndarray:
    """Return the second direction of optax's Adafactor for one leaf; it factors the two largest axes."""
    transform = optax.chain(
        optax.scale_by_factored_rms(min_dim_size_to_factor=2), optax.clip_by_block_rms(1.0)
    )
    params = jnp.zeros(gradients[0].shape)
    state, update = transform.init(params), jax.jit(transform.update)
    for gradient in gradients:
        updates, state = update(jnp.asarray(gradient, jnp.float32), state, params)
    return np.asarray(updates)


@pytest.mark.full
def test_a_stacked_kernel_moves_as_its_layers_do_unstacked():
    """Scan and loop: layer by layer, optax's on the unstacked matrix. Its own reading of the stack is another one."""
    stacks = [gradient["blocks/attention/query/kernel"] for gradient in GRADIENTS[:2]]
    loop = np.stack([optax_direction([stack[i].reshape(6, 8) for stack in stacks]) for i in range(3)])
    np.testing.assert_allclose(first_query_direction(), loop, rtol=0, atol=1e-5)
    control = optax_direction(stacks).reshape(3, 6, 8)
    assert np.abs(control - loop).max() > 0.1


def test_the_state_is_a_row_and_a_column_for_each_layers_matrix():
    square = shapes_of(jax.eval_shape(compiled(PLAIN).init, as_params(draws(0))).square)
    assert square["blocks/attention/query/kernel/row"] == (3, 6, 1, 1)
    assert square["blocks/attention/query/kernel/column"] == (3, 1, 4, 2)
    assert square["blocks/attention/output/kernel/row"] == (3, 4, 2, 1)
    for path, shape in SHAPES.items():
        fans, layers = fans_of(path), 3 if path.startswith("blocks") else 1
        numbers = [math.prod(own) for name, own in square.items() if f"{name}/".startswith(f"{path}/")]
        assert sum(numbers) == (layers * sum(fans) if fans else math.prod(shape)), path


@jax.jit
def head_update(gradient):
    optimizer = make_optimizer(OptimizerConfig(algorithm=PLAIN, weight_decay=0.0, clip=0.0))
    params = {"head": {"kernel": gradient}}
    return optimizer.update(params, optimizer.init(params), params)[0]["head"]["kernel"]


@pytest.mark.parametrize("size", [0.0, 1e-20, 1e15])
def test_gradients_of_any_size_give_finite_directions(size):
    """Squares of 1e-20 are below float32's range, products of two sums of squares of 1e15 above it."""
    updates = head_update(jnp.full((6, 7), size, jnp.float32))
    assert np.isfinite(updates).all()
    assert np.abs(updates).max() == pytest.approx(float(size > 1e-15), abs=1e-4)
