"""Every benchmark runs at a tiny size, prints its JSON and draws its figure; how fast it was is not looked at."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jaxblock.functional.attention import IMPLEMENTATIONS

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
    assert all(one["share_of_ceiling"][0] > 0 for one in record["contenders"])
    refused = run("train_step", "--residual", "pre_nrm")
    assert refused.returncode == 1
    assert "did you mean 'pre_norm'?" in refused.stderr


def test_depth_cost(tmp_path):
    words = [
        "--width",
        "16",
        "--seq",
        "16",
        "--batch",
        "2",
        "--compiles",
        "1",
        "--rounds",
        "1",
        "--steps",
        "1",
    ]
    record = found("depth_cost", "--depths", "4", "6", *words, figure=tmp_path / "a.png")
    assert [arm["remat"] for arm in record["arms"]] == ["none", "full"]
    for arm in record["arms"]:
        costs = arm["depths"]
        assert list(costs) == ["4", "6"]
        assert costs["6"]["bytes"] < 1.05 * costs["4"]["bytes"]
        # By block added: one [B, T, D] stream in float32 where all is recomputed, and more where nothing is.
        more = (costs["6"]["gradient_temporaries"] - costs["4"]["gradient_temporaries"]) / 2
        streams = more / (4 * 2 * 16 * 16)
        assert abs(streams - 1) < 0.15 if arm["remat"] == "full" else streams > 2
    loop = found("depth_cost", "--depths", "1", "3", "--scan-unroll", "depth", "--remat", "none", *words)
    (arm,) = loop["arms"]
    assert arm["checks"] == []
    assert arm["depths"]["3"]["bytes"] > 1.05 * arm["depths"]["1"]["bytes"]  # what one block keeps to


def test_attention(tmp_path):
    words = ["--lengths", "16", "32", "--tokens", "32", "--heads", "2", "--head-size", "8", "--rounds", "1"]
    record = found("attention", *words, figure=tmp_path / "a.png")
    ran = {(one["implementation"], one["length"], one["causal"], one["passes"]) for one in record["cells"]}
    names = {name for name, *_ in ran}
    assert {"xla", "blocked", "jax.nn"} <= names
    assert len(ran) == len(record["cells"]) == 8 * len(names)
    assert names | set(record["left_out"]) == {*IMPLEMENTATIONS, "jax.nn"}


def test_vocabulary_loss(tmp_path):
    words = ["--batch", "1", "--length", "8", "--width", "8", "--vocabulary", "16", "--rounds", "1"]
    record = found("vocabulary_loss", *words, figure=tmp_path / "a.png")
    assert [one["form"] for one in record["forms"]] == ["whole", "blocked"]
    assert record["checks"] == []  # one block holds all of it
    assert record["gradient_apart"] < 1e-5


def test_import_time(tmp_path):
    record = found("import_time", "--rounds", "1", figure=tmp_path / "a.png")
    assert [one["name"] for one in record["statements"]][1] == "import jaxblock"
    verdicts = {one["verdict"] for one in record["statements"][1:]}
    assert verdicts <= {"holds", "does not hold", "not resolved"}
    assert sum(record["shares"].values()) == pytest.approx(1.0)
    assert {"jax", "flax", "jaxblock"} <= set(record["shares"])
