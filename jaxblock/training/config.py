"""What a training run is, one frozen record per section of the file; the defaults are `configs/quickstart.toml`."""

from collections.abc import Mapping
from typing import Any

import pydantic

from jaxblock.config import Choice, ExecutionConfig, ModelConfig, resolve
from jaxblock.contracts import check_choice, check_integer, check_number
from jaxblock.residual import topology

SCHEDULES: Mapping[str, Mapping[str, Any]] = {
    "cosine": {"final": 0.0},
    "linear": {"final": 0.0},
    "constant": {},
}


class _Section(pydantic.BaseModel):
    """Frozen and strict: an unknown key, or 3.0 where 3 is meant, is refused."""

    model_config = pydantic.ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True
    )


class RunConfig(_Section):
    """Where a run lives, how long it is, what it writes when."""

    name: str = "quickstart"
    """Names the run's folder, runs/NAME-TIME, when dir is left out."""
    dir: str | None = None
    """The run's folder; it must not exist."""
    steps: int = 2300
    """Number of optimizer steps."""
    seed: int = 0
    """Decides initial parameters, order of the data, dropout and the sample."""
    log_every: int = 20
    """Steps between progress lines; metrics.jsonl has every step."""
    evaluate_every: int = 1150
    """Steps between evaluations of the whole validation slice; the last step is always evaluated."""
    checkpoint_every: int = 500
    """Steps between checkpoints; the last step is always saved."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> "RunConfig":
        for name in ("steps", "log_every", "evaluate_every", "checkpoint_every"):
            check_integer(f"run.{name}", getattr(self, name), least=1)
        check_integer("run.seed", self.seed, least=0, most=2**32 - 1)
        if not self.name or "/" in self.name or "\\" in self.name or self.name.startswith("."):
            raise ValueError(f"run.name is {self.name!r}; it must be a plain file name")
        return self


class DataConfig(_Section):
    """What the model reads."""

    path: str | None = None
    """A text or JSONL file, a folder of them, or .bin token shards. Left out: the standard library's source."""
    batch: int = 8
    """B, sequences per step."""
    seams: str = "joined"
    """joined: windows run on across documents; separate: neither attention nor loss crosses a seam."""
    validation_tokens: int = 262_144
    """Most tokens held out for evaluation (and at most a tenth of the data)."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> "DataConfig":
        if self.path == "":
            raise ValueError("data.path is empty; it must name a file or a folder, or be left out")
        check_integer("data.batch", self.batch, least=1)
        check_integer("data.validation_tokens", self.validation_tokens, least=2)
        check_choice("data.seams", self.seams, ("joined", "separate"))
        return self


class OptimizerConfig(_Section):
    """AdamW and its schedule."""

    learning_rate: float = 2.5e-3
    """Peak learning rate."""
    schedule: str = "cosine(final=0.02)"
    """After the warm-up: cosine(final=0.0), linear(final=0.0) or constant; final = last step's fraction of the peak."""
    warmup: float = 0.05
    """Warm-up as a fraction of run.steps; it rises linearly and the first update is not 0."""
    weight_decay: float = 0.1
    """Decoupled weight decay, times the learning rate; norms, biases, tables and connections are left out."""
    beta1: float = 0.9
    """Decay of the gradient's running mean."""
    beta2: float = 0.95
    """Decay of the squared gradient's running mean."""
    epsilon: float = 1e-8
    """Added to the root of the second moment."""
    clip: float = 1.0
    """Largest global gradient norm; 0 = no clipping."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> "OptimizerConfig":
        schedule = self.schedule_choice
        if schedule.options:
            check_number("optimizer.schedule: final", schedule.options["final"], least=0.0, most=1.0)
        check_number("optimizer.learning_rate", self.learning_rate, least=0.0)
        check_number("optimizer.warmup", self.warmup, least=0.0, most=1.0)
        check_number("optimizer.weight_decay", self.weight_decay, least=0.0)
        check_number("optimizer.beta1", self.beta1, least=0.0, below=1.0)
        check_number("optimizer.beta2", self.beta2, least=0.0, below=1.0)
        check_number("optimizer.epsilon", self.epsilon, above=0.0)
        check_number("optimizer.clip", self.clip, least=0.0)
        return self

    @property
    def schedule_choice(self) -> Choice:
        """`schedule`, parsed, with its defaults filled in."""
        return resolve("optimizer.schedule", self.schedule, SCHEDULES)


class LossConfig(_Section):
    """What is minimised beside the plain cross entropy; evaluation never includes it."""

    z_loss: float = 0.0
    """Coefficient of the squared log normalizer."""
    label_smoothing: float = 0.0
    """Probability spread evenly over the vocabulary."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> "LossConfig":
        check_number("loss.z_loss", self.z_loss, least=0.0)
        check_number("loss.label_smoothing", self.label_smoothing, least=0.0, below=1.0)
        return self


class SampleConfig(_Section):
    """The continuation drawn at the end of a run."""

    prompt: str | None = None
    """Text to continue, or token ids separated by spaces for token shards. Left out: the validation slice's start."""
    length: int = 400
    """Tokens to draw."""
    temperature: float = 0.8
    """0 = greedy."""
    top_k: int | None = None
    """Draw among the k likeliest tokens. Left out: among all."""
    top_p: float | None = None
    """Draw among the likeliest tokens that hold this probability. Left out: among all."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> "SampleConfig":
        if self.prompt == "":
            raise ValueError("sample.prompt is empty; it must hold at least one character")
        check_integer("sample.length", self.length, least=1)
        check_number("sample.temperature", self.temperature, least=0.0)
        if self.top_k is not None:
            check_integer("sample.top_k", self.top_k, least=1)
        if self.top_p is not None:
            check_number("sample.top_p", self.top_p, above=0.0, most=1.0)
        return self


class TrainConfig(_Section):
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
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    loss: LossConfig = LossConfig()
    sample: SampleConfig = SampleConfig()

    @pydantic.model_validator(mode="after")
    def _check(self) -> "TrainConfig":
        topology(self.model.residual)
        return self

    def as_dict(self) -> dict[str, Any]:
        """Return plain nested values, None left out: what `config.toml` holds."""
        return self.model_dump(exclude_none=True)
