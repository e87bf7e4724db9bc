"""A plan on a Ray cluster gives the results of one machine, whoever is killed; without Ray a sentence says so."""

import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import types

import pytest
import tomli_w

from jaxblock.cli import main
from jaxblock.sweeps import ray_crew, worker
from jaxblock.sweeps.plan import SweepConfig
from jaxblock.sweeps.ray_crew import check_address
from jaxblock.sweeps.reading import read_sweep
from jaxblock.sweeps.runner import prepare_sweep, run_sweep
from jaxblock.sweeps.store import RUNNING, STATES, Store
from tests.simulated_devices import ROOT
from tests.sweeps.small_sweeps import plan, values, when_saved

with_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is an extra, and has no wheels for every Python"
)


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("everywhere", "must be local, auto, or HOST:PORT"),
        ("ray://head:10001", "must be local, auto, or HOST:PORT"),
        ("127.0.0.1:99999", "must be local, auto, or HOST:PORT"),
        ("127.0.0.1:1", "nothing listens there"),
    ],
)
def test_an_address_without_a_cluster_is_refused(address, words):
    with pytest.raises(ValueError, match=words):
        check_address(address)


@pytest.fixture
def listener():
    """A port, and what to say to the first who calls there."""
    with socket.create_server(("127.0.0.1", 0)) as server, contextlib.ExitStack() as stack:

        def speak(words):
            def accept():
                connection = stack.enter_context(server.accept()[0])
                connection.sendall(words)

            threading.Thread(target=accept, daemon=True).start()
            return f"127.0.0.1:{server.getsockname()[1]}"

        yield speak


