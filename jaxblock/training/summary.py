"""The end of a run: its sample, its figures, its summary.json."""

import math
import platform
import time
from importlib.metadata import version
from typing import Any

from jaxblock.training.files import replace_text
from jaxblock.training.plots import plot_run
from jaxblock.training.prepare import Prepared, run_keys
from jaxblock.training.run_folder import RunFolder
from jaxblock.training.sampling import continue_prompt, decode
from jaxblock.types import Params
from jaxblock.version import __version__

NATS_PER_BIT = math.log(2.0)


def finish_run(
    prepared: Prepared, folder: RunFolder, params: Params, facts: dict[str, Any], *, started: float
) -> dict[str, Any]:
    """Write sample.txt, plots/ and summary.json; return the summary.

    Args:
      prepared: the run.
      folder: its folder.
      params: its last parameters.
      facts: what the loop knows: status, steps, speed, sizes.
      started: `time.perf_counter()` at the start, for wall_s.
    """
    corpus, config = prepared.corpus, prepared.config
    key = run_keys(config.run.seed).sample
    tokens = continue_prompt(prepared.model, params, prepared.prompt_1T, config.sample, key=key)
    as_bytes = corpus.bytes_per_token is not None
    prompt, text = decode(prepared.prompt_1T[0], as_bytes=as_bytes), decode(tokens, as_bytes=as_bytes)
    replace_text(folder.sample, prompt + ("" if as_bytes else " ") + text + "\n")

    rows = folder.read_metrics()
    plot_run(rows, folder.plots, baseline=facts["baseline_trigram_loss"])
    losses = [row["val_loss"] for row in rows if row.get("val_loss") is not None]
    val_loss = losses[-1] if losses else None
    bits = None if val_loss is None or not as_bytes else val_loss / NATS_PER_BIT / corpus.bytes_per_token
    summary = {
        **facts,
        "val_loss": val_loss,
        "val_bits_per_byte": bits,
        "wall_s": time.perf_counter() - started,
        "corpus": corpus.source,
        "corpus_fingerprint": corpus.fingerprint,
        "sublayers": config.model.sublayers,
        "initialization": config.model.initialization,
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
