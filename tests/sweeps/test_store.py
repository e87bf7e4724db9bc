"""The store: transactions that are whole or not there, results that stay, programs that are claimed once."""

import sqlite3

import numpy as np
import pytest

from jaxblock.sweeps.ledger import ASKED, answer
from jaxblock.sweeps.outcomes import finished, stopped
from jaxblock.sweeps.reading import thinned
from jaxblock.sweeps.schema import Saved
from jaxblock.sweeps.states import state_bytes, state_from
from jaxblock.sweeps.store import FILE, Store
from tests.sweeps.small_sweeps import through_bytes


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


def test_a_state_comes_back_bit_for_bit_and_a_damaged_one_not_at_all():
    import ml_dtypes

    state = {"x": np.arange(6, dtype=np.float32).reshape(2, 3), "y": np.ones(3, ml_dtypes.bfloat16) / 3}
    whole = state_bytes(state)
    found = state_from(whole, state)
    assert all(found[name].dtype == state[name].dtype for name in state)
    assert all(found[name].tobytes() == state[name].tobytes() for name in state)
    assert state_from(whole, {**state, "x": state["x"].T}) is None
    assert state_from(whole, {"x": state["x"]}) is None
    for damaged in (b"", whole[: len(whole) // 2], whole[:80] + bytes([whole[80] ^ 255]) + whole[81:]):
        assert state_from(damaged, state) is None


def test_a_store_keeps_the_state_it_is_told_to(store):
    store.add_programs([["a"], ["b"]])
    first, second = store.claim(1), store.claim(2)
    for name in ("1-4.npz", "1-8.npz", "2-4.npz"):
        store.write_state(name, name.encode())
    assert store.read_state("1-4.npz") == b"1-4.npz"
    store.forget_states(first, but="1-8.npz")
    assert [store.read_state(name) for name in ("1-4.npz", "1-8.npz", "2-4.npz")] == [
        None,
        b"1-8.npz",
        b"2-4.npz",
    ]
    store.forget_states(second)
    assert store.read_state("2-4.npz") is None


# Another machine's -----------------------------------------------------------------------------------------


def test_a_ledger_answers_as_the_store_does_and_only_what_a_worker_asks(store):
    assert set(ASKED) >= {"claim", "save_chunk", "finish", "write_state", "halve"}
    assert all(callable(getattr(store, name)) for name in ASKED)
    store.add_programs([["a", "b"], ["c"]])
    ledger = through_bytes(store)
    program = ledger.claim(7)
    assert program == store.claimed_by(7)
    assert ledger.config("a") == store.config("a")
    ledger.write_state("1-4.npz", b"state")
    ledger.save_chunk(program, [("a", 1, 2.0, None)], Saved(4, 4, 0.5, "1-4.npz"))
    assert ledger.losses("a") == store.losses("a") == [(1, 2.0, None)]
    assert store.claimed_by(7).file == "1-4.npz"
    assert ledger.read_state("1-4.npz") == b"state"
    ledger.finish(program, {"a": RESULT, "b": RESULT})
    assert set(store.results()) == {"a", "b"}
    assert ledger.claim(7).runs == ("c",)
    for method in ("forget", "close", "_rows", "add_programs"):
        with pytest.raises(ValueError, match="is asked for"):
            answer(store, method, (), {})
        with pytest.raises(AttributeError):
            getattr(ledger, method)


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
