"""The classifier as a task: loss and accuracy over real rows, what to beat, and a run's classes read back."""

import functools
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxblock import ExecutionConfig
from jaxblock.functional.losses import LossOptions
from jaxblock.models.classifier import Classifier
from jaxblock.training import predict_run as predict_run_module
from jaxblock.training.classifier_task import (
    classifier_loss,
    classifier_score,
    classifier_task,
    majority_baseline,
)
from jaxblock.training.config import DataConfig, RunConfig, SampleConfig, TrainConfig
from jaxblock.training.labelled import LabelledExamples, LabelledValidation, pad_examples
from jaxblock.training.predict_run import predict_run
from jaxblock.training.run_folder import RunFolder
from jaxblock.training.task import evaluate
from jaxblock.training.weights import Weights
from tests.models.test_classifier import drawn
from tests.small import config

TEXTS = [b"abc", b"defgh", b"q", b"xy", b"zzz", b"hello"]
EXAMPLES = LabelledExamples.of(TEXTS, [0, 1, 2, 0, 1, 2], ("a", "b", "c"))
MODEL = Classifier(config(depth=1, vocab_size=256), classes=3)


@functools.cache
def logits_of() -> np.ndarray:
    """Return the logits of the six examples, [6, 3]."""
    batch = pad_examples(EXAMPLES, range(6), context=8)
    return np.asarray(
        jax.jit(MODEL.apply)({"params": drawn(MODEL)}, batch.inputs_BT, valid_BT=batch.valid_BT)
    )


def nats_of(rows) -> np.ndarray:
    logits_BC = logits_of().astype(np.float64)[rows]
    log_p_BC = logits_BC - np.log(np.exp(logits_BC).sum(-1, keepdims=True))
    return -log_p_BC[np.arange(len(rows)), EXAMPLES.labels_E[rows]]


SCORE = jax.jit(functools.partial(classifier_score, MODEL))
LOSS = jax.jit(functools.partial(classifier_loss, MODEL), static_argnames="options")


def test_the_loss_is_the_mean_over_real_rows():
    batch = pad_examples(EXAMPLES, [3, None, 0, 5, None, 1, None, None], context=8)
    result = LOSS(drawn(MODEL), batch)
    np.testing.assert_allclose(result.loss, nats_of([3, 0, 5, 1]).mean(), rtol=1e-5)
    assert float(result.weight) == 4
    loud = batch._replace(labels_B=np.where(batch.real_B, batch.labels_B, -7).astype(np.int32))
    assert float(LOSS(drawn(MODEL), loud).loss) == float(result.loss)
    everything = batch._replace(real_B=np.ones(8, bool))  # control: the empty rows would count
    assert abs(float(LOSS(drawn(MODEL), everything).loss) - float(result.loss)) > 1e-3


def test_smoothing_is_in_the_loss_and_never_in_the_score():
    batch = pad_examples(EXAMPLES, range(4), context=8)
    smooth = LOSS(drawn(MODEL), batch, options=LossOptions(label_smoothing=0.3))
    assert abs(float(smooth.loss) - nats_of([0, 1, 2, 3]).mean()) > 1e-3
    np.testing.assert_allclose(smooth.nats, nats_of([0, 1, 2, 3]).sum(), rtol=1e-5)
    with pytest.raises(ValueError, match="vocab_size is 256; it must be at most 3"):
        LOSS(drawn(MODEL), batch, options=LossOptions(vocab_size=256))


@pytest.mark.parametrize("count", [3, 6])
def test_b68_scores_count_each_example_once_whatever_the_batch(count):
    """Three examples in a batch of eight, and the same ones in batches of four and of one shape."""
    rows = list(range(count))
    hits = (logits_of()[rows].argmax(-1) == EXAMPLES.labels_E[rows]).mean()
    for batch in (8, 4):
        found = evaluate(SCORE, drawn(MODEL), LabelledValidation(EXAMPLES.take(rows), context=8, batch=batch))
        np.testing.assert_allclose(found["loss"], nats_of(rows).mean(), rtol=1e-5)
        np.testing.assert_allclose(found["accuracy"], hits, rtol=1e-6)
    assert 0 < hits < 1


def test_the_majority_reads_no_text():
    """Six of ten are class 1: p = (6 + 1) / (10 + 3), and one in four held-out examples is of it."""
    names = ("a", "b", "c")
    train = LabelledExamples.of([b"x"] * 10, [1] * 6 + [0] * 4, names)
    held_out = LabelledExamples.of([b"y"] * 4, [1, 0, 0, 2], names)
    found = majority_baseline(train, held_out)
    assert found.accuracy == 0.25
    np.testing.assert_allclose(found.loss, -np.log(np.array([7, 5, 5, 1]) / 13).mean())


# The task ------------------------------------------------------------------------------------------------------------


def run_config(path: Path, **changes) -> TrainConfig:
    sections = {
        "run": RunConfig(task='classifier(pooling="last")', steps=2),
        "model": config(depth=1, vocab_size=256),
        "data": DataConfig(path=str(path), batch=4),
        **changes,
    }
    return TrainConfig(**sections)


