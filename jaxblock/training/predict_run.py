"""Say of which class texts are, with the newest checkpoint of a classifier's run."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxblock.models.classifier import Classifier, predict
from jaxblock.training.digit_corpus import NAME as DIGITS
from jaxblock.training.labelled import LabelledExamples, LabelledValidation
from jaxblock.training.run_folder import RunFolder
from jaxblock.training.weights import load_weights

MOST_ROWS = 64
"""Texts that are read at once."""


class TextPrediction(NamedTuple):
    """A text, the class found for it, and the probability of each class by name, the most probable first."""

    text: str
    label: str
    probabilities: dict[str, float]


def predict_run(path: Path, texts: Sequence[str]) -> list[TextPrediction]:
    """Return what the newest checkpoint of the run in `path` says about each text.

    A text is read as in training: its UTF-8 bytes, the first `context` of them. The names of the classes are the
    run's own, from the first row of metrics.jsonl.

    Raises:
      ValueError: no run, no classifier, one of images, no checkpoint, no text, or an empty one.
    """
    folder = RunFolder.open(path)
    run = folder.read_config()
    task = run.run.task_choice
    if task.name != "classifier":
        raise ValueError(
            f"the run in {str(path)!r} has run.task = {run.run.task!r}; only a classifier predicts"
        )
    if run.data.path == DIGITS:
        raise ValueError(
            f"the run in {str(path)!r} has data.path = {run.data.path!r}: it classifies images, and no text is one; "
            "jaxblock eval scores it on its held-out images"
        )
    if isinstance(texts, str):
        raise ValueError("texts is one text; it must be a sequence of texts")
    encoded = [text.encode("utf-8", errors="surrogateescape") for text in texts]
    if not encoded or not all(encoded):
        raise ValueError(
            "there is no text to classify, or an empty one; each must hold at least one character"
        )
    names = tuple(folder.start_row()["classes"])
    model = Classifier(run.model, run.execution, classes=len(names), pooling=task.options["pooling"])
    tokens_BT = jnp.zeros((1, run.model.context), jnp.int32)
    like = jax.eval_shape(model.init, jax.random.key(0), tokens_BT)["params"]
    params = load_weights(path, like, which="average" if run.optimizer.average else "last").params
    examples = LabelledExamples.of(encoded, [0] * len(encoded), names)
    batches = LabelledValidation(examples, context=run.model.context, batch=min(MOST_ROWS, len(encoded)))
    found = []
    for batch in batches:
        p_BC = jax.device_get(predict(model, params, batch.inputs_BT, batch.valid_BT).probability_BC)
        found += [dict(zip(names, map(float, p_C), strict=True)) for p_C in p_BC[batch.real_B]]
    ordered = [dict(sorted(p.items(), key=lambda item: -item[1])) for p in found]
    return [TextPrediction(text, next(iter(p)), p) for text, p in zip(texts, ordered, strict=True)]
