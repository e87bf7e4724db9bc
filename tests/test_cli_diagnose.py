"""`jaxblock diagnose` as a command: what it prints, its exit codes, what it refuses before anything is computed."""

import json
from pathlib import Path

import pytest

from jaxblock.cli import main
from tests.small_runs import train, write_text

FEW = ["--only", "shapes,official_layers"]
SMALL = ["--model.depth", "2", "--model.width", "16", "--model.heads", "2", "--model.context", "16"]
SMALL += ["--model.kv_heads", "2", "--data.batch", "4"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("data") / "text.jsonl")


@pytest.fixture(scope="module")
def run(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "run"
    assert train(text, path) == 0
    return path


def diagnose(text: Path, *words: str) -> int:
    return main(["diagnose", *SMALL, "--data.path", str(text), *words])


def test_the_table_says_number_bound_and_control(text: Path, capsys: pytest.CaptureFixture) -> None:
    assert diagnose(text, *FEW) == 0
    page = capsys.readouterr().out
    for words in (
        "pass  2. shapes",
        "pass  8. official layers",
        "bound: below 0.0001",
        "control: an epsilon of 0.1, the other mask, tanh for the activation",
    ):
        assert words in page
    assert "2 pass, 0 warn, 0 fail, 0 skip" in page


def test_json_holds_what_the_table_says(text: Path, capsys: pytest.CaptureFixture) -> None:
    assert diagnose(text, "--only", "official_layers", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    (check,) = found["checks"]
    assert found["verdict"] == check["verdict"] == "pass"
    assert 0 <= check["number"] < 1e-4 < check["control"]["number"]
    assert check["control"]["caught"] is True


def test_a_failed_check_is_exit_code_1(text: Path, capsys: pytest.CaptureFixture) -> None:
    words = ["--only", "learning_rate", "--optimizer.learning_rate", "3.0"]
    assert diagnose(text, *words) == 1
    page = capsys.readouterr().out
    assert "fail     learning rate" in page
    assert "look at: a smaller optimizer.learning_rate" in page


def test_a_run_is_diagnosed_at_its_checkpoint_and_left_as_it_is(
    run: Path, capsys: pytest.CaptureFixture
) -> None:
    before = {path: path.stat().st_mtime_ns for path in sorted(run.rglob("*"))}
    assert main(["diagnose", str(run), "--only", "relative_update"]) == 0
    assert f"{run}, step 6" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in sorted(run.rglob("*"))} == before


def test_a_figure_is_never_drawn_over_another(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "learning.png").write_text("mine")
    assert diagnose(text, *FEW, "--figures", str(tmp_path)) == 2
    assert "has a learning.png already" in capsys.readouterr().err
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.full
def test_figures_are_drawn_into_a_new_folder(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = tmp_path / "new" / "figures"
    assert diagnose(text, *FEW, "--figures", str(folder)) == 0
    assert sorted(path.name for path in folder.iterdir()) == ["depth.png", "learning.png"]
    assert "figure: " in capsys.readouterr().out


REFUSED = {
    "unknown check": (["--only", "overfits"], "--only is 'overfits'; it must be one of .*'overfit'"),
    "unknown field": (["--model.dept", "3"], "'model.depth'"),
    "missing file": (["missing.toml"], "missing.toml"),
    "figures are a file": (["--figures", __file__], "which is no folder"),
    "figures in a file": (["--figures", f"{__file__}/x"], "cannot be written to"),
    "figures are nothing": (["--figures", ""], "it must be a folder"),
    "no run": (["."], "is not a run"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_one_sentence_and_exit_code_2(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    import re

    monkeypatch.chdir(tmp_path)
    words, sentence = REFUSED[name]
    assert main(["diagnose", *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.search(sentence, printed.err)
    assert printed.err.count("\n") == 1


def test_a_run_has_its_own_config(run: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["diagnose", str(run), "--model.depth", "3"]) == 2
    assert "model.depth cannot be changed" in capsys.readouterr().err
