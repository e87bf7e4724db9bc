"""What importing costs: `python -m experiments.benchmarks.import_time [--rounds 20] [--json] [--figure FILE]`.

Fresh interpreters in turns: `import jax, flax.linen`, which nobody who uses this library can avoid, `import jaxblock`,
and `from jaxblock import Decoder, ModelConfig`, which brings all that computing needs. All read bytecode that one
uncounted round has written into a folder of this run's own, so that none compiles its sources. Below the times stand
the packages that importing the models spends its time in, by the interpreter's own count (-X importtime, which slows
every import down: read shares, not seconds).

Expected: both ratios at most 1.15. "holds" where the 95 % interval of the ratio lies below the bound, "does not hold"
where it lies above, "not resolved" where it contains it: then more rounds, or a machine without other work, tell.
"""

import argparse
import collections
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence

from experiments.benchmarks.arguments import Help, figure_path, positive
from experiments.benchmarks.contest import ROOT, turn_order
from experiments.benchmarks.summary import Row, draw_times, ratio_words, summarise, table, verdict

BASE = "import jax, flax.linen"
STATEMENTS = (BASE, "import jaxblock", "from jaxblock import Decoder, ModelConfig")
BOUND = 1.15
SHOWN = 8


def main() -> None:
    """Print the table, or one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument("--rounds", type=positive, default=20, help="turns that count")
    parser.add_argument("--json", action="store_true", help="one line of JSON in place of the table")
    parser.add_argument("--figure", type=figure_path, help="where to draw the times")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": folder}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        rounds: dict[str, list[list[float]]] = {statement: [] for statement in STATEMENTS}
        for number in range(arguments.rounds + 1):
            for statement in turn_order(STATEMENTS, number):
                seconds = seconds_of(statement, environment)
                if number:
                    rounds[statement].append([seconds])
        shares = package_shares(import_log(STATEMENTS[-1], environment))
    rows = summarise(rounds, peers=[BASE])
    print(json.dumps(record(rows, shares, arguments.rounds)) if arguments.json else text(rows, shares))
    if arguments.figure:
        (base,) = (row.seconds.median for row in rows if row.name == BASE)
        draw_times(
            rows,
            arguments.figure,
            title="Starting Python and importing, in a new process each time, sources already compiled",
            line=(BOUND * base, f"bound: {BOUND} x {BASE!r}"),
        )


def seconds_of(statement: str, environment: Mapping[str, str]) -> float:
    """Return the seconds of an interpreter that does nothing else, from its start to its end."""
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", statement], check=True, env=environment, cwd=ROOT)
    return time.perf_counter() - begin


def import_log(statement: str, environment: Mapping[str, str]) -> str:
    """Return what -X importtime writes."""
    command = [sys.executable, "-X", "importtime", "-c", statement]
    return subprocess.run(
        command, check=True, env=environment, cwd=ROOT, capture_output=True, text=True
    ).stderr


def package_shares(log: str) -> dict[str, float]:
    """Return the share of each top-level package in the modules' own times, largest first."""
    times: collections.Counter[str] = collections.Counter()
    for line in log.splitlines():
        parts = line.removeprefix("import time:").split("|")
        if len(parts) == 3 and parts[0].strip().isdigit():
            times[parts[2].strip().partition(".")[0]] += int(parts[0])
    whole = sum(times.values())
    return {name: time / whole for name, time in times.most_common()}


def record(rows: Sequence[Row], shares: Mapping[str, float], rounds: int) -> dict:
    """Return what is printed, as JSON has it."""
    return {
        "benchmark": "import_time",
        "rounds": rounds,
        "statements": [
            {
                "name": row.name,
                "seconds": list(row.seconds),
                "ratio": row.ratio and list(row.ratio.spread),
                "ratio_interval_95": row.ratio and list(row.ratio.interval),
                "verdict": None if row.name == BASE else verdict_of(row),
            }
            for row in rows
        ],
        "bound": BOUND,
        "shares": shares,
    }


def verdict_of(row: Row) -> str:
    """Return whether a statement costs no more than it may, as far as the interval of its ratio tells."""
    assert row.ratio is not None  # the base has run
    return verdict(row.ratio.interval, high=BOUND)


def text(rows: Sequence[Row], shares: Mapping[str, float]) -> str:
    """Return the table and the packages."""
    lines = []
    for row in rows:
        median, low, high = row.seconds
        verdict = "" if row.name == BASE else verdict_of(row)
        lines.append((row.name, f"{median:.3f} [{low:.3f}, {high:.3f}]", ratio_words(row.ratio), verdict))
    first = list(shares.items())[:SHOWN]
    return "\n".join(
        (
            table(("a fresh interpreter", "s [quartiles]", f"over {BASE!r}", f"<= {BOUND}"), lines),
            "own time of modules: " + ", ".join(f"{name} {100 * share:.0f} %" for name, share in first),
        )
    )


if __name__ == "__main__":
    main()
