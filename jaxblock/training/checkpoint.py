"""Checkpoints of a run.

A checkpoint is a folder named by its step: what Orbax writes (one flat tree of named arrays) and `manifest.json`.
It is written under another name, brought to the disk, and renamed: a kill at any moment leaves it whole or not
there. Orbax writes and reads arrays; what is saved, wanted, damaged or kept is settled here: its own manager casts
to another dtype without a word, fails alike at another model and at damage, and skips steps below the newest.

Of several processes each writes, and reads, the parts that its devices hold; the main one adds the manifest and gives
the name.
"""

import contextlib
import itertools
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from jaxblock.contracts import check_integer
from jaxblock.parallel import processes
from jaxblock.training import orbax_arrays
from jaxblock.training.checkpoint_manifest import (
    SCHEMA,
    CheckpointDamaged,
    CheckpointMismatch,
    Manifest,
    SavedLeaf,
    check_facts,
    damaged_files,
    differences,
    named_leaves,
    read_manifest,
    saved_leaf,
    write_manifest,
    written_files,
)
from jaxblock.training.checkpoint_pieces import (
    digest,
    gathered_digests,
    loaded_digests,
    own_pieces,
    raw,
    spread,
    tell_digests,
)
from jaxblock.training.config import CheckpointConfig
from jaxblock.training.files import bring_to_disk, sync
from jaxblock.training.full_disk import check_space
from jaxblock.training.run_folder import RunError, RunFilesError
from jaxblock.types import Array

__all__ = ["CheckpointDamaged", "CheckpointMismatch", "Checkpoints", "kept_steps"]

_KEEP = CheckpointConfig()
_PARTIAL = ".partial"


