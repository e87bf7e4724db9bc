"""A classifier as a task: labelled examples, mean cross entropy over real rows, accuracy, the largest class to beat.

Examples are texts, a byte a token, or images, a gray level a token (`data.path = "digits"`).
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxblock.functional.losses import CrossEntropy, LossOptions, cross_entropy
from jaxblock.models.classifier import Classifier, predict
from jaxblock.models.observation import OBSERVED
from jaxblock.modules.experts import ROUTING
from jaxblock.training.config import TrainConfig
from jaxblock.training.digit_corpus import LEVELS, load_digits
from jaxblock.training.digit_corpus import NAME as DIGITS
from jaxblock.training.function_corpus import load_functions
from jaxblock.training.labelled import (
    LabelledBatch,
    LabelledBatches,
    LabelledCorpus,
    LabelledExamples,
    LabelledValidation,
    load_labelled,
    pad_examples,
)
from jaxblock.training.objectives import ProbedLoss, add_balance, balance_weight, collections_of, observing
from jaxblock.training.task import Baseline, Score, Task
from jaxblock.types import Array, Params

SHOWN = 4
"""Held-out examples in sample.txt."""
PLAIN = LossOptions()
"""Neither smoothing nor z-loss; every column of the logits is a class."""


class Majority(NamedTuple):
    """How a predictor that reads no text does on the validation examples."""

    loss: float
    """Nats per example."""
    accuracy: float
    """Fraction of examples that are of the largest class."""


def classifier_task(config: TrainConfig) -> Task:
    """Load the examples and return the task.

    Without `data.path` they are the functions of the standard library, with "digits" scikit-learn's images, else the
    texts of a `.jsonl` file.

    Raises:
      ValueError: the data do not fit the config.
    """
    corpus = _load(config)
    pooling = config.run.task_choice.options["pooling"]
    model = Classifier(config.model, config.execution, classes=len(corpus.names), pooling=pooling)
    options = LossOptions(z_loss=config.loss.z_loss, label_smoothing=config.loss.label_smoothing)
    balance = balance_weight(config.model)
    majority = majority_baseline(corpus.train, corpus.validation)
    shown = _shown(corpus, config)
    shape = {"context": config.model.context, "batch": config.data.batch}

    def probed(statistics: Sequence[str]) -> ProbedLoss:
        given, seen = {"options": options, "balance": balance}, observing(model, statistics)
        return lambda variables, batch, key: observed_classifier_loss(
            seen, variables, batch, dropout_key=key, **given
        )

    def forward(params: Params, batch: LabelledBatch, key: Array | None) -> tuple[Array, dict[str, Any]]:
        logits_BC, collected = _apply(model, {"params": params}, batch, key, mutable=["intermediates"])
        return logits_BC, dict(collected["intermediates"])

    return Task(
        model=model,
        unit="examples",
        init=lambda key: model.init(key, jnp.zeros((1, config.model.context), jnp.int32))["params"],
        loss=lambda params, batch, key: classifier_loss(
            model, params, batch, options=options, dropout_key=key, balance=balance
        ),
        probed=probed,
        score=lambda params, batch: classifier_score(model, params, batch),
        batches=lambda seed: LabelledBatches(corpus.train, seed=seed, **shape),
        train=LabelledBatches(corpus.train, seed=config.run.seed, **shape),
        validation=LabelledValidation(corpus.validation, **shape),
        facts={
            "corpus": corpus.source,
            "corpus_fingerprint": corpus.fingerprint,
            "bytes_per_token": None,
            "classes": list(corpus.names),
        },
        files={},
        words=(corpus.source, *corpus.notes),
        baseline=lambda: Baseline(majority.loss, f"class frequencies (accuracy {majority.accuracy:.3f})"),
        finish=lambda params, key: _describe(
            model, params, shown, show=corpus.show, known=config.sample.prompt is None
        ),
        forward=forward,
    )


def classifier_loss(
    model: Classifier,
    params: Params,
    batch: LabelledBatch,
    *,
    options: LossOptions = PLAIN,
    dropout_key: Array | None = None,
    balance: float = 0.0,
) -> CrossEntropy:
    """Return the mean cross entropy over real rows (`weight` of them); dropout is on exactly when a key is passed.

    `options.vocab_size` stays None: every column of the logits is a class. `balance` is the weight of the experts'
    load-balance loss, which a model without experts does not have.
    """
    return observed_classifier_loss(
        model, {"params": params}, batch, options=options, dropout_key=dropout_key, balance=balance
    )[0]


def observed_classifier_loss(
    model: Classifier,
    variables: Mapping[str, Any],
    batch: LabelledBatch,
    *,
    options: LossOptions,
    dropout_key: Array | None,
    balance: float,
) -> tuple[CrossEntropy, Mapping[str, Any]]:
    """Return the loss as `classifier_loss` does, and what the model's observer saw: {} where it has none."""
    mutable = collections_of(model, balance)
    logits_BC, collected = _apply(model, variables, batch, dropout_key, mutable=mutable)
    result = _row_loss(logits_BC, batch, options)
    if balance:
        result = add_balance(result, collected[ROUTING], jnp.asarray(batch.real_B), balance=balance)
    return result, collected.get(OBSERVED, {})