@pytest.mark.parametrize("words", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_a_port_where_something_else_listens_is_refused_in_time(listener, monkeypatch, words):
    monkeypatch.setattr(ray_crew, "_PATIENCE", 0.2)
    address = listener(words)
    with pytest.raises(ValueError, match="is not the head of a Ray cluster"):
        check_address(address)


def test_a_head_that_answers_is_not_refused(listener):
    """The control: the frame that a head of Ray was seen to send."""
    check_address(listener(b"\x00\x00\x18\x04\x00\x00\x00\x00\x00"))


def test_auto_is_where_the_environment_says_and_names_it(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(ValueError, match=r"RAY_ADDRESS .*, and nothing listens there"):
        check_address("auto")
    check_address("local")  # which is not asked for it
    monkeypatch.delenv("RAY_ADDRESS")
    check_address("auto")


@pytest.fixture
def plan_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "plan.toml"
    path.write_text(tomli_w.dumps(values(tmp_path)), encoding="utf-8")
    return path


def test_without_ray_a_sentence_says_so_and_nothing_is_written(plan_file, monkeypatch, capsys):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "ray" else found(name, *rest)
    )
    assert main(["sweep", "plan.toml", "--ray", "local"]) == 2
    assert 'pip install -e ".[ray]"' in capsys.readouterr().err
    assert not (plan_file.parent / "sweeps").exists()


@pytest.mark.full
def test_a_local_sweep_does_not_load_ray():
    code = "import sys, jaxblock.sweeps.runner, jaxblock.sweeps.ray_crew; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


class Machine:
    """What a worker's process asks Ray of itself, where its machine has `cores` and it has `gpus`."""

    def __init__(self, *, cores, gpus):
        self._cores, self._gpus = cores, gpus

    def get_gpu_ids(self):
        return self._gpus

    def get_runtime_context(self):
        return types.SimpleNamespace(get_node_id=lambda: "here")

    def nodes(self):
        there = {"NodeID": "there", "Resources": {"CPU": 64.0, "GPU": 8.0}}
        return [there, {"NodeID": "here", "Resources": {"CPU": self._cores}}]


def test_a_gpu_is_its_workers_own_and_a_machines_memory_its_cores(monkeypatch):
    assert ray_crew._sharing(Machine(cores=4.0, gpus=[3])) == 1
    assert ray_crew._sharing(Machine(cores=4.0, gpus=[])) == 4
    monkeypatch.setattr(worker, "device_bytes", lambda: 1000)
    sweep = SweepConfig(name="memory", workers=8)
    assert worker.memory_limit(sweep, sharing=1) == 800  # of a GPU of its own, not an eighth
    assert worker.memory_limit(sweep, sharing=8) == 100
    given = sweep.model_copy(update={"memory_gib": 8.0})
    assert worker.memory_limit(given, sharing=1) == 2**30  # what a plan gives is for all workers


# On a cluster of this machine -------------------------------------------------------------------------------

PLAN = {"sweep": {"chunk": 2, "workers": 2}, "run": {"steps": 60}, "axes": {"model.width": [8, 16]}}


def figures(folder):
    names = ("id", "outcome", "steps", "val_loss", "losses", "start", "end")
    return [{name: getattr(result, name) for name in names} for result in read_sweep(folder).results]


def small(folder):
    return plan(folder, **{**PLAN, "model": {"width": None, "hidden": None}})


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """What processes of this machine find."""
    folder = tmp_path_factory.mktemp("here")
    made = small(folder)
    assert run_sweep(prepare_sweep(made), folder / "store") == 0
    return made, figures(folder / "store")


def on_ray(made, folder):
    from jaxblock.sweeps.ray_crew import LOCAL, Cluster

    with contextlib.closing(Cluster(LOCAL, workers=2)) as cluster:
        return run_sweep(prepare_sweep(made), folder, make_crew=cluster.crew)


def workers(folder):
    """The processes of Ray's workers that run our task for a command in `folder`, where they stand too."""
    found = []
    for process in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{process}/cmdline", "rb") as file:
            ours = os.readlink(f"/proc/{process}/cwd") == str(folder.resolve())
            if ours and b"ray::" in (line := file.read()) and b"_work" in line:
                found.append(int(process))
    return found


@with_ray
@pytest.mark.skipif(sys.platform != "linux", reason="finds the worker in /proc")
def test_a_cluster_finds_what_one_machine_finds_though_a_worker_is_killed(expected, tmp_path, monkeypatch):
    made, found = expected
    monkeypatch.chdir(tmp_path)

    def kill(_):
        os.kill(workers(tmp_path)[0], signal.SIGKILL)

    folder = tmp_path / "store"
    killer = threading.Thread(target=when_saved, args=(folder,), kwargs={"after_step": 4, "then": kill})
    killer.start()
    assert on_ray(made, folder) == 0
    killer.join()
    assert figures(folder) == found
    events = [event for event in read_sweep(folder).events if event.kind == "worker_killed"]
    assert len(events) == 1
    assert "goes on from there" in events[0].sentence
    assert list((folder / STATES).iterdir()) == []


@with_ray
@pytest.mark.full
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")  # Ray's processes replace themselves at once
def test_what_a_lost_machine_trained_goes_on_at_another(expected, tmp_path):
    """Three nodes of a cluster, none of them this process: the command's, which has no core, and two that train."""
    from ray.cluster_utils import Cluster as Nodes

    from jaxblock.sweeps.ray_crew import Cluster

    made, found = expected

    def lose(_):
        with contextlib.closing(Store.open(folder)) as store:
            deadline = time.monotonic() + 60
            while sum(state == RUNNING for _, state in store.progress()) < 2 and time.monotonic() < deadline:
                time.sleep(0.05)
        nodes.remove_node(lost, allow_graceful=False)

    folder, nodes = tmp_path / "store", Nodes(initialize_head=True, head_node_args={"num_cpus": 0})
    lost, _ = nodes.add_node(num_cpus=1), nodes.add_node(num_cpus=1)
    try:
        with contextlib.closing(Cluster(nodes.address, workers=2)) as cluster:
            loss = threading.Thread(target=when_saved, args=(folder,), kwargs={"after_step": 0, "then": lose})
            loss.start()
            assert run_sweep(prepare_sweep(made), folder, make_crew=cluster.crew) == 0
            loss.join()
    finally:
        nodes.shutdown()
    assert figures(folder) == found
    events = [event.sentence for event in read_sweep(folder).events if event.kind == "worker_killed"]
    assert len(events) == 1
    assert "NodeDiedError" in events[0]


@with_ray
@pytest.mark.skipif(sys.platform != "linux", reason="finds the workers in /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_same_command_goes_on_after_its_end(expected, tmp_path, number):
    """Also on one machine without Ray; the workers end with the command."""
    made, found = expected
    (tmp_path / "plan.toml").write_text(tomli_w.dumps(made.values()), encoding="utf-8")
    command = [sys.executable, "-m", "jaxblock.cli", "sweep", str(tmp_path / "plan.toml")]
    command += ["--ray", "local", "--store", str(tmp_path / "store")]
    process = subprocess.Popen(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)})
    when_saved(tmp_path / "store", after_step=4, then=lambda _: process.send_signal(number))
    assert process.wait(timeout=120) == (143 if number == signal.SIGTERM else -number)
    deadline = time.monotonic() + 60
    while workers(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert workers(tmp_path) == []
    before = [result["steps"] for result in figures(tmp_path / "store")]
    assert sum(before) < sum(result["steps"] for result in found)
    assert run_sweep(prepare_sweep(made), tmp_path / "store") == 0
    assert figures(tmp_path / "store") == found
