"""A worker trains the same whoever holds the store, and one on a machine with other code or data fails no run."""

import contextlib

import pytest

from jaxblock.sweeps import worker
from jaxblock.sweeps.crew import SweepError
from jaxblock.sweeps.reading import read_sweep
from jaxblock.sweeps.runner import _groups, _save, prepare_sweep, run_sweep
from jaxblock.sweeps.store import Store
from jaxblock.sweeps.worker import OtherMachineError, work
from tests.sweeps.small_sweeps import plan, through_bytes


@contextlib.contextmanager
def begun(folder, name="store"):
    """The store of a sweep whose program waits."""
    prepared = prepare_sweep(plan(folder, axes={"run.seed": [0, 1]}))
    with contextlib.closing(Store.create(folder / name)) as store:
        number = _save(prepared, store)
        store.add_programs(_groups(prepared, store, number))
        yield store


def figures(folder):
    names = ("id", "outcome", "steps", "val_loss", "losses", "first_gradient_norm", "start", "end", "probe")
    return [{name: getattr(result, name) for name in names} for result in read_sweep(folder).results]


class Lost(BaseException):
    """The end of a worker, wherever it is."""


def test_a_worker_elsewhere_goes_on_where_a_lost_one_was_and_finds_the_same_bits(tmp_path):
    with begun(tmp_path, "here") as store:
        work(store, 1)
        expected = figures(tmp_path / "here")
    with begun(tmp_path, "elsewhere") as store:
        ledger, begun_at = through_bytes(store), []

        class Losing:
            """A ledger that ends its worker after the first chunk."""

            def __getattr__(self, method):
                return getattr(ledger, method)

            def save_chunk(self, *arguments):
                ledger.save_chunk(*arguments)
                raise Lost

        class Telling(Losing):
            def save_chunk(self, program, rows, saved):
                begun_at.append((program.number, saved.step - saved.steps))
                ledger.save_chunk(program, rows, saved)

        with pytest.raises(Lost):
            work(Losing(), 1)
        store.release(store.claimed_by(1))
        work(Telling(), 2)
        assert begun_at == [(1, 4)]  # its first chunk is not trained again
    assert figures(tmp_path / "elsewhere") == expected
    assert [len(found["losses"]) for found in expected] == [8, 8]


def flip_a_byte(folder, monkeypatch):
    content = bytearray((folder / "text.txt").read_bytes())
    content[10] ^= 1
    (folder / "text.txt").write_bytes(bytes(content))


def remove(folder, monkeypatch):
    (folder / "text.txt").unlink()


def change_code(folder, monkeypatch):
    monkeypatch.setattr(worker, "code_fingerprint", lambda: "other")


def change_jax(folder, monkeypatch):
    monkeypatch.setattr(worker, "versions", lambda: {"jax": "0.0.1", "jaxlib": "0.0.1"})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (flip_a_byte, r"the data on .* \(fingerprint .*\) are not those the sweep was started with"),
        (remove, r"the data on .* cannot be used: .*text\.txt does not exist"),
        (change_code, "jaxblock on .* is not the code the sweep was started with"),
        (change_jax, r"jax is 0\.0\.1 on .*, and the sweep was started with"),
    ],
)
def test_another_machines_code_or_data_are_refused_and_no_run_has_failed(
    tmp_path, monkeypatch, change, words
):
    with begun(tmp_path) as store:
        change(tmp_path, monkeypatch)
        with pytest.raises(OtherMachineError, match=words):
            work(through_bytes(store), 1)
        assert store.results() == {}
        store.reopen()
        assert [program.tries for program in store.programs()] == [0]


def test_a_sweep_whose_data_change_under_it_stops_with_a_sentence(tmp_path, capfd):
    prepared = prepare_sweep(plan(tmp_path))
    flip_a_byte(tmp_path, None)
    with pytest.raises(SweepError, match="other code or data"):
        run_sweep(prepared, tmp_path / "store")
    error = capfd.readouterr().err
    assert "are not those the sweep was started with" in error
    assert "Traceback" not in error
    with contextlib.closing(Store.open(tmp_path / "store")) as store:
        assert store.results() == {}
        assert len(store.reopen()) == 1  # as the next call does: it waits again, and has not been tried
        assert store.claim(1).tries == 1
