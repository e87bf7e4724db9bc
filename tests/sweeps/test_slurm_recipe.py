"""The README's SLURM script makes one cluster and runs the sweep on it: run by bash, with stand-ins that record."""

import os
import re
import shutil
import subprocess

import pytest

from tests.simulated_devices import ROOT

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="the script is bash's")

README = (ROOT / "README.md").read_text(encoding="utf-8")
(SCRIPT,) = [text for text in re.findall(r"```text\n(.*?)```", README, re.DOTALL) if "#SBATCH" in text]

RECORD = '#!/bin/bash\nprintf "%s\\n" "$(basename "$0") $*" >> "$RECORD"\n'
STANDINS = {
    "jaxblock": RECORD + "sleep_really 0.3",  # until what was started in the background has been recorded
    "srun": RECORD + 'if [ "$HEAD" = ends ]; then exit 1; fi\nsleep_really 0.2',
    "scontrol": RECORD + "printf 'n1\\nn2\\nn3\\n'",
    "sleep": RECORD + "sleep_really 0.05",
    "ray": RECORD + '[ "$(grep -c "^ray status" "$RECORD")" -ge "$TRIES" ]',
}


def calls(folder, *, nodes, tries=3, head="stays"):
    """Run the script where the head answers at the `tries`-th question; return (exit code, what it called)."""
    for name, text in STANDINS.items():
        text = text.replace("sleep_really", str(shutil.which("sleep")))
        (folder / name).write_text(text + "\n", encoding="utf-8")
        (folder / name).chmod(0o755)
    job = {"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_JOB_NUM_NODES": str(nodes), "SLURM_JOB_ID": "1234567"}
    job |= {"SLURM_CPUS_PER_TASK": "16", "SLURM_SUBMIT_DIR": "/there"}
    environment = {**os.environ, **job, "RECORD": str(folder / "record"), "TRIES": str(tries), "HEAD": head}
    environment["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"
    ended = subprocess.run(["bash", "-c", SCRIPT], env=environment, timeout=60, check=False)
    return ended.returncode, (folder / "record").read_text(encoding="utf-8").splitlines()


def test_the_script_starts_a_head_then_the_others_then_the_sweep(tmp_path):
    code, found = calls(tmp_path, nodes=3)
    assert code == 0
    assert found[0] == "scontrol show hostnames n[1-3]"
    (head, others) = [line for line in found if line.startswith("srun")]
    (sweep,) = [line for line in found if line.startswith("jaxblock")]
    asked = [index for index, line in enumerate(found) if line == "ray status --address=n1:24567"]
    assert head.startswith(
        "srun --nodes=1 --ntasks=1 --nodelist=n1 ray start --head --port=24567 --num-cpus=16"
    )
    assert others.startswith(
        "srun --nodes=2 --ntasks=2 --exclude=n1 ray start --address=n1:24567 --num-cpus=16"
    )
    assert all("--block" in line for line in (head, others))  # or the step, and with it the node, would end
    assert sweep == "jaxblock sweep PLAN.toml --store /there/sweeps/NAME --ray n1:24567"
    assert len(asked) == 3
    assert max(asked) < min(found.index(others), found.index(sweep))  # no one joins before the head answers


def test_one_node_is_a_cluster_of_its_head(tmp_path):
    code, found = calls(tmp_path, nodes=1, tries=1)
    assert code == 0
    assert len([line for line in found if line.startswith("srun")]) == 1
    assert found[-1].startswith("jaxblock sweep")


def test_a_head_that_ends_ends_the_job(tmp_path):
    """The control: not every start ends in a sweep."""
    code, found = calls(tmp_path, nodes=3, tries=10**6, head="ends")
    assert code != 0
    assert not [line for line in found if line.startswith("jaxblock")]
