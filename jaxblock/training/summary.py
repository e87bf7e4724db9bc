"""The end of a run: its sample, its figures, its summary.json."""

import math
import platform
import time
from importlib.metadata import version
from typing import Any

from jaxblock.training.files import replace_text
from jaxblock.training.plots import plot_run
from jaxblock.training.prepare import Prepared, run_keys
from jaxblock.training.probe_plots import plot_probes
from jaxblock.training.run_folder import RunFolder
from jaxblock.types import Params
from jaxblock.version import __version__

NATS_PER_BIT = math.log(2.0)


def finish_run(
    prepared: Prepared, folder: RunFolder, weights: Params, facts: dict[str, Any], *, started: float
) -> dict[str, Any]:
    """Write sample.txt, plots/ and summary.json; return the summary.

    Args:
      prepared: the run.
      folder: its folder.
      weights: its last parameters, or their moving average where one is kept: what the sample is drawn with.
      facts: what the loop knows: status, steps, speed, sizes.
      started: `time.perf_counter()` at the start, for wall_s.
    """
    task, config = prepared.task, prepared.config
    key = run_keys(config.run.seed).sample
    replace_text(folder.sample, task.finish(weights, key))
    rows = folder.read_metrics()
    plot_run(rows, folder.plots, baseline=facts["baseline_loss"])
    plot_probes(folder.read_probes(), folder.plots / "probes.png")
    evaluations = [row for row in rows if "val_loss" in row]
    found = {name: value for name, value in evaluations[-1].items() if name != "step"} if evaluations else {}
    val_loss, bytes_per_token = found.get("val_loss"), task.facts.get("bytes_per_token")
    bits = None
    if val_loss is not None and bytes_per_token is not None:
        bits = val_loss / NATS_PER_BIT / bytes_per_token
    summary = {
        **facts,
        "val_loss": val_loss,
        **found,
        "val_bits_per_byte": bits,
        "wall_s": time.perf_counter() - started,
        **task.facts,
        "sublayers": config.model.sublayers,
        "initialization": config.model.initialization,
        "parametrization": config.model.parametrization,
        "versions": versions(),
    }
    folder.write_summary(summary)
    return summary


def versions() -> dict[str, str]:
    """Return the versions a result depends on."""
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
    return {
        "jaxblock": __version__,
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
    }
