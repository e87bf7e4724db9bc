"""The README's SLURM script makes one cluster and runs the sweep on it: run by bash, with stand-ins that record."""

import os
import re
import shutil
import socket
import subprocess
import sys

import pytest

from tests.simulated_devices import ROOT

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="the script is bash's")

README = (ROOT / "README.md").read_text(encoding="utf-8")
(SCRIPT,) = [text for text in re.findall(r"```text\n(.*?)```", README, re.DOTALL) if "#SBATCH" in text]

HEAD = "127.0.0.1"
LISTEN = "import socket, sys; s = socket.create_server(('127.0.0.1', int(sys.argv[1]))); s.settimeout(20); s.accept()"
RECORD = (
    '#!/bin/bash\nprintf "%s\\n" "$(basename "$0") $* token=$RAY_AUTH_MODE:$RAY_AUTH_TOKEN" >> "$RECORD"\n'
)
STANDINS = {
    "scontrol": RECORD + f"printf '{HEAD}\\nn2\\nn3\\n'",
    "srun": RECORD
    + 'if [ "$FAILS" = yes ]; then exit 1; fi\n'
    + f'case "$*" in *--head*) exec "{sys.executable}" -c "{LISTEN}" "$PORT" ;; esac',
    "sleep": RECORD + "really_sleep 0.05",
    "jaxblock": RECORD + "really_sleep 0.3",  # until what was started in the background has been recorded
}


def free_job():
    """A job's number whose port is free, and the port."""
    for port in range(24567, 30000):
        with socket.socket() as probe:
            if probe.connect_ex((HEAD, port)):
                return 1230000 + port - 20000, port
    raise AssertionError("no free port")


def calls(folder, *, nodes, fails=False):
    """Run the script; return (exit code, what it called, the port of its job)."""
    for name, text in STANDINS.items():
        text = text.replace("really_sleep", str(shutil.which("sleep")))
        (folder / name).write_text(text + "\n", encoding="utf-8")
        (folder / name).chmod(0o755)
    number, port = free_job()
    job = {"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_JOB_NUM_NODES": str(nodes), "SLURM_JOB_ID": str(number)}
    job |= {"SLURM_CPUS_PER_TASK": "16", "SLURM_SUBMIT_DIR": "/there"}
    environment = {**os.environ, **job, "RECORD": str(folder / "record"), "PORT": str(port)}
    environment |= {"FAILS": "yes" if fails else "no", "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    ended = subprocess.run(["bash", "-c", SCRIPT], env=environment, timeout=60, check=False)
    return ended.returncode, (folder / "record").read_text(encoding="utf-8").splitlines(), port


def test_the_script_starts_a_head_then_the_others_then_the_sweep(tmp_path):
    code, found, port = calls(tmp_path, nodes=3)
    assert code == 0
    assert found[0].startswith("scontrol show hostnames n[1-3]")
    (head, others) = [line for line in found if line.startswith("srun")]
    (sweep,) = [line for line in found if line.startswith("jaxblock")]
    started = "ray start --head"
    assert head.startswith(
        f"srun --nodes=1 --ntasks=1 --nodelist={HEAD} {started} --port={port} --num-cpus=16"
    )
    started = f"ray start --address={HEAD}:{port}"
    assert others.startswith(f"srun --nodes=2 --ntasks=2 --exclude={HEAD} {started} --num-cpus=16")
    assert all("--block" in line for line in (head, others))  # or the step, and with it the node, would end
    assert sweep.startswith(f"jaxblock sweep PLAN.toml --store /there/sweeps/NAME --ray {HEAD}:{port} ")
    waited = [index for index, line in enumerate(found) if line.startswith("sleep")]
    assert waited, "Python takes longer to listen than the script to look"
    assert max(waited) < min(found.index(others), found.index(sweep))  # no one joins before the head listens


def test_a_job_has_a_token_of_its_own(tmp_path):
    """Ray asks for one, and without it the machines of a cluster refuse each other."""
    tokens = []
    for job in ("first", "second"):
        (tmp_path / job).mkdir()
        _, found, _ = calls(tmp_path / job, nodes=3)
        (token,) = {line.partition(" token=")[2] for line in found[1:]}
        assert re.fullmatch(r"token:[0-9a-f]{64}", token)
        tokens.append(token)
    assert len(set(tokens)) == 2


def test_one_node_is_a_cluster_of_its_head(tmp_path):
    code, found, _ = calls(tmp_path, nodes=1)
    assert code == 0
    assert len([line for line in found if line.startswith("srun")]) == 1
    assert found[-1].startswith("jaxblock sweep")


def test_a_head_that_ends_ends_the_job(tmp_path):
    """The control: not every start ends in a sweep."""
    code, found, _ = calls(tmp_path, nodes=3, fails=True)
    assert code != 0
    assert not [line for line in found if line.startswith("jaxblock")]
