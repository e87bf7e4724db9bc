"""Checkpoints of a run; the one module that touches Orbax.

A checkpoint is a folder named by its step: what Orbax writes (one flat tree of named arrays) and `manifest.json`.
It is written under another name, brought to the disk, and renamed: a kill at any moment leaves it whole or not
there. Orbax writes and reads arrays; what is saved, wanted, damaged or kept is settled here: its own manager casts
to another dtype without a word, fails alike at another model and at damage, and skips steps below the newest.
"""

import contextlib
import itertools
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from orbax.checkpoint import v1 as orbax

from jaxblock.contracts import check_integer
from jaxblock.parallel import processes
from jaxblock.training.checkpoint_manifest import (
    SCHEMA,
    CheckpointDamaged,
    CheckpointMismatch,
    Manifest,
    SavedLeaf,
    array_digest,
    check_facts,
    damaged_files,
    differences,
    host_array,
    named_leaves,
    read_manifest,
    saved_leaf,
    write_manifest,
    written_files,
)
from jaxblock.training.config import CheckpointConfig
from jaxblock.training.full_disk import check_space, without_late_reports
from jaxblock.training.run_folder import RunError, RunFilesError
from jaxblock.types import Array, Params

__all__ = ["CheckpointDamaged", "CheckpointMismatch", "Checkpoints", "count_parameters", "kept_steps"]

_KEEP = CheckpointConfig()
_ARRAYS = "arrays"
_PARTIAL = ".partial"


