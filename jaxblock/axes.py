"""One table for every parameter of a model: its role and the logical name of each of its axes.

Roles decide initial scale, weight decay and labels; axis names decide sharding. Every parameter matches exactly
one row, or the model is refused. Modules know axis names and no mesh: `constrain` does nothing without one.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

import jax
from flax.linen import spmd

from jaxblock.contracts import check_number
from jaxblock.types import Array, Params


class ParameterRule(NamedTuple):
    """One row: the path it matches (whole), the role, and the axis names (None = every axis unnamed)."""

    pattern: str
    role: str
    axes: tuple[str | None, ...] | None


class Label(NamedTuple):
    """What the optimizer does differently with the parameters whose path matches `pattern` (whole)."""

    pattern: str
    decay: bool | None = None
    """Whether weight decay applies; None = as the role says."""
    learning_rate: float = 1.0
    """Factor on the learning rate, decay included."""


def _block(path: str, role: str, *axes: str | None) -> ParameterRule:
    return ParameterRule(f"blocks/{path}", role, ("depth", *axes))


PARAMETERS: tuple[ParameterRule, ...] = (
    ParameterRule("embedding/table", "embedding", ("vocab", "width")),
    ParameterRule("positions/table", "position", ("position", "width")),
    _block("attention/query/kernel", "query", "width", "heads", "head_dim"),
    _block("attention/query/bias", "bias", "heads", "head_dim"),
    _block("attention/key/kernel", "key", "width", "kv_heads", "head_dim"),
    _block("attention/key/bias", "bias", "kv_heads", "head_dim"),
    _block("attention/value/kernel", "value", "width", "kv_heads", "head_dim"),
    _block("attention/value/bias", "bias", "kv_heads", "head_dim"),
    _block("attention/output/kernel", "output", "heads", "head_dim", "width"),
    _block("attention/output/bias", "bias", "width"),
    _block("attention/inner_norm/(scale|bias)", "norm", "width"),
    # Factors of the first block's values and of its own.
    _block("attention/value_mix", "connection", None),
    # A token mixer of positions: an MLP [T, F], [F, T], or two convolutions [rows, columns, D, D].
    _block("token_mixer/mlp_up/kernel", "up", "position", None),
    _block("token_mixer/mlp_up/bias", "bias", None),
    _block("token_mixer/mlp_down/kernel", "down", None, "position"),
    _block("token_mixer/mlp_down/bias", "bias", "position"),
    _block("token_mixer/convolution_in/kernel", "up", None, None, "width", None),
    _block("token_mixer/convolution_in/bias", "bias", None),
    _block("token_mixer/convolution_out/kernel", "down", None, None, None, "width"),
    _block("token_mixer/convolution_out/bias", "bias", "width"),
    _block("token_mixer/inner_norm/(scale|bias)", "norm", None),
    _block("feed_forward/gate/kernel", "gate", "width", "hidden"),
    _block("feed_forward/gate/bias", "bias", "hidden"),
    _block("feed_forward/up/kernel", "up", "width", "hidden"),
    _block("feed_forward/up/bias", "bias", "hidden"),
    _block("feed_forward/down/kernel", "down", "hidden", "width"),
    _block("feed_forward/down/bias", "bias", "width"),
    _block("feed_forward/inner_norm/(scale|bias)", "norm", "hidden"),
    _block("experts/router/kernel", "router", "width", None),
    _block("experts/gate/kernel", "gate", "experts", "width", "hidden"),
    _block("experts/gate/bias", "bias", "experts", "hidden"),
    _block("experts/up/kernel", "up", "experts", "width", "hidden"),
    _block("experts/up/bias", "bias", "experts", "hidden"),
    _block("experts/down/kernel", "down", "experts", "hidden", "width"),
    _block("experts/down/bias", "bias", "experts", "width"),
    _block(
        r"(attention_|token_mixer_|feed_forward_)?connection/[a-z_]*norm[a-z_]*/(scale|bias)", "norm", "width"
    ),
    # Whatever else a residual connection declares: mixing weights, gates, branch scales, nested norms.
    ParameterRule(
        r"blocks/(attention_|token_mixer_|feed_forward_)?connection/(?![a-z_]*norm[a-z_]*/(scale|bias)$).*",
        "connection",
        None,
    ),
    ParameterRule("blocks/after_block/.*", "connection", None),
    ParameterRule("(shared|close)/.*", "connection", None),
    ParameterRule("final_norm/(scale|bias)", "norm", ("width",)),
    ParameterRule("head/kernel", "head", ("width", "vocab")),
    ParameterRule("classifier/kernel", "head", ("width", "classes")),
    ParameterRule("classifier/bias", "bias", ("classes",)),
)


def parameter_rule(path: str) -> ParameterRule:
    """Return the one row that matches `path` ("blocks/attention/query/kernel").

    Raises:
      ValueError: no row, or more than one, matches.
    """
    rows = [rule for rule in PARAMETERS if re.fullmatch(rule.pattern, path)]
    if len(rows) != 1:
        found = ", ".join(rule.pattern for rule in rows) or "none"
        raise ValueError(
            f"parameter {path!r} must match exactly one row of jaxblock.axes.PARAMETERS; it matches: {found}"
        )
    return rows[0]


def path_name(path: tuple) -> str:
    """Join a pytree key path with slashes: (DictKey("blocks"), DictKey("attention")) -> "blocks/attention"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def roles(params: Params) -> Params:
    """Return a tree of the same structure that holds each parameter's role."""
    return jax.tree_util.tree_map_with_path(lambda path, _: parameter_rule(path_name(path)).role, params)


def labelled(params: Params, labels: Sequence[Label]) -> Params:
    """Return a tree of the same structure that holds each parameter's label; None where it has none.

    Raises:
      ValueError: two labels match one parameter, or a label matches none.
    """
    names = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    for label in labels:
        check_number(f"learning_rate of label {label.pattern!r}", label.learning_rate, least=0.0)
        if not any(re.fullmatch(label.pattern, name) for name in names):
            raise ValueError(
                f"label {label.pattern!r} matches no parameter; the parameters: {', '.join(names)}"
            )

    def find(path: tuple, _: Array) -> Label | None:
        found = [label for label in labels if re.fullmatch(label.pattern, path_name(path))]
        if len(found) > 1:
            raise ValueError(f"parameter {path_name(path)!r} has {len(found)} labels; it may have one")
        return found[0] if found else None

    return jax.tree_util.tree_map_with_path(find, params)


STREAM_AXES = ("batch", "position", "width")
"""Of the residual stream [B, T, D], of what a branch reads and writes, and of each row of a history."""


def constrain(x: Array, *names: str | None) -> Array:
    """Constrain an activation's sharding by logical axis names; returns `x` itself where there is no mesh."""
    return spmd.with_logical_constraint(x, names)
