"""`jaxblock report DIR`: bad input is one sentence, good input is a page and its verdicts."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from jaxblock.cli.report import report
from jaxblock.sweeps import reading
from jaxblock.sweeps import report as report_package
from jaxblock.sweeps.results import Sweep
from tests.sweeps.test_report_sweep import synthetic_sweep

RECORD = {"sweep": "depth", "plan": {}, "finished": True, "runs": {"planned": 1, "done": 1}, "time": "2026"}
VERDICTS = [
    {"id": "a", "status": "pass", "sentence": "it holds", "numbers": {"slope": 0.0}, "rule": ""},
    {"id": "b", "status": "refused", "sentence": "it needs 5 depths", "numbers": {}, "rule": "few_depths"},
]


@pytest.fixture
def sweep_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a sweep whose report is written by a stand-in: `test_report` covers the real one."""

    def write(sweep: Sweep, folder: Path) -> Path:
        (folder / "verdicts.json").write_text(json.dumps({**RECORD, "verdicts": VERDICTS}), encoding="utf-8")
        (folder / "report.html").write_text(sweep.name, encoding="utf-8")
        return folder / "report.html"

    monkeypatch.setattr(reading, "read_sweep", lambda folder: synthetic_sweep(depths=(2,)))
    monkeypatch.setattr(report_package, "write_report", write)
    return tmp_path


def test_it_prints_the_path_and_every_verdict(sweep_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report([str(sweep_folder)])() == 0
    path, *verdicts = capsys.readouterr().out.splitlines()
    assert Path(path).is_file()
    assert verdicts == ["  pass     it holds", "  refused  it needs 5 depths"]


def test_json_is_one_line_with_the_path_and_the_verdicts(
    sweep_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(["--json", str(sweep_folder)])() == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line) == {
        "report": str(sweep_folder / "report.html"),
        **RECORD,
        "verdicts": VERDICTS,
    }


def test_nothing_is_written_before_the_arguments_are_known_to_be_good(sweep_folder: Path) -> None:
    report([str(sweep_folder)])
    assert list(sweep_folder.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "DIR is missing"),
        (["a", "b"], "unexpected argument 'b'"),
        (["a", "--jsn"], "unknown flag 'jsn'.*json"),
        (["a", "--json=yes"], "takes no value"),
    ],
)
def test_bad_arguments_are_refused(arguments: Sequence[str], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        report(arguments)


def test_a_folder_that_is_no_sweep_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=str(tmp_path)):
        report([str(tmp_path)])
    assert list(tmp_path.iterdir()) == []
