"""A checkpoint saved in the background is the state at the moment it was begun, and its failure is not lost."""

import json
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as drawn

from jaxblock.training import checkpoint as module
from jaxblock.training import loop
from jaxblock.training.checkpoint import Checkpoints
from jaxblock.training.checkpoint_pieces import Piece, digest, gathered_digests
from jaxblock.training.config import CheckpointConfig
from jaxblock.training.run_folder import RunError, RunFilesError
from tests.small_runs import losses, resume, rows, shared_programs, train, write_text

KEEP = CheckpointConfig(keep_latest=9)


def state(step: int) -> dict[str, Any]:
    return {"params": {"kernel": jnp.arange(12.0).reshape(3, 4) + step, "scale": jnp.ones(())}}


class Gate:
    """Holds the threads that bring a checkpoint to the disk, and can let them fail."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self.open, self.failure, work = threading.Event(), None, module.bring_to_disk

        def bring_to_disk(folder: Path) -> None:
            assert self.open.wait(60)
            if self.failure is not None:
                raise self.failure
            work(folder)

        patch.setattr(module, "bring_to_disk", bring_to_disk)


@pytest.fixture
def gate(monkeypatch):
    return Gate(monkeypatch)


def test_the_state_may_go_as_soon_as_its_save_has_begun(tmp_path, gate):
    """What is saved is what was there at `start`, although the step after it has the memory by then."""
    folder, saved = tmp_path / "checkpoints", state(1)
    with Checkpoints(folder, KEEP) as checkpoints:
        assert checkpoints.start(1, saved, facts={})
        step = jax.jit(lambda x: jax.tree.map(lambda leaf: -leaf, x), donate_argnums=0)
        assert float(step(saved)["params"]["scale"]) == -1
        for leaf in jax.tree.leaves(saved):
            assert leaf.is_deleted()
        assert not (folder / "1").exists()
        gate.open.set()
        found = checkpoints.load(1, state(0))  # it waits
    assert np.array_equal(found["params"]["kernel"], state(1)["params"]["kernel"])
    assert sorted(path.name for path in folder.iterdir()) == ["1"]


def test_one_save_at_a_time_and_leaving_waits(tmp_path, gate):
    folder = tmp_path / "checkpoints"
    with Checkpoints(folder, KEEP) as checkpoints:
        checkpoints.start(1, state(1), facts={})
        opener = threading.Timer(0.2, gate.open.set)
        opener.start()
        checkpoints.start(2, state(2), facts={})
        assert (folder / "1").is_dir()
    assert (folder / "2").is_dir()


def look(checkpoints: Checkpoints) -> None:
    for _ in range(1000):
        checkpoints.raise_failure()
        threading.Event().wait(0.01)


LOOKS = {
    "wait": lambda checkpoints: checkpoints.wait(),
    "start": lambda checkpoints: checkpoints.start(2, state(2), facts={}),
    "load": lambda checkpoints: checkpoints.load(1, state(1)),
    "steps": lambda checkpoints: checkpoints.steps(),
    "raise_failure": look,
    "leaving": lambda checkpoints: checkpoints.__exit__(None, None, None),
}


@pytest.mark.parametrize("told_by", LOOKS)
def test_a_failure_in_the_background_is_raised_where_one_looks_next(tmp_path, gate, told_by):
    gate.failure = OSError(28, "No space left on device")
    gate.open.set()
    checkpoints = Checkpoints(tmp_path / "checkpoints", KEEP)
    checkpoints.start(1, state(1), facts={})
    with pytest.raises(RunFilesError, match=r"step 1 cannot be saved .* No space left on device"):
        LOOKS[told_by](checkpoints)
    # Told once; the step can be saved again.
    gate.failure = None
    with Checkpoints(tmp_path / "checkpoints", KEEP) as again:
        assert again.steps() == []
        assert again.save(1, state(1), facts={})


def test_another_error_is_not_hidden_and_the_save_is_brought_to_its_end(tmp_path, gate):
    folder = tmp_path / "checkpoints"
    threading.Timer(0.2, gate.open.set).start()

    def fail() -> None:
        with Checkpoints(folder, KEEP) as checkpoints:
            checkpoints.start(1, state(1), facts={})
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert (folder / "1").is_dir()


def test_a_run_trains_on_while_it_saves_and_ends_with_1_where_that_fails(tmp_path, capsys, monkeypatch):
    """The failure of the save of step 4 ends the run at step 6, where it reports next; it goes on from nothing lost."""
    text, run = write_text(tmp_path / "fox.jsonl"), tmp_path / "run"
    with shared_programs(tmp_path / "programs"):
        assert train(text, tmp_path / "unbroken") == 0
        with monkeypatch.context() as patch:
            gate, program = Gate(patch), loop._Loop._program
            gate.failure = OSError(28, "No space left on device")

            def opening(self: Any, number: int, *rest: Any) -> Any:
                if number == 6:  # two steps were made while the checkpoint of step 4 was held
                    gate.open.set()
                return program(self, number, *rest)

            patch.setattr(loop._Loop, "_program", opening)
            capsys.readouterr()
            assert train(text, run) == 1
        assert "step 4 cannot be saved" in capsys.readouterr().err
        assert resume(run) == 0
    assert rows(run) == rows(tmp_path / "unbroken")
    assert list(losses(run)) == list(range(1, 7))


# The checksum


@st.composite
def cut_arrays(draw: st.DrawFn) -> tuple[np.ndarray, list[Piece]]:
    """An array of some dtype, and the blocks it falls into when every axis is cut somewhere."""
    dtype = np.dtype(draw(st.sampled_from(["bool", "uint8", "bfloat16", "float16", "int32", "float32"])))
    shape = draw(drawn.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))
    seed = np.random.default_rng(draw(st.integers(0, 99)))
    value = np.asarray(seed.normal(size=shape) * 9).astype(dtype)
    pieces = [Piece((0,) * value.ndim, value)]
    for axis, size in enumerate(shape):
        at = draw(st.integers(0, size))

        def halves(piece: Piece, axis: int = axis, at: int = at) -> list[Piece]:
            first, second = np.split(piece.value, [at], axis)
            start = tuple(x + at if i == axis else x for i, x in enumerate(piece.start))
            return [Piece(piece.start, first), Piece(start, second)]

        pieces = [half for piece in pieces for half in halves(piece)]
    return value, pieces


@settings(deadline=None, max_examples=150)
@given(cut=cut_arrays(), choice=st.integers(0, 10**6))
def test_the_checksums_of_parts_add_up_to_the_wholes_and_one_bit_shows(cut, choice):
    value, pieces = cut
    whole = digest([Piece((0,) * value.ndim, value)], value.shape)
    bits = np.ascontiguousarray(value).view(f"u{value.dtype.itemsize}").reshape(-1)
    assert whole == sum(int(bit) * (2 * i + 1) for i, bit in enumerate(bits)) % 2**64
    assert sum(digest([piece], value.shape) for piece in pieces) % 2**64 == whole
    assert digest(pieces[::-1], value.shape) == whole
    if bits.size:
        changed = bits.copy()
        changed[choice % bits.size] ^= 1
        other = changed.view(value.dtype).reshape(value.shape)
        assert digest([Piece((0,) * value.ndim, other)], value.shape) != whole


def test_a_long_array_is_summed_in_parts(monkeypatch):
    value = np.random.default_rng(0).normal(size=(50, 3, 7)).astype(np.float32)
    pieces = [Piece((0, 0, 0), value)]
    whole = digest(pieces, value.shape)
    monkeypatch.setattr("jaxblock.training.checkpoint_pieces._CHUNK", 20)
    assert digest(pieces, value.shape) == whole


def test_the_sums_of_processes_are_added_by_name(tmp_path, monkeypatch):
    """An array that all have whole is told by one of them, a part by each that has one."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    for process, told in enumerate(({"whole": 5, "parts": 2**64 - 1}, {"parts": 3})):
        (tmp_path / f"{process}.json").write_text(json.dumps(told))
    assert gathered_digests(tmp_path) == {"whole": 5, "parts": 2}


def test_a_relative_path_that_goes_away_is_an_error_and_no_crash(tmp_path):
    """A folder that cannot be made is refused before anything is copied, in the call itself."""
    (tmp_path / "checkpoints").write_text("in the way")
    with pytest.raises(RunError, match="cannot be"):
        Checkpoints(tmp_path / "checkpoints").start(1, state(1), facts={})
