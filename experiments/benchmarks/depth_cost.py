"""What depth costs: `python -m experiments.benchmarks.depth_cost [--json] [--figure FILE]`.

For each execution asked for (`--scan-unroll`, `--remat`; "depth" is a loop) and each depth: the lowered text of the
training step in bytes and lines, seconds of its compilation, seconds of a step per block, and two sizes of memory that
the compiler states exactly: temporaries of the step, and those of the gradient of the loss alone. Depths take turns,
compilations as well as steps, and a ratio of times is made of two depths of one round (`summary.py`).

What has to hold for one compiled block (scan_unroll 1):

    lowered text        depth 96 / depth 4       within 5 % of 1
    compilation         depth 96 / depth 6       at most 1.3
    step per block      depth 48 / depth 6       within 10 % of 1
    remat = full        gradient temporaries per block added, in float32 streams [B, T, D]: within 15 % of 1

Bytes are exact and the same at any load; times want a machine without other work: they are judged by the 95 % interval
of their ratio, and "not resolved" where it contains a bound.
"""

import argparse
import dataclasses
import itertools
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.benchmarks.arguments import Help, figure_path, positive
from experiments.benchmarks.contest import tell, turn_order
from experiments.benchmarks.peers.ours import Built, build
from experiments.benchmarks.sizes import Sizes
from experiments.benchmarks.summary import ratio_of, ratio_words, spread_of, table, verdict
from jaxblock.config import REMAT_POLICIES
from jaxblock.functional.attention import IMPLEMENTATIONS

DEPTHS = (4, 6, 12, 24, 48, 96)


class Arm(NamedTuple):
    """One way to run the stack."""

    scan_unroll: str
    """A number, or "depth"."""
    remat: str

    def unroll(self, depth: int) -> int:
        """Return the number for a depth."""
        return depth if self.scan_unroll == "depth" else int(self.scan_unroll)

    def words(self) -> str:
        """Return it as the config writes it."""
        return f"scan_unroll {self.scan_unroll}, remat {self.remat}"


@dataclasses.dataclass
class Cost:
    """What one depth costs under one arm."""

    lines: int
    bytes: int
    step_temporaries: int
    gradient_temporaries: int
    compile_R: list[float]
    compiling_R: list[float]
    """Processor seconds of the same compilations, of all threads: other work leaves them alone."""
    step_R: list[float] = dataclasses.field(default_factory=list)


class Check(NamedTuple):
    """One thing that has to hold."""

    name: str
    words: str
    value: float
    interval: tuple[float, float]
    """The 95 % interval of a ratio of times; of a number of bytes, which is exact, the number itself, twice."""
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """Return "holds", "does not hold" or "not resolved"."""
        return verdict(self.interval, low=self.low, high=self.high)


def main() -> None:
    """Print the table, or one line of JSON."""
    arguments = parse()
    sizes = Sizes(
        width=arguments.width,
        heads=arguments.heads,
        seq=arguments.seq,
        batch=arguments.batch,
        vocab=arguments.vocab,
    )
    costs = {}
    for arm in itertools.starmap(Arm, itertools.product(arguments.scan_unroll, arguments.remat)):
        tell(arm.words())
        try:
            costs[arm] = measure(sizes, arm, arguments)
        except ValueError as error:
            sys.exit(str(error))
    checks = {arm: checks_of(arm, by_depth, sizes) for arm, by_depth in costs.items()}
    print(json.dumps(record(sizes, costs, checks)) if arguments.json else text(sizes, costs, checks))
    if arguments.figure:
        draw(sizes, costs, arguments.figure)


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument("--depths", type=positive, nargs="+", default=list(DEPTHS), help="in blocks")
    parser.add_argument("--scan-unroll", nargs="+", default=["1"], help='numbers, or "depth"')
    parser.add_argument(
        "--remat", nargs="+", choices=REMAT_POLICIES, default=["none", "full"], help="what is recomputed"
    )
    parser.add_argument("--residual", default="pre_norm", help="a connection, as in a config")
    parser.add_argument("--attention", choices=IMPLEMENTATIONS, default="xla", help="implementation")
    parser.add_argument("--width", type=positive, default=64, help="of the stream")
    parser.add_argument("--heads", type=positive, default=2, help="of attention")
    parser.add_argument("--seq", type=positive, default=128, help="positions of a row")
    parser.add_argument("--batch", type=positive, default=4, help="rows")
    parser.add_argument("--vocab", type=positive, default=256, help="tokens there are")
    parser.add_argument("--compiles", type=positive, default=5, help="compilations of each depth")
    parser.add_argument("--rounds", type=positive, default=15, help="turns of steps")
    parser.add_argument("--steps", type=positive, default=3, help="steps of a turn")
    parser.add_argument("--json", action="store_true", help="one line of JSON in place of the table")
    parser.add_argument("--figure", type=figure_path, help="where to draw the costs")
    arguments = parser.parse_args(words)
    arguments.depths = sorted(set(arguments.depths))
    for one in arguments.scan_unroll:
        if one != "depth" and not (one.isdigit() and int(one)):
            parser.error(f'--scan-unroll is {one!r}; it must be a whole number of at least 1, or "depth"')
    return arguments


