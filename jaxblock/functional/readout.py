"""A model's logits as a product that need not be made: factor * (states matrix), the states apart from the matrix."""

import dataclasses
import functools

import jax

from jaxblock.contracts import check_choice
from jaxblock.functional.dense import logits, unembed
from jaxblock.functional.parametrization import scaled
from jaxblock.types import Array

LAYOUTS = {"table": 0, "kernel": 1}
"""The axis of the vocabulary: a table [V, D] is the embedding's, tied; a kernel [D, V] is a head's own."""


@functools.partial(jax.tree_util.register_dataclass, data_fields=["matrix"], meta_fields=["layout", "factor"])
@dataclasses.dataclass(frozen=True)
class Readout:
    """What makes logits of states; a pytree with one leaf. Raises ValueError for a layout of another name."""

    matrix: Array
    """[V, D] or [D, V], as `layout` says, in any floating dtype."""
    layout: str = "table"
    """table or kernel."""
    factor: float = 1.0
    """On the logits: `Scaling.logits`."""

    def __post_init__(self) -> None:
        check_choice("layout", self.layout, tuple(LAYOUTS))

    @property
    def columns(self) -> int:
        """V, the width of the logits, rows that pad a table included."""
        return self.matrix.shape[LAYOUTS[self.layout]]


def read_out(x: Array, readout: Readout) -> Array:
    """Return the logits, [..., D] -> [..., V]; dtypes and errors as in `dense.logits` and `dense.unembed`."""
    product = unembed if readout.layout == "table" else logits
    return scaled(product(x, readout.matrix), readout.factor)
