"""A flat dict of named arrays as a folder; the one module that touches Orbax."""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from orbax.checkpoint import v1 as orbax

from jaxblock.training.full_disk import without_late_reports

_NAME = "arrays"


def start_saving(folder: Path, arrays: Mapping[str, Any]) -> Callable[[], None]:
    """Begin to write arrays in the background; return what waits for the end, and raises what went wrong.

    Args:
      folder: not there yet; it has its name when all is written, by all processes.
      arrays: name -> numpy arrays, which must not change until then, or JAX's, of which each process writes its parts;
        those may be donated as soon as this returns. None without entries.
    """
    with contextlib.ExitStack() as begun:
        begun.enter_context(_quiet())
        begun.enter_context(without_late_reports())
        with _settings():
            response = orbax.save_async(str(folder), dict(arrays), checkpointable_name=_NAME)
        until_the_end = begun.pop_all()

    def wait() -> None:
        with until_the_end:
            response.result()

    return wait


def load(folder: Path, like: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arrays that `like` names.

    Args:
      folder: what `start_saving` wrote.
      like: name -> a numpy array of the shape and dtype, for one, or a `jax.ShapeDtypeStruct` with a sharding, for one
        of JAX's of which each process reads its parts.
    """
    with _quiet(), _settings():
        return orbax.load(str(folder), dict(like), checkpointable_name=_NAME)


@contextlib.contextmanager
def _settings() -> Iterator[None]:
    """Orbax as we use it."""
    options = orbax.Context()
    options.array.saving.use_compression = (
        False  # it saves 7 % of the bytes of floats and takes half as long again
    )
    # Made in the background, a folder that cannot be made leaves coroutines that nobody awaits.
    options.asynchronous.create_directories_asynchronously = False
    options.memory.deepcopy_host_arrays = False  # they do not change
    options.pytree.loading.partial_load = True  # the leaves of the parts asked for; we have compared them
    with options:
        yield


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Within the context Orbax writes no log: of a failure it holds pages, and the error raised says the same."""
    log = logging.getLogger("absl")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before
