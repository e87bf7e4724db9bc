"""A sweep from plan to results: what diverges, does not fit or is killed is named, and a kill changes nothing."""

import html
import multiprocessing
import os
import random
import signal
import threading
import time

import pytest

from jaxblock.sweeps.crew import SweepError
from jaxblock.sweeps.reading import read_sweep
from jaxblock.sweeps.report import write_report
from jaxblock.sweeps.runner import prepare_sweep, run_sweep
from jaxblock.sweeps.store import STATES
from tests.sweeps.small_sweeps import plan, when_saved


def run(made, folder, **options):
    return run_sweep(prepare_sweep(made), folder, **options)


def figures(folder):
    """Return what a sweep found, times aside."""
    names = ("id", "outcome", "reason", "steps", "val_loss", "losses", "first_gradient_norm", "start", "end")
    return [{name: getattr(result, name) for name in names} for result in read_sweep(folder).results]


def kill(worker):
    os.kill(worker, signal.SIGKILL)


@pytest.fixture(scope="module")
def eventful(tmp_path_factory):
    """A sweep with a diverging rate, a width that cannot fit, and a worker that is killed once."""
    folder = tmp_path_factory.mktemp("eventful")
    changes = {
        "sweep": {"memory_gib": 0.25, "chunk": 2},
        "axes": {
            "model.width": [8, 4096],
            "optimizer.learning_rate": [1e-2, 1e30],
            "run.seed": [0, 1],
        },
        "model": {"width": None, "hidden": None},
        "run": {"steps": 60},
    }
    made = plan(folder, **changes)
    killer = threading.Thread(
        target=when_saved, args=(folder / "store",), kwargs={"after_step": 2, "then": kill}
    )
    killer.start()
    assert run(made, folder / "store") == 0
    killer.join()
    return made, folder / "store"


def test_all_three_are_named(eventful):
    sweep = read_sweep(eventful[1])
    outcomes = {}
    for result in sweep.results:
        outcomes.setdefault((result.width, result.learning_rate), []).append(result.outcome)
    assert outcomes == {
        (8, 1e-2): ["ok", "ok"],
        (8, 1e30): ["non_finite", "non_finite"],
        (4096, 1e-2): ["out_of_memory", "out_of_memory"],
        (4096, 1e30): ["out_of_memory", "out_of_memory"],
    }
    assert all("GiB" in result.reason for result in sweep.results if result.outcome == "out_of_memory")
    kinds = [event.kind for event in sweep.events]
    assert kinds.count("worker_killed") == 1
    assert "halved_lanes" in kinds
    killed = next(event for event in sweep.events if event.kind == "worker_killed")
    assert "SIGKILL" in killed.sentence
    assert set(killed.runs) == {result.id for result in sweep.results if result.width == 8}
    page = write_report(sweep, eventful[1]).read_text(encoding="utf-8")
    for words in (killed.sentence, "not finite at step", "GiB and a worker has"):
        assert html.escape(words) in page


def test_a_failed_run_has_no_loss_and_an_ok_one_has_all_of_it(eventful):
    for result in read_sweep(eventful[1]).results:
        if result.outcome == "ok":
            assert result.steps == 60
            assert [step for step, _ in result.losses] == list(range(1, 61))
            assert result.val_loss is not None
            assert result.val_error > 0
            assert len(result.start.stream) == 2
            assert result.step_s > 0
            assert result.parameters["total"] > 0
        else:
            assert result.val_loss is None
            assert result.reason


def test_s1_28_a_result_carries_its_initialization(eventful):
    made, folder = eventful
    assert {result.initialization for result in read_sweep(folder).results} == {"plain"}
    assert made.runs()[0].config.model.initialization == "plain"


def test_what_is_done_is_not_run_again_and_no_state_is_left(eventful):
    made, folder = eventful
    before = figures(folder)
    begin = time.perf_counter()
    assert run(made, folder) == 0  # no worker starts
    assert figures(folder) == before
    assert time.perf_counter() - begin < 30
    assert list((folder / STATES).iterdir()) == []


def test_one_process_at_a_time_runs_a_sweep(eventful):
    import fcntl

    made, folder = eventful
    held = os.open(folder, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    try:
        with pytest.raises(SweepError, match="another process"):
            run(made, folder)
    finally:
        os.close(held)


@pytest.mark.full
def test_a_larger_plan_keeps_the_results_of_the_smaller_one(eventful, tmp_path):
    folder = tmp_path / "store"
    assert run(plan(tmp_path), folder) == 0
    first = figures(folder)
    assert (
        run(plan(tmp_path, axes={"optimizer.learning_rate": [1e-3, 1e-2], "run.seed": [0, 1, 2]}), folder)
        == 0
    )
    second = figures(folder)
    assert [row for row in second if row["id"] in {old["id"] for old in first}] == first
    assert len(second) == 6


def _sweep(made, folder):
    os._exit(run(made, folder))


@pytest.mark.full
def test_twenty_kills_change_no_result(tmp_path):
    """SIGKILL of the whole sweep at random moments; workers end with it, and a resumed sweep is as an unbroken one."""
    changes = {"axes": {"model.depth": [1, 2], "run.seed": [0, 1]}, "model": {"depth": None}}
    changes |= {"run": {"steps": 400}, "sweep": {"chunk": 2}}
    made, draw = plan(tmp_path, **changes), random.Random(0)
    context, kills = multiprocessing.get_context("spawn"), 0
    assert run(made, tmp_path / "whole") == 0
    while True:
        process = context.Process(target=_sweep, args=(made, tmp_path / "killed"))
        process.start()
        process.join(timeout=None if kills == 20 else draw.uniform(3.0, 25.0))
        if process.exitcode == 0:
            break
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        kills += 1
    assert kills > 5
    assert figures(tmp_path / "killed") == figures(tmp_path / "whole")
