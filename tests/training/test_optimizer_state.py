"""The optimizer: dtypes in both modes of JAX, one rounding, buffers apart, rates as values, what is refused."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxblock.training.config import ALGORITHMS, OptimizerConfig
from jaxblock.training.optimizer import make_optimizer
from tests.small_training import bigram_params
from tests.training.optimizer_reference import GRADIENTS, as_params, assert_same, draws, flattened, moved

NAMES = tuple(ALGORITHMS)
PATHS = (
    "blocks/attention/query/kernel",
    "blocks/attention_connection/norm/scale",
    "blocks/attention_connection/mixing",
    "embedding/table",
)


@functools.cache
def transform(name: str) -> optax.GradientTransformation:
    """Return an optimizer with a clip, decay and a role's rate, jitted."""
    config = OptimizerConfig(algorithm=name, clip=5.0, role_rates={"norm": 0.5})
    optimizer = make_optimizer(config)
    return optax.GradientTransformation(jax.jit(optimizer.init), jax.jit(optimizer.update))


def mixed(draw: Mapping[str, np.ndarray]) -> Any:
    """Return one kernel in bfloat16, and a norm, a table and a connection's parameter in float32."""
    half = as_params({path: draw[path] for path in PATHS}, jnp.bfloat16)
    whole = as_params({path: draw[path] for path in PATHS})
    return jax.tree.map(lambda h, w: h if h.ndim == 4 else w, half, whole)


class Updated(NamedTuple):
    """What stands around one update."""

    params: Any
    first: Any
    second: Any
    updates: Any
    after: Any


@functools.cache
def updated(name: str, *, wide_mode: bool = False) -> Updated:
    """Return one update of the mixed tree with rate 0.1, in 64-bit mode where asked."""
    with jax.enable_x64(wide_mode):
        params, optimizer = mixed(draws(0)), transform(name)
        first = optimizer.init(params)
        updates, second = optimizer.update(mixed(GRADIENTS[0]), first, params)
        return Updated(params, first, second, updates, moved(params, updates, jnp.float32(0.1)))


def dtypes(tree) -> list[str]:
    return [leaf.dtype.name for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize("wide_mode", [False, True], ids=["32-bit", "64-bit"])
@pytest.mark.parametrize("name", NAMES)
def test_b36_b61_parameters_keep_their_dtypes_and_moments_are_float32(name, wide_mode):
    """Of bfloat16 and float32 parameters and gradients, in both modes of JAX."""
    params, first, second, updates, after = updated(name, wide_mode=wide_mode)
    assert dtypes(after) == dtypes(params)
    assert set(dtypes(params)) == {"bfloat16", "float32"}
    assert set(dtypes(updates)) == {"float32"}
    assert dtypes(second) == dtypes(first)
    assert set(dtypes(first)) == {"float32", "int32"}
    assert jax.tree.structure(second) == jax.tree.structure(first)


@pytest.mark.parametrize("name", NAMES)
def test_b36_64_bit_mode_changes_no_value(name):
    narrow, wide = (updated(name, wide_mode=mode).updates for mode in (False, True))
    assert_same(flattened(wide), flattened(narrow))


@pytest.mark.parametrize("name", NAMES)
def test_b61_bfloat16_gradients_are_squared_and_summed_in_float32(name):
    """Two updates of bfloat16 values equal those of the same values held in float32."""
    optimizer = transform(name)

    def second(tree: Callable) -> dict[str, np.ndarray]:
        params, state = tree(draws(0)), updated(name).first
        for gradient in GRADIENTS[:2]:
            updates, state = optimizer.update(tree(gradient), state, params)
        return flattened(updates)

    def widened(draw: Mapping[str, np.ndarray]) -> Any:
        return jax.tree.map(lambda x: jnp.asarray(np.asarray(x, np.float32)), mixed(draw))

    assert_same(second(mixed), second(widened), tolerance=2e-6)


def test_a_bfloat16_parameter_is_rounded_once():
    params, _, _, updates, after = updated("adamw")
    for path, x in flattened(params).items():
        step = np.float32(0.1) * flattened(updates)[path]
        np.testing.assert_array_equal(flattened(after)[path], (np.float32(x) + step).astype(x.dtype))
    path = "blocks/attention/query/kernel"
    twice = flattened(params)[path] + flattened(jax.tree.map(jnp.bfloat16, updates))[path] * jnp.bfloat16(0.1)
    assert (twice != flattened(after)[path]).any()


@pytest.mark.parametrize("name", NAMES)
def test_b106_nothing_returned_shares_a_buffer(name):
    """Else donating one would delete the other: parameters, gradients, states and updates are all arrays apart."""
    leaves = jax.tree.leaves(updated(name))
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)


