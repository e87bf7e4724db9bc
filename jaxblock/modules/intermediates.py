"""Values on the way, for whoever asks for them: `apply(..., mutable=["intermediates"])` returns them, else nothing
is kept and the compiled program does not change."""

import flax.linen as nn

from jaxblock.types import Array

COLLECTION = "intermediates"


def record(module: nn.Module, name: str, value: Array) -> None:
    """Put a value under the module's path in the collection "intermediates", where the caller made it mutable."""
    if module.is_mutable_collection(COLLECTION):
        module.put_variable(COLLECTION, name, value)
