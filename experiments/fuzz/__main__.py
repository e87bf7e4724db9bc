"""Fuzzing: random and damaged configs and data files end in a run, or in exit code 2 and one sentence.

    python -m experiments.fuzz [--configs 2000] [--files 500] [--processes 50] [--seed 0] [--json]

Every case goes the way of the command: words and file to a checked config, data loaded, step traced, folder made; a
part of what is accepted is run, in this process. `--processes` of the cases also run as `python -m jaxblock.cli`.
Broken is: any other exception, an answer that takes 100 s, a refusal that is not one line, does not say what it is
about or leaves a file behind, a traceback, an exit code but 0, 2, and 3 (the run's own guard).

Expected: 0 broken, and exit code 1 otherwise; each broken kind is shown with a reduced case. The same seed makes the
same cases. Seen (seed 0): 21 minutes on two cores that other jobs shared.
"""

import argparse
import collections
import contextlib
import json
import os
import random
import resource
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")  # compiling is what takes the time

import jax
from jax.experimental.compilation_cache import compilation_cache

from experiments.fuzz.cases import Case, Outcome, fresh, reduce_case, try_apart, try_here
from experiments.fuzz.configs import config_cases
from experiments.fuzz.files import base_files, data_cases

OUTCOMES = ("accepted", "stopped", "refused", "broken")
MOST_BYTES = 24 * 2**30
"""Address space of this process: an array of a terabyte fails at once, and does not take the machine with it."""
SHOWN_KINDS = 20


def try_all(
    cases: Sequence[Case],
    attempt: Callable[[Case, Path], Outcome],
    place: Path,
    *,
    say: Callable[[str], None],
) -> list[Outcome]:
    """Return what came of each case."""
    found = []
    for number, case in enumerate(cases, start=1):
        found.append(attempt(case, fresh(place, case)))
        if found[-1].name == "broken":
            say(f"broken: {found[-1].fault}: {case.words[:200]}")
        if number % 100 == 0:
            say(f"{number} of {len(cases)}: {_counts(found)}")
    return found


def report_on(
    cases: Sequence[Case], outcomes: Sequence[Outcome], place: Path, *, reduces: bool
) -> dict[str, Any]:
    """Return the counts, and each broken kind with its first case, reduced."""
    kinds: dict[str, list[tuple[Case, Outcome]]] = {}
    for case, outcome in zip(cases, outcomes, strict=True):
        if outcome.name == "broken":
            kinds.setdefault(outcome.fault, []).append((case, outcome))
    shown = []
    for fault, found in list(kinds.items())[:SHOWN_KINDS]:
        case, outcome = found[0]
        least = reduce_case(case, outcome, place) if reduces else case
        shown.append({"fault": fault, "cases": len(found), **least.show(), "details": outcome.details})
    return {**_counts(outcomes), "kinds": shown}


def choose(cases: Sequence[Case], count: int, *, seed: int) -> list[Case]:
    """Return some of the cases, to be run."""
    return random.Random(f"processes {seed}").sample(list(cases), min(count, len(cases)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Try the cases; return 1 if any is broken."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.fuzz",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name, count in (("configs", 2000), ("files", 500), ("processes", 50), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=count)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        _bounded(Path(folder) / "programs"),
    ):
        found = _run(given, Path(folder) / "case")
    if given.json:
        print(json.dumps(found))
    else:
        print(_words(found))
    return int(any(part["broken"] for part in found.values()))


@contextlib.contextmanager
def _bounded(programs: Path) -> Iterator[None]:
    """Bound the memory of this process, and let cases share what they compile."""
    limit = resource.getrlimit(resource.RLIMIT_AS)
    settings = {"jax_compilation_cache_dir": str(programs), "jax_persistent_cache_min_compile_time_secs": 0}
    before = {name: getattr(jax.config, name) for name in settings}
    try:
        resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, limit[1]))
        for name, value in settings.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        resource.setrlimit(resource.RLIMIT_AS, limit)


def _run(given: argparse.Namespace, place: Path) -> dict[str, dict[str, Any]]:
    files = base_files(given.seed)
    configs = config_cases(given.configs, seed=given.seed, files=files)
    data = data_cases(given.files, seed=given.seed, files=files)
    apart = choose(configs, given.processes * 3 // 5, seed=given.seed)
    apart += choose(data, given.processes - len(apart), seed=given.seed)
    found = {}
    for name, cases, attempt in (
        ("processes", apart, try_apart),
        ("files", data, try_here),
        ("configs", configs, try_here),
    ):
        outcomes = try_all(cases, attempt, place, say=lambda text: print(text, file=sys.stderr, flush=True))
        found[name] = report_on(cases, outcomes, place, reduces=attempt is try_here)
    return found


def _counts(outcomes: Sequence[Outcome]) -> dict[str, int]:
    counts = collections.Counter(outcome.name for outcome in outcomes)
    return {"tried": len(outcomes), **{name: counts[name] for name in OUTCOMES}}


def _words(found: dict[str, dict[str, Any]]) -> str:
    lines = [f"{'':10}{'tried':>9}" + "".join(f"{name:>10}" for name in OUTCOMES)]
    for name, part in found.items():
        lines.append(f"{name:10}{part['tried']:9}" + "".join(f"{part[outcome]:10}" for outcome in OUTCOMES))
    for name, part in found.items():
        for kind in part["kinds"]:
            lines += ["", f"{name}: {kind['fault']} ({kind['cases']} cases)", f"  {kind['words']}"]
            lines += [
                f"  {kind['arguments']}",
                *(f"  {path}: {text}" for path, text in kind["files"].items()),
            ]
            lines += ["  " + line for line in kind["details"].splitlines()]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
