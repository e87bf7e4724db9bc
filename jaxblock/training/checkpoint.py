"""Checkpoints of a run; the one module that touches Orbax. Writes are atomic: a kill leaves the last whole one."""

from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import jax.numpy as jnp
from orbax.checkpoint import v1 as orbax

from jaxblock.training.run_folder import RunError
from jaxblock.types import Params


class Checkpoints:
    """The checkpoints of one run, by step. Use as a context manager; leaving it waits for the last write."""

    def __init__(self, folder: Path, *, keep: int = 2):
        self._folder = folder
        policy: Any = orbax.training.preservation_policies.LatestN(keep)
        self._checkpointer = orbax.training.Checkpointer(str(folder.resolve()), preservation_policy=policy)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._checkpointer.close()

    def latest(self) -> int | None:
        """Return the newest saved step, or None."""
        newest = self._checkpointer.latest
        return None if newest is None else newest.step

    def save(self, step: int, state: Any) -> None:
        """Save a pytree of arrays and wait until it is on disk; a step already saved is left as it is."""
        if self.latest() != step:
            self._checkpointer.save(step, state, force=True)

    def restore(self, step: int, like: Any) -> Any:
        """Return the state saved at `step` with the structure, shapes and dtypes of `like`.

        Args:
          step: a saved step.
          like: a pytree of arrays or `jax.ShapeDtypeStruct`s.
        """
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])

        def abstract(leaf: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device)

        try:
            return self._checkpointer.load(step, jax.tree.map(abstract, like))
        except Exception as error:  # Orbax and TensorStore raise many kinds, with pages of text
            raise RunError(
                f"checkpoint {step} in {str(self._folder)!r} cannot be read ({type(error).__name__}): it is damaged, "
                "or was saved with another config; move it away to continue from the one before"
            ) from error


def count_parameters(params: Params) -> int:
    """Return the number of parameters in a tree."""
    return sum(jnp.size(leaf) for leaf in jax.tree.leaves(params))
