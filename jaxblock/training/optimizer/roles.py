"""What the optimizer does by role of parameter: weight decay, rates of their own, and kernels read as matrices."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax

from jaxblock import axes
from jaxblock.axes import Label
from jaxblock.functional.parametrization import Scaling
from jaxblock.training.config import OptimizerConfig
from jaxblock.types import Params


class MatrixAxes(NamedTuple):
    """Which axes of a kernel are its matrix's rows (inputs) and columns (outputs), counted from the end.

    What stands before them is a batch of matrices: the depth axis of a stacked kernel, and any other.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


HIDDEN_KERNELS: Mapping[str, MatrixAxes] = {
    "query": MatrixAxes((-3,), (-2, -1)),  # [L, D, H, K]
    "key": MatrixAxes((-3,), (-2, -1)),  # [L, D, G, K]
    "value": MatrixAxes((-3,), (-2, -1)),
    "output": MatrixAxes((-3, -2), (-1,)),  # [L, H, K, D]
    "gate": MatrixAxes((-2,), (-1,)),  # [L, D, F], of experts [L, E, D, F]
    "up": MatrixAxes((-2,), (-1,)),
    "down": MatrixAxes((-2,), (-1,)),  # [L, F, D], of experts [L, E, F, D]
}
"""The kernels between stream and stream; Muon orthogonalises these and no others."""
ROUTER = "router"
"""The kernel that scores experts, [L, D, E]: its outputs are no features, so it is read like a head, by AdamW."""
BLOCK_KERNELS = frozenset({*HIDDEN_KERNELS, ROUTER})
"""Kernels of the blocks: what sums over the width, and so has a learning rate and a decay that scale with it."""
MATRICES: Mapping[str, MatrixAxes] = {
    **HIDDEN_KERNELS,
    ROUTER: MatrixAxes((-2,), (-1,)),
    "head": MatrixAxes((-2,), (-1,)),
    "embedding": MatrixAxes((-2,), (-1,)),
    "position": MatrixAxes((-2,), (-1,)),
}
"""Every role whose parameters are matrices; Adafactor factors the second moments of these and no others."""
DECAYED_ROLES = frozenset({*BLOCK_KERNELS, "head"})
"""Dense kernels decay; norms, biases, tables and whatever a residual connection declares do not."""
UNSCALED = Scaling()
"""The factors of a model at its base, or without one: all 1."""


def depth_axes(params: Params) -> Params:
    """Return a tree of ints: 1 where the leading axis is the depth, each slice one layer's own parameter; else 0."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: int("blocks" in axes.path_name(path).split("/")), params
    )


def decay_mask(params: Params, labels: Sequence[Label] = ()) -> Params:
    """Return a tree of booleans: True where weight decay applies, by role unless a label says otherwise."""

    def decays(role: str, label: Label | None) -> bool:
        return role in DECAYED_ROLES if label is None or label.decay is None else label.decay

    return jax.tree.map(decays, axes.roles(params), axes.labelled(params, labels))


def decay_rates(
    params: Params, labels: Sequence[Label] = (), *, weight_decay: float, scaling: Scaling = UNSCALED
) -> Params:
    """Return a tree of floats: each parameter's weight decay, 0 where it has none."""

    def rate(role: str, depth: int, decayed: int) -> float:
        factor = scaling.hidden_decay if depth and role in BLOCK_KERNELS else 1.0
        return weight_decay * factor * decayed

    return jax.tree.map(rate, axes.roles(params), depth_axes(params), decay_mask(params, labels))


def rate_factors(
    params: Params,
    labels: Sequence[Label] = (),
    *,
    role_rates: Mapping[str, float] | None = None,
    scaling: Scaling = UNSCALED,
) -> Params:
    """Return a tree of floats: each parameter's own factor on the learning rate.

    It is its role's, times its label's, times what depth and width put on it.

    Raises:
      ValueError: `role_rates` names a role that no parameter has, or a label matches none.
    """
    rates = role_rates or {}
    roles = axes.roles(params)
    present = set(jax.tree.leaves(roles))
    for role in rates:
        if role not in present:
            raise ValueError(
                f"optimizer.role_rates names {role!r}, and the model has no such parameter; "
                f"its roles: {', '.join(sorted(present))}"
            )

    def factor(role: str, depth: int, label: Label | None) -> float:
        own = rates.get(role, 1.0) * (1.0 if label is None else label.learning_rate)
        if not depth:
            return own
        return own * (scaling.hidden_rate if role in BLOCK_KERNELS else scaling.vector_rate)

    return jax.tree.map(factor, roles, depth_axes(params), axes.labelled(params, labels))


def decay_table(params: Params, labels: Sequence[Label] = ()) -> str:
    """Return what decays and what does not, by role, with numbers of parameters."""
    decayed = jax.tree.leaves(decay_mask(params, labels))
    return (
        f"weight decay on: {_listed(params, decayed)}\n"
        f"no weight decay on: {_listed(params, [not flag for flag in decayed])}"
    )


def optimizer_table(
    config: OptimizerConfig, params: Params, labels: Sequence[Label] = (), *, scaling: Scaling = UNSCALED
) -> str:
    """Return what is done by role, with numbers of parameters: the lines a run's log opens with.

    The decay table; the factors on the learning rate, where one is not 1, then those that depth and width put on
    weight decay and epsilon; with Muon, what is orthogonalised and what AdamW moves.
    """
    lines = [decay_table(params, labels)]
    factors = jax.tree.leaves(rate_factors(params, labels, role_rates=config.role_rates, scaling=scaling))
    for factor in sorted(set(factors) - {1.0}):
        lines.append(f"learning rate times {factor:g} on: {_listed(params, [f == factor for f in factors])}")
    if scaling.hidden_decay != 1.0:
        of_one = decay_rates(params, labels, weight_decay=1.0, scaling=scaling)
        chosen = [x == scaling.hidden_decay for x in jax.tree.leaves(of_one)]
        lines.append(f"weight decay times {scaling.hidden_decay:g} on: {_listed(params, chosen)}")
    if scaling.block_epsilon != 1.0:
        chosen = [bool(depth) for depth in jax.tree.leaves(depth_axes(params))]
        lines.append(f"epsilon times {scaling.block_epsilon:g} on: {_listed(params, chosen)}")
    if config.algorithm_choice.name == "muon":
        orthogonal = [role in HIDDEN_KERNELS for role in jax.tree.leaves(axes.roles(params))]
        lines.append(f"orthogonalised by Muon: {_listed(params, orthogonal)}")
        lines.append(f"moved by AdamW: {_listed(params, [not flag for flag in orthogonal])}")
    return "\n".join(lines)


def _listed(params: Params, chosen: Sequence[bool]) -> str:
    """Return "role count, ..." of the chosen leaves."""
    counts: Counter[str] = Counter()
    for leaf, role, flag in zip(
        jax.tree.leaves(params), jax.tree.leaves(axes.roles(params)), chosen, strict=True
    ):
        if flag:
            counts[role] += leaf.size
    return ", ".join(f"{role} {count:,}" for role, count in sorted(counts.items())) or "nothing"
