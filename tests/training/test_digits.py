"""The digits as a classifier's data: tokens, the split by class, what is refused, and a run that learns them."""

import functools
import hashlib
import importlib
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxblock.config import ModelConfig
from jaxblock.sweeps.lanes import Lane, LaneProgram
from jaxblock.training.classifier_task import classifier_task
from jaxblock.training.config import DataConfig, RunConfig, SampleConfig, TrainConfig
from jaxblock.training.config_file import build_config, read_config_file
from jaxblock.training.digit_corpus import draw_image, load_digits
from jaxblock.training.predict_run import predict_run
from jaxblock.training.prepare import prepare
from jaxblock.training.run_folder import RunFolder
from jaxblock.training.task import evaluate
from tests.small import config

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
IMAGE = np.tile(np.array([0, 2, 5, 7, 9, 11, 14, 16], np.uint8), 8)


@functools.cache
def corpus():
    return load_digits(context=64)


def digits_config(**changes) -> TrainConfig:
    sections = {
        "run": RunConfig(task="classifier", steps=2),
        "model": config(depth=1, vocab_size=17, context=64, token_mixer="mlp(hidden=4)"),
        "data": DataConfig(path="digits", batch=4),
        **changes,
    }
    return TrainConfig(**sections)


def test_every_image_is_64_gray_levels_and_stands_once():
    both = (corpus().train, corpus().validation)
    assert sum(map(len, both)) == 1797
    images = [part.text(index) for part in both for index in range(len(part))]
    assert {image.shape for image in images} == {(64,)}
    assert len({image.tobytes() for image in images}) == 1797
    levels = np.concatenate(images)
    assert (levels.min(), levels.max()) == (0, 16)
    assert corpus().names == tuple("0123456789")
    assert corpus().notes == ()
    assert "1,797 images of 8 x 8 pixels, 10 classes" in corpus().source


def test_labels_are_those_of_the_images():
    """Each image stands next to its own label: those of scikit-learn, looked up by the pixels."""
    datasets = importlib.import_module("sklearn.datasets")
    pixels, labels = datasets.load_digits(return_X_y=True)
    truth = {image.astype(np.uint8).tobytes(): label for image, label in zip(pixels, labels, strict=True)}
    for part in (corpus().train, corpus().validation):
        found = [truth[part.text(index).tobytes()] for index in range(len(part))]
        np.testing.assert_array_equal(part.labels_E, found)


def test_a_fifth_of_each_class_is_held_out_by_the_hash_of_its_images():
    train, held_out = corpus().train, corpus().validation
    for label in range(10):
        parts = [
            [
                hashlib.sha256(hashlib.sha256(part.text(i).tobytes()).hexdigest().encode()).digest()
                for i in np.flatnonzero(part.labels_E == label)
            ]
            for part in (train, held_out)
        ]
        assert len(parts[1]) == (len(parts[0]) + len(parts[1])) // 5
        assert max(parts[1]) < min(parts[0])


def test_the_data_have_a_name_that_never_changes():
    """A new fingerprint means other images or another split: results of before cannot be compared."""
    assert corpus().fingerprint == "43998ce01a5a09b9"


def test_an_image_is_drawn_from_white_to_black():
    lines = draw_image(IMAGE).split("\n")
    assert lines == ["  ..--==++**%%@@"] * 8
    assert draw_image(np.zeros(64, np.uint8)).strip() == ""


def test_a_task_shows_images_and_beats_the_largest_class():
    task = classifier_task(digits_config())
    params = jax.tree.map(
        lambda x: np.random.default_rng(0).normal(size=x.shape).astype(x.dtype),
        jax.eval_shape(task.init, jax.random.key(0)),
    )
    assert task.facts["corpus_fingerprint"] == corpus().fingerprint
    assert task.facts["classes"] == list("0123456789")
    assert task.train[0].inputs_BT.shape == (4, 64)
    assert task.train[0].valid_BT.all()
    sample = task.finish(params, jax.random.key(0))
    assert sample.count("\n-> ") == sample.count(" (it is ") == 4
    drawn = draw_image(corpus().validation.text(0))
    assert sample.startswith(drawn)
    assert task.baseline().loss == pytest.approx(np.log(10), abs=0.01)
    assert "accuracy 0.101" in task.baseline().words


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model": config(vocab_size=16, context=64)},
            "model.vocab_size is 16; it must be at least 17 for gray levels",
        ),
        (
            {"model": config(vocab_size=17, context=32)},
            "model.context is 32 and data.path is 'digits'; an image is 64 tokens",
        ),
        ({"sample": SampleConfig(prompt="a seven")}, "sample.prompt is 'a seven'.*no text is an image"),
        ({"data": DataConfig(path="digits", seams="separate")}, "data.seams is 'separate'"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        classifier_task(digits_config(**changes))


def test_without_scikit_learn_the_extra_is_named(monkeypatch):
    import_module = importlib.import_module

    def without(name, *given):
        if name.startswith("sklearn"):
            raise ImportError(name)
        return import_module(name, *given)

    monkeypatch.setattr(importlib, "import_module", without)
    with pytest.raises(
        ValueError, match=r"come with scikit-learn; install it with pip install 'jaxblock\[vision\]'"
    ):
        classifier_task(digits_config())


def test_a_run_on_images_classifies_no_text(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.create(digits_config())
    folder.append_metrics([{"step": 0, "event": "start", "classes": list("0123456789")}])
    with pytest.raises(ValueError, match=r"data.path = 'digits': it classifies images, and no text is one"):
        predict_run(tmp_path / "run", ["seven"])


@pytest.mark.parametrize("name", ["digits_mixer", pytest.param("digits_convolution", marks=pytest.mark.full)])
@pytest.mark.parametrize("residual", ["pre_norm", pytest.param("none", marks=pytest.mark.full)])
def test_the_configs_and_their_controls_are_ready_to_run(name, residual):
    """Data loaded and the step traced: all that could be refused."""
    values = read_config_file(CONFIGS / f"{name}.toml")
    prepared = prepare(build_config(values, {"model.residual": residual, "model.depth": 2}))
    assert prepared.task.model.classes == 10
    assert prepared.config.model.token_mixer_choice.name == name.removeprefix("digits_").replace(
        "mixer", "mlp"
    )


@pytest.mark.full
@pytest.mark.parametrize("mixer", ["mlp(hidden=16)", "convolution(size=3, rows=8)"])
def test_a_mixer_learns_the_digits(mixer):
    """60 steps of two blocks bring held-out accuracy far above a tenth, the largest class."""
    model = ModelConfig(vocab_size=17, context=64, depth=2, width=16, heads=1, hidden=32, token_mixer=mixer)
    run = digits_config(
        model=model, run=RunConfig(task="classifier", steps=60), data=DataConfig(path="digits", batch=16)
    )
    task = classifier_task(run)
    program = LaneProgram(task, run, [Lane(0, 1e-2, 0.1)])
    state, _ = program.run(program.first_state(), 0, 60)
    params = jax.tree.map(lambda x: x[0], state.params)
    found = evaluate(jax.jit(task.score), params, task.validation)
    assert found["accuracy"] > 0.3
