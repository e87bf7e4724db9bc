"""What the model reads and how it learns: data, optimizer and its schedule, loss."""

import os
from collections.abc import Mapping
from typing import Any

import pydantic

from jaxblock.axes import PARAMETERS
from jaxblock.choices import Choice, resolve
from jaxblock.contracts import check_choice, check_file_name, check_integer, check_number
from jaxblock.training.config.section import Section

SCHEDULES: Mapping[str, Mapping[str, Any]] = {
    "cosine": {"final": 0.0},
    "linear": {"final": 0.0},
    "constant": {},
    "wsd": {"decay": 0.2, "final": 0.0},
    "inverse_sqrt": {},
}
ALGORITHMS: Mapping[str, Mapping[str, Any]] = {
    "adamw": {"beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8},
    "lion": {"beta1": 0.9, "beta2": 0.99},
    "adafactor": {"decay": 0.8, "epsilon": 1e-30, "clipping": 1.0},
    "muon": {
        "momentum": 0.95,
        "nesterov": True,
        "iterations": 5,
        "scale": "rms",
        "beta1": 0.9,
        "beta2": 0.95,
    },
}
SMALLEST = 1e-37
"""Below this, float32 has no normal numbers: a smaller epsilon would be 0."""
ROLES = tuple(dict.fromkeys(rule.role for rule in PARAMETERS))


class DataConfig(Section):
    """What the model reads."""

    path: str | None = None
    """A text or JSONL file, a folder of them, or .bin token shards; for a classifier labelled text or "digits",
    scikit-learn's bundled images. Left out: the standard library's source."""
    mixture: dict[str, float] = pydantic.Field(default={})
    """Instead of path, several of them with weights above 0, as in { books = 0.5, "data/code" = 0.3, web = 0.2 }: each
    has its weight over the sum of all weights as its part of the windows. Language model only."""
    batch: int = 8
    """B, sequences per step."""
    accumulation: int = 1
    """Pieces the batch is split into, one after the other in memory; divides batch. The step is the same."""
    seams: str = "joined"
    """joined: windows run on across documents; separate: neither attention nor loss crosses a seam."""
    separator: int | None = None
    """Token id that marks seams in .bin shards which have no tokens.json. Left out: each shard is one document."""
    validation_tokens: int = 262_144
    """Most tokens held out for evaluation (and at most a tenth of the data); no classifier reads it."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> "DataConfig":
        if self.path == "":
            raise ValueError("data.path is empty; it must name a file or a folder, or be left out")
        if self.path is not None:
            check_file_name("data.path", self.path)
        self._check_mixture()
        check_integer("data.batch", self.batch, least=1)
        check_integer("data.accumulation", self.accumulation, least=1)
        if self.batch % self.accumulation:
            raise ValueError(
                f"data.accumulation is {self.accumulation} and data.batch is {self.batch}; it must divide the batch"
            )
        if self.separator is not None:
            check_integer("data.separator", self.separator, least=0)
        check_integer("data.validation_tokens", self.validation_tokens, least=2)
        check_choice("data.seams", self.seams, ("joined", "separate"))
        return self

    def __hash__(self) -> int:
        """Hash by value, as every section does; a dictionary has no hash of its own."""
        return hash(self.model_dump_json())

    def _check_mixture(self) -> None:
        if self.mixture and self.path is not None:
            raise ValueError(
                f"data.path is {self.path!r} and data.mixture names others; one of them must be left out "
                "(as a flag: --data.path none)"
            )
        names: dict[str, str] = {}
        for name, weight in self.mixture.items():
            if not name:
                raise ValueError("data.mixture has an empty path; each must name a file or a folder")
            check_file_name("data.mixture: a path", name)
            check_number(f"data.mixture: {name}", weight, above=0.0)
            other = names.setdefault(os.path.normpath(name), name)
            if other != name:
                raise ValueError(
                    f"data.mixture names {other} and {name}, which are the same; each must be there once"
                )


class OptimizerConfig(Section):
    """The update and its schedule."""

    learning_rate: float = 2.5e-3
    """Peak learning rate."""
    algorithm: str = "adamw(beta1=0.9, beta2=0.95)"
    """adamw(beta1=0.9, beta2=0.95, epsilon=1e-8), lion(beta1=0.9, beta2=0.99), adafactor(decay=0.8, epsilon=1e-30,
    clipping=1.0), or muon(momentum=0.95, nesterov=True, iterations=5, scale="rms", beta1=0.9, beta2=0.95): the
    betas belong to the AdamW that moves what is no matrix of a block."""
    schedule: str = "cosine(final=0.02)"
    """After the warm-up: cosine(final=0.0), linear(final=0.0), constant, wsd(decay=0.2, final=0.0) or inverse_sqrt;
    final = the last step's fraction of the peak, decay = the falling part, as a fraction of run.steps."""
    warmup: float = 0.05
    """Warm-up as a fraction of run.steps; it rises linearly and the first update is not 0."""
    weight_decay: float = 0.1
    """Decoupled weight decay, times the learning rate; norms, biases and tables are left out, and a
    connection's parameters but those its topology labels."""
    clip: float = 1.0
    """Largest global gradient norm; 0 = no clipping."""
    role_rates: dict[str, float] = pydantic.Field(default={})
    """Factors on the learning rate by role of parameter, as in { embedding = 0.3, norm = 2.0 }; 1 where not named."""
    average: float = 0.0
    """Decay of a moving average of the parameters, evaluated beside them and used for samples; 0 = none is kept."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> "OptimizerConfig":
        self._check_choices()
        check_number("optimizer.learning_rate", self.learning_rate, least=0.0)
        check_number("optimizer.warmup", self.warmup, least=0.0, most=1.0)
        check_number("optimizer.weight_decay", self.weight_decay, least=0.0)
        check_number("optimizer.clip", self.clip, least=0.0)
        check_number("optimizer.average", self.average, least=0.0, below=1.0)
        for role, rate in self.role_rates.items():
            check_choice("optimizer.role_rates: role", role, ROLES)
            check_number(f"optimizer.role_rates: {role}", rate, least=0.0)
        return self

    def __hash__(self) -> int:
        """Hash by value, as every section does; a dictionary has no hash of its own."""
        return hash(self.model_dump_json())

    def _check_choices(self) -> None:
        schedule = self.schedule_choice
        for name in schedule.options:
            check_number(f"optimizer.schedule: {name}", schedule.options[name], least=0.0, most=1.0)
        name, options = self.algorithm_choice
        for decay in ("beta1", "beta2", "momentum", "decay"):
            if decay in options:
                check_number(f"optimizer.algorithm: {decay}", options[decay], least=0.0, below=1.0)
        for positive in ("epsilon", "clipping"):
            if positive in options:
                check_number(f"optimizer.algorithm: {positive}", options[positive], least=SMALLEST)
        if name == "muon":
            check_integer("optimizer.algorithm: iterations", options["iterations"], least=1, most=20)
            check_choice("optimizer.algorithm: scale", options["scale"], ("rms", "spectral"))

    @property
    def schedule_choice(self) -> Choice:
        """`schedule`, parsed, with its defaults filled in."""
        return resolve("optimizer.schedule", self.schedule, SCHEDULES)

    @property
    def algorithm_choice(self) -> Choice:
        """`algorithm`, parsed, with its defaults filled in."""
        return resolve("optimizer.algorithm", self.algorithm, ALGORITHMS)


class LossConfig(Section):
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
