"""Whole runs through the command: what a folder holds, that seeds and resumes are exact, how a run ends early."""

import itertools
import json
import math
import os
import re
import shutil
import signal
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblock.cli import main
from jaxblock.training.corpus import load_corpus
from jaxblock.training.guard import GOOD
from jaxblock.training.interrupts import Interrupts
from tests.small_corpus import write_shard
from tests.small_runs import (
    STEPS,
    at_step,
    bad_target,
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
def unbroken(text, tmp_path_factory) -> Path:
    """The folder of a run that went through."""
    run = tmp_path_factory.mktemp("runs") / "unbroken"
    assert train(text, run) == 0
    return run


# A run that goes through -----------------------------------------------------------------------------------


def test_the_folder_holds_what_a_run_is(unbroken):
    for name in ("config.toml", "metrics.jsonl", "summary.json", "sample.txt"):
        assert (unbroken / name).stat().st_size > 0
    for name in ("loss", "learning_rate", "gradient_norm"):
        assert (unbroken / "plots" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in (unbroken / "checkpoints").iterdir()) == ["4", "6"]
    names = {path.name for path in unbroken.iterdir()}
    assert names == {"config.toml", "metrics.jsonl", "summary.json", "sample.txt", "plots", "checkpoints"}
    # 32 bytes of the validation slice, 8 drawn ones, a line end; a byte may be no character of its own.
    assert len((unbroken / "sample.txt").read_bytes()) >= 32 + 8 + 1


def test_the_summary_tells_the_result(unbroken, text):
    told = summary(unbroken)
    corpus = load_corpus(text, vocab_size=256, context=16)
    assert told["status"] == "done"
    assert told["steps"] == STEPS
    assert told["corpus_fingerprint"] == corpus.fingerprint
    assert told["val_bits_per_byte"] == pytest.approx(told["val_loss"] / math.log(2))
    assert 0 < told["baseline_loss"] < told["val_loss"] < 7
    assert told["params"] == sum(leaf.size for leaf in jax.tree.leaves(restored(unbroken)[3].params))
    assert told["wall_s"] > told["compile_s"] > 0
    assert told["tokens_per_s"] > 0
    assert {"jaxblock", "python", "jax", "flax", "optax", "numpy"} <= set(told["versions"])


def test_metrics_have_each_step_once(unbroken):
    assert list(losses(unbroken)) == list(range(1, STEPS + 1))
    every = rows(unbroken)
    assert every[0]["event"] == "start"
    assert every[0]["corpus_fingerprint"] == summary(unbroken)["corpus_fingerprint"]
    assert [row["step"] for row in every if "val_loss" in row] == [4, 6]
    assert every[-1]["val_loss"] == summary(unbroken)["val_loss"]
    assert min(row["tokens"] for row in every if "loss" in row) < 4 * 16  # a seam has no target
    for row in every:
        if "loss" in row:
            assert 4 * 12 < row["tokens"] <= 4 * 16
            assert all(row[name] > 0 for name in ("objective", "gradient_norm", "learning_rate"))


def test_the_validation_loss_is_that_of_the_checkpoint_over_every_target_once(unbroken, text):
    """Each document of each window alone, padded: the same as windows with seams kept apart."""
    config, model, step, state = restored(unbroken)
    assert step == int(state.step) == STEPS
    context, stream = config.model.context, load_corpus(text, vocab_size=256, context=16).validation
    tokens_N = stream.read(0, len(stream))
    cuts = sorted({*stream.starts.tolist(), *range(0, len(stream) - 1, context), len(stream) - 1})
    pieces = list(itertools.pairwise(cuts))
    inputs_WT = np.zeros((len(pieces), context), np.int32)
    for row, (start, stop) in enumerate(pieces):
        inputs_WT[row, : stop - start] = tokens_N[start:stop]
    logits_WTV = np.float64(jax.jit(model.apply)({"params": state.params}, inputs_WT))
    nats_WTV = np.log(np.exp(logits_WTV).sum(-1, keepdims=True)) - logits_WTV
    nats = {
        place + 1: nats_WTV[row, place - start, tokens_N[place + 1]]
        for row, (start, stop) in enumerate(pieces)
        for place in range(start, stop)
    }
    assert sorted(nats) == list(range(1, len(stream)))
    assert len(stream.starts) > 5
    within = [value for target, value in nats.items() if target not in stream.starts]
    assert summary(unbroken)["val_loss"] == pytest.approx(np.mean(within), rel=1e-5)
    for part in (
        list(nats.values()),
        within[:-1],
        within[: len(within) // 2],
    ):  # seams counted, or not all targets
        assert abs(np.mean(part) / np.mean(within) - 1) > 1e-5


def test_b94_the_last_step_is_saved_and_intervals_are_kept(unbroken, text, tmp_path):
    run = tmp_path / "run"
    assert train(text, run, "--run.steps", "7", "--run.checkpoint_every", "5") == 0
    assert sorted(int(path.name) for path in (run / "checkpoints").iterdir()) == [5, 7]
    assert sorted(int(path.name) for path in (unbroken / "checkpoints").iterdir()) == [4, 6]


def test_b91_a_folder_that_takes_no_more_checkpoints_ends_the_run(text, tmp_path, monkeypatch, capsys):
    """After step 2 a file stands where the folder was; at step 4 the run says so, and what was saved is whole."""
    run = tmp_path / "run"

    def in_the_way(batch):
        for thread in threading.enumerate():  # step 2 is saved in the background
            if thread.name.startswith("checkpoint"):
                thread.join()
        (run / "checkpoints").rename(run / "away")
        (run / "checkpoints").write_text("in the way")
        return batch

    flags = ["--run.checkpoint_every", "2"]
    with monkeypatch.context() as patch:
        at_step(patch, 2, in_the_way)
        assert train(text, run, *flags) not in (0, 3, 130, 143)
    said = capsys.readouterr()
    assert re.search(r"checkpoints cannot be listed in .*NotADirectoryError", said.err)
    assert "done" not in said.out
    (run / "checkpoints").unlink()
    (run / "away").rename(run / "checkpoints")
    assert restored(run)[2] == 2
    assert resume(run) == 0  # the control: with the folder back it goes on to its end
    assert sorted(int(path.name) for path in (run / "checkpoints").iterdir()) == [4, 6]


def test_a_run_whose_rows_are_gone_goes_on_and_says_so(text, tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    with shared_programs(tmp_path / "programs"):
        with monkeypatch.context() as patch:
            at_step(patch, 4, signalled(signal.SIGTERM))
            assert train(text, run) == 143
        (run / "metrics.jsonl").unlink()
        capsys.readouterr()
        assert resume(run) == 0
    assert "metrics.jsonl is not there: the rows up to step" in capsys.readouterr().err
    assert any("is not there" in note for note in summary(run)["notes"])


def test_b98_a_new_run_in_the_folder_of_another_is_refused_at_its_start(unbroken, text, tmp_path, capsys):
    """The control, a folder of its own where the same run saves, is B94's."""
    old, flags = tmp_path / "old", ["--run.steps", "10", "--run.checkpoint_every", "5"]
    shutil.copytree(unbroken, old)
    (old / "checkpoints" / "6").rename(old / "checkpoints" / "100")
    before = {path: path.stat().st_mtime_ns for path in old.rglob("*")}
    assert train(text, old, *flags) == 2
    assert re.search(r"run\.dir is .*old', which exists; .*--resume", capsys.readouterr().err)
    assert {path: path.stat().st_mtime_ns for path in old.rglob("*")} == before


AVERAGE = ["--optimizer.average", "0.9", "--run.evaluate_every", "2", "--run.checkpoint_every", "2"]


@pytest.mark.parametrize("checked", [True, pytest.param(False, marks=pytest.mark.full)])
def test_b106_a_run_that_keeps_an_average_uses_no_buffer_twice_nor_after_it_is_gone(text, tmp_path, checked):
    """Step, evaluate both weights, save, step; with and without `jax_debug_nans`, which runs a program again."""
    run = tmp_path / "run"
    with jax.debug_nans(checked):
        assert train(text, run, *AVERAGE, "--run.steps", "4") == 0
    assert list(losses(run)) == [1, 2, 3, 4]
    scores = [row for row in rows(run) if "val_loss_average" in row]
    assert [row["step"] for row in scores] == [2, 4]
    assert all(row["val_loss_average"] != row["val_loss"] for row in scores)


def test_b106_control_an_average_that_is_the_parameters_cannot_be_donated(unbroken):
    state = restored(unbroken)[3]
    step = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
    copied = jax.tree.map(jnp.array, (state.params, state.params))
    step(copied)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(copied))
    params = jax.tree.map(jnp.array, state.params)
    with pytest.raises(ValueError, match="donate the same buffer twice"):
        step((params, params))


@pytest.mark.full
def test_b95_b96_five_and_five_steps_are_ten_rows_dropout_included(text, tmp_path, monkeypatch):
    flags = ["--run.steps", "10", "--run.evaluate_every", "10", "--run.checkpoint_every", "10"]
    flags += ["--model.branch_dropout", "0.1"]
    straight, halved = tmp_path / "straight", tmp_path / "halved"
    assert train(text, straight, *flags) == 0
    with monkeypatch.context() as patch:
        at_step(patch, 4, signalled(signal.SIGTERM))
        assert train(text, halved, *flags) == 143
    assert summary(halved)["steps"] == 5
    assert resume(halved) == 0
    assert list(losses(halved)) == list(range(1, 11))
    assert rows(halved) == rows(straight)  # step, learning rate, loss, to the bit
    rates = [row["learning_rate"] for row in rows(straight) if "learning_rate" in row]
    assert len(set(rates)) == 10


def test_a_done_run_is_not_resumed(unbroken, capsys):
    assert resume(unbroken) == 2
    assert "is done; there is nothing to resume" in capsys.readouterr().err
    assert losses(unbroken).keys() == set(range(1, STEPS + 1))


def test_a_run_is_continued_by_sample(unbroken, capsys):
    prompt = "the fox jumps over the lazy dog;"  # as long as the run's own: nothing is compiled anew
    assert len(prompt) == 32
    assert main(["sample", str(unbroken), "--prompt", prompt]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(prompt)
    assert len(printed) > len(prompt) + 1
    drawn = {}
    for seed in ("0", "0 ", "1"):
        assert main(["sample", str(unbroken), "--prompt", prompt, "--json", "--seed", seed.strip()]) == 0
        drawn[seed] = json.loads(capsys.readouterr().out)
    assert drawn["0"]["prompt"] == prompt
    assert prompt + drawn["0"]["text"] == printed.removesuffix("\n")
    assert drawn["0"] == drawn["0 "] != drawn["1"]


@pytest.mark.full
def test_b113_a_run_and_its_evaluation_need_no_logger_installed(
    text, unbroken, tmp_path, monkeypatch, capsys
):
    for package in ("tensorboardX", "tensorboard", "tensorflow", "wandb"):
        monkeypatch.setitem(sys.modules, package, None)
    run = tmp_path / "run"
    assert train(text, run) == 0
    assert rows(run) == rows(unbroken)
    assert "step 6/6" in capsys.readouterr().err
    assert main(["eval", str(run), "--stride", "16", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    scored = {row["step"]: row["val_loss"] for row in rows(run) if "val_loss" in row}
    assert found["loss"] == pytest.approx(scored[found["step"]], rel=1e-5)
    assert train(text, tmp_path / "asked", "--watch.tensorboard", "true") == 2  # the control: asked for


# Interrupts, resumes, seeds --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def interrupted(text, unbroken, tmp_path_factory) -> Path:
    """The folder of a run that was told to stop during its third step."""
    run = tmp_path_factory.mktemp("runs") / "interrupted"
    with pytest.MonkeyPatch.context() as monkeypatch:
        at_step(monkeypatch, 2, signalled(signal.SIGTERM))
        assert train(text, run) == 143
    return run


def test_b44_the_same_seed_gives_the_same_bits(interrupted, unbroken):
    first = rows(unbroken)[1:4]
    assert rows(interrupted)[1:4] == first
    assert [row["step"] for row in first] == [1, 2, 3]


def test_b94_a_signal_in_step_3_saves_step_3_and_says_so(interrupted):
    told = summary(interrupted)
    assert (told["status"], told["steps"], told["val_loss"]) == ("interrupted", 3, None)
    config, _, step, state = restored(interrupted)
    assert step == int(state.step) == 3
    assert config.run.steps == STEPS
    assert state.guard.alarm == GOOD
    assert list(losses(interrupted)) == [1, 2, 3]
    assert (interrupted / "plots" / "loss.png").exists()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL  # the handlers of before are back


def test_a_resume_with_another_config_is_refused_by_field(interrupted, capsys):
    flags = ["--optimizer.learning_rate", "1e-2", "--run.seed", "3"]
    before = (interrupted / "metrics.jsonl").read_bytes()
    assert resume(interrupted, *flags) == 2
    words = capsys.readouterr().err
    assert "optimizer.learning_rate: 0.01, 0.003" in words
    assert "run.seed: 3, 0" in words
    assert "model" not in words
    assert (interrupted / "metrics.jsonl").read_bytes() == before


def test_a_run_stopped_twice_ends_with_the_bits_of_the_unbroken_one(
    interrupted, unbroken, monkeypatch, capsys
):
    # What a kill between two writes leaves behind: steps after the checkpoint, and half a line.
    with (interrupted / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 4, "loss": 9.0}\n{"step": 5, "lo')
    with monkeypatch.context() as patch:
        at_step(patch, 4, signalled(signal.SIGINT))
        assert resume(interrupted) == 130
    assert (summary(interrupted)["status"], summary(interrupted)["steps"]) == ("interrupted", 5)
    assert list(losses(interrupted)) == [1, 2, 3, 4, 5]

    capsys.readouterr()
    assert resume(interrupted, "--run.steps", str(STEPS), "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["status"], told["steps"], told["run"]) == ("done", STEPS, str(interrupted))
    assert rows(interrupted) == rows(unbroken)
    assert (interrupted / "sample.txt").read_bytes() == (unbroken / "sample.txt").read_bytes()
    for ours, theirs in zip(*(jax.tree.leaves(restored(x)[3]) for x in (interrupted, unbroken)), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.fixture
def sigint_raises():
    """Python's own answer to SIGINT, which a shell has switched off for a process it started in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("sigint_raises")
def test_a_second_signal_acts_at_once():
    with Interrupts() as interrupts:
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupts.signal == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert interrupts.exit_code == 130


# A run that breaks -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def broken(text, unbroken, tmp_path_factory) -> Path:
    """The folder of a run with another seed, and a target that does not exist in its fourth step."""
    run = tmp_path_factory.mktemp("runs") / "broken"
    with pytest.MonkeyPatch.context() as monkeypatch:
        at_step(monkeypatch, 3, bad_target)
        assert train(text, run, "--run.seed", "1") == 3
    return run


def test_b44_another_seed_gives_other_losses(broken, unbroken):
    ours, theirs = losses(broken), losses(unbroken)
    assert all(ours[step] != theirs[step] for step in (1, 2, 3))


def test_a_run_that_is_not_finite_stops_and_keeps_its_last_finite_parameters(broken):
    told = summary(broken)
    assert (told["status"], told["steps"], told["bad_step"]) == ("non_finite", 3, 4)
    _, _, step, state = restored(broken)
    assert step == int(state.step) == 3
    assert state.guard.alarm == GOOD  # whoever resumes meets the batch again
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((state.params, state.moments)))
    last = rows(broken)[-1]
    assert (last["step"], last["event"], last["action"], last["loss"]) == (4, "non_finite", "stop", None)
    assert last["quantity"] == "loss"  # every logit was finite
    assert [row["step"] for row in rows(broken) if "event" in row] == [0, 4]
    assert (broken / "sample.txt").stat().st_size > 0


# Token shards ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shards(unbroken, tmp_path_factory) -> Path:
    """The folder of a run over uint16 shards of ten ids."""
    data = tmp_path_factory.mktemp("shards")
    ids = np.random.default_rng(0).integers(0, 10, 300)
    write_shard(data / "train_0.bin", ids[:70])
    write_shard(data / "train_1.bin", ids[70:200], header=[20240520, 1, 130])
    write_shard(data / "val.bin", ids[200:])
    run = tmp_path_factory.mktemp("runs") / "shards"
    assert train(data, run) == 0
    return run


def test_shards_train(shards):
    told = summary(shards)
    assert told["val_bits_per_byte"] is None  # nobody knows the bytes behind an id
    assert told["val_loss"] < math.log(256) + 0.5
    assert list(losses(shards)) == list(range(1, STEPS + 1))
    # 12 windows of 16 lie in 200 tokens, and 6 steps of 4 windows are two epochs; one window holds the seam at 70.
    assert [row["tokens"] for row in rows(shards) if "loss" in row].count(63) == 2
    ids = [int(word) for word in (shards / "sample.txt").read_text().split()]
    assert len(ids) == 32 + 8
    assert max(ids) < 256


def test_b94_data_that_run_out_begin_again_and_the_last_step_is_saved(shards):
    """Twelve windows in batches of four run out at step 3: an epoch's end is no end of a run."""
    assert list(losses(shards)) == list(range(1, STEPS + 1))
    assert sorted(path.name for path in (shards / "checkpoints").iterdir()) == ["4", "6"]


def test_shards_are_sampled_by_ids(shards, capsys):
    prompt = " ".join(["3 1 4 1 5 9 2 6"] * 4)
    assert main(["sample", str(shards), "--prompt", prompt, "--json"]) == 0
    drawn = json.loads(capsys.readouterr().out)
    ids = [int(word) for word in drawn["text"].split()]
    assert len(ids) == 8
    assert 0 <= min(ids) <= max(ids) < 256
    for wrong, reason in {
        "3 256": "holds token id 256; ids must be below vocab_size = 256",
        "fox": "must be ids separated by spaces",
    }.items():
        assert main(["sample", str(shards), "--prompt", wrong]) == 2
        captured = capsys.readouterr()
        assert reason in captured.err
        assert captured.err.count("\n") == 1
        assert captured.out == ""
