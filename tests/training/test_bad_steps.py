"""Bad steps in whole runs: skipped, rewound or stopped at, counted, logged with their place, kept by a resume."""

import json
import math
import signal
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblock.training import step
from jaxblock.training.checkpoint import Checkpoints
from jaxblock.training.guard import GOOD
from tests.small_runs import (
    STEPS,
    at_batches,
    bad_input,
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

SKIP = ("--guard.non_finite", "skip")


@pytest.fixture(scope="module", autouse=True)
def _compile_once(tmp_path_factory):
    with shared_programs(tmp_path_factory.mktemp("programs")):
        yield


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return write_text(tmp_path_factory.mktemp("data") / "fox.jsonl")


def events(run: Path) -> list[dict]:
    return [row for row in rows(run) if row.get("event") not in (None, "start")]


def finite_everywhere(run: Path) -> bool:
    return all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(restored(run)[3]))


@pytest.fixture(scope="module")
def skipped(text, tmp_path_factory) -> Path:
    """A run that passed over batches 2 and 3."""
    run = tmp_path_factory.mktemp("runs") / "skipped"
    with pytest.MonkeyPatch.context() as monkeypatch:
        at_batches(monkeypatch, {2: bad_target, 3: bad_input})
        assert train(text, run, *SKIP) == 0
    return run


def test_b52_a_skipped_batch_is_counted_logged_and_passed_over(skipped, text, tmp_path, monkeypatch):
    told = summary(skipped)
    assert (told["status"], told["steps"], told["skipped_batches"]) == ("done", STEPS, 2)
    assert list(losses(skipped)) == list(range(1, STEPS + 1))
    first, second = events(skipped)
    assert [first[name] for name in ("step", "event", "action", "batch", "strikes", "skipped")] == [
        *(3, "non_finite", "skip", 2, 1, 1)
    ]
    assert [second[name] for name in ("step", "batch", "strikes", "skipped")] == [3, 3, 2, 2]
    assert (first["quantity"], first["loss"]) == ("loss", None)
    assert (second["quantity"], second["place"]) == ("activation", "embedding")
    assert finite_everywhere(skipped)
    # The same as a run whose data never held the two: inner state and schedule were left alone.
    without = tmp_path / "without"
    at_batches(monkeypatch, {}, passing_over=(2, 3))
    assert train(text, without) == 0
    assert losses(without) == losses(skipped)
    for ours, theirs in zip(
        *(jax.tree.leaves(restored(x)[3].params) for x in (without, skipped)), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)


EIGHT = ("--run.steps", "8", "--run.checkpoint_every", "2", "--checkpoint.keep_latest", "9")


def finite_checkpoints(run: Path) -> dict[int, bool]:
    """Return for each retained step whether its parameters are finite."""
    checkpoints, like = Checkpoints(run / "checkpoints"), {"params": restored(run)[3].params}
    return {
        step: all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(checkpoints.load(step, like)))
        for step in checkpoints.steps()
    }


@pytest.mark.parametrize(
    ("answer", "code", "saved"),
    [("stop", 3, [2, 3]), pytest.param("skip", 0, [2, 4, 6, 8], marks=pytest.mark.full)],
)
def test_b52_no_checkpoint_of_eight_steps_holds_a_nan_of_batch_4(
    text, tmp_path, monkeypatch, answer, code, saved
):
    run = tmp_path / "run"
    at_batches(monkeypatch, {3: bad_input})
    assert train(text, run, *EIGHT, "--guard.non_finite", answer) == code
    assert finite_checkpoints(run) == dict.fromkeys(saved, True)
    assert summary(run)["steps"] == saved[-1]
    (event,) = events(run)
    assert [event[name] for name in ("step", "event", "action")] == [4, "non_finite", answer]


@pytest.mark.full
def test_b52_control_with_a_blind_guard_the_nan_is_saved(text, tmp_path, monkeypatch):
    run = tmp_path / "run"
    at_batches(monkeypatch, {3: bad_input})
    monkeypatch.setattr(step, "judge", lambda *_, **__: jnp.int32(GOOD))
    assert train(text, run, *EIGHT) == 0
    assert finite_checkpoints(run) == {2: True, 4: False, 6: False, 8: False}


@pytest.mark.full
def test_events_survive_a_resume_once(skipped, text, tmp_path, monkeypatch):
    run = tmp_path / "stopped"
    with monkeypatch.context() as patch:
        at_batches(patch, {2: bad_target, 3: bad_input, 5: signalled(signal.SIGTERM)})
        assert train(text, run, *SKIP) == 143
    at_batches(monkeypatch, {2: bad_target, 3: bad_input})
    assert summary(run)["steps"] == 4
    assert resume(run) == 0
    assert rows(run) == rows(skipped)