class Checkpoints:
    """The checkpoints of one run, by step. Nothing is written before the first save.

    `save` returns when its checkpoint is on disk; `start` when the arrays are copied, and a thread does the rest. Every
    other method, and leaving a `with` block, waits for that thread first and raises what went wrong in it. Of
    several processes all call the same methods in the same order.
    """

    def __init__(self, folder: Path, keep: CheckpointConfig = _KEEP, *, writes: bool = True):
        """`writes` is whether this process is the one of its run that names and deletes checkpoints."""
        self._folder = folder.absolute()
        self._writes = writes
        self._keep = keep
        self._saving: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.wait()
        elif self._saving is not None:  # brought to its end, whatever else went wrong
            self._saving.exception()

    def steps(self) -> list[int]:
        """Return the saved steps in order, damaged ones among them."""
        self.wait()
        return self._steps()

    def _steps(self) -> list[int]:
        if not self._folder.exists():
            return []
        with self._reported("checkpoints cannot be listed"):
            names = [path.name for path in self._folder.iterdir() if path.is_dir()]
        return sorted(int(name) for name in names if name.isdecimal() and name == str(int(name)))

    def latest(self) -> int | None:
        """Return the newest saved step, or None."""
        return max(self.steps(), default=None)

    def save(self, step: int, parts: Mapping[str, Any], *, facts: Mapping[str, Any]) -> bool:
        """Save as `start` does, and wait until it is on disk."""
        started = self.start(step, parts, facts=facts)
        self.wait()
        return started

    def start(self, step: int, parts: Mapping[str, Any], *, facts: Mapping[str, Any]) -> bool:
        """Copy named pytrees and save the copies in the background; then drop what `keep` does not name.

        Args:
          step: optimizer steps made.
          parts: pytrees of arrays; None and empty containers hold nothing. Typed random keys are arrays. They may be
            donated, or deleted, as soon as this returns.
          facts: JSON values about them; `val_loss`, a number or None, is what the best ones are kept by.

        Returns:
          False where this step is there already, whole and of the same shapes: it is left as it is.

        Raises:
          ValueError: `parts` or `facts` hold something else.
          CheckpointMismatch: this step is there already, of another model.
          RunError: it cannot be written, or a newer step exists, behind which this one would be lost; or the save
            before this one failed.
        """
        check_integer("step", step, least=0)
        check_facts(facts)
        leaves = named_leaves(parts)
        if not leaves:
            raise ValueError("a checkpoint's parts hold no array")
        steps = self.steps()
        if step in steps:
            try:
                self._read(step, parts)
                return False
            except CheckpointDamaged:
                if self._writes:
                    self._set_aside(step)
        elif steps and step < steps[-1]:
            raise RunError(
                f"step {step} cannot be saved in {str(self._folder)!r}, which holds step {steps[-1]}: a resumed run "
                "would continue from there; use another folder, or move the newer checkpoints away"
            )
        with self._reported(f"step {step} cannot be saved"):
            finish = self._begin(step, sorted(parts), leaves, dict(facts))
        pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._saving = pool.submit(self._finish, step, finish)
        pool.shutdown(wait=False)
        return True

    def wait(self) -> None:
        """Wait until what `start` began is on disk.

        Raises:
          RunError: it could not be written.
        """
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()
            processes.meet("the checkpoint has its name")

    def raise_failure(self) -> None:
        """Raise what has gone wrong with a save in the background by now, without waiting for it."""
        if self._saving is not None and self._saving.done() and self._saving.exception() is not None:
            self._saving.result()

    def load(self, step: int, like: Mapping[str, Any]) -> dict[str, Any]:
        """Return the parts that `like` names as they were saved, bit by bit, on any number of devices.

        Args:
          step: a saved step.
          like: pytrees of arrays or `jax.ShapeDtypeStruct`s; parts it does not name are not read. A struct with a
            sharding says where its leaf is to lie, the others come to the default device.

        Raises:
          CheckpointMismatch: another structure, shape or dtype is saved, the leaves named; nothing was read.
          CheckpointDamaged: it is not what was written.
          RunError: there is no such step, or it cannot be read.
        """
        self.wait()
        leaves, values = self._read(step, like)
        wanted = named_leaves(like)
        loaded = {name: _on_device(leaf, values[name], wanted[name]) for name, leaf in leaves.items()}
        arrays = iter(loaded.values())  # in the order of the trees' leaves
        return {part: jax.tree.map(lambda _: next(arrays), tree) for part, tree in like.items()}

    def facts(self, step: int) -> dict[str, Any]:
        """Return what was saved as `facts`, with `schema`, the form of the checkpoint.

        Raises:
          CheckpointDamaged: they are not what was written.
          RunError: there is no such step, or it cannot be read.
        """
        self.wait()
        return {"schema": SCHEMA, **self._manifest(step).facts}

    def newest_whole(
        self, like: Mapping[str, Any], *, set_aside: bool = True
    ) -> tuple[int | None, dict[str, Any] | None, list[str]]:
        """Return the newest step that is whole, its parts, and a sentence for each damaged one passed over.

        Args:
          like: as for `load`.
          set_aside: whether damaged ones are moved to `damaged/STEP` beside the checkpoints' folder, so that their
            steps can be saved again; nothing is deleted. Who only reads a run passes False.

        Returns:
          Step and parts are None where none is whole.

        Raises:
          CheckpointMismatch: as `load` does; another model's checkpoint is not passed over.
        """
        notes: list[str] = []
        for step in reversed(self.steps()):
            try:
                return step, self.load(step, like), notes
            except CheckpointDamaged as error:
                moved = f"was moved to {str(self._set_aside(step))!r}" if set_aside else "was passed over"
                notes.append(f"{error}; it {moved}")
        return None, None, notes

    def _begin(
        self, step: int, parts: list[str], leaves: Mapping[str, Any], facts: dict[str, Any]
    ) -> Callable[[], None]:
        """Copy the arrays and begin to write them beside their place; return what is left to do, in a thread."""
        unfinished = self._folder / f"{step}{_PARTIAL}"
        told = unfinished.with_name(f"{unfinished.name}.digests")
        if self._writes:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._remove_leftovers()
            check_space(self._folder, [raw(leaf).nbytes for leaf in leaves.values() if leaf.size])
            told.mkdir()
        processes.meet("the checkpoints' folder is there, with room")
        pieces = {name: own_pieces(leaf) for name, leaf in leaves.items()}
        # TensorStore has no arrays without entries; the manifest says all there is to say of them.
        filled = {
            name: raw(leaf) if spread(leaf) else pieces[name][0].value
            for name, leaf in leaves.items()
            if leaf.size
        }
        described = {name: saved_leaf(leaf, 0) for name, leaf in leaves.items()}
        told_of = [name for name, leaf in leaves.items() if self._writes or spread(leaf)]
        wait = orbax_arrays.start_saving(unfinished, filled)

        def finish() -> None:
            wait()
            tell_digests(told, {name: digest(pieces[name], described[name].shape) for name in told_of})
            if not self._writes:
                return
            digests = gathered_digests(told)
            saved = {name: leaf._replace(digest=digests[name]) for name, leaf in described.items()}
            write_manifest(unfinished, Manifest(step, facts, parts, saved, written_files(unfinished)))
            bring_to_disk(unfinished)
            unfinished.rename(self._folder / str(step))
            sync(self._folder)
            shutil.rmtree(told)

        return finish

    def _finish(self, step: int, finish: Callable[[], None]) -> None:
        """Bring a save to its end, in its thread."""
        with self._reported(f"step {step} cannot be saved"):
            finish()
        if self._writes:
            with self._reported(f"step {step} is saved, but older ones cannot be dropped"):
                self._drop()

    def _read(self, step: int, like: Mapping[str, Any]) -> tuple[dict[str, SavedLeaf], dict[str, Any]]:
        """Return the leaves of the named parts with their values, compared with `like` and their checksums."""
        manifest = self._manifest(step)
        found = differences(manifest, like)
        if found is not None:
            raise CheckpointMismatch(f"{self._named(step)} is not of the model or optimizer wanted: {found}")
        wanted = named_leaves(like)
        leaves = {name: manifest.leaves[name] for name in wanted}
        # Before Orbax sees it: it may read zeros for what is missing, and fails in threads that go on complaining.
        with self._reported(f"checkpoint {step} cannot be read"):
            fault = self._first_fault(step, manifest, shared=any(map(spread, wanted.values())))
        if fault is not None:
            raise CheckpointDamaged(f"{self._named(step)} is damaged: {fault}")
        values = self._read_arrays(step, leaves, wanted)
        digests = loaded_digests(values)
        for name, leaf in leaves.items():
            if digests[name] != leaf.digest:
                raise RunError(f"{self._named(step)} is whole, but {name} was not read as it was saved")
        return leaves, values

    def _first_fault(self, step: int, manifest: Manifest, *, shared: bool) -> str | None:
        """Return what is wrong with the first file that is not as it was written, if any.

        `shared` is whether all processes ask: each then looks at some of the files.
        """
        folder, files = self._folder / str(step), list(manifest.files.items())
        own = range(jax.process_index(), len(files), jax.process_count()) if shared else range(len(files))
        bad = next((at for at in own if damaged_files(folder, dict([files[at]]))), -1)
        bad = processes.largest(bad) if shared else bad
        if bad < 0:
            return None
        here = damaged_files(folder, dict([files[bad]]))
        return here[0] if here else f"{files[bad][0]} is not as it was written, as another process reads it"

    def _read_arrays(
        self, step: int, leaves: Mapping[str, SavedLeaf], wanted: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the values of some leaves as Orbax reads them: of an array on several processes, this one's part."""

        def like(name: str) -> Any:
            leaf, sharding = leaves[name], getattr(wanted[name], "sharding", None)
            dtype = np.dtype(np.uint32 if leaf.generator else leaf.dtype)
            if spread(wanted[name]) and math.prod(leaf.shape):
                return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=sharding)
            # A view of one entry: it tells Orbax shape and dtype, and takes no memory.
            return np.broadcast_to(np.zeros((), dtype), leaf.shape)

        likes = {name: like(name) for name in leaves}
        filled = {name: value for name, value in likes.items() if value.size}
        with self._reported(f"checkpoint {step} is whole, but cannot be read"):
            read = orbax_arrays.load(self._folder / str(step), filled) if filled else {}
            return {**likes, **{name: read[name] for name in filled}}

    def _manifest(self, step: int) -> Manifest:
        steps = self._steps()
        if step not in steps:
            known = ", ".join(map(str, steps)) or "none"
            raise RunError(f"there is no checkpoint {step} in {str(self._folder)!r}; saved are: {known}")
        return read_manifest(self._folder / str(step))

    def _drop(self) -> None:
        """Delete what `keep` does not name; a kill in the middle leaves nothing that looks like a checkpoint."""
        losses: dict[int, float | None] = {}
        for step in self._steps():
            with contextlib.suppress(RunError):  # what cannot be read is not ours to delete
                losses[step] = self._manifest(step).facts.get("val_loss")
        for step in losses.keys() - kept_steps(losses, self._keep):
            (self._folder / str(step)).rename(self._folder / f"{step}{_PARTIAL}")
        self._remove_leftovers()

    def _remove_leftovers(self) -> None:
        """Delete what a kill left of a save (under Orbax's temporary name or ours) or of a deletion."""
        for path in self._folder.glob(f"*{_PARTIAL}*"):
            shutil.rmtree(path)

    def _set_aside(self, step: int) -> Path:
        """Move a damaged checkpoint out of the way; return where it is."""
        folder = self._folder.parent / "damaged"
        names = itertools.chain([str(step)], (f"{step}-{number}" for number in itertools.count(2)))
        target = next(path for name in names if not (path := folder / name).exists())
        with self._reported(f"damaged checkpoint {step} cannot be moved to {str(target)!r}"):
            folder.mkdir(exist_ok=True)
            (self._folder / str(step)).rename(target)
        return target

    def _named(self, step: int) -> str:
        return f"checkpoint {step} in {str(self._folder)!r}"

    @contextlib.contextmanager
    def _reported(self, what: str) -> Iterator[None]:
        """Raise whatever goes wrong with the files as a RunFilesError that says what was done."""
        try:
            yield
        except RunError:
            raise
        except Exception as error:  # OSError, and what Orbax and TensorStore make of one
            reason = f"{type(error).__name__}: {_first_line(error)}"
            raise RunFilesError(f"{what} in {str(self._folder)!r}: {reason}") from error