def measure(sizes: Sizes, arm: Arm, arguments: argparse.Namespace) -> dict[int, Cost]:
    """Return the costs by depth."""

    def fresh(depth: int) -> Built:
        options = {
            **dataclasses.asdict(dataclasses.replace(sizes, depth=depth)),
            "residual": arguments.residual,
            "stream_dtype": "float32",
            "scan_unroll": arm.unroll(depth),
            "remat": arm.remat,
            "attention": arguments.attention,
            "loss": "whole",
        }
        return build(options)

    costs: dict[int, Cost] = {}
    runners: dict[int, Runner] = {}
    for number in range(arguments.compiles + 1):
        # The first compilation of a process pays for more than itself, and is not counted.
        for depth in turn_order(arguments.depths, number) if number else arguments.depths[:1]:
            built = fresh(depth)
            lowered = built.step.lower(built.state, built.batch, built.key)
            begin, busy = time.perf_counter(), time.process_time()
            compiled = lowered.compile()
            seconds, busy = time.perf_counter() - begin, time.process_time() - busy
            if not number:
                continue
            if depth not in costs:
                words, memory = lowered.as_text(), compiled.memory_analysis()
                lines, found = words.count("\n"), gradient_temporaries(built)
                costs[depth] = Cost(lines, len(words), memory.temp_size_in_bytes, found, [], [])
                runners[depth] = Runner(built, compiled)
            costs[depth].compile_R.append(seconds)
            costs[depth].compiling_R.append(busy)
    for number in range(arguments.rounds + 1):
        for depth in turn_order(arguments.depths, number):
            seconds = runners[depth].run(arguments.steps)
            if number:
                costs[depth].step_R.append(seconds)
    return dict(sorted(costs.items()))


def gradient_temporaries(built: Built) -> int:
    """Return the bytes that the gradient of the loss holds besides its arguments and results."""
    from jaxblock.training.objectives import training_loss

    loss = training_loss(built.model, built.config)
    gradient = jax.jit(jax.grad(lambda params, batch: loss(params, batch, None).loss))
    compiled: Any = gradient.lower(built.state.params, built.batch).compile()
    return compiled.memory_analysis().temp_size_in_bytes


class Runner:
    """A compiled step and the state it has come to."""

    def __init__(self, built: Built, compiled: Any):
        self._compiled, self._state = compiled, built.state
        self._batch, self._key = built.batch, built.key

    def run(self, steps: int) -> float:
        """Return the median seconds of some steps."""
        times = []
        for _ in range(steps):
            begin = time.perf_counter()
            self._state, metrics = self._compiled(self._state, self._batch, self._key)
            float(metrics.loss)
            times.append(time.perf_counter() - begin)
        return float(np.median(times))


def streams_per_block(costs: Mapping[int, Cost], sizes: Sizes) -> float:
    """Return the gradient's temporaries per block added, from the least to the greatest depth, in float32 streams."""
    low, high = min(costs), max(costs)
    more = costs[high].gradient_temporaries - costs[low].gradient_temporaries
    return more / (high - low) / (4 * sizes.tokens * sizes.width)


def checks_of(arm: Arm, costs: Mapping[int, Cost], sizes: Sizes) -> list[Check]:
    """Return what has to hold, of the depths that were measured; nothing where blocks are unrolled."""
    if arm.scan_unroll != "1":
        return []
    checks = []
    if {4, 96} <= set(costs):
        value = costs[96].bytes / costs[4].bytes
        checks.append(Check("lowered text, 96 / 4", f"{value:.4f}", value, (value, value), 0.95, 1.05))
    if {6, 96} <= set(costs):
        ratio = ratio_of(costs[96].compile_R, costs[6].compile_R)
        busy = ratio_of(costs[96].compiling_R, costs[6].compiling_R)
        words = f"{ratio_words(ratio)}, of processor seconds {ratio_words(busy)}"
        checks.append(Check("compilation, 96 / 6", words, ratio.spread.median, ratio.interval, 0.0, 1.3))
    if {6, 48} <= set(costs):
        ratio = ratio_of(per_block(costs, 48), per_block(costs, 6))
        checks.append(
            Check("step per block, 48 / 6", ratio_words(ratio), ratio.spread.median, ratio.interval, 0.9, 1.1)
        )
    if arm.remat == "full" and len(costs) > 1:
        value = streams_per_block(costs, sizes)
        checks.append(Check("streams per block added", f"{value:.4f}", value, (value, value), 0.85, 1.15))
    return checks


