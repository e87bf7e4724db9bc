"""Every benchmark runs at a tiny size, prints its JSON and draws its figure; how fast it was is not looked at."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--depth", "2", "--width", "16", "--heads", "2", "--seq", "8", "--batch", "2", "--vocab", "16"]
pytestmark = pytest.mark.full


def run(name: str, *words: str) -> subprocess.CompletedProcess:
    """Run one as a user does."""
    command = [sys.executable, "-m", f"experiments.benchmarks.{name}", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)


def found(name: str, *words: str, figure: Path | None = None) -> dict:
    """Return the JSON that one prints."""
    drawn = [] if figure is None else ["--figure", str(figure)]
    result = run(name, *words, "--json", *drawn)
    assert result.returncode == 0, result.stderr
    assert figure is None or figure.stat().st_size > 1000
    return json.loads(result.stdout)


def test_train_step(tmp_path):
    words = [*SMALL, "--rounds", "2", "--steps", "1", "--residual", "pre_norm", "--residual", "highway"]
    record = found("train_step", *words, "--peers", "flax", "flax_scan", "torch", figure=tmp_path / "a.png")
    ran = [one["name"] for one in record["contenders"]]
    assert ran[:4] == ["ours pre_norm", "ours highway", "flax.linen", "flax.linen nn.scan"]
    assert set(ran) | set(record["left_out"]) == {*ran[:4], "torch"}
    assert record["flops_per_step"] == record["library_flops_per_step"] > 0
    assert all(0 < one["share_of_ceiling"][0] for one in record["contenders"])
    refused = run("train_step", "--residual", "pre_nrm")
    assert refused.returncode == 1
    assert "did you mean 'pre_norm'?" in refused.stderr