def test_b53_more_bad_steps_than_the_limit_end_the_run_with_its_last_good_parameters(
    text, tmp_path, monkeypatch, capsys
):
    """Twenty bad batches in a row under a limit of 5."""
    run = tmp_path / "run"
    at_batches(monkeypatch, dict.fromkeys(range(2, 22), bad_target))
    assert train(text, run, *SKIP, "--guard.limit", "5") == 3
    told = summary(run)
    assert (told["status"], told["steps"], told["skipped_batches"], told["bad_step"]) == (
        "non_finite",
        2,
        5,
        3,
    )
    found = events(run)
    assert [row["action"] for row in found] == [*["skip"] * 5, "stop"]
    assert "more than guard.limit = 5 bad steps" in found[-1]["sentence"]
    assert found[-1]["sentence"] in capsys.readouterr().err
    assert finite_everywhere(run)
    # With a higher limit it may go on, and meets the rest.
    assert resume(run, "--guard.limit", "30") == 0
    assert summary(run)["skipped_batches"] == 20
    assert list(losses(run)) == list(range(1, STEPS + 1))
    (stop,) = [json.loads(line) for line in (run / "abandoned.jsonl").read_text().splitlines()]
    assert stop == found[-1]  # a resume meets the step again, and loses nothing
    changed = [row for row in rows(run) if row.get("event") == "config"]
    assert [row["changed"] for row in changed] == [["guard.limit: 30, 5"]]


def test_a_rewind_goes_back_to_the_checkpoint_and_passes_over_all_batches_since(text, tmp_path, monkeypatch):
    run = tmp_path / "run"
    at_batches(monkeypatch, {4: bad_target})
    flags = ("--run.checkpoint_every", "2", "--run.log_every", "1", "--run.evaluate_every", "6")
    assert train(text, run, "--guard.non_finite", "rewind", *flags) == 0
    (event,) = events(run)
    assert [event[name] for name in ("step", "action", "batch", "skipped")] == [5, "rewind", 4, 1]
    assert list(losses(run)) == list(range(1, STEPS + 1))
    assert not (run / "abandoned.jsonl").exists() or (run / "abandoned.jsonl").read_text() == ""

    late = tmp_path / "late"
    monkeypatch.undo()
    at_batches(monkeypatch, {3: bad_target})
    assert train(text, late, "--guard.non_finite", "rewind", *flags) == 0
    (event,) = events(late)
    # Step 4 was bad; the state goes back to step 2, whose next batch is the one after the bad one.
    assert [event[name] for name in ("step", "batch", "skipped")] == [4, 3, 2]
    assert [json.loads(line)["step"] for line in (late / "abandoned.jsonl").read_text().splitlines()] == [3]
    assert list(losses(late)) == list(range(1, STEPS + 1))
    at_batches(monkeypatch, {}, passing_over=(2, 3))
    plain = tmp_path / "plain"
    assert train(text, plain, *flags) == 0
    assert losses(plain) == losses(late)


@pytest.mark.full
def test_a_rewind_before_the_first_checkpoint_starts_again(text, tmp_path, monkeypatch):
    run = tmp_path / "run"
    at_batches(monkeypatch, {1: bad_target})
    assert train(text, run, "--guard.non_finite", "rewind") == 0
    (event,) = events(run)
    assert [event[name] for name in ("step", "batch", "skipped")] == [2, 1, 2]
    assert list(losses(run)) == list(range(1, STEPS + 1))


@pytest.mark.full  # the rule is tested in test_guard, what a skip does above
def test_a_spike_is_seen_and_skipped(text, tmp_path, monkeypatch):
    """A batch whose targets are bytes that never occur has a loss far above the last ones."""

    def strange(batch):
        return batch._replace(targets_BT=np.full_like(batch.targets_BT, 200))

    run = tmp_path / "run"
    at_batches(monkeypatch, {8: strange})
    flags = ("--guard.spike", "skip", "--guard.window", "4", "--guard.deviations", "8", "--run.steps", "12")
    flags += (
        "--optimizer.learning_rate",
        "2e-2",
        "--run.checkpoint_every",
        "12",
        "--run.evaluate_every",
        "12",
    )
    assert train(text, run, *flags) == 0
    (event,) = events(run)
    assert [event[name] for name in ("step", "event", "action", "batch")] == [9, "spike", "skip", 8]
    assert event["loss"] > 1.2 * losses(run)[8]
    recent = np.float64([losses(run)[step] for step in range(5, 9)])
    assert event["loss_bound"] == pytest.approx(recent.mean() + 8 * recent.std(), rel=1e-4)
    assert f"loss {event['loss']:.4g} above {event['loss_bound']:.4g}" in event["sentence"]
    assert event["quantity"] == "gradient"
    assert event["tensor"]
    # Without the guard the same batch is trained on.
    other = tmp_path / "other"
    assert train(text, other, *flags, "--guard.spike", "ignore") == 0
    assert events(other) == []
    assert losses(other)[9] == event["loss"]


@pytest.mark.full
def test_a_stopped_run_may_be_resumed_with_another_answer(text, tmp_path, monkeypatch):
    run = tmp_path / "run"
    at_batches(monkeypatch, {2: bad_target})
    assert train(text, run) == 3
    assert resume(run) == 3  # the bad batch comes again
    assert [row["action"] for row in events(run)] == ["stop"]
    assert resume(run, *SKIP) == 0
    assert summary(run)["skipped_batches"] == 1
    assert math.isfinite(summary(run)["val_loss"])
