"""A run's folder: made in one move, held by one process, resumed only with the config and the data it started on."""

import dataclasses
import json
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from jaxblock.training.checkpoint import Checkpoints
from jaxblock.training.config import RunConfig, TrainConfig
from jaxblock.training.config_file import write_config
from jaxblock.training.corpus import load_corpus
from jaxblock.training.run_folder import RunError, RunFolder


@pytest.fixture
def made():
    return TrainConfig(run=RunConfig(steps=5))


@pytest.fixture
def corpus(tmp_path):
    text = tmp_path / "text.txt"
    text.write_bytes(b"to be or not to be " * 40)
    return load_corpus(text, vocab_size=256, context=4)


@pytest.fixture
def folder(tmp_path, made, corpus):
    run = RunFolder(tmp_path / "run")
    run.create(made)
    run.start_metrics(made, corpus, after=0)
    return run


def test_a_folder_is_whole_or_absent(tmp_path, made, monkeypatch):
    run = RunFolder(tmp_path / "run")

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("jaxblock.training.run_folder.write_config", killed)
        with pytest.raises(KeyboardInterrupt):
            run.create(made)
    assert not run.path.exists()
    run.create(made)
    assert run.read_config() == made


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path, made):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"run\.dir is .*file/run.*cannot be made"):
        RunFolder(tmp_path / "file" / "run").create(made)


def test_an_equal_config_and_the_same_data_resume(folder, made, corpus):
    folder.check_resumable(made)
    folder.check_corpus(corpus)


def test_another_config_is_refused_with_the_field(folder, made):
    other = made.model_copy(update={"run": RunConfig(steps=6)})
    with pytest.raises(ValueError, match=r"run\.steps: 6, 5"):
        folder.check_resumable(other)


def test_an_edited_config_file_is_refused(folder):
    edited = TrainConfig(run=RunConfig(steps=5, seed=3))
    write_config(edited, folder.config)
    with pytest.raises(ValueError, match="changed since the run started"):
        folder.check_resumable(edited)


def test_other_data_are_refused(folder, corpus):
    other = dataclasses.replace(corpus, fingerprint="0" * 16)
    with pytest.raises(ValueError, match=f"fingerprint {corpus.fingerprint}.*{'0' * 16}"):
        folder.check_corpus(other)


def test_a_done_run_is_not_resumed_and_a_damaged_summary_is_named(folder, made):
    folder.summary.write_text(json.dumps({"status": "done"}))
    with pytest.raises(ValueError, match="nothing to resume"):
        folder.check_resumable(made)
    folder.summary.write_text("")
    with pytest.raises(ValueError, match=r"summary\.json.* is not JSON"):
        folder.check_resumable(made)


def test_a_damaged_line_of_metrics_is_named_and_a_cut_last_line_forgiven(folder):
    with folder.metrics.open("a") as file:
        file.write('{"step": 1, "lo')
    assert len(folder.read_metrics()) == 1
    with folder.metrics.open("a") as file:
        file.write('garbage\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl.* not JSON"):
        folder.read_metrics()


def test_one_process_at_a_time_holds_a_run(folder):
    other = (
        "import sys; from pathlib import Path; from jaxblock.training.run_folder import RunError, RunFolder\n"
        "try:\n"
        "    with RunFolder(Path(sys.argv[1])).locked(): print('held')\n"
        "except RunError as error: print(error)\n"
    )

    def second():
        command = [sys.executable, "-c", other, str(folder.path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    with folder.locked():
        assert "in use by another process" in second()
    assert second() == "held\n"


def test_a_damaged_checkpoint_is_one_sentence_that_names_it(tmp_path):
    state = {"kernel": jnp.asarray(np.random.default_rng(0).normal(size=(64, 64)), jnp.float32)}
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(3, state)
        np.testing.assert_array_equal(checkpoints.restore(3, state)["kernel"], state["kernel"])
        for file in (tmp_path / "checkpoints" / "3").rglob("*"):
            if file.is_file() and file.stat().st_size > 200:
                file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        with pytest.raises(RunError, match=r"checkpoint 3 .* cannot be read .*damaged"):
            checkpoints.restore(3, state)
