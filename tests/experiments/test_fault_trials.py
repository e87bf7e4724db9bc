"""What experiments.faults calls lost is lost, what it prints is counted; the faults themselves are in the full run."""

import json
from pathlib import Path

import numpy as np
import pytest

from experiments.faults import __main__ as faults
from experiments.faults.laboratory import (
    STEPS,
    CannotTry,
    Ended,
    Trial,
    difference,
    not_finite,
    not_one_sentence,
    steps_made,
)
from jaxblock.training.checkpoint import Checkpoints


def ended_run(folder: Path, *, steps: list[int] | None = None, value: float = 1.0, loss: float = 2.0) -> Path:
    """Write what a run leaves: its rows and its last checkpoint."""
    made = list(range(1, STEPS + 1)) if steps is None else steps
    rows = [{"step": 0, "event": "start"}, *({"step": step, "loss": loss} for step in made)]
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    params = {"kernel": np.array([0.0, value], np.float32)}
    Checkpoints(folder / "checkpoints").save(STEPS, {"params": params}, facts={})
    return folder


def test_two_runs_differ_by_a_bit_a_row_or_a_step(tmp_path):
    unbroken = ended_run(tmp_path / "unbroken")
    assert difference(ended_run(tmp_path / "same"), unbroken) is None
    next_value = float(np.nextafter(np.float32(1.0), np.float32(2.0)))
    for name, found, words in (
        (
            "bit",
            ended_run(tmp_path / "bit", value=next_value),
            "params/kernel and 0 more are not bit-identical",
        ),
        ("row", ended_run(tmp_path / "row", loss=2.5), "rows of metrics.jsonl"),
        ("twice", ended_run(tmp_path / "twice", steps=[1, *range(1, STEPS + 1)]), "not each of"),
        ("missing", ended_run(tmp_path / "missing", steps=list(range(1, STEPS))), "not each of"),
    ):
        told = difference(found, unbroken)
        assert told is not None, name
        assert words in told


def test_zeros_of_two_signs_are_not_the_same_bits(tmp_path):
    ours, theirs = (ended_run(tmp_path / str(zero), value=zero) for zero in (0.0, -0.0))
    assert difference(ours, theirs) is not None


def test_a_cut_last_line_is_no_row_and_any_other_is_an_error(tmp_path):
    run = ended_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9')
    assert steps_made(run)[-1] == STEPS
    with (run / "metrics.jsonl").open("a") as file:
        file.write("\n")
    with pytest.raises(ValueError):
        steps_made(run)


def test_a_saved_parameter_that_is_not_finite_is_named(tmp_path):
    assert not_finite(ended_run(tmp_path / "good")) is None
    assert (
        not_finite(ended_run(tmp_path / "bad", value=np.inf))
        == f"params/kernel of checkpoint {STEPS} is not finite"
    )


def test_a_refusal_is_one_sentence_and_an_exit_code():
    good = Ended(2, "step 3\njaxblock: run.dir is 'x', which exists\n")
    assert not_one_sentence(good, code=2, names="run.dir") is None
    for bad in (
        good._replace(code=1),
        good._replace(words=good.words + "jaxblock: again\n"),
        good._replace(words=good.words + "something else\n"),
        good._replace(words="Traceback (most recent call last):\n" + good.words),
        good._replace(words="jaxblock: data.path is 'x'\n"),
    ):
        assert not_one_sentence(bad, code=2, names="run.dir") is not None


def survives(lab, times):
    yield from [Trial("good", None)] * times


def loses(lab, times):
    yield from [Trial("bad", None), Trial("bad", "a step"), Trial("bad", "a step")]


def cannot(lab, times):
    yield Trial("half", None)
    raise CannotTry("no root")


def test_it_counts_and_fails_where_something_was_lost(monkeypatch, capsys):
    monkeypatch.setattr(faults, "FAULTS", {"kills": survives, "loses": loses, "cannot": cannot})
    assert faults.main(["--json", "--kills", "7"]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    told = json.loads(line)
    assert told["kinds"]["good"] == {"tried": 7, "survived": 7, "lost": 0, "faults": []}
    assert told["kinds"]["bad"] == {"tried": 3, "survived": 1, "lost": 2, "faults": ["a step"]}
    assert told["total"] == {"tried": 11, "survived": 9, "lost": 2}
    assert told["not_tried"] == {"cannot": "no root"}
    assert faults.main(["--only", "kills", "cannot"]) == 0
    assert "cannot: not tried in full here: no root" in capsys.readouterr().out


@pytest.mark.full
@pytest.mark.parametrize("name", faults.FAULTS)
def test_nothing_is_lost(name, capsys):
    """100 kills, half of them while a checkpoint is written; every other fault once."""
    code = faults.main(["--only", name, "--trials", "1", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert code == 0, told
    assert told["total"]["tried"] == told["total"]["survived"] > 0
    if name == "kills":
        assert told["total"]["tried"] == 100
        assert all(
            told["kinds"][f"SIGKILL, {moment}"]["tried"] for moment in ("start", "steps", "checkpoint")
        )
        assert told["kinds"]["SIGKILL, checkpoint"]["tried"] >= 20
