"""Where in the stack a connection stands, for rules that need to know: its block, its sublayer, what is shared."""

from typing import Any, NamedTuple

import flax.linen as nn

from jaxblock.types import Array, Params

COLLECTION = "place"
"""The Flax collection that the stack gives to a block's `apply` beside its parameters."""


class Place(NamedTuple):
    """Scanned with the stack (block, sublayer) or closed over by it (shared); never carried."""

    block: Array
    """Number of the block, from 0: int32 scalar."""
    sublayer: Array
    """Number of the sublayer, from 0: int32 scalar."""
    shared: Params
    """What `Topology.shared` made for the whole stack; None without it."""


def place(module: nn.Module) -> Place:
    """Return where a connection, or `after_block`, stands: call it inside its `__call__`.

    Outside a stack, pass `{"params": ..., "place": {"block": i, "sublayer": j, "shared": ...}}` to `apply`.
    """
    scope = module.scope
    if scope is None or not scope.root.has_variable(COLLECTION, "block"):
        raise ValueError(
            f"{type(module).__name__} asks for its place in the stack and none was given; outside a stack pass "
            'the collection "place" with "block", "sublayer" and, where the topology has it, "shared" to apply'
        )
    root = scope.root
    block, sublayer = root.get_variable(COLLECTION, "block"), root.get_variable(COLLECTION, "sublayer")
    if module.path and module.path[0].startswith("feed_forward"):
        sublayer = sublayer + 1
    return Place(block, sublayer, root.get_variable(COLLECTION, "shared", None))


def is_first(module: nn.Module) -> bool:
    """Return whether a connection is its block's first: the only one with wiring = "parallel"."""
    return not (module.name or "").startswith("feed_forward")


def told_ahead(module: nn.Module) -> Any:
    """Return what `Groups.before` made for this connection's sublayer; None where there is nothing."""
    scope = module.scope
    if scope is None or not scope.root.has_variable(COLLECTION, "ahead"):
        return None
    return scope.root.get_variable(COLLECTION, "ahead")[module.path[0]]
