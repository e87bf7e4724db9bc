"""A run that starts from another run's weights; refused: other sizes, by leaf, and runs without what is asked."""

import shutil
import signal
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxblock.cli import main
from jaxblock.training.checkpoint import Checkpoints
from jaxblock.training.run_folder import RunFolder
from jaxblock.training.weights import load_weights
from tests.small_runs import (
    at_batches,
    at_step,
    losses,
    restored,
    resume,
    rows,
    shared_programs,
    signalled,
    summary,
    train,
    write_text,
)


@pytest.fixture(scope="module", autouse=True)
def _compile_once(tmp_path_factory):
    with shared_programs(tmp_path_factory.mktemp("programs")):
        yield


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return write_text(tmp_path_factory.mktemp("data") / "fox.jsonl")


@pytest.fixture(scope="module")
def first(text, tmp_path_factory) -> Path:
    """A run that kept an average."""
    run = tmp_path_factory.mktemp("runs") / "first"
    assert train(text, run, "--optimizer.average", "0.9", "--run.checkpoint_every", "2") == 0
    return run


def test_a_run_starts_from_the_weights_of_another(first, text, tmp_path, capsys):
    run = tmp_path / "second"
    assert train(text, run, "--init.from", str(first), "--optimizer.learning_rate", "0.0") == 0
    assert f"starts from step 6 of {first}" in capsys.readouterr().err
    assert f"starts from step 6 of {first}" in summary(run)["notes"]
    ours, theirs = restored(run)[3], restored(first)[3]
    for a, b in zip(*(jax.tree.leaves(state.params) for state in (ours, theirs)), strict=True):
        np.testing.assert_array_equal(a, b)  # the learning rate is 0
    assert summary(run)["val_loss"] == summary(first)["val_loss"]
    assert int(ours.step) == 6  # its own count, its own optimizer
    averaged = tmp_path / "averaged"
    flags = ("--init.from", str(first), "--init.weights", "average", "--optimizer.learning_rate", "0.0")
    assert train(text, averaged, *flags) == 0
    assert summary(averaged)["val_loss"] == pytest.approx(summary(first)["val_loss_average"], rel=1e-6)
    assert summary(averaged)["val_loss"] != summary(first)["val_loss"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model.depth", "2"], "params/blocks/attention/query/kernel"),
        (
            ["--model.width", "16"],
            "params/blocks/attention_connection/norm/scale [1, 8] saved, [1, 16] wanted",
        ),
        (["--model.residual", "dense_former"], "params/shared"),
        (["--init.from", "nowhere"], "'nowhere' is not a run"),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name_before_anything_is_written(
    first, text, tmp_path, capsys, flags, words
):
    run = tmp_path / "run"
    assert train(text, run, "--init.from", str(first), *flags) == 2
    assert words in capsys.readouterr().err
    assert not run.exists()


@pytest.mark.full
@pytest.mark.full
def test_a_run_without_an_average_has_none_to_give(first, text, tmp_path, capsys):
    plain = tmp_path / "plain"
    assert train(text, plain, "--run.steps", "2") == 0
    assert train(text, tmp_path / "x", "--init.from", str(plain), "--init.weights", "average") == 2
    assert "kept no average: its optimizer.average is 0" in capsys.readouterr().err
    assert main(["eval", str(plain), "--weights", "average"]) == 2


@pytest.mark.full  # test_checkpoint damages a checkpoint every way
def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_used(text, tmp_path, monkeypatch, capsys):
    flags = ("--run.checkpoint_every", "2", "--optimizer.average", "0.9")
    run, whole = tmp_path / "run", tmp_path / "whole"
    assert train(text, whole, *flags) == 0
    with monkeypatch.context() as patch:
        at_step(patch, 4, signalled(signal.SIGTERM))
        assert train(text, run, *flags) == 143
    newest = run / "checkpoints" / "5"
    for file in newest.rglob("*"):
        if file.is_file() and file.stat().st_size > 500:
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    # Reading does not change the run, and says nothing false: the one before serves.
    folder = RunFolder.open(run)
    like = jax.eval_shape(lambda: restored(whole)[3].params)
    assert load_weights(run, like, which="last").step == 4
    assert newest.exists()
    capsys.readouterr()
    assert resume(run) == 0
    words = capsys.readouterr().err
    assert "checkpoint 5" in words
    assert "continues after step 4" in words
    assert (run / "damaged" / "5").is_dir()  # nothing is thrown away
    assert "checkpoint 5" in summary(run)["notes"][0]
    assert rows(run) == rows(whole)
    assert list(losses(run)) == list(range(1, 7))
    with Checkpoints(folder.checkpoints) as checkpoints:
        assert checkpoints.steps() == [4, 6]


@pytest.mark.full
@pytest.mark.full
def test_a_run_that_started_from_another_is_whole_without_it(first, text, tmp_path, monkeypatch):
    """The source is gone when it goes on; and a rewind before the first checkpoint has weights to go back to."""
    source, run = tmp_path / "source", tmp_path / "run"
    shutil.copytree(first, source)
    flags = ("--init.from", str(source), "--guard.non_finite", "rewind")

    def bad_target(batch):
        return batch._replace(targets_BT=np.full_like(batch.targets_BT, 999))

    with monkeypatch.context() as patch:
        at_batches(patch, {1: bad_target, 3: signalled(signal.SIGTERM)})
        assert train(text, run, *flags) == 143
    shutil.rmtree(source)
    assert resume(run) == 0
    assert summary(run)["skipped_batches"] == 2
    assert list(losses(run)) == list(range(1, 7))
