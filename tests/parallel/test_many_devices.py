"""One device's numbers on meshes of 8 simulated devices, under pmap, and in two processes; checkpoints move between."""

import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.residual.entries import NAMES
from tests.simulated_devices import ROOT, environment, printed_by

RUN = ["--model.depth", "1", "--model.width", "16", "--model.heads", "2", "--model.kv_heads", "2"]
RUN += [
    "--model.context",
    "16",
    "--data.batch",
    "8",
    "--data.validation_tokens",
    "600",
    "--sample.length",
    "4",
]
RUN += ["--model.branch_dropout", "0.1", "--model.attention_dropout", "0.1", "--run.log_every", "3"]
RUN += ["--run.checkpoint_every", "3", "--optimizer.average", "0.9", "--execution.scan_unroll", "1"]


def eight(*names: str) -> dict[str, Any]:
    """Return what `eight_placements.py` prints."""
    return printed_by("tests.parallel.eight_placements", *names)


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return eight()


def assert_one_devices_numbers(found: dict[str, Any]) -> None:
    one = found.pop("one")
    assert len(one["losses"]) == 20
    assert one["whole"]  # the control: one device has them
    for name, placed in found.items():
        np.testing.assert_allclose(placed["losses"], one["losses"], rtol=0, atol=1e-5, err_msg=name)
        assert placed["whole"] == [], name  # streams, histories, branches: no device has all rows of one
        # Adam makes full steps of gradients that are near round-off: parameters may differ more than losses do.
        assert placed["parameters"] < 1e-3, name
    assert found


@pytest.mark.parametrize(
    "kind", ["pre_norm", "attention_residual", "hyper_connections(streams=2)", "accumulation"]
)
def test_a_mesh_and_pmap_train_as_one_device_dropout_included(report, kind):
    assert_one_devices_numbers(dict(report[kind]))


def test_other_masks_are_other_losses(report):
    """The control: pieces of a batch draw with keys of their own, so the same batches have other losses."""
    difference = np.abs(
        np.subtract(report["accumulation"]["one"]["losses"], report["pre_norm"]["one"]["losses"])
    )
    assert difference.max() > 1e-3


@pytest.mark.parametrize("onto", ["one", "all", "data"])
def test_a_checkpoint_of_eight_devices_comes_back_elsewhere_bit_by_bit(report, onto):
    assert report["moved"]["restored"][onto] == {"bits": True, "placed": True}


def test_fsdp_splits_parameters_and_optimizer_state_evenly(report):
    moved = report["moved"]
    assert moved["fsdp_bytes"] <= 1.05 * moved["total_bytes"] / 8
    assert moved["data_bytes"] == moved["total_bytes"]  # the control: data parallelism copies all of it


