"""The store: transactions that are whole or not there, results that stay, programs that are claimed once."""

import sqlite3

import numpy as np
import pytest

from jaxblock.sweeps.outcomes import finished, stopped
from jaxblock.sweeps.reading import thinned
from jaxblock.sweeps.schema import Saved
from jaxblock.sweeps.states import load_state, save_state
from jaxblock.sweeps.store import FILE, Store


@pytest.fixture
def store(tmp_path):
    made = Store.create(tmp_path)
    number = made.save_plan({"sweep": {"name": "s"}, "axes": {}}, {}, identity="i")
    made.add_runs(number, [(name, {"run.seed": i}, {}, {}) for i, name in enumerate("abcd")])
    yield made
    made.close()


RESULT = {"outcome": "ok"}


def test_what_has_a_result_is_not_run_again(store):
    assert store.pending(1) == list("abcd")
    store.add_programs([["a", "b"], ["c"]])
    assert store.pending(1) == ["d"]
    store.finish(store.claim(1), {"a": RESULT, "b": RESULT})
    assert store.pending(1) == ["d"]
    assert set(store.results()) == {"a", "b"}


def test_a_result_is_never_overwritten(store):
    store.add_programs([["a"], ["a"]])
    store.finish(store.claim(1), {"a": {"outcome": "ok", "val_loss": 1.0}})
    store.finish(store.claim(1), {"a": {"outcome": "ok", "val_loss": 2.0}})
    assert store.results()["a"]["val_loss"] == 1.0


def test_a_program_is_claimed_by_one_worker(store, tmp_path):
    store.add_programs([["a"], ["b"]])
    other = Store.open(tmp_path)
    first, second = store.claim(11), other.claim(12)
    assert {first.runs, second.runs} == {("a",), ("b",)}
    assert store.claim(13) is None
    assert store.claimed_by(12) == second
    other.close()


def test_a_killed_sweep_leaves_no_program_behind_and_no_try(store):
    store.add_programs([["a"]])
    assert store.claim(1).tries == 1
    assert [program.runs for program in store.reopen()] == [("a",)]
    assert store.claim(2).tries == 1


def test_a_program_with_a_run_of_another_plan_is_ended(store):
    store.add_programs([["a", "x"], ["b"]])
    assert store.drop_foreign(1) == ["x"]
    assert [program.runs for program in store.programs()] == [("b",)]
    assert store.pending(1) == ["a", "c", "d"]


def test_a_released_program_has_been_tried(store):
    store.add_programs([["a"]])
    store.release(store.claim(1))
    assert store.claim(2).tries == 2


def test_halves_cover_the_lanes_and_start_again(store):
    store.add_programs([["a", "b", "c"]])
    program = store.claim(1)
    store.save_chunk(program, [("a", 1, 2.0, 1.0)], Saved(1, 1, 0.5, "f"))
    store.halve(program, "too large")
    assert [other.runs for other in store.programs()] == [("a", "b"), ("c",)]
    assert store.losses("a") == []
    assert [event[1] for event in store.events()] == ["halved_lanes"]


def test_a_chunk_is_there_whole_or_not_at_all(store):
    store.add_programs([["a"]])
    program = store.claim(1)
    with pytest.raises(sqlite3.Error):
        store.save_chunk(program, [("a", 1, 2.0, 1.0), ("a", 2, object(), 1.0)], Saved(2, 2, 0.5, "f"))
    assert store.losses("a") == []
    assert store.claimed_by(1).step == 0
    store.save_chunk(program, [("a", 1, 2.0, float("nan"))], Saved(1, 1, 0.5, "f"))
    assert store.losses("a") == [(1, 2.0, None)]
    assert store.claimed_by(1).file == "f"


def test_only_what_failed_is_forgotten(store):
    store.add_programs([["a", "b"]])
    store.finish(store.claim(1), {"a": RESULT, "b": {"outcome": "error"}})
    assert store.forget(["error", "killed"]) == ["b"]
    assert set(store.results()) == {"a"}
    assert "b" in store.pending(1)


def test_an_equal_plan_is_the_same_and_another_one_is_kept_beside_it(store):
    values = {"sweep": {"name": "s"}, "axes": {}}
    assert store.save_plan(values, {"load": 2}, identity="i") == 1
    assert store.newest_plan()[2] == {"load": 2}
    assert store.save_plan(values, {}, identity="j") == 2  # another code or other data: other runs
    store.add_runs(2, [("a", {}, {}, {})])
    store.add_runs(2, [("e", {"x": 1}, {}, {})], widened=True)
    assert store.widened_axes() == [{"x": 1}]
    assert [run[0] for run in store.planned(1)] == list("abcd")
    assert [run[0] for run in store.planned(2)] == ["a", "e"]


@pytest.mark.parametrize("content", [None, b"no database", b""])
def test_a_folder_that_is_no_sweep_is_refused(tmp_path, content):
    if content is not None:
        (tmp_path / FILE).write_bytes(content)
    with pytest.raises(ValueError, match="sweep"):
        Store.open(tmp_path)


# States ----------------------------------------------------------------------------------------------------


def test_a_state_comes_back_bit_for_bit_and_a_damaged_one_not_at_all(tmp_path):
    import ml_dtypes

    state = {"x": np.arange(6, dtype=np.float32).reshape(2, 3), "y": np.ones(3, ml_dtypes.bfloat16) / 3}
    path = tmp_path / "state.npz"
    save_state(path, state)
    found = load_state(path, state)
    assert all(found[name].dtype == state[name].dtype for name in state)
    assert all(found[name].tobytes() == state[name].tobytes() for name in state)
    assert load_state(path, {**state, "x": state["x"].T}) is None
    assert load_state(path, {"x": state["x"]}) is None
    whole = path.read_bytes()
    for damaged in (b"", whole[: len(whole) // 2], whole[:80] + bytes([whole[80] ^ 255]) + whole[81:]):
        path.write_bytes(damaged)
        assert load_state(path, state) is None
    assert load_state(tmp_path / "missing.npz", state) is None


# Outcomes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("losses", "name"),
    [
        ([5.6, 5.0, 4.0], "ok"),
        ([5.6, 5.59, 5.58], "plateau"),
        ([5.5, 5.49, 5.53], "plateau"),  # batches differ by as much
        ([5.5, 5.0, 5.7], "diverged"),
        ([8.5, 5.0, 6.0], "diverged"),  # back above a uniform guess
        ([8.5, 7.0, 6.0], "ok"),  # not yet below one
    ],
)
def test_a_run_has_one_outcome_and_a_reason_unless_it_is_ok(losses, name):
    outcome = finished(losses, val_loss=losses[-1], uniform=5.545)
    assert outcome.name == name
    assert (outcome.reason == "") == (name == "ok")


def test_what_was_not_finite_first_is_named():
    nan = float("nan")
    assert stopped(7, loss=nan, gradient_norm=nan).reason == "the loss was not finite at step 7"
    assert stopped(7, loss=1.0, gradient_norm=nan).reason == "the gradient was not finite at step 7"
    assert stopped(7, loss=1.0, gradient_norm=1.0).reason == "the parameters were not finite at step 7"
    assert finished([5.0, 4.0], val_loss=nan, uniform=5.0).name == "non_finite"


def test_a_long_curve_keeps_its_ends():
    points = [(step, 1.0 / (step + 1)) for step in range(1000)]
    short = thinned(points)
    assert len(short) == 200
    assert (short[0], short[-1]) == (points[0], points[-1])
    assert thinned(points[:3]) == points[:3]
