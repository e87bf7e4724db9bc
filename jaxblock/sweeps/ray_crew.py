"""Workers on the machines of a Ray cluster; the one module that touches Ray.

    runner, and the store's owner: this machine          workers: wherever there is a free GPU, or core

A worker is a task in a process of its own, which claims programs and trains them as a local one does. The store's
file stays here: a worker asks the owner, an actor beside the runner, and no folder is shared. What Ray knows of lost
processes and machines is settled as a dead local worker is.
"""

import importlib
import importlib.util
import os
import signal
import socket
import warnings
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from jaxblock.sweeps.crew import SweepError, settle
from jaxblock.sweeps.ledger import answer, remote_ledger
from jaxblock.sweeps.plan import SweepConfig
from jaxblock.sweeps.store import Store
from jaxblock.sweeps.worker import work
from jaxblock.training.host_memory import keep_freed_memory

LOCAL, AUTO = "local", "auto"
_PATIENCE = 10.0
"""Seconds in which a cluster answers."""
_SETTINGS = b"\x04"
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0" + _SETTINGS + b"\0\0\0\0\0"
"""What both ends of HTTP/2 begin with: a client these bytes, a server a frame whose fourth byte is its type, SETTINGS
(RFC 9113, sections 3.4 and 4.1)."""
_FORWARDED = ("JAX_", "XLA_", "LIBTPU_", "TF_CPP_", "NVIDIA_", "NCCL_")
"""Beginnings of the environment's variables that workers are given: what decides which numbers come out."""


class Cluster:
    """A connection to a Ray cluster, until `close`."""

    def __init__(self, address: str, *, workers: int):
        """Connect; `workers` is how many cores a cluster of its own has.

        Raises:
          ValueError: Ray is not installed, or no cluster is there.
        """
        check_address(address)
        if importlib.util.find_spec("ray") is None:
            raise ValueError('--ray needs Ray, which is not installed; pip install -e ".[ray]" does it')
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent anywhere
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        self._ray = ray = importlib.import_module("ray")
        own: dict[str, Any] = {"num_cpus": workers, "include_dashboard": False} if address == LOCAL else {}
        try:
            with warnings.catch_warnings():
                # Ray forks to start its processes, which replace themselves at once.
                warnings.filterwarnings("ignore", message=r"os\.fork\(\) was called", category=RuntimeWarning)
                # What it would print goes to stdout, which is the report's; its log has it too.
                ray.init(address, logging_level="ERROR", log_to_driver=False, **own)
        except Exception as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ValueError(
                f"--ray is {address!r}, and no cluster answers there: {reason} (one started with a token "
                "wants RAY_AUTH_MODE=token and the same RAY_AUTH_TOKEN here)"
            ) from error
        for number, handler in handlers.items():  # Ray takes them; they are the runner's
            signal.signal(number, handler)

    def crew(self, store: Store, sweep: SweepConfig, *, say: Callable[[str], None]) -> "RayCrew":
        """Return workers for a store of this machine."""
        return RayCrew(self._ray, store, sweep, say=say)

    def close(self) -> None:
        """Disconnect; a cluster of its own ends."""
        self._ray.shutdown()