@pytest.mark.full
@pytest.mark.parametrize("part", range(8))
def test_every_topology_trains_on_every_mesh_as_on_one_device(part):
    for name, found in eight(*NAMES[part::8]).items():
        print(name)  # of a failure
        assert_one_devices_numbers(found)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def train(folder: Path, *flags: str, devices: int = 1, processes: int = 1, resume: bool = False) -> None:
    """Run the command, in one process or in several that find each other on this machine; all must end well."""
    where = ["--resume", str(folder)] if resume else ["--run.dir", str(folder), *RUN]
    port, started = free_port(), []
    for index in range(processes):
        group = ["--coordinator", f"127.0.0.1:{port}", "--processes", str(processes), "--process", str(index)]
        command = [sys.executable, "-m", "jaxblock.cli", "train", *where, *flags]
        started.append(
            subprocess.Popen(
                [*command, *(group if processes > 1 else [])],
                env=environment(devices),
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    words = [process.communicate(timeout=280)[0] for process in started]
    codes = [process.returncode for process in started]
    assert codes == [0] * processes, "\n".join(words)[-4000:]


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in rows(folder) if "loss" in row]


def test_two_processes_train_as_one_and_write_each_file_once(tmp_path):
    """2 processes x 2 devices against 1 x 1."""
    one, two = tmp_path / "one", tmp_path / "two"
    train(one, "--run.steps", "6")
    train(two, "--run.steps", "6", "--parallel.fsdp", "2", devices=2, processes=2)
    np.testing.assert_allclose(losses(two), losses(one), rtol=0, atol=1e-5)
    assert [row["step"] for row in rows(two) if "loss" in row] == [1, 2, 3, 4, 5, 6]  # each written once
    val = [next(row["val_loss"] for row in rows(folder) if "val_loss" in row) for folder in (one, two)]
    np.testing.assert_allclose(*val, rtol=0, atol=1e-5)
    assert sorted(path.name for path in (two / "checkpoints").iterdir()) == ["3", "6"]
    assert all((two / name).exists() for name in ("sample.txt", "summary.json"))
    for process in range(2):  # each has written a part of the arrays
        written = (two / "checkpoints" / "6" / "arrays" / f"ocdbt.process_{process}" / "d").iterdir()
        assert sum(path.stat().st_size for path in written) > 1000


@pytest.mark.full
def test_a_run_goes_on_with_other_processes_and_another_execution(tmp_path):
    """10 steps unbroken, against 2 processes x 4 devices stopped after 6, then one device with another remat."""
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    train(whole, "--run.steps", "10")
    kept = ["--checkpoint.keep_latest", "9"]
    train(moved, "--run.steps", "10", "--parallel.fsdp", "4", *kept, devices=4, processes=2)
    for name in ("9", "10"):  # as if a kill had come after step 6
        (moved / "checkpoints" / name).rename(moved / f"later-{name}")
    (moved / "summary.json").unlink()
    changed = ["--parallel.fsdp", "1", "--execution.remat", "full", "--execution.loss", "blocked"]
    train(moved, *changed, resume=True)
    assert json.loads((moved / "summary.json").read_text())["continued_after"] == 6
    np.testing.assert_allclose(losses(moved), losses(whole), rtol=0, atol=1e-5)
    assert [row["step"] for row in rows(moved) if "loss" in row] == list(range(1, 11))


@pytest.mark.full
def test_processes_go_on_from_one_devices_checkpoint_and_pass_over_a_damaged_one(tmp_path):
    """10 steps on one device; then from step 6 on 2 processes x 2 devices, a bit of step 9's arrays flipped."""
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    train(whole, "--run.steps", "10", "--checkpoint.keep_latest", "9")
    shutil.copytree(whole, moved)
    shutil.rmtree(moved / "checkpoints" / "10")
    (moved / "summary.json").unlink()
    data = max((moved / "checkpoints" / "9").rglob("*"), key=lambda path: path.stat().st_size)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 4
    data.write_bytes(content)
    train(moved, "--parallel.fsdp", "4", devices=2, processes=2, resume=True)
    assert (moved / "damaged" / "9").is_dir()
    assert json.loads((moved / "summary.json").read_text())["continued_after"] == 6
    np.testing.assert_allclose(losses(moved), losses(whole), rtol=0, atol=1e-5)
    assert [row["step"] for row in rows(moved) if "loss" in row] == list(range(1, 11))


def refusals(folder: Path, *flags: tuple[str, str]) -> list[str]:
    """Run a process for each pair of words, all of one run that is refused; return what they say."""
    port, started = free_port(), []
    for index, words in enumerate(flags):
        command = [sys.executable, "-m", "jaxblock.cli", "train", "--coordinator", f"127.0.0.1:{port}"]
        command += ["--processes", str(len(flags)), "--process", str(index), "--run.dir", str(folder)]
        started.append(
            subprocess.Popen(
                [*command, *words],
                env=environment(1),
                cwd=ROOT,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    said = [process.communicate(timeout=200)[1] for process in started]
    assert [process.returncode for process in started] == [2] * len(flags)
    assert not folder.exists()
    return said


def test_what_one_process_refuses_ends_all(tmp_path):
    said = refusals(tmp_path / "run", ("--model.width", "16"), ("--model.width", "15"))
    assert "another process cannot start the run" in said[0]
    assert "model.width is 15" in said[1]


def test_processes_of_different_configs_do_not_train_together(tmp_path):
    """Each good by itself. Their losses would be of neither."""
    rates = [("--optimizer.learning_rate", rate) for rate in ("0.001", "0.002")]
    said = refusals(tmp_path / "run", *rates)
    assert "another process has another config than process 0" in said[0]
    assert "this process has another config than process 0" in said[1]