class Checkpoints:
    """The checkpoints of one run, by step. Nothing is written before the first save.

    Every save waits until its checkpoint is on disk, so leaving a `with` block has nothing to wait for, and no
    failure is left behind in a thread. Several processes save
    and load together, each with all arrays on its host; one of them writes.
    """

    def __init__(self, folder: Path, keep: CheckpointConfig = _KEEP, *, writes: bool = True):
        """`writes` is whether this process is the one of its run that writes."""
        self._folder = folder.absolute()
        self._writes = writes
        self._keep = keep

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def steps(self) -> list[int]:
        """Return the saved steps in order, damaged ones among them."""
        if not self._folder.exists():
            return []
        with self._reported("checkpoints cannot be listed"):
            names = [path.name for path in self._folder.iterdir() if path.is_dir()]
        return sorted(int(name) for name in names if name.isdecimal() and name == str(int(name)))

    def latest(self) -> int | None:
        """Return the newest saved step, or None."""
        return max(self.steps(), default=None)

    def save(self, step: int, parts: Mapping[str, Any], *, facts: Mapping[str, Any]) -> bool:
        """Save named pytrees and wait until they are on disk; then drop what `keep` does not name.

        Args:
          step: optimizer steps made.
          parts: pytrees of arrays; None and empty containers hold nothing. Typed random keys are arrays.
          facts: JSON values about them; `val_loss`, a number or None, is what the best ones are kept by.

        Returns:
          False where this step is there already, whole and of the same shapes: it is left as it is.

        Raises:
          ValueError: `parts` or `facts` hold something else.
          CheckpointMismatch: this step is there already, of another model.
          RunError: it cannot be written, or a newer step exists, behind which this one would be lost.
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
            self._write(step, sorted(parts), leaves, dict(facts))
        with self._reported(f"step {step} is saved, but older ones cannot be dropped"):
            if self._writes:
                self._drop()
        return True

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

    def _write(self, step: int, parts: list[str], leaves: Mapping[str, Any], facts: dict[str, Any]) -> None:
        """Write a checkpoint beside its place, then rename it."""
        values = {name: host_array(leaf) for name, leaf in leaves.items()}
        saved = {name: saved_leaf(leaf, values[name]) for name, leaf in leaves.items()}
        if self._writes:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._remove_leftovers()
        processes.meet("the checkpoints' folder is there")
        unfinished = self._folder / f"{step}{_PARTIAL}"
        # TensorStore has no arrays without entries; the manifest says all there is to say of them.
        filled = {name: value for name, value in values.items() if value.size}
        check_space(self._folder, [value.nbytes for value in filled.values()])
        with _orbax_settings(), without_late_reports():
            orbax.save(str(unfinished), filled, checkpointable_name=_ARRAYS)
        if not self._writes:
            return
        write_manifest(unfinished, Manifest(step, facts, parts, saved, written_files(unfinished)))
        _bring_to_disk(unfinished)
        unfinished.rename(self._folder / str(step))
        _sync(self._folder)

    def _read(self, step: int, like: Mapping[str, Any]) -> tuple[dict[str, SavedLeaf], dict[str, np.ndarray]]:
        """Return the leaves of the named parts with their values, compared with `like` and their checksums."""
        manifest = self._manifest(step)
        found = differences(manifest, like)
        if found is not None:
            raise CheckpointMismatch(f"{self._named(step)} is not of the model or optimizer wanted: {found}")
        leaves = {name: manifest.leaves[name] for name in named_leaves(like)}
        # Before Orbax sees it: it may read zeros for what is missing, and fails in threads that go on complaining.
        with self._reported(f"checkpoint {step} cannot be read"):
            faults = damaged_files(self._folder / str(step), manifest)
        if faults:
            raise CheckpointDamaged(f"{self._named(step)} is damaged: {faults[0]}")
        values = self._read_arrays(step, leaves)
        for name, leaf in leaves.items():
            if array_digest(values[name]) != leaf.crc32:
                raise RunError(f"{self._named(step)} is whole, but {name} was not read as it was saved")
        return leaves, values

    def _read_arrays(self, step: int, leaves: Mapping[str, SavedLeaf]) -> dict[str, np.ndarray]:
        """Return the values of some leaves as Orbax reads them."""
        # Views of one entry: they tell Orbax shapes and dtypes, and take no memory.
        like = {
            name: np.broadcast_to(np.zeros((), np.uint32 if leaf.generator else leaf.dtype), leaf.shape)
            for name, leaf in leaves.items()
        }
        filled = {name: value for name, value in like.items() if value.size}
        with self._reported(f"checkpoint {step} is whole, but cannot be read"), _orbax_settings():
            path = str(self._folder / str(step))
            read = orbax.load(path, filled, checkpointable_name=_ARRAYS) if filled else {}
            return {**like, **{name: read[name] for name in filled}}

    def _manifest(self, step: int) -> Manifest:
        if step not in self.steps():
            known = ", ".join(str(other) for other in self.steps()) or "none"
            raise RunError(f"there is no checkpoint {step} in {str(self._folder)!r}; saved are: {known}")
        return read_manifest(self._folder / str(step))

    def _drop(self) -> None:
        """Delete what `keep` does not name; a kill in the middle leaves nothing that looks like a checkpoint."""
        losses: dict[int, float | None] = {}
        for step in self.steps():
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


def count_parameters(params: Params) -> int:
    """Return the number of parameters in a tree."""
    return sum(jnp.size(leaf) for leaf in jax.tree.leaves(params))


@contextlib.contextmanager
def _orbax_settings() -> Iterator[None]:
    """Orbax as we use it, without its log: of a failure it holds pages, and the error raised says the same."""
    options = orbax.Context()
    options.array.saving.use_compression = (
        False  # it saves 7 % of the bytes of floats and takes half as long again
    )
    options.pytree.loading.partial_load = True  # the leaves of the parts asked for; we have compared them
    log = logging.getLogger("absl")
    before, log.disabled = log.disabled, True
    try:
        with options:
            yield
    finally:
        log.disabled = before


def _on_device(leaf: SavedLeaf, value: np.ndarray, wanted: Any) -> Array:
    """Return a new array of JAX's own: a step that is given it can reuse its memory."""
    if leaf.generator is not None:
        return jax.random.wrap_key_data(jnp.array(value), impl=leaf.generator)
    if isinstance(wanted, jax.ShapeDtypeStruct) and wanted.sharding is not None:
        # Each device is given its part, and no device all of it.
        return jax.make_array_from_callback(value.shape, wanted.sharding, lambda index: value[index])
    return jnp.array(value)


def _bring_to_disk(folder: Path) -> None:
    """Wait until a folder, and all that is in it, is on the disk and not only in its cache."""
    with ThreadPoolExecutor(8) as pool:  # the disk takes many at once in the time of a few
        list(pool.map(_sync, [*folder.rglob("*"), folder]))


def _sync(path: Path) -> None:
    if path.is_dir() and os.name == "nt":  # Windows gives no handle to a folder
        return
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:600]
