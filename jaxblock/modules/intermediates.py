"""Values on the way, for whoever asks for them: `apply(..., mutable=["intermediates"])` returns them, else nothing
is kept and the compiled program does not change."""

from collections.abc import Mapping
from typing import Any

import flax.linen as nn

from jaxblock.types import Array

COLLECTION = "intermediates"
HEALTH = "attention_health"
"""The collection to which attention gives the numbers of `functional.attention_health`, where the caller made it
mutable: {"blocks": {"attention": {name: float32 [L, H] or [L, G]}}} of a model."""
BRANCHES = (("attention", "feed_forward"), ("token_mixer", "feed_forward"), ("parallel",))
"""The names of a block's branches in the order they run, for each kind of block: `<name>_in`, `<name>_out`."""


def record(module: nn.Module, name: str, value: Array) -> None:
    """Put a value under the module's path in the collection "intermediates", where the caller made it mutable."""
    if module.is_mutable_collection(COLLECTION):
        module.put_variable(COLLECTION, name, value)


def asked_for(module: nn.Module, collection: str) -> bool:
    """Return whether `apply` was called with this collection mutable; not for `init`, where nearly all are."""
    return module.is_mutable_collection(collection) and not module.is_initializing()


def recorded_branches(collected: Mapping[str, Any]) -> tuple[str, ...]:
    """Return which of `BRANCHES` a model recorded.

    Args:
      collected: the collection "intermediates" of a `Decoder` or `Encoder`.

    Raises:
      ValueError: none.
    """
    for branches in BRANCHES:
        if all(f"{name}_out" in collected.get("blocks", {}) for name in branches):
            return branches
    raise ValueError(
        "nothing was collected: pass the intermediates of "
        'model.apply({"params": params}, tokens, mutable=["intermediates"])'
    )
