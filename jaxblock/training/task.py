"""What a run learns, as one record: the loop knows batches, a loss and numbers to report, and no task by name."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from jaxblock.training.objectives import Loss, ProbedLoss
from jaxblock.types import Array, Params


class Batches(Protocol):
    """The endless training batches: `batches[number]` is a pure function of the run's seed and the number."""

    batch: int
    """B."""

    def __getitem__(self, step: int, /) -> Any: ...

    def rows(self, step: int, rows: Sequence[int], /) -> Any:
        """Return some rows of `self[step]`, without reading the others: what one process takes."""
        ...


class Validation(Protocol):
    """The validation batches, in which every target stands once; all have one shape, whoever reads them."""

    batch: int
    """B."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Any]: ...
    def __getitem__(self, number: int, /) -> Any: ...

    def rows(self, number: int, rows: Sequence[int], /) -> Any:
        """Return some rows of `self[number]`, without reading the others: what one process takes."""
        ...


class Baseline(NamedTuple):
    """What a model has to beat."""

    loss: float
    """Nats per target on the validation data."""
    words: str
    """What it is, as in "a trigram model"."""


class Score(NamedTuple):
    """Sums over a batch of evaluation; add them, then divide by `weight`."""

    nats: Array
    """Cross entropy of the real targets, without smoothing and z-loss."""
    weight: Array
    """Number of real targets."""
    extra: Mapping[str, Array]
    """Other sums by name, as "correct" of a classifier: reported per target."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Task:
    """Everything a run needs to know about what it learns."""

    model: Any
    """Has `labels` and `project`, as `Decoder` has."""
    init: Callable[[Array], Params]
    """Initial parameters from a key."""
    loss: Loss
    """What is minimised."""
    probed: Callable[[Sequence[str]], ProbedLoss]
    """Names of statistics -> the same loss with them taken of every sublayer (see `jaxblock.probes.StreamProbe`)."""
    score: Callable[[Params, Any], Score]
    """What is evaluated."""
    batches: Callable[[int], Batches]
    """A seed -> the training batches of a run with it."""
    train: Batches
    """The training batches of this run's seed."""
    validation: Validation
    facts: dict[str, Any]
    """What the run records about its data in the first row of metrics.jsonl; `corpus_fingerprint` names them."""
    files: dict[str, str]
    """Texts the run keeps in its folder, by name: what is needed later to read its checkpoints' tokens."""
    words: tuple[str, ...]
    """Sentences about the data."""
    baseline: Callable[[], Baseline]
    finish: Callable[[Params, Array], str]
    """(parameters, key) -> the text of sample.txt."""
    forward: Callable[[Params, Any, Array | None], tuple[Array, dict[str, Any]]]
    """(params, batch, dropout key) -> (logits, intermediates): what a bad step is searched with."""
    parts: Mapping[str, range] = field(default_factory=dict)
    """Name -> the numbers of the validation batches that hold that source of a mixture: evaluated on its own, too."""
    unit: str = "tokens"
    """What its targets are called."""
    utilisation: Callable[[float], float | None] = lambda per_second: None
    """Targets per second of one device -> its model FLOPs utilisation; None where the chip is not known."""


def evaluate(
    score: Callable[[Params, Any], Score],
    params: Params,
    batches: Iterable[Any],
    *,
    parts: Mapping[str, range] | None = None,
) -> dict[str, float]:
    """Return the mean loss, and every extra, per target over all batches, each target weighted once.

    Of each of `parts` (name -> numbers of its batches) the loss is also there, as "loss/NAME".
    """
    scores = [jax.device_get(score(params, batch)) for batch in batches]
    means = {"loss": _mean([s.nats for s in scores], scores)}
    for name in scores[0].extra:
        means[name] = _mean([s.extra[name] for s in scores], scores)
    for name, numbers in (parts or {}).items():
        own = scores[numbers.start : numbers.stop]
        means[f"loss/{name}"] = _mean([s.nats for s in own], own)
    return means


def _mean(sums: Sequence[Array], scores: Sequence[Score]) -> float:
    """Return a sum over batches per target."""
    return float(np.sum(np.asarray(sums, np.float64)) / np.sum([np.float64(s.weight) for s in scores]))
