"""The rules table: on which axis of a mesh each logical axis of a parameter or an activation lies.

| logical axis | of parameters | of activations |
|---|---|---|
| batch | | replica, data, fsdp |
| width | fsdp | whole |
| vocab | tensor | tensor: of the embedding's table, while tokens are looked up |
| heads, kv_heads, hidden | tensor | as the compiler finds best |

Constrained are the embedding, what branches read and write, every stream of several, and the rows of a history.

A parameter without a width (a bias, what a connection mixes with) lies on "fsdp" along its largest axis that "fsdp"
divides and no other axis of the mesh has, its depth left out; without such an axis it is whole on each device of
"fsdp". State of the optimizer that has a parameter's shape lies as the parameter does; what else there is, as a
parameter without a width. Sources: Megatron's split of heads and hidden units (arXiv 1909.08053); ZeRO-3, of
parameters, gradients and optimizer state over the devices that split rows (arXiv 1910.02054).
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxblock.axes import parameter_rule, path_name
from jaxblock.parallel.meshes import FSDP, ROWS, TENSOR
from jaxblock.types import Params

PARAMETER_AXES: Mapping[str, str] = {
    "width": FSDP,
    "vocab": TENSOR,
    "heads": TENSOR,
    "kv_heads": TENSOR,
    "hidden": TENSOR,
}
"""Logical axis of a parameter -> axis of the mesh; others are not split by name."""
ACTIVATION_AXES: Mapping[str, tuple[str, ...]] = {"batch": ROWS, "vocab": (TENSOR,)}
"""Logical axis of an activation -> axes of the mesh; where an activation is constrained, its other axes are whole."""
_FIELDS = {
    "width": "model.width",
    "vocab": "model.vocab_size, padded",
    "heads": "model.heads",
    "kv_heads": "model.kv_heads",
    "hidden": "the width of the feed-forward",
}


@contextlib.contextmanager
def use_mesh(mesh: Mesh) -> Iterator[None]:
    """Within the context, what is traced constrains its activations to the mesh by ACTIVATION_AXES."""
    there = {name: tuple(a for a in axes if a in mesh.axis_names) for name, axes in ACTIVATION_AXES.items()}
    with jax.set_mesh(mesh), nn.logical_axis_rules(list(there.items())):
        yield


def parameter_shardings(params: Params, mesh: Mesh, *, rules: Mapping[str, str] = PARAMETER_AXES) -> Params:
    """Return a tree of the same structure with each parameter's sharding.

    Args:
      params: arrays, or their shapes; every one matches a row of `jaxblock.axes.PARAMETERS`.
      mesh: with any of the axes of `meshes.AXES`.
      rules: the table's second column.

    Raises:
      ValueError: two axes of one parameter on one axis of the mesh; one that its axis of the mesh does not divide.
    """

    def place(path: tuple, leaf: Any) -> NamedSharding:
        name = path_name(path)
        names = parameter_rule(name).axes
        if names is None:
            names = (
                ("depth", *(None,) * (leaf.ndim - 1)) if name.startswith("blocks/") else (None,) * leaf.ndim
            )
        return NamedSharding(mesh, _spec(name, names, leaf.shape, mesh, rules))

    return jax.tree_util.tree_map_with_path(place, params)


def state_shardings(state: Any, params: Params, mesh: Mesh) -> Any:
    """Return a tree of the shardings of a state that holds `params` and trees like it, as an optimizer's moments.

    A leaf whose path ends in a parameter's, and which has its shape, lies as that parameter; a leaf without axes is
    whole everywhere; another, such as a factored moment, lies along its largest axis that "fsdp" divides.

    Raises:
      ValueError: as `parameter_shardings`.
    """
    placed = jax.tree.leaves(parameter_shardings(params, mesh))
    known = {
        path_name(path): (leaf.shape, sharding)
        for (path, leaf), sharding in zip(jax.tree_util.tree_leaves_with_path(params), placed, strict=True)
    }

    def place(path: tuple, leaf: Any) -> NamedSharding:
        parts = path_name(path).split("/")
        tails = ("/".join(parts[start:]) for start in range(len(parts)))
        name = next((tail for tail in tails if tail in known), None)
        if name is not None and known[name][0] == leaf.shape:
            return known[name][1]
        if leaf.ndim == 0 or name is None:
            return NamedSharding(mesh, PartitionSpec())
        names = ("depth" if name.startswith("blocks/") else None, *(None,) * (leaf.ndim - 1))
        return NamedSharding(mesh, _spec(name, names, leaf.shape, mesh, PARAMETER_AXES))

    return jax.tree_util.tree_map_with_path(place, state)


def bytes_per_device(tree: Any) -> int:
    """Return the most bytes of a tree of placed arrays (or of shapes with shardings) that one device holds."""
    sizes = [leaf.sharding.shard_shape(leaf.shape) for leaf in jax.tree.leaves(tree)]
    counts = (_product(shape) for shape in sizes)
    return sum(n * leaf.dtype.itemsize for n, leaf in zip(counts, jax.tree.leaves(tree), strict=True))


def _product(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _spec(
    path: str,
    names: Sequence[str | None],
    shape: Sequence[int],
    mesh: Mesh,
    rules: Mapping[str, str],
) -> PartitionSpec:
    """Return the spec of one parameter; see the module for the rule."""
    if len(names) != len(shape):
        raise ValueError(f"parameter {path!r} has shape {tuple(shape)}; its axes are {tuple(names)}")
    spec: list[str | None] = []
    for name, size in zip(names, shape, strict=True):
        axis = None if name is None else rules.get(name)
        ways = 1 if axis is None else mesh.shape.get(axis, 1)
        if ways == 1:
            spec.append(None)
            continue
        if axis in spec:
            raise ValueError(
                f"parameter {path!r} has axes {tuple(names)}, two of which lie on parallel.{axis}; one of them may"
            )
        if size % ways:
            raise ValueError(
                f"parallel.{axis} is {ways} and {_FIELDS.get(name or '', name)} is {size} (parameter {path!r}); "
                f"parallel.{axis} must divide it"
            )
        spec.append(axis)
    ways = mesh.shape.get(FSDP, 1)
    if ways > 1 and FSDP not in spec:
        free = [
            (size, -place)
            for place, (name, size, axis) in enumerate(zip(names, shape, spec, strict=True))
            if axis is None and name != "depth" and size % ways == 0 and size > 0
        ]
        if free:
            spec[-max(free)[1]] = FSDP
    return PartitionSpec(*spec)
