"""A `jax.profiler` trace of some steps of a run."""

from pathlib import Path
from typing import Any

import jax

from jaxblock.training.config import WatchConfig


class Profile:
    """Trace the steps from `profile_start` on, `profile_steps` of them, once.

    A run that is resumed among them traces the rest; a run that ends among them ends the trace.
    """

    def __init__(self, config: WatchConfig, path: Path):
        self._path = path
        start = config.profile_start
        self._steps = range(0) if start is None else range(start, start + config.profile_steps)
        self._tracing = False

    def before_step(self, step: int) -> None:
        """Start the trace if it covers this step."""
        if step not in self._steps or self._tracing:
            return
        last, self._steps = self._steps[-1], range(0)  # it is tried once, whatever comes of it
        jax.profiler.start_trace(str(self._path))
        self._tracing, self._last = True, last

    def after_step(self, step: int, state: Any) -> None:
        """End the trace if this was its last step, after the step's results are there."""
        if self._tracing and step >= self._last:
            jax.block_until_ready(state)
            self._stop()

    def close(self) -> None:
        """End the trace if it runs, after all that was started."""
        if self._tracing:
            # Programs run in order on a device: once this one is done, all before it are.
            jax.block_until_ready([jax.device_put(0.0, device) + 1.0 for device in jax.local_devices()])
            self._stop()

    def _stop(self) -> None:
        self._tracing = False
        jax.profiler.stop_trace()
