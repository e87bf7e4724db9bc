"""`jaxblock check`: its two positional words, the table, the line of JSON and the exit codes."""

import json

import numpy as np
import pytest

from jaxblock import cli
from jaxblock.cli.check import check
from jaxblock.sweeps import coordinate
from jaxblock.sweeps.coordinate import CheckPlan
from jaxblock.sweeps.coordinate_slopes import CoordinateCheck, NonFinite
from tests.small_corpus import write_folder

SMALL = ["--model.width", "8", "--model.heads", "2", "--model.context", "8", "--data.validation_tokens", "20"]


@pytest.fixture(autouse=True)
def command(monkeypatch):
    monkeypatch.setitem(cli.COMMANDS, "check", check)  # pyright: ignore[reportArgumentType]


@pytest.fixture
def measured(monkeypatch):
    """Let y = size^exponent stand in for training; return the plans that came."""
    plans: list[CheckPlan] = []

    def stand_in(exponent: float, *, lost: tuple[NonFinite, ...] = ()):
        def run(plan: CheckPlan, say) -> CoordinateCheck:
            plans.append(plan)
            shape = (len(plan.sizes), len(plan.seeds), plan.steps + 1)
            law = np.array(plan.sizes, float)[:, None, None] ** exponent * np.ones(shape)
            law[:, :, 0] = 0.0
            if lost:
                law[-1, 0, -1] = np.nan
            for size in plan.sizes:
                say(size)
            rms = dict.fromkeys(("attention", "final_stream", "logits", "change"), law)
            return CoordinateCheck(
                axis=plan.axis,
                sizes=plan.sizes,
                seeds=plan.seeds,
                steps=plan.steps,
                learning_rate=plan.configs[0].optimizer.learning_rate,
                mean_abs=rms,
                rms=rms,
                non_finite=lost,
            )

        monkeypatch.setattr(coordinate, "run_check", run)
        monkeypatch.setattr(coordinate, "_program", lambda config, plan: lambda *keys: ())
        return plans

    return stand_in


def refused(arguments: list[str], capsys) -> str:
    assert cli.main(["check", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    return line


def test_a_flat_model_passes(measured, capsys):
    plans = measured(0.0)
    assert cli.main(["check", "depth"]) == 0
    (plan,) = plans
    printed = capsys.readouterr()
    assert plan.sizes == (2, 4, 8, 16, 32)
    assert (plan.seeds, plan.steps, plan.batch.inputs_BT.shape) == ((0, 1, 2), 10, (4, 64))
    assert "* final stream " in printed.out
    assert "  attention " in printed.out
    header = next(line for line in printed.out.splitlines() if "t = 0" in line)
    assert [int(t) for t in header.replace("t =", "").split()] == [0, 1, 2, 5, 10]
    assert printed.out.splitlines()[-1].startswith("pass: ")
    assert printed.err.splitlines()[-1].startswith("depth 32: ")


def test_a_file_flags_and_caps(measured, tmp_path, capsys):
    plans = measured(1.0)
    write_folder(tmp_path / "text", ["a.txt", "b.txt", "c.txt"])
    file = tmp_path / "run.toml"
    file.write_text(f'[data]\npath = "{tmp_path / "text"}"\nbatch = 3\naccumulation = 3\n')
    flags = [
        "--sizes",
        "8,16,24,32,40",
        "--seeds=2",
        "--steps",
        "3",
        "--run.seed",
        "5",
        "--most-context",
        "6",
    ]
    assert cli.main(["check", "width", str(file), *SMALL, *flags]) == 1
    (plan,) = plans
    assert [config.model.width for config in plan.configs] == [8, 16, 24, 32, 40]
    assert {config.model.head_dim for config in plan.configs} == {4}
    assert (plan.seeds, plan.steps, plan.batch.inputs_BT.shape) == ((5, 6), 3, (3, 6))
    printed = capsys.readouterr().out
    assert "slope of log rms against log width, 8, 16, 24, 32, 40" in printed
    assert "fail: final stream has slope +1.00 [+1.00, +1.00] at t = 2, outside +-0.1" in printed


def test_not_resolved_is_no_pass(measured, capsys):
    measured(0.0)
    assert cli.main(["check", "depth", "--sizes", "1,2,3"]) == 1
    assert "not resolved: final stream has no slope in depth from 3 sizes" in capsys.readouterr().out


def test_json_is_one_strict_line(measured, capsys):
    measured(0.5, lost=(NonFinite(32, 0, 10),))
    assert cli.main(["check", "depth", "--json"]) == 1

    def refuse(constant: str):
        raise AssertionError(f"{constant} is no JSON")

    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line, parse_constant=refuse)
    assert (found["verdict"], found["sizes"]) == ("fail", [2, 4, 8, 16, 32])
    assert found["non_finite"] == [{"size": 32, "seed": 0, "step": 10}]
    assert found["rms"]["logits"][-1][0][-1] is None
    slope = next(s for s in found["slopes"] if (s["quantity"], s["t"]) == ("logits", 5))
    assert slope["found"]["value"] == pytest.approx(0.5)
    assert slope["verdict"] == "fail"


CONVOLUTION = [
    "--model.token_mixer",
    "convolution",
    "--model.kv_heads",
    "none",
    "--model.positions",
    "learned",
]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "needs an axis, depth or width"),
        (["--sizes", "1,2"], "needs an axis, depth or width"),
        (["dept"], "'dept'; it must be one of depth, width (did you mean 'depth'?)"),
        (["depth", "a.toml", "b.toml"], "unexpected argument 'b.toml'"),
        (["depth", "quickstat.toml"], "'quickstat.toml' does not exist"),
        (["depth", "--sizes", "2,x"], "--sizes is 'x'; it must be a whole number"),
        (["depth", "--sizes", "2"], "sizes are [2]; they must be at least 2"),
        (["depth", "--seeds", "0"], "--seeds is 0"),
        (["depth", "--steps", "1"], "steps is 1; it must be a whole number of at least 2"),
        (["depth", "--most-batch", "0"], "--most_batch is 0"),
        (["depth", "--model.dept", "3"], "'model.depth'"),
        (
            ["depth", *CONVOLUTION, "--model.context", "96"],
            "--most-context would cut to 64: a mixer of positions is another",
        ),
        (["width", "--sizes", "30,64"], "width 30 is no multiple of the head size 32"),
    ],
)
def test_bad_input_is_one_sentence(arguments, sentence, capsys):
    assert sentence in refused(arguments, capsys)


def test_help_needs_no_axis(capsys):
    for arguments in (["--help"], ["width", "-h"]):
        with pytest.raises(SystemExit) as left:
            cli.main(["check", *arguments])
        assert left.value.code == 0
        assert "check depth|width" in capsys.readouterr().out


@pytest.mark.full
def test_a_real_check_in_small(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(coordinate, "COMPILER_OPTIONS", None)
    write_folder(tmp_path, ["a.txt", "b.txt", "c.txt"])
    data = ["--data.path", str(tmp_path), "--model.kv_heads", "none"]
    flags = ["--sizes", "1,2,3,4,5", "--seeds", "2", "--steps", "2", "--json"]
    assert cli.main(["check", "depth", *SMALL, *data, *flags]) in (0, 1)
    found = json.loads(capsys.readouterr().out)
    assert np.shape(found["rms"]["final_stream"]) == (5, 2, 3)
    assert {slope["quantity"] for slope in found["slopes"]} == set(found["rms"])
