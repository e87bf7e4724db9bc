"""What a training run is, one frozen record per section of the file; the defaults are `configs/quickstart.toml`."""

from typing import Any

import pydantic

from jaxblock.config import ExecutionConfig, ModelConfig
from jaxblock.residual import check_depth_rules, topology
from jaxblock.training.config.learning import (
    ALGORITHMS,
    SCHEDULES,
    DataConfig,
    LossConfig,
    OptimizerConfig,
)
from jaxblock.training.config.parallel import ParallelConfig
from jaxblock.training.config.probe import ProbeConfig
from jaxblock.training.config.run import (
    TASKS,
    CheckpointConfig,
    GuardConfig,
    InitConfig,
    RunConfig,
    SampleConfig,
    WatchConfig,
)
from jaxblock.training.config.section import Section

__all__ = [
    "ALGORITHMS",
    "SCHEDULES",
    "TASKS",
    "CheckpointConfig",
    "DataConfig",
    "GuardConfig",
    "InitConfig",
    "LossConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "ProbeConfig",
    "RunConfig",
    "SampleConfig",
    "TrainConfig",
    "WatchConfig",
]


class TrainConfig(Section):
    """A training run."""

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig(
        vocab_size=256,
        context=128,
        depth=3,
        width=128,
        heads=4,
        kv_heads=1,
        feed_forward="swiglu",
        norm="rms_norm",
        bias=False,
        positions="rope",
        initialization="zero_output",
    )
    execution: ExecutionConfig = ExecutionConfig(remat="dots")
    parallel: ParallelConfig = ParallelConfig()
    init: InitConfig = InitConfig()
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    loss: LossConfig = LossConfig()
    guard: GuardConfig = GuardConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    watch: WatchConfig = WatchConfig()
    probe: ProbeConfig = ProbeConfig()
    sample: SampleConfig = SampleConfig()

    @pydantic.model_validator(mode="after")
    def _check(self) -> "TrainConfig":
        check_depth_rules(self.model, topology(self.model.residual))
        parametrization, algorithm = self.model.parametrization, self.optimizer.algorithm_choice.name
        if self.model.parametrization_choice.name != "standard" and algorithm != "adamw":
            raise ValueError(
                f"optimizer.algorithm is {self.optimizer.algorithm!r} and model.parametrization is "
                f"{parametrization!r}, whose rules are AdamW's; the algorithm must be adamw"
            )
        return self

    def values(self) -> dict[str, Any]:
        """Return plain nested values under the names the file uses, None included."""
        return self.model_dump(by_alias=True)

    def as_dict(self) -> dict[str, Any]:
        """Return plain nested values, None left out: what `config.toml` holds."""
        return self.model_dump(by_alias=True, exclude_none=True)
