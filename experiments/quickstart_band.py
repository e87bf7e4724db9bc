"""The quickstart over seeds: what loss to expect, and how far seeds lie apart.

    python -m experiments.quickstart_band [--seeds 5] [--json]

Each seed is a process of its own, `python train.py --run.seed N`, one after the other. Expected: every validation
loss at most 1.35 nats per byte, the spread (largest - smallest) below 0.05, and the trigram model far above. The
numbers belong to the corpus fingerprint they are printed with: another Python is another corpus.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def run_seed(seed: int, folder: Path) -> dict[str, Any]:
    """Train one seed in `folder` and return its summary."""
    command = [sys.executable, "train.py", "--json", "--run.seed", str(seed), "--run.dir", str(folder)]
    finished = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(finished.stdout.splitlines()[-1])


def main() -> None:
    """Run the seeds and print the band."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = [run_seed(seed, Path(folder) / str(seed)) for seed in range(arguments.seeds)]
    losses = [run["val_loss"] for run in runs]
    band = {
        "val_loss": losses,
        "mean": statistics.mean(losses),
        "standard_deviation": statistics.stdev(losses) if len(losses) > 1 else None,
        "least": min(losses),
        "most": max(losses),
        "baseline_loss": runs[0]["baseline_loss"],
        "wall_s": [run["wall_s"] for run in runs],
        "corpus_fingerprint": runs[0]["corpus_fingerprint"],
        "versions": runs[0]["versions"],
    }
    if arguments.json:
        print(json.dumps(band))
        return
    for seed, run in enumerate(runs):
        print(f"seed {seed}: validation loss {run['val_loss']:.4f} nats per byte, {run['wall_s']:.0f} s")
    print(f"band {band['least']:.4f} to {band['most']:.4f}, mean {band['mean']:.4f}")
    print(f"trigram {band['baseline_loss']:.4f}; corpus {band['corpus_fingerprint']}")


if __name__ == "__main__":
    main()