@pytest.mark.parametrize("name", NAMES)
def test_b106_parameters_and_state_are_donated_step_after_step(name):
    optimizer = transform(name)
    params, gradients = mixed(draws(0)), mixed(GRADIENTS[0])

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state):
        updates, state = optimizer.update(gradients, state, params)
        return moved(params, updates, 0.1), state

    state = optimizer.init(params)
    for _ in range(2):
        old, (params, state) = params, step(params, state)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old))  # else nothing was tried
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((params, state)))


def test_rates_are_vmapped():
    """A sweep over learning rates is one program: two updates with two rates at once equal one after the other."""
    optimizer = transform("adamw")

    def run(rate):
        params = mixed(draws(0))
        state = optimizer.init(params)
        for _ in range(2):
            updates, state = optimizer.update(params, state, params)
            params = moved(params, updates, rate)
        return params

    rates_2 = jnp.asarray([0.1, 0.4], jnp.float32)
    both = jax.jit(jax.vmap(run))(rates_2)
    for i, alone in enumerate(map(flattened, map(jax.jit(run), rates_2))):
        assert_same({path: leaf[i] for path, leaf in flattened(both).items()}, alone)
    assert not np.allclose(*flattened(both)["embedding/table"], atol=0.01)


# What is refused -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["int32", "bool", "uint8"])
def test_b62_an_integer_among_the_parameters_is_refused(dtype):
    params = {"embedding": {"table": jnp.ones((2, 2))}, "head": {"kernel": jnp.ones((2, 2), dtype)}}
    optimizer = make_optimizer(OptimizerConfig())
    message = (
        rf"'head/kernel' has dtype {dtype}; .* floating-point arrays only: keep counters and buffers beside"
    )
    with pytest.raises(ValueError, match=message):
        optimizer.init(params)
    gradients = jax.tree.map(lambda x: jnp.ones(x.shape), params)
    with pytest.raises(ValueError, match=message):
        optimizer.update(gradients, (), params)


def test_b62_integers_beside_the_parameters_are_left_alone():
    """A state that holds a step counter and an int buffer next to the parameters, differentiated in the latter."""
    optimizer = transform("adamw")
    params = mixed(draws(0))
    state = {"step": jnp.int32(7), "buffer": jnp.arange(3), "moments": optimizer.init(params)}

    @jax.jit
    def step(params, state):
        loss = lambda params: optax.tree.norm(params) * state["buffer"][2]  # noqa: E731
        updates, moments = optimizer.update(jax.grad(loss)(params), state["moments"], params)
        return moved(params, updates, 0.1), {**state, "step": state["step"] + 1, "moments": moments}

    after, new = step(params, state)
    assert (new["step"].dtype, int(new["step"])) == (jnp.int32, 8)
    np.testing.assert_array_equal(new["buffer"], [0, 1, 2])
    assert new["buffer"].dtype == state["buffer"].dtype
    assert dtypes(after) == dtypes(params)


def test_an_update_without_parameters_is_refused():
    params = bigram_params()
    optimizer = make_optimizer(OptimizerConfig())
    with pytest.raises(ValueError, match="needs the parameters"):
        optimizer.update(params, optimizer.init(params))
