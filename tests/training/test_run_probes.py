"""Whole runs with [probe]: what probes.jsonl holds, that resumes and rewinds keep it, what a bad step leaves behind."""

import json
import signal
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxblock.training import loop
from jaxblock.training.config_file import build_config
from jaxblock.training.prepare import TASKS
from jaxblock.training.probe_plots import LINES, chosen, is_logarithmic, plot_probes, profiles_of
from jaxblock.training.probing import open_probing, plain, write_profile
from jaxblock.training.run_folder import RunFolder
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

SMALL = {"vocab_size": 256, "context": 16, "depth": 1, "width": 8, "heads": 2}
PROBE = ("--probe.every", "2", "--probe.statistics", '["sizes", "branch", "gradient", "update"]')


@pytest.fixture(scope="module", autouse=True)
def _compile_once(tmp_path_factory):
    with shared_programs(tmp_path_factory.mktemp("programs")):
        yield


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return write_text(tmp_path_factory.mktemp("data") / "fox.jsonl")


@pytest.fixture(scope="module")
def probed(text, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "probed"
    with pytest.MonkeyPatch.context() as monkeypatch:
        made = compiled(monkeypatch)
        assert train(text, run, *PROBE) == 0
    assert made == [True, False]  # the plain one when step 3 needed it
    return run


def compiled(monkeypatch) -> list[bool]:
    """Return a list that grows by each step that is compiled: whether it measures."""
    made, compile_step = [], loop._Loop._compile

    def counted(self, state, key, *, probed):
        made.append(probed)
        return compile_step(self, state, key, probed=probed)

    monkeypatch.setattr(loop._Loop, "_compile", counted)
    return made


def probes(run: Path) -> list[dict]:
    return RunFolder(run).read_probes()


# probes.jsonl ----------------------------------------------------------------------------------------------


def test_a_row_per_measured_step_and_a_first_one_that_says_what_they_hold(probed):
    first, *measured = probes(probed)
    assert first == {
        "step": 0,
        "event": "start",
        "every": 2,
        "statistics": ["sizes", "branch", "gradient", "update"],
        "missing": [],
        "branches": ["attention", "feed_forward"],
        "sublayers": 2,
    }
    assert [row["step"] for row in measured] == [1, 2, 4, 6]
    for row in measured:
        assert len(row["stream_rms"]) == len(row["branch_gain"]) == 2
        assert len(row["stream_gradient"]) == 3
        assert len(row["parameter_update"]["query"]["relative"]) == 1
        assert row["parameter_update"]["embedding outside the blocks"]["rms"] > 0
    assert measured[0]["stream_rms"] != measured[-1]["stream_rms"]
    assert (probed / "plots" / "probes.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.full
def test_losses_and_parameters_are_those_of_the_run_without_probes(probed, text, tmp_path):
    run = tmp_path / "plain"
    assert train(text, run) == 0
    assert not (run / "probes.jsonl").exists()
    assert not (run / "plots" / "probes.png").exists()
    np.testing.assert_allclose(list(losses(run).values()), list(losses(probed).values()), rtol=1e-5)
    for ours, theirs in zip(*(jax.tree.leaves(restored(x)[3].params) for x in (run, probed)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    assert losses(run)[6] != losses(run)[1]  # control: they move by far more


@pytest.mark.full
def test_no_program_is_compiled_that_no_step_needs(text, tmp_path, monkeypatch):
    made = compiled(monkeypatch)
    assert train(text, tmp_path / "all", *PROBE, "--probe.every", "1") == 0
    assert made == [True]
    assert [row["step"] for row in probes(tmp_path / "all")] == list(range(STEPS + 1))
    made.clear()
    assert train(text, tmp_path / "none") == 0
    assert made == [False]


@pytest.mark.full
def test_a_resume_keeps_what_was_measured_before_its_checkpoint_and_no_row_twice(
    text, probed, tmp_path, monkeypatch
):
    run = tmp_path / "stopped"
    with monkeypatch.context() as patch:
        at_batches(patch, {4: signalled(signal.SIGTERM)})
        assert train(text, run, *PROBE) == 143
    # What a kill between two writes leaves behind: a step after the checkpoint, and half a line.
    with (run / "probes.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 6, "stream_rms": [9.0, 9.0]}\n{"step": 8, "stre')
    assert resume(run) == 0
    assert probes(run) == probes(probed)


@pytest.mark.full
def test_a_resume_may_switch_probes_off_and_on(text, tmp_path, monkeypatch):
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        at_batches(patch, {2: signalled(signal.SIGTERM), 4: signalled(signal.SIGTERM)})
        assert train(text, run, *PROBE) == 143
        assert resume(run, "--probe.every", "0", "--probe.statistics", "[]") == 2  # nothing would be measured
        off = '["sizes", "budget", "constant_share", "token_similarity", "branch"]'
        assert resume(run, "--probe.every", "0", "--probe.statistics", off) == 143
        assert [row["step"] for row in probes(run)] == [0, 1, 2]
        assert resume(run, "--probe.every", "3") == 0
    # What is measured from step 5 on is another thing, which a row of its own says.
    assert [row["step"] for row in probes(run)] == [0, 1, 2, 5, 6]
    assert [(row["step"], row["every"]) for row in probes(run) if "event" in row] == [(0, 2), (5, 3)]


def test_what_a_stream_has_not_is_found_by_tracing_the_model(text):
    def of(residual):
        config = build_config(
            {
                "model": {**SMALL, "residual": residual},
                "data": {"path": str(text), "batch": 2},
                "probe": {"every": 1, "statistics": ["branch", "gradient", "sizes", "update"]},
            }
        )
        task = TASKS["language_model"](config)
        shapes = jax.eval_shape(task.init, jax.random.key(0))
        return open_probing(task, config, shapes)

    history, plain_stream = of("attention_residual"), of("pre_norm")
    assert (history.statistics, history.missing) == (("branch", "update"), ("gradient", "sizes"))
    assert (plain_stream.missing, len(plain_stream.statistics)) == ((), 4)


@pytest.mark.full
def test_what_a_stream_has_not_is_named_once_and_is_in_no_row(text, tmp_path, capsys):
    run = tmp_path / "history"
    assert train(text, run, *PROBE, "--model.residual", "attention_residual") == 0
    words = capsys.readouterr().err
    assert words.count("missing, as the stream of this topology is not one array: sizes, gradient") == 1
    first, *measured = probes(run)
    assert (first["missing"], first["statistics"]) == (["sizes", "gradient"], ["branch", "update"])
    assert all("stream_rms" not in row and "stream_gradient" not in row for row in measured)
    assert all(len(row["branch_gain"]) == 2 for row in measured)


@pytest.mark.full
def test_a_classifier_is_measured_over_its_real_tokens(tmp_path):
    data = tmp_path / "labels.jsonl"
    lines = [json.dumps({"text": f"{word} {i}", "label": word}) for word in ("up", "down") for i in range(20)]
    data.write_text("\n".join(lines), encoding="utf-8")
    run = tmp_path / "run"
    assert train(data, run, *PROBE, "--run.task", "classifier", "--data.seams", "joined") == 0
    assert [row["step"] for row in probes(run)] == [0, 1, 2, 4, 6]
    assert all(np.isfinite(row["stream_rms"]).all() for row in probes(run)[1:])


def test_a_misspelt_statistic_is_refused_before_anything_is_written(text, tmp_path, capsys):
    run = tmp_path / "run"
    assert train(text, run, "--probe.every", "2", "--probe.statistics", '["szies"]') == 2
    assert "did you mean 'sizes'" in capsys.readouterr().err
    assert not run.exists()


# Bad steps -------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_bad_step_leaves_everything_measured_of_it(text, tmp_path, monkeypatch, capsys):
    run = tmp_path / "bad"
    at_batches(monkeypatch, {2: bad_target, 3: bad_input})
    assert train(text, run, *PROBE, "--guard.non_finite", "skip") == 0
    events = [row for row in rows(run) if "skipped" in row]
    names = ["probe_step_3.json", "probe_step_3_batch_3.json"]
    assert all(
        row["sentence"].endswith(f"measured along depth in {n}") for row, n in zip(events, names, strict=True)
    )
    assert names[0] in capsys.readouterr().err
    for number, name in enumerate(names, 2):
        found = json.loads((run / name).read_text(encoding="utf-8"))
        assert (found["step"], found["batch"], found["event"]) == (3, number, "non_finite")
        assert {"stream_rms", "outlier", "absorbed", "stream_rank", "branch_gain"} <= found.keys()
        sound = number == 2  # a target that is none leaves the forward pass as it is
        assert np.isfinite(np.array(found["stream_rms"], float)).all() == sound
        assert found["not_finite"] == [0.0 if sound else 1.0] * 2
        assert (found["parameter_gradient"]["query"]["rms"] == [None]) == (not sound)
    assert [row["step"] for row in probes(run)] == [0, 1, 2, 4, 6]


@pytest.mark.full
def test_control_without_probes_a_bad_step_leaves_its_row_alone(text, tmp_path, monkeypatch):
    run = tmp_path / "bad"
    at_batches(monkeypatch, {2: bad_target})
    assert train(text, run) == 3
    assert not list(run.glob("probe*"))
    assert rows(run)[-1]["sentence"].endswith("stop")
    assert summary(run)["bad_step"] == 3


@pytest.mark.full
def test_a_measurement_that_fails_does_not_hide_the_bad_step(text, tmp_path, monkeypatch):
    def full(*_, **__):
        raise MemoryError("no room")

    run = tmp_path / "bad"
    monkeypatch.setattr(loop, "profiler", full)
    at_batches(monkeypatch, {2: bad_target})
    assert train(text, run, *PROBE) == 3
    assert rows(run)[-1]["sentence"].endswith("measuring it along depth failed with MemoryError: no room")


@pytest.mark.full
def test_a_rewind_takes_out_what_it_makes_again(text, tmp_path, monkeypatch):
    run = tmp_path / "run"
    at_batches(monkeypatch, {3: bad_target})
    flags = ("--run.checkpoint_every", "2", "--run.log_every", "1", "--run.evaluate_every", "6")
    assert train(text, run, *flags, *PROBE, "--probe.every", "1", "--guard.non_finite", "rewind") == 0
    assert [row["step"] for row in probes(run)] == [0, 1, 2, 3, 4, 5, 6]
    gone = [json.loads(line) for line in (run / "abandoned_probes.jsonl").read_text().splitlines()]
    assert [row["step"] for row in gone] == [3]
    assert gone[0] != probes(run)[3]


def test_a_rewind_moves_rows_and_loses_none(tmp_path):
    folder = RunFolder(tmp_path)
    folder.start_probes(None, after=0)
    assert not folder.probes.exists()  # nothing was measured
    made = [{"step": step, "stream_rms": [1.0]} for step in range(1, 6)]
    folder.start_probes({"step": 0, "event": "start"}, after=0)
    folder.append_probes(made)
    folder.abandon_metrics(after=2)
    assert folder.read_probes()[1:] == made[:2]
    gone = [json.loads(line) for line in folder.abandoned_probes.read_text().splitlines()]
    assert gone == made[2:]


def test_a_number_is_written_as_float32_and_what_is_not_finite_as_null():
    values = np.array([[0.1, np.nan], [np.inf, 2.0]], np.float32)
    assert plain(values) == [[0.1, None], [None, 2.0]]
    assert np.float32(plain(np.float32(1 / 3))) == np.float32(1 / 3)


def test_the_same_batch_at_the_same_step_has_one_file(tmp_path):
    assert write_profile(tmp_path, {"a": 1}, step=3, batch=2) == "probe_step_3.json"
    assert write_profile(tmp_path, {"a": 2}, step=3, batch=2) == "probe_step_3.json"
    assert write_profile(tmp_path, {"a": 3}, step=3, batch=7) == "probe_step_3_batch_7.json"
    assert json.loads((tmp_path / "probe_step_3.json").read_text())["a"] == 2


# The figure ------------------------------------------------------------------------------------------------


def made_rows(count: int) -> list[dict]:
    return [
        {
            "step": step,
            "stream_rms": [1.0, 2.0 * step, 30.0],
            "budget_cosine": [-0.1, 0.2, None],
            "not_finite": [0.0, 0.0, 0.0],
            "parameter_update": {
                "query": {"rms": [1.0], "relative": [0.1]},
                "head outside the blocks": {"rms": 1.0, "relative": 0.1},
            },
        }
        for step in range(1, count + 1)
    ]


def test_at_most_twelve_steps_are_drawn_the_first_and_the_last_among_them():
    steps = [row["step"] for row in chosen(made_rows(100))]
    assert (len(steps), steps[0], steps[-1]) == (LINES, 1, 100)
    assert max(np.diff(steps)) - min(np.diff(steps)) <= 1
    assert [row["step"] for row in chosen(made_rows(3))] == [1, 2, 3]


def test_panels_are_the_statistics_that_have_a_depth(tmp_path):
    panels = profiles_of(made_rows(2))
    assert [panel.along for panel in panels] == ["sublayer", "sublayer", "block"]
    assert [len(panel.lines) for panel in panels] == [2, 2, 2]
    assert np.isnan(panels[1].lines[0][1][2])
    assert plot_probes([{"step": 0, "event": "start"}], tmp_path / "probes.png") is None
    path = plot_probes(made_rows(1), tmp_path / "probes.png")
    assert path is not None
    assert [file.name for file in tmp_path.iterdir()] == ["probes.png"]


def test_an_axis_is_logarithmic_where_positive_values_span_decades():
    assert is_logarithmic(np.array([1.0, 30.0, np.nan]))
    assert is_logarithmic(np.array([0.0, 1.0, 5.0, 30.0]))
    assert not is_logarithmic(np.array([0.0, 0.0, 1.0, 30.0]))
    assert not is_logarithmic(np.array([1.0, 5.0]))
    assert not is_logarithmic(np.array([-1.0, 1.0, 30.0, 2.0, 3.0]))
    assert not is_logarithmic(np.array([np.nan]))