def kept_steps(losses: Mapping[int, float | None], keep: CheckpointConfig) -> set[int]:
    """Return which of the saved steps stay.

    Args:
      losses: each step's validation loss, None where it has none.
      keep: the newest `keep_latest`; the `keep_best` of the lowest loss, of equal ones the newer; the multiples of
        `keep_every`, unless that is 0.
    """
    newest = sorted(losses, reverse=True)
    best = sorted((loss, -step) for step, loss in losses.items() if loss is not None)
    multiples = {step for step in losses if keep.keep_every and step % keep.keep_every == 0}
    return {*newest[: keep.keep_latest], *(-step for _, step in best[: keep.keep_best]), *multiples}


def _on_device(leaf: SavedLeaf, value: Any, wanted: Any) -> Array:
    """Return a new array of JAX's own: a step that is given it can reuse its memory."""
    if leaf.generator is not None:
        return jax.random.wrap_key_data(jnp.asarray(value), impl=leaf.generator)
    if isinstance(value, jax.Array):
        return value
    if isinstance(wanted, jax.ShapeDtypeStruct) and wanted.sharding is not None:
        # Each device is given its part, and no device all of it.
        return jax.make_array_from_callback(value.shape, wanted.sharding, lambda index: value[index])
    return jnp.array(value)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:600]