def per_block(costs: Mapping[int, Cost], depth: int) -> list[float]:
    """Return the seconds of a step over the depth, by round."""
    return [seconds / depth for seconds in costs[depth].step_R]


def record(
    sizes: Sizes, costs: Mapping[Arm, Mapping[int, Cost]], checks: Mapping[Arm, Sequence[Check]]
) -> dict[str, Any]:
    """Return everything that is printed, as JSON has it."""
    arms = [
        {
            **arm._asdict(),
            "depths": {depth: dataclasses.asdict(cost) for depth, cost in by_depth.items()},
            "checks": [{**check._asdict(), "verdict": check.verdict} for check in checks[arm]],
        }
        for arm, by_depth in costs.items()
    ]
    shape = {name: size for name, size in dataclasses.asdict(sizes).items() if name != "depth"}
    return {"benchmark": "depth_cost", **shape, "arms": arms}


def text(sizes: Sizes, costs: Mapping[Arm, Mapping[int, Cost]], checks: Mapping[Arm, Sequence[Check]]) -> str:
    """Return a table per arm, and what has to hold."""
    header = (
        "depth",
        "text lines",
        "KB",
        "compile s",
        "processor s",
        "step/block ms",
        "step MB",
        "gradient MB",
    )
    words = [sizes.words().partition(", ")[2]]
    for arm, by_depth in costs.items():
        lines = []
        for depth, cost in by_depth.items():
            block_ms = np.array(per_block(by_depth, depth)) * 1e3
            times = [spread_of(values) for values in (cost.compile_R, cost.compiling_R, block_ms)]
            cells = [f"{one.median:.3f} [{one.low:.3f}, {one.high:.3f}]" for one in times]
            sizes_mb = [f"{x / 2**20:.2f}" for x in (cost.step_temporaries, cost.gradient_temporaries)]
            lines.append((str(depth), str(cost.lines), f"{cost.bytes / 1e3:.1f}", *cells, *sizes_mb))
        words += ["", arm.words(), table(header, lines)]
        for one in checks[arm]:
            bounds = f"{one.low:g} to {one.high:g}" if one.low else f"at most {one.high:g}"
            words.append(f"{one.name}: {one.words}; {one.verdict} ({bounds})")
        if arm.scan_unroll != "1" and len(by_depth) > 1:
            words.append(f"streams per block added: {streams_per_block(by_depth, sizes):.4f}")
    return "\n".join(words)


def draw(sizes: Sizes, costs: Mapping[Arm, Mapping[int, Cost]], path: Path) -> None:
    """Draw the four costs against depth, a line an arm."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6.5), layout="constrained")
    figure.suptitle(
        f"width {sizes.width}, {sizes.heads} heads, batch {sizes.batch} x {sizes.seq}, vocabulary {sizes.vocab}, "
        f"{sizes.dtype}",
        fontsize=10,
    )
    panels = figure.subplots(2, 2).ravel()
    measured = sorted({depth for by_depth in costs.values() for depth in by_depth})
    titles = ("lowered text, KB", "compilation, s", "step per block, ms", "gradient temporaries, MB")
    for arm, by_depth in costs.items():
        depths = list(by_depth)
        columns = (
            [cost.bytes / 1e3 for cost in by_depth.values()],
            [spread_of(cost.compile_R).median for cost in by_depth.values()],
            [1e3 * float(np.median(per_block(by_depth, depth))) for depth in depths],
            [cost.gradient_temporaries / 2**20 for cost in by_depth.values()],
        )
        for axes, values in zip(panels, columns, strict=True):
            axes.plot(depths, values, marker="o", label=arm.words())
    for axes, title in zip(panels, titles, strict=True):
        axes.set(xscale="log", title=title, xlabel="blocks", ylim=(0, 1.1 * axes.dataLim.ymax))
        axes.set_xticks(measured, [str(depth) for depth in measured])
        axes.minorticks_off()
    panels[0].legend(fontsize=8)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
