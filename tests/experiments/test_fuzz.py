"""The fuzzing study: its judge finds what is planted, its cases are those of the seed, a few of them hold."""

import subprocess
import sys
from pathlib import Path

import pytest

from experiments.fuzz.__main__ import main, report_on
from experiments.fuzz.cases import CONFIG, ROOT, Case, Outcome, fresh, reduce_case, try_apart, try_here
from experiments.fuzz.configs import bases, config_cases
from experiments.fuzz.files import base_files, data_cases
from jaxblock import cli

FILES = {CONFIG: b"[run]\nsteps = 1\n", "text.txt": b"text"}
CASE = Case("config", "planted", ("train", CONFIG), FILES, runs=True)


def _raise(error):
    def command(arguments):
        raise error

    return command


def _say(text, code):
    def command(arguments):
        return lambda: print(text, file=sys.stderr) or code

    return command


def _write_and_refuse(arguments):
    Path("runs").mkdir()
    raise ValueError("run.dir is wrong")


def _warn_and_refuse(arguments):
    print("SyntaxWarning: x", file=sys.stderr)
    raise ValueError("run.dir is wrong")


def _wait(arguments):
    while True:
        pass


@pytest.mark.parametrize(
    ("command", "fault"),
    [
        (_raise(TypeError("x")), "TypeError in"),
        (_raise(RecursionError("x")), "RecursionError in"),
        (_raise(SystemExit(2)), "SystemExit in"),
        (_raise(ValueError("no")), "does not say"),
        (_write_and_refuse, "leaves files"),
        (_warn_and_refuse, "not one line"),
        (_say("Traceback (most recent call last)", 0), "traceback"),
        (_say("", 7), "exit code 7"),
        (_wait, "no answer in 1 s"),
    ],
)
def test_the_judge_finds_what_is_planted(tmp_path, monkeypatch, command, fault):
    monkeypatch.setitem(cli.COMMANDS, "train", command)
    found = try_here(CASE, fresh(tmp_path / "case", CASE), seconds=1)
    assert found.name == "broken"
    assert fault in found.fault


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (_raise(ValueError("run.dir is wrong")), "refused"),
        (_say("", 0), "accepted"),
        (_say("", 3), "stopped"),
    ],
)
def test_control_what_is_in_order_is_not_broken(tmp_path, monkeypatch, command, name):
    monkeypatch.setitem(cli.COMMANDS, "train", command)
    assert try_here(CASE, fresh(tmp_path / "case", CASE)).name == name


def test_a_broken_case_is_reduced_to_what_breaks_it(tmp_path, monkeypatch):
    def command(arguments):
        raise TypeError if b"steps" in Path(CONFIG).read_bytes() else ValueError("run.dir is wrong")

    monkeypatch.setitem(cli.COMMANDS, "train", command)
    case = Case(
        "config", "x", ("train", CONFIG), {**FILES, CONFIG: b'[run]\nname = "x"\nsteps = 1\n\n[data]\n'}
    )
    outcome = try_here(case, fresh(tmp_path / "case", case))
    least = reduce_case(case, outcome, tmp_path / "case")
    assert dict(least.files) == {CONFIG: b"steps = 1\n"}
    found = report_on([case, CASE], [outcome, Outcome("refused")], tmp_path / "case", reduces=True)
    assert (found["tried"], found["broken"], found["refused"], len(found["kinds"])) == (2, 1, 1, 1)


def test_a_seed_has_its_cases():
    files = base_files(0)
    for make in (config_cases, data_cases):
        assert repr(make(60, seed=0, files=files)) == repr(make(60, seed=0, files=files))
        assert repr(make(60, seed=0, files=files)) != repr(make(60, seed=1, files=files))  # control
    assert len(bases(files)) == len(list((ROOT / "configs").glob("*.toml")))


def test_a_few_cases_hold(capsys):
    assert main(["--configs", "6", "--files", "4", "--processes", "0", "--seed", "3"]) == 0
    assert "configs           6" in capsys.readouterr().out


def test_a_broken_case_fails_the_study(monkeypatch, capsys):
    monkeypatch.setitem(cli.COMMANDS, "train", _raise(TypeError("planted")))
    assert main(["--configs", "2", "--files", "0", "--processes", "0"]) == 1
    assert "TypeError in" in capsys.readouterr().out


@pytest.mark.full
def test_processes_hold(tmp_path):
    assert try_apart(CASE, fresh(tmp_path / "case", CASE)).name == "refused"
    words = ["--configs", "60", "--files", "60", "--processes", "4", "--seed", "4"]
    done = subprocess.run(
        [sys.executable, "-m", "experiments.fuzz", *words], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