class RayCrew:
    """Tasks that end with the context; with this process, Ray ends them."""

    def __init__(self, ray: Any, store: Store, sweep: SweepConfig, *, say: Callable[[str], None]):
        self._ray, self._store, self._sweep, self._say = ray, store, sweep, say
        self._workers: dict[Any, int] = {}
        """Task -> the number by which it claims programs."""
        self._started = 0
        self._idle_deaths = 0
        self._owner: Any = None

    def __enter__(self) -> Self:
        pinned = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            self._ray.get_runtime_context().get_node_id(), soft=False
        )
        owner = self._ray.remote(num_cpus=0, max_restarts=0, scheduling_strategy=pinned)(_Owner)
        self._owner = owner.options(runtime_env=_environment()).remote(str(self._store.folder.absolute()))
        for _ in range(min(self._sweep.workers, len(self._store.programs()))):
            self._start()
        self._tell_of_room()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._workers:
            self._ray.cancel(worker, force=True)  # what it has saved is what its program goes on from
        self._ray.wait(list(self._workers), num_returns=len(self._workers), timeout=_PATIENCE)
        self._ray.kill(self._owner)

    def is_at_work(self) -> bool:
        """Start another worker for each that died, or whose machine was lost."""
        started = self._started
        ready, _ = self._ray.wait(list(self._workers), num_returns=len(self._workers), timeout=0)
        for worker in ready:
            number = self._workers.pop(worker)
            how = self._end_of(worker)
            if how is not None:
                self._bury(number, how)
                if len(self._workers) < len(self._store.programs()):
                    self._start()
        if self._started > started:
            self._tell_of_room()
        return bool(self._workers)

    def _tell_of_room(self) -> None:
        """Say that no worker can begin; no refusal, as machines may still join, or be lost and come back."""
        if self._ray.cluster_resources().get("CPU", 0) < 1:
            self._say("no machine of the cluster has a core for a worker; waiting for one to join")

    def _start(self) -> None:
        accelerators = self._ray.cluster_resources().get("GPU", 0)
        needs = {"num_cpus": 1, "num_gpus": 1 if accelerators else 0}
        # A process that has trained keeps its device and its memory: each worker has one of its own.
        task = self._ray.remote(max_retries=0, max_calls=1, runtime_env=_environment(), **needs)(_work)
        self._started += 1
        self._workers[task.remote(self._owner, self._started, os.getcwd())] = self._started

    def _end_of(self, worker: Any) -> str | None:
        """Return what happened to a worker that ended, or None where it ended because no program waits.

        Raises:
          SweepError: its code failed, which another worker would do too.
        """
        try:
            self._ray.get(worker)
        except self._ray.exceptions.RayTaskError as error:
            reason = str(error.cause) if error.cause is not None else str(error)
            raise SweepError(f"a worker on the cluster failed: {reason.strip().splitlines()[-1]}") from error
        except self._ray.exceptions.RayError as error:
            return f"was lost ({type(error).__name__})"
        return None

    def _bury(self, number: int, how: str) -> None:
        """Settle what a dead worker left behind."""
        program = self._store.claimed_by(number)
        if program is not None:
            settle(self._store, self._sweep, program, how, say=self._say)
            return
        self._idle_deaths += 1
        if self._idle_deaths > self._sweep.attempts:
            raise SweepError(f"a worker on the cluster {how} and had no program; Ray's log says why")
        self._say(f"a worker on the cluster {how} between two programs; another one is started")


class _Owner:
    """The actor that has the store's file open for workers of any machine."""

    def __init__(self, folder: str):
        self._store = Store.open(Path(folder))

    def answer(self, method: str, arguments: tuple, named: dict[str, Any]) -> Any:
        return answer(self._store, method, arguments, named)


def _work(owner: Any, number: int, folder: str) -> None:
    """Train programs until none waits, in a process of a Ray cluster; `folder` is where the sweep's command runs."""
    ray = importlib.import_module("ray")
    # A plan's relative paths begin there; Ray's processes stand where Ray was started.
    if os.path.isdir(folder):
        os.chdir(folder)
    keep_freed_memory()
    ledger = remote_ledger(lambda *question: ray.get(owner.answer.remote(*question)))
    work(ledger, number, sharing=_sharing(ray))


def _sharing(ray: Any) -> int:
    """Return how many workers may have the memory of this one's device: its GPU is its own, its machine is not."""
    if ray.get_gpu_ids():
        return 1
    here = ray.get_runtime_context().get_node_id()
    cores = next(node["Resources"]["CPU"] for node in ray.nodes() if node["NodeID"] == here)
    return max(int(cores), 1)


def check_address(address: str) -> None:
    """Raise ValueError unless it is local, auto, or HOST:PORT where the head of a cluster may listen.

    Ray itself would wait for minutes for one that does not answer.
    """
    named = f"--ray is {address!r}"
    if address == AUTO and (known := os.environ.get("RAY_ADDRESS", AUTO)) != AUTO:
        named, address = f"--ray is {address!r} and RAY_ADDRESS {known!r}", known
    if address in (LOCAL, AUTO):
        return
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ValueError(
            f"{named}; it must be {LOCAL}, {AUTO}, or HOST:PORT of the cluster's head, as in 10.0.0.1:6379"
        )
    try:
        connection = socket.create_connection((host, int(port)), timeout=_PATIENCE)
    except OSError as error:
        raise ValueError(f"{named}, and nothing listens there: {error}") from error
    with connection:
        if not _is_head(connection):
            raise ValueError(f"{named}, and what listens there is not the head of a Ray cluster")


def _is_head(connection: socket.socket) -> bool:
    """Return whether HTTP/2 is spoken at the other end, as gRPC does; a cluster with TLS is not asked."""
    if os.environ.get("RAY_USE_TLS", "0") != "0":
        return True
    try:
        connection.sendall(_PREFACE)
        with connection.makefile("rb") as heard:
            frame = heard.read(9)
    except OSError:
        return False
    return frame[3:4] == _SETTINGS


def _environment() -> dict[str, Any]:
    """Return what a worker's process is given of this one's: the package that runs here, and JAX's settings."""
    paths = [str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    given = {name: value for name, value in os.environ.items() if name.startswith(_FORWARDED)}
    return {"env_vars": {**given, "PYTHONPATH": os.pathsep.join(paths)}}
