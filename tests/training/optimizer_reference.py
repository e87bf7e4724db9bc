"""The optimizers written out in numpy, float64, one matrix of one layer at a time, and a tree of every kind of leaf."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxblock.axes import Label, path_name
from jaxblock.training.config import OptimizerConfig
from jaxblock.training.optimizer import make_optimizer

SHAPES: Mapping[str, tuple[int, ...]] = {
    "blocks/attention/query/kernel": (3, 6, 4, 2),  # [L, D, H, K]
    "blocks/attention/key/kernel": (3, 6, 2, 2),  # [L, D, G, K]
    "blocks/attention/output/kernel": (3, 4, 2, 6),  # [L, H, K, D]
    "blocks/attention/query/bias": (3, 4, 2),
    "blocks/attention_connection/norm/scale": (3, 6),
    "blocks/attention_connection/mixing": (3, 2, 5),
    "blocks/feed_forward/up/kernel": (3, 6, 10),  # [L, D, F]
    "blocks/feed_forward/down/kernel": (3, 10, 6),  # [L, F, D]
    "embedding/table": (7, 6),
    "head/kernel": (6, 7),
    "shared/queries": (2, 6),
}
MATRICES: Mapping[str, tuple[int, int]] = {
    "query": (6, 8),
    "key": (6, 4),
    "output": (8, 6),
    "up": (6, 10),
    "down": (10, 6),
}
"""Inputs and outputs of each hidden kernel."""
DECAYED = frozenset({*(f"{name}/kernel" for name in MATRICES), "head/kernel"})
LABELS = (Label("shared/queries", decay=True, learning_rate=0.5),)
Moments = dict[str, Any]
Direction = Callable[[np.ndarray, Moments, int], np.ndarray]
"""(gradient of one layer's parameter, its moments, to be written, number of the update) -> direction."""


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return {"a/b": x} as {"a": {"b": x}}."""
    tree: dict[str, Any] = {}
    for path, leaf in flat.items():
        *groups, last = path.split("/")
        functools.reduce(lambda node, name: node.setdefault(name, {}), groups, tree)[last] = leaf
    return tree


def flattened(tree: Any) -> dict[str, np.ndarray]:
    """Return a tree's leaves by path, as numpy arrays."""
    return {path_name(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def shapes_of(tree: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a tree's leaves by path."""
    return {path_name(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def draws(seed: int, *, spread: bool = False) -> dict[str, np.ndarray]:
    """Return a normal draw for each of SHAPES; with `spread`, layer i is 10^i times as large as layer 0."""
    draw = np.random.default_rng(seed)
    flat = {path: draw.normal(size=shape) for path, shape in SHAPES.items()}
    if spread:
        for path, leaf in flat.items():
            if path.startswith("blocks"):
                leaf *= 10.0 ** np.arange(3).reshape(-1, *[1] * (leaf.ndim - 1))
    return flat


def as_params(flat: Mapping[str, np.ndarray], dtype: Any = jnp.float32) -> Any:
    """Return the tree on the device."""
    return nested({path: jnp.asarray(leaf, dtype) for path, leaf in flat.items()})


GRADIENTS = [draws(seed, spread=True) for seed in (1, 2, 3)]


@functools.cache
def compiled(text: str, *, clip: float = 0.0) -> optax.GradientTransformation:
    """Return an optimizer with decay 0.3, a rate for the head and a label, jitted."""
    config = OptimizerConfig(algorithm=text, clip=clip, weight_decay=0.3, role_rates={"head": 0.25})
    optimizer = make_optimizer(config, LABELS)
    return optax.GradientTransformation(jax.jit(optimizer.init), jax.jit(optimizer.update))


@jax.jit
def moved(params: Any, updates: Any, rate: jax.typing.ArrayLike) -> Any:
    """Apply updates as the training step does."""
    return optax.apply_updates(params, optax.tree.scale(rate, updates))


def three_updates(text: str, *, clip: float = 0.0) -> dict[str, np.ndarray]:
    """Return the parameters after three updates with rates 0.1, 0.2, 0.3."""
    optimizer = compiled(text, clip=clip)
    params = as_params(draws(0))
    state = optimizer.init(params)
    for n, gradient in enumerate(GRADIENTS, start=1):
        updates, state = optimizer.update(as_params(gradient), state, params)
        params = moved(params, updates, 0.1 * n)
    return flattened(params)


def three_references(direction: Callable[[str], Direction], *, clip: float = 0.0) -> dict[str, np.ndarray]:
    """Return the same in float64: every layer of a stacked parameter by itself, and every role spelt out here."""
    params = draws(0)
    moments: dict[tuple[str, int], Moments] = {}
    for n, gradients in enumerate(GRADIENTS, start=1):
        norm = np.sqrt(sum((g**2).sum() for g in gradients.values()))
        shrink = min(1.0, clip / norm) if clip else 1.0
        for path, gradient in gradients.items():
            layered = path.startswith("blocks")
            layers = gradient if layered else gradient[None]
            parts = [
                direction(path)(shrink * g, moments.setdefault((path, i), {}), n)
                for i, g in enumerate(layers)
            ]
            d = np.stack(parts) if layered else parts[0]
            decays = any(path.endswith(end) for end in DECAYED) or path == "shared/queries"
            factor = {"head/kernel": 0.25, "shared/queries": 0.5}.get(path, 1.0)
            params[path] = params[path] - 0.1 * n * factor * (d + 0.3 * decays * params[path])
    return params


def adam_direction(beta1: float, beta2: float, epsilon: float) -> Direction:
    """Return Adam's."""

    def direction(g: np.ndarray, moments: Moments, n: int) -> np.ndarray:
        first = moments["first"] = beta1 * moments.get("first", 0.0) + (1 - beta1) * g
        second = moments["second"] = beta2 * moments.get("second", 0.0) + (1 - beta2) * g**2
        return first / (1 - beta1**n) / (np.sqrt(second / (1 - beta2**n)) + epsilon)

    return direction


def assert_same(found: Mapping[str, np.ndarray], want: Mapping[str, np.ndarray], *, tolerance: float = 1e-5):
    """Every leaf within `tolerance` of its largest entry."""
    assert found.keys() == want.keys()
    for path in want:
        size = float(np.abs(want[path]).max())
        np.testing.assert_allclose(found[path], want[path], rtol=0, atol=tolerance * size, err_msg=path)


def distances(found: Mapping[str, np.ndarray], want: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Return each leaf's largest difference over its largest entry."""
    return {path: float(np.abs(found[path] - want[path]).max() / np.abs(want[path]).max()) for path in want}
