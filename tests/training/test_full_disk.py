"""A disk without room: said before a checkpoint is begun, exit code 1, what was saved stays."""

import shutil
import sys
import threading
import types

import jax.numpy as jnp
import pytest

from jaxblock.training import full_disk, run_folder
from jaxblock.training.checkpoint import Checkpoints
from jaxblock.training.config import TrainConfig
from jaxblock.training.full_disk import check_space, without_late_reports
from jaxblock.training.run_folder import RunFilesError, RunFolder
from tests.small_runs import losses, resume, rows, shared_programs, train, write_text


def filled(monkeypatch, *, free: int) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(full_disk.shutil, "disk_usage", lambda path: usage._replace(free=free))


def test_arrays_that_do_not_fit_are_refused_before_any_is_written(tmp_path, monkeypatch):
    checkpoints, parts = Checkpoints(tmp_path / "checkpoints"), {"params": jnp.ones(1000)}
    assert checkpoints.save(1, parts, facts={})
    filled(monkeypatch, free=4000)
    with pytest.raises(
        RunFilesError, match=r"step 2 cannot be saved .* it takes 8,096 bytes, and 4,000 are free"
    ):
        checkpoints.save(2, parts, facts={})
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["1"]
    filled(monkeypatch, free=8096)
    assert checkpoints.save(2, parts, facts={})


def test_the_space_asked_for_grows_with_the_arrays(tmp_path):
    check_space(tmp_path, [1000] * 10)
    with pytest.raises(OSError, match="No space left on device"):
        check_space(tmp_path, [2**60])


@pytest.mark.parametrize("hooked", ["excepthook", "unraisablehook"])
def test_late_reports_of_a_failed_save_are_dropped_and_others_are_not(monkeypatch, hooked):
    said, hook = [], lambda kind, error, trace: said.append(str(error))

    def unraisable(report) -> None:
        said.append(str(report.exc_value))

    monkeypatch.setattr(full_disk, "_SECONDS_OF_LATE_REPORTS", 0.2)
    monkeypatch.setattr(sys, "excepthook", hook)
    monkeypatch.setattr(sys, "unraisablehook", unraisable)

    def report(words: str) -> None:
        error = RuntimeError(words)
        if hooked == "excepthook":
            sys.excepthook(type(error), error, None)
        else:
            sys.unraisablehook(types.SimpleNamespace(exc_value=error))

    @without_late_reports()
    def fail() -> None:
        for words in ("Event loop is closed", "something else"):
            threading.Timer(0.02, report, [words]).start()
        raise ValueError("the failure itself")

    with pytest.raises(ValueError, match="the failure itself"):
        fail()
    assert said == ["something else"]
    assert (sys.excepthook, sys.unraisablehook) == (hook, unraisable)
    report("Event loop is closed")
    assert said[1:] == ["Event loop is closed"]


def test_a_run_folder_that_cannot_be_made_leaves_nothing(tmp_path, monkeypatch):
    def no_room(config, path):
        path.write_text("a part")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_folder, "write_config", no_room)
    with pytest.raises(ValueError, match=r"run\.dir is .* No space left on device"):
        RunFolder(tmp_path / "run").create(TrainConfig())
    assert list(tmp_path.iterdir()) == []


def test_a_run_on_a_disk_that_fills_up_ends_with_1_and_goes_on_when_there_is_room(tmp_path, capsys):
    text, run = write_text(tmp_path / "fox.jsonl"), tmp_path / "run"
    with shared_programs(tmp_path / "programs"):
        assert train(text, tmp_path / "unbroken") == 0
        with pytest.MonkeyPatch.context() as monkeypatch:
            filled(monkeypatch, free=0)
            capsys.readouterr()
            assert train(text, run) == 1
        said = capsys.readouterr().err.splitlines()[-1]
        assert said.startswith("jaxblock: step 4 cannot be saved in ")
        assert said.endswith(f"continue with: jaxblock train --resume {run}")
        assert resume(run) == 0
    assert rows(run) == rows(tmp_path / "unbroken")
    assert list(losses(run)) == list(range(1, 7))
