"""What is done to running trainings here loses nothing: kills, signals, full disks, damaged files, bad batches.

    python -m experiments.faults [--kills 100] [--trials 3] [--seed 0] [--only kills] [--json]

Small runs of `jaxblock train` (dropout, a moving average, accumulated pieces), each a process of its own, are harmed
and then continued by the command their user would type. A fault is survived where the run ends with the bits of the
unbroken one in all that its last checkpoint holds, with each step once in metrics.jsonl; where it is to be refused,
where the exit code and one sentence say so and no file has changed.

| faults | what is done |
|---|---|
| kills | SIGKILL at random moments: starting, stepping, and half of them while a checkpoint is written |
| signals | SIGTERM (143) and Ctrl-C (130) |
| disk | it fills while a run trains, is full at its start, turns read-only; a limit on the size of files |
| checkpoints | the newest truncated, a bit of it flipped, a file of it deleted |
| shards | one of the token shards is gone when the run is to go on |
| bad_steps | a batch whose loss is NaN: stop, skip, rewind; a learning rate that overflows |
| peers | one of a run's two processes is killed: the other ends within a minute, and both go on |
| refusals | a run's folder that cannot be made, a logger that is not installed |

Expected: nothing lost, the exit code 0; 1 where something was. A fault that this machine cannot have (a disk of its own
needs root on Linux) is named, not counted. 100 kills take about 20 minutes on two cores, the others 5.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax

from experiments.benchmarks.arguments import Help, positive
from experiments.faults.bad_steps import bad_step_runs
from experiments.faults.disks import disk_runs
from experiments.faults.files import damaged_runs, shard_runs
from experiments.faults.kills import interrupted_runs, killed_runs
from experiments.faults.laboratory import CannotTry, Laboratory, Trial
from experiments.faults.peers import peer_runs
from experiments.faults.refusals import refused_runs

Fault = Callable[[Laboratory, int], Iterator[Trial]]
FAULTS: Mapping[str, Fault] = {
    "kills": killed_runs,
    "signals": interrupted_runs,
    "disk": disk_runs,
    "checkpoints": damaged_runs,
    "shards": shard_runs,
    "bad_steps": bad_step_runs,
    "peers": peer_runs,
    "refusals": refused_runs,
}
"""Name -> what does it, given the laboratory and how often; another fault is another line."""


class Count(NamedTuple):
    """How often a kind of fault was tried, and how it went."""

    kind: str
    tried: int
    lost: int
    faults: list[str]
    """What was lost, each once."""

    @property
    def survived(self) -> int:
        """Trials that lost nothing."""
        return self.tried - self.lost


class Found(NamedTuple):
    """Everything that was tried."""

    counts: list[Count]
    seconds: dict[str, float]
    """Name of FAULTS -> what all its kinds took, unbroken runs included."""
    not_tried: dict[str, str]
    """Fault -> why this machine cannot have it."""


def try_all(lab: Laboratory, times: Mapping[str, int]) -> Found:
    """Do every named fault so many times."""
    trials: dict[str, list[Trial]] = {}
    seconds: dict[str, float] = {}
    not_tried: dict[str, str] = {}
    for name, number in times.items():
        begin = time.monotonic()
        try:
            for trial in FAULTS[name](lab, number):
                trials.setdefault(trial.kind, []).append(trial)
        except CannotTry as reason:
            not_tried[name] = str(reason)
        seconds[name] = time.monotonic() - begin
    return Found([_count(kind, made) for kind, made in trials.items()], seconds, not_tried)


def _count(kind: str, trials: Sequence[Trial]) -> Count:
    faults = [trial.fault for trial in trials if trial.fault is not None]
    return Count(kind, len(trials), len(faults), list(dict.fromkeys(faults)))


def record(found: Found) -> dict:
    """Return what --json prints."""
    kinds = {
        count.kind: {
            "tried": count.tried,
            "survived": count.survived,
            "lost": count.lost,
            "faults": count.faults,
        }
        for count in found.counts
    }
    total = {key: sum(kind[key] for kind in kinds.values()) for key in ("tried", "survived", "lost")}
    seconds = {name: round(value, 1) for name, value in found.seconds.items()}
    return {"kinds": kinds, "total": total, "seconds": seconds, "not_tried": found.not_tried}


def text(found: Found) -> str:
    """Return the table."""
    lines = [f"{'fault':40} tried survived lost"]
    for count in found.counts:
        lines.append(f"{count.kind:40} {count.tried:5} {count.survived:8} {count.lost:4}")
        lines += [f"  lost: {fault}" for fault in count.faults]
    lines.append("seconds: " + ", ".join(f"{name} {value:.0f}" for name, value in found.seconds.items()))
    lines += [f"{name}: not tried in full here: {reason}" for name, reason in found.not_tried.items()]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, or one line of JSON; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.faults", description=__doc__, formatter_class=Help
    )
    parser.add_argument("--kills", type=positive, default=100, help="SIGKILLs, about ten to a run")
    parser.add_argument("--trials", type=positive, default=3, help="how often each other fault is tried")
    parser.add_argument("--seed", type=int, default=0, help="decides every moment and place")
    parser.add_argument("--only", nargs="+", choices=FAULTS, default=list(FAULTS), help="the faults to try")
    parser.add_argument("--json", action="store_true", help="one line of JSON in place of the table")
    asked = parser.parse_args(arguments)
    jax.config.update("jax_platforms", "cpu")  # the runs are on the CPU, and what they saved is read there
    times = {name: asked.kills if name == "kills" else asked.trials for name in asked.only}
    with tempfile.TemporaryDirectory() as folder:
        lab = Laboratory(Path(folder), random.Random(asked.seed), lambda line: print(line, file=sys.stderr))
        found = try_all(lab, times)
    print(json.dumps(record(found)) if asked.json else text(found))
    return 1 if any(count.lost for count in found.counts) else 0


if __name__ == "__main__":
    sys.exit(main())