@pytest.fixture(scope="module")
def jsonl(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data") / "a.jsonl"
    rows = [
        {"text": f"{i} is {'odd' if i % 2 else 'even'}", "label": "odd" if i % 2 else "even"}
        for i in range(40)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_a_task_is_what_the_loop_asks_for(jsonl):
    task = classifier_task(run_config(jsonl))
    params = drawn(task.model)
    assert task.model.classes == 2
    assert task.model.pooling == "last"
    assert task.facts["classes"] == ["even", "odd"]
    assert task.facts["bytes_per_token"] is None
    json.dumps(task.facts)
    batch = task.train[0]
    logits_BC, collected = jax.eval_shape(lambda p: task.forward(p, batch, None), params)
    assert logits_BC.shape == (4, 2)
    assert collected["blocks"]["resid_pre"].shape == (1, 4, 8, 8)
    assert jax.eval_shape(lambda p: task.loss(p, batch, None), params).loss.shape == ()
    assert set(evaluate(jax.jit(task.score), params, task.validation)) == {"loss", "accuracy"}
    np.testing.assert_allclose(task.baseline().loss, np.log(2), rtol=1e-6)
    assert "accuracy 0.500" in task.baseline().words
    assert any(sentence.startswith("Cut 35 of 40 texts") for sentence in task.words)
    sample = task.finish(params, jax.random.key(0))
    assert sample.count("\n-> ") == sample.count(" (it is ") == 4


def test_the_sample_is_the_prompt_where_there_is_one(jsonl):
    task = classifier_task(run_config(jsonl, sample=SampleConfig(prompt="7 is odd")))
    sample = task.finish(drawn(task.model), jax.random.key(0))
    assert sample.startswith("7 is odd\n-> ")
    assert sample.count("->") == 1
    assert "(it is" not in sample


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": config(vocab_size=255)}, "model.vocab_size is 255; it must be at least 256"),
        ({"data": DataConfig(path="none.jsonl", seams="separate")}, "data.seams is 'separate'"),
        ({"data": DataConfig(path="none.jsonl", separator=0)}, "data.separator is 0"),
        (
            {"execution": ExecutionConfig(loss="blocked")},
            "execution.loss is 'blocked'; a classifier has no vocabulary",
        ),
        ({"data": DataConfig(path="none.jsonl")}, r"none.jsonl cannot be read"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(jsonl, changes, message):
    with pytest.raises(ValueError, match=message):
        classifier_task(run_config(jsonl, **changes))


# A run ---------------------------------------------------------------------------------------------------------------


def make_run(path: Path, run: TrainConfig, classes: list[str]) -> Path:
    folder = RunFolder(path)
    folder.create(run)
    folder.append_metrics([{"step": 0, "event": "start", "classes": classes}])
    return path


def test_a_runs_classes_are_predicted_by_name(tmp_path, monkeypatch):
    """Three texts at two rows a time, with the weights that `load_weights` returns."""
    run = run_config(Path("gone.jsonl"))
    path = make_run(tmp_path / "run", run, ["low", "mid", "top"])
    asked = []

    def load_weights(path, like, *, which):
        asked.append((path, which))
        model = Classifier(run.model, classes=3, pooling="last")
        assert jax.tree.map(lambda x: x.shape, like) == jax.tree.map(lambda x: x.shape, drawn(model))
        return Weights(2, drawn(model))

    monkeypatch.setattr(predict_run_module, "load_weights", load_weights)
    monkeypatch.setattr(predict_run_module, "MOST_ROWS", 2)
    texts = ["abc", "a text longer than the context", "é"]
    found = predict_run(path, texts)
    assert asked == [(path, "last")]
    assert [one.text for one in found] == texts
    batch = pad_examples(
        LabelledExamples.of([t.encode() for t in texts], [0] * 3, ("x",)), range(3), context=8
    )
    model = Classifier(run.model, classes=3, pooling="last")
    logits_BC = jax.jit(model.apply)({"params": drawn(model)}, batch.inputs_BT, valid_BT=batch.valid_BT)
    for one, p_C in zip(found, np.asarray(jax.nn.softmax(logits_BC)), strict=True):
        np.testing.assert_allclose(
            [one.probabilities[name] for name in ("low", "mid", "top")], p_C, atol=1e-6
        )
        assert one.label == ("low", "mid", "top")[p_C.argmax()]
        assert list(one.probabilities.values()) == sorted(one.probabilities.values(), reverse=True)
        assert sum(one.probabilities.values()) == pytest.approx(1, abs=1e-6)


def test_what_cannot_predict_is_refused(tmp_path):
    language = make_run(tmp_path / "language", TrainConfig(), ["a", "b"])
    with pytest.raises(ValueError, match="only a classifier predicts"):
        predict_run(language, ["abc"])
    path = make_run(tmp_path / "run", run_config(Path("gone.jsonl")), ["a", "b"])
    for texts in ([], ["abc", ""]):
        with pytest.raises(ValueError, match="no text to classify, or an empty one"):
            predict_run(path, texts)
    with pytest.raises(ValueError, match="no checkpoint yet"):
        predict_run(path, ["abc"])
    with pytest.raises(ValueError, match="is not a run"):
        predict_run(tmp_path / "nothing", ["abc"])
