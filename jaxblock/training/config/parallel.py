"""How a run lies on its devices."""

import pydantic

from jaxblock.contracts import check_choice, check_integer
from jaxblock.training.config.section import Section


class ParallelConfig(Section):
    """How a run lies on its devices, all processes' together: their number is the product of the four sizes. One
    device's numbers, whatever is chosen, beyond round-off; dropout's draws included."""

    replica: int = 1
    """Copies of everything across a slow network, as slices of a pod; each takes its rows of the batch."""
    data: int | None = None
    """Copies of parameters, each with its rows of the batch. Left out: all devices the other sizes leave."""
    fsdp: int = 1
    """Devices over which rows of the batch, parameters and the optimizer's state are split, the latter by width."""
    tensor: int = 1
    """Devices over which heads, hidden units and the vocabulary are split; it divides each of them."""
    form: str = "jit"
    """jit: the compiler splits the step over the mesh; pmap: rows only, one process, sums written out."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> "ParallelConfig":
        for name in ("replica", "fsdp", "tensor"):
            check_integer(f"parallel.{name}", getattr(self, name), least=1)
        if self.data is not None:
            check_integer("parallel.data", self.data, least=1)
        check_choice("parallel.form", self.form, ("jit", "pmap"))
        if self.form == "pmap":
            for name in ("replica", "fsdp", "tensor"):
                if getattr(self, name) > 1:
                    raise ValueError(
                        f'parallel.form is "pmap", which splits rows alone, and parallel.{name} is '
                        f"{getattr(self, name)}; it must be 1, or the form jit"
                    )
        return self
