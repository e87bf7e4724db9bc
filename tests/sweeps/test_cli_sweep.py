"""`jaxblock sweep` and `report`: bad input is one sentence and nothing is written; a dry run writes nothing either."""

import json
from pathlib import Path

import pytest
import tomli_w

from jaxblock.cli import main
from jaxblock.sweeps.plan import SweepConfig, read_plan
from jaxblock.sweeps.store import Store
from tests.sweeps.small_sweeps import values

PLANS = sorted((Path(__file__).resolve().parents[2] / "configs" / "sweeps").glob("*.toml"))


@pytest.mark.parametrize("path", PLANS, ids=[path.stem for path in PLANS])
def test_every_plan_of_the_repository_builds(path):
    made = read_plan(path)
    assert made.sweep.name == path.stem
    assert len(made.runs()) > 1
    head = path.read_text(encoding="utf-8")
    assert all(word in head for word in ("# command:", "# device:", "# wall time:", "# expect:"))


@pytest.fixture
def plan_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.toml").write_text(tomli_w.dumps(values(tmp_path)), encoding="utf-8")
    return tmp_path / "plan.toml"


def refused(capsys, *arguments):
    before = sorted(Path.cwd().rglob("*"))
    assert main(list(arguments)) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.count("\n") == 1
    assert sorted(Path.cwd().rglob("*")) == before
    return error


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "needs a plan file"),
        (["pln.toml"], "did you mean 'plan.toml'"),
        (["plan.toml", "--stor", "x"], "did you mean 'store'"),
        (["plan.toml", "--store"], "needs a value"),
        (["plan.toml", "--store", "plan.toml"], "is a file"),
        (["plan.toml", "--store", "full"], "holds other things"),
        (["plan.toml", "other.toml"], "unexpected argument"),
        (["--store", "missing"], "does not exist"),
        (["plan.toml", "--store", "plan.toml/x"], "is a file"),
        (["full"], "go on with the sweep in it by --store full"),
    ],
)
def test_bad_arguments_are_refused(plan_file, capsys, arguments, sentence):
    (plan_file.parent / "full").mkdir()
    (plan_file.parent / "full" / "mine.txt").write_text("mine")
    assert sentence in refused(capsys, "sweep", *arguments)


def test_a_model_that_cannot_be_built_is_refused_before_anything_is_written(plan_file, capsys):
    made = values(plan_file.parent, model={"context": 4000})
    plan_file.write_text(tomli_w.dumps(made), encoding="utf-8")
    assert "context" in refused(capsys, "sweep", "plan.toml")


def test_the_store_of_another_sweep_is_refused(plan_file, capsys):
    folder = plan_file.parent / "other"
    store = Store.create(folder)
    assert main(["sweep", "plan.toml", "--store", "other", "--dry-run"]) == 0  # ended in its first moment
    store.save_plan({"sweep": {"name": "other"}, "axes": {}}, {}, identity="i")
    store.close()
    capsys.readouterr()
    assert "holds the sweep 'other'" in refused(capsys, "sweep", "plan.toml", "--store", "other")


def test_help_says_what_a_plan_may_hold(capsys):
    with pytest.raises(SystemExit):
        main(["sweep", "--help"])
    text = capsys.readouterr().out
    assert all(f"{name}:" in text for name in SweepConfig.model_fields)


def test_report_refuses_a_folder_that_is_no_sweep(plan_file, capsys):
    assert "holds no sweep" in refused(capsys, "report", ".")


def test_a_dry_run_tells_every_program_and_writes_nothing(plan_file, capsys):
    before = sorted(plan_file.parent.rglob("*"))
    assert main(["sweep", "plan.toml", "--dry-run", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)["arms"][0]
    assert (row["runs"], row["lanes"], row["blocks"], row["sublayers"]) == (4, 4, 1, 2)
    assert len(row["flops_per_token"]) == 4
    assert row["parameters"]["total"] > row["parameters"]["blocks"] > 0
    assert row["seconds"] > 0
    assert row["bytes"] > 0
    assert main(["sweep", "plan.toml", "--dry-run"]) == 0
    assert "4 runs in 1 programs" in capsys.readouterr().out
    assert sorted(plan_file.parent.rglob("*")) == before
