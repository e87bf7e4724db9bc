"""What a run measures along depth while it trains."""

import pydantic

from jaxblock.contracts import check_integer, nearest
from jaxblock.probes import CHEAP, EVERY
from jaxblock.training.config.section import Section

BACKWARD = ("gradient", "update")
"""What the training step knows besides the forward pass: the stream's gradient, the parameters' update."""
STATISTICS = (*EVERY, *BACKWARD)


class ProbeConfig(Section):
    """What is measured of the residual stream, sublayer by sublayer, while a run trains; into probes.jsonl."""

    every: int = 0
    """Steps between measurements: step 1, and every multiple of this; 0 = none. In a sweep: 0, or once at the end."""
    statistics: tuple[str, ...] = CHEAP
    """What is measured: sizes, budget, constant_share, outliers, token_similarity, absorption, effective_rank, branch,
    gradient (of the loss with respect to the stream), update (of the parameters, by role)."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> "ProbeConfig":
        check_integer("probe.every", self.every, least=0)
        asked = list(self.statistics)
        for name in asked:
            if name not in STATISTICS:
                known = f"{', '.join(STATISTICS)}{nearest(name, STATISTICS)}"
                raise ValueError(f"probe.statistics has {name!r}; they must be among {known}")
        if not asked or len(set(asked)) < len(asked):
            raise ValueError(f"probe.statistics is {asked}; it must hold at least one name, and each once")
        if not self.every and self.statistics != CHEAP:
            raise ValueError(
                f"probe.statistics is {asked} and probe.every is 0, so that nothing is measured; probe.every must be "
                f"above 0, or probe.statistics left out ({list(CHEAP)})"
            )
        return self

    @property
    def forward(self) -> tuple[str, ...]:
        """The statistics that a forward pass has."""
        return tuple(name for name in self.statistics if name in EVERY)

    def is_due(self, step: int) -> bool:
        """Whether the step with this number in metrics.jsonl, from 1, is measured."""
        return self.every > 0 and (step == 1 or step % self.every == 0)
