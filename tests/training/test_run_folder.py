"""A run's folder: made in one move, held by one process, resumed only with the config and the data it started on."""

import json
import subprocess
import sys

import pytest

from jaxblock.training.config import GuardConfig, RunConfig, TrainConfig, WatchConfig
from jaxblock.training.config_file import write_config
from jaxblock.training.run_folder import RunFolder


@pytest.fixture
def made():
    return TrainConfig(run=RunConfig(steps=5))


FACTS = {"corpus": "words", "corpus_fingerprint": "a" * 16, "bytes_per_token": 1.0, "tokenizer": None}


@pytest.fixture
def folder(tmp_path, made):
    run = RunFolder(tmp_path / "run")
    run.create(made)
    run.start_metrics(made, FACTS, after=0, skipped=0)
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


def test_an_equal_config_and_the_same_data_resume(folder, made):
    assert folder.check_resumable(made) == []
    folder.check_data(FACTS)


def test_what_decides_no_number_may_change_and_is_written_down(folder, made):
    other = made.model_copy(
        update={
            "run": RunConfig(steps=5, log_every=1),
            "guard": GuardConfig(non_finite="skip", limit=3),
            "watch": WatchConfig(figure_seconds=1.0),
        }
    )
    changed = [
        "run.log_every: 1, 20",
        "guard.non_finite: 'skip', 'stop'",
        "guard.limit: 3, 10",
        "watch.figure_seconds: 1.0, 60.0",
    ]
    assert folder.check_resumable(other) == changed
    folder.start_metrics(other, FACTS, after=0, skipped=0)
    assert folder.read_config() == other
    assert folder.read_metrics()[-1] == {"step": 0, "event": "config", "changed": changed}
    assert folder.check_resumable(other) == []
    # A kill between the two files: whichever was written first, the run can be resumed.
    write_config(made, folder.config)
    assert folder.check_resumable(other) == changed
    with pytest.raises(ValueError, match=r"guard\.window: 64, 128"):
        folder.check_resumable(made.model_copy(update={"guard": GuardConfig(window=64)}))


def test_a_resume_keeps_what_happened_before_its_checkpoint(folder, made):
    def bad(step: int, skipped: int) -> dict:
        return {"step": step, "event": "non_finite", "action": "skip", "skipped": skipped}

    steps = [{"step": number, "loss": 1.0} for number in range(1, 6)]
    stop = {"step": 6, "event": "spike", "action": "stop"}
    folder.append_metrics([*steps[:2], bad(3, 1), *steps[2:], bad(6, 2), stop])
    folder.start_metrics(made, FACTS, after=4, skipped=1)
    assert folder.read_metrics()[1:] == [*steps[:2], bad(3, 1), *steps[2:4]]
    # A rewind's row stands behind the step it came back to: what counts is how many batches were passed over.
    folder.append_metrics([bad(9, 4)])
    folder.start_metrics(made, FACTS, after=4, skipped=4)
    assert folder.read_metrics()[-1] == bad(9, 4)
    folder.start_metrics(made, FACTS, after=4, skipped=3)
    assert folder.read_metrics()[-1] == steps[3]


def test_abandoned_steps_are_moved_and_nothing_is_lost(folder):
    rows = [{"step": number, "loss": 1.0} for number in range(1, 6)]
    event = {"step": 6, "event": "spike", "action": "rewind", "skipped": 4}
    folder.append_metrics([*rows, event])
    folder.abandon_metrics(after=2)
    assert folder.read_metrics()[1:] == [*rows[:2], event]
    assert [json.loads(line) for line in folder.abandoned.read_text().splitlines()] == rows[2:]


def test_another_config_is_refused_with_the_field(folder, made):
    other = made.model_copy(update={"run": RunConfig(steps=6)})
    with pytest.raises(ValueError, match=r"run\.steps: 6, 5"):
        folder.check_resumable(other)


def test_an_edited_config_file_is_refused(folder):
    edited = TrainConfig(run=RunConfig(steps=5, seed=3))
    write_config(edited, folder.config)
    with pytest.raises(ValueError, match="changed since the run started"):
        folder.check_resumable(edited)


def test_other_data_are_refused(folder):
    with pytest.raises(ValueError, match=f"fingerprint {'a' * 16}.*{'0' * 16}"):
        folder.check_data({**FACTS, "corpus_fingerprint": "0" * 16})


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
    folder.metrics.unlink()
    folder.metrics.mkdir()
    with pytest.raises(ValueError, match=r"metrics\.jsonl.* is not a file"):
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
        write_config(folder.read_config(), folder.config)  # a resume may replace it, and keeps the lock
        assert "in use by another process" in second()
    assert second() == "held\n"