def classifier_score(model: Classifier, params: Params, batch: LabelledBatch) -> Score:
    """Return a batch's sums: nats, real rows, and "accuracy", the real rows whose most probable class is theirs.

    Without dropout, smoothing and z-loss.
    """
    logits_BC, _ = _apply(model, {"params": params}, batch, None)
    result = _row_loss(logits_BC, batch, PLAIN)
    hit_B = jnp.argmax(logits_BC, axis=-1) == jnp.asarray(batch.labels_B)
    hits = jnp.sum(hit_B & jnp.asarray(batch.real_B)).astype(jnp.float32)
    return Score(result.nats, result.weight, {"accuracy": hits})


def majority_baseline(train: LabelledExamples, validation: LabelledExamples) -> Majority:
    """Return how the training classes alone predict, the mark to beat.

    The class with most training examples (the first of equals) is always said; class c has probability
    (n_c + 1) / (n + C), so that one without a training example still has some.
    """
    counts_C = np.bincount(train.labels_E, minlength=len(train.names))
    p_C = (counts_C + 1.0) / (len(train) + len(train.names))
    return Majority(
        loss=float(np.mean(-np.log(p_C[validation.labels_E]))),
        accuracy=float(np.mean(validation.labels_E == np.argmax(counts_C))),
    )


def _load(config: TrainConfig) -> LabelledCorpus:
    vocab_size, data = config.model.vocab_size, config.data
    levels, words = (LEVELS, "gray levels") if data.path == DIGITS else (256, "bytes")
    if vocab_size < levels:
        raise ValueError(f"model.vocab_size is {vocab_size}; it must be at least {levels} for {words}")
    unread = (
        ("seams", data.seams, "joined"),
        ("separator", data.separator, None),
        ("mixture", data.mixture, {}),
    )
    for name, value, default in unread:
        if value != default:
            raise ValueError(f"data.{name} is {value!r}; a classifier's rows are one text each, leave it out")
    if config.execution.loss != "whole":
        raise ValueError(
            f"execution.loss is {config.execution.loss!r}; a classifier has no vocabulary, leave it out"
        )
    if data.path is None:
        return load_functions(context=config.model.context)
    if data.path == DIGITS:
        return load_digits(context=config.model.context)
    return load_labelled(Path(data.path), context=config.model.context)


def _apply(
    model: Classifier,
    variables: Mapping[str, Any],
    batch: LabelledBatch,
    key: Array | None,
    *,
    mutable: Sequence[str] = (),
) -> tuple[Array, Any]:
    """Return (logits [B, C], what was collected)."""
    rngs = {} if key is None else {"dropout": key}
    inputs_BT, valid_BT = jnp.asarray(batch.inputs_BT), jnp.asarray(batch.valid_BT)
    made = model.apply(variables, inputs_BT, valid_BT=valid_BT, rngs=rngs, mutable=list(mutable))
    return cast(tuple[Array, Any], made)


def _row_loss(logits_BC: Array, batch: LabelledBatch, options: LossOptions) -> CrossEntropy:
    labels_B1, real_B1 = jnp.asarray(batch.labels_B)[:, None], jnp.asarray(batch.real_B)[:, None]
    return cross_entropy(logits_BC[:, None], labels_B1, valid_BT=real_B1, options=options)


def _shown(corpus: LabelledCorpus, config: TrainConfig) -> LabelledExamples:
    """Return what sample.txt shows: the config's prompt, whose label is not known, or some held-out examples.

    Raises:
      ValueError: a prompt for images.
    """
    validation = corpus.validation
    if config.sample.prompt is not None:
        if config.data.path == DIGITS:
            raise ValueError(
                f"sample.prompt is {config.sample.prompt!r} and data.path is {DIGITS!r}; no text is an image, leave "
                "it out: held-out images are shown"
            )
        prompt = config.sample.prompt.encode("utf-8", errors="surrogateescape")
        return LabelledExamples.of([prompt], [0], validation.names)
    chosen = np.linspace(0, len(validation) - 1, min(SHOWN, len(validation)), dtype=int)
    return validation.take(chosen.tolist())


def _describe(
    model: Classifier,
    params: Params,
    examples: LabelledExamples,
    *,
    show: Callable[[np.ndarray], str],
    known: bool,
) -> str:
    """Return examples with the two classes that the model finds most probable, as a person reads them."""
    batch = pad_examples(examples, range(len(examples)), context=model.config.context)
    found = jax.device_get(predict(model, params, batch.inputs_BT, batch.valid_BT))
    parts = []
    for row, p_C in enumerate(found.probability_BC):
        says = ", ".join(f"{examples.names[c]} {p_C[c]:.2f}" for c in np.argsort(-p_C, kind="stable")[:2])
        shown = show(examples.text(row)[: model.config.context])
        truth = f" (it is {examples.names[examples.labels_E[row]]})" if known else ""
        parts.append(f"{shown}\n-> {says}{truth}\n")
    return "\n".join(parts)
