"""What the loss costs in blocks of positions and with whole logits: `python -m experiments.benchmarks.vocabulary_loss`.

The loss of states [B, T, D] and a tied table [V, D] with its gradient by both, float32: `functional.cross_entropy` of
`read_out` against `functional.cross_entropy_blocked`, compiled ahead. Memory is the compiler's temporary memory, which
is exact; the two take turns on the same arrays, and a ratio of times is made within a round (`summary.py`). Ratios are
blocked / whole, below 1 = the blocked form costs less. That of processor seconds is the one to read where other work
shares the machine. A size whose logits fit in one block has nothing to compare, and the table says so.

What has to hold at the default sizes (V = 50257, 8 x 256 positions, width 256):

    compiled memory     blocked / whole             at most 1/3
    loss                |blocked - whole| / whole   at most 1e-5
    seconds             blocked / whole             at most 1.15
"""

import argparse
import json
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks.arguments import Help, figure_path, positive
from experiments.benchmarks.contest import turn_order
from experiments.benchmarks.summary import (
    Ratio,
    Row,
    draw_times,
    ratio_of,
    ratio_words,
    summarise,
    table,
    verdict,
)
from jaxblock.functional import CrossEntropy, Readout, cross_entropy, cross_entropy_blocked, read_out
from jaxblock.functional.cross_entropy_blocked import block_positions
from jaxblock.types import Array

WHOLE, BLOCKED = "whole", "blocked"
MEMORY_BOUND, VALUE_BOUND, TIME_BOUND = 1 / 3, 1e-5, 1.15


class Found(NamedTuple):
    """What was measured, and what of it is compared."""

    rows: list[Row]
    memory: dict[str, int]
    """Form -> bytes of temporaries."""
    loss: dict[str, float]
    gradient_apart: float
    """The largest difference of a gradient's entries, over its largest entry."""
    busy: Ratio
    """Of processor seconds, blocked / whole."""
    block: int
    """Positions of a block, in every row of the batch."""


class Check(NamedTuple):
    """One thing that has to hold of blocked / whole."""

    name: str
    words: str
    interval: tuple[float, float]
    bound: float

    @property
    def verdict(self) -> str:
        """Return "holds", "does not hold" or "not resolved"."""
        return verdict(self.interval, high=self.bound)


def main() -> None:
    """Print the table, or one line of JSON; draw a figure where a path is given."""
    arguments = parse()
    found = measure(arguments)
    checks = checks_of(found, arguments.length)
    print(json.dumps(record(arguments, found, checks)) if arguments.json else text(arguments, found, checks))
    if arguments.figure:
        rows = [
            row._replace(name=f"{row.name}, {found.memory[row.name] / 2**20:.1f} MB") for row in found.rows
        ]
        draw_times(rows, arguments.figure, title=f"loss and its gradient: {words_of(arguments)}")


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument("--rounds", type=positive, default=15, help="turns that count")
    parser.add_argument("--batch", type=positive, default=8, help="rows")
    parser.add_argument("--length", type=positive, default=256, help="positions of a row")
    parser.add_argument("--width", type=positive, default=256, help="of the states")
    parser.add_argument("--vocabulary", type=positive, default=50_257, help="rows of the table")
    parser.add_argument("--json", action="store_true", help="one line of JSON in place of the table")
    parser.add_argument("--figure", type=figure_path, help="where to draw the times")
    return parser.parse_args(words)


def measure(sizes: argparse.Namespace) -> Found:
    """Return what both forms cost on the same arrays."""
    draw = np.random.default_rng(0)
    states_BTD = draw.normal(size=(sizes.batch, sizes.length, sizes.width))
    table_VD = draw.normal(size=(sizes.vocabulary, sizes.width)) / sizes.width**0.5
    targets_BT = draw.integers(0, sizes.vocabulary, (sizes.batch, sizes.length))
    readout = Readout(jnp.asarray(table_VD, jnp.float32))
    given = (jnp.asarray(states_BTD, jnp.float32), readout, jnp.asarray(targets_BT, jnp.int32))
    forms = {name: compiled(loss, given) for name, loss in ((WHOLE, whole), (BLOCKED, blocked))}
    (want, wanted), (got, gradient) = (form(*given) for form in forms.values())
    apart = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max() / jnp.abs(b).max()), gradient, wanted)
    seconds: dict[str, list[list[float]]] = {name: [] for name in forms}
    busy: dict[str, list[float]] = {name: [] for name in forms}
    for number in range(sizes.rounds + 1):
        for name in turn_order(list(forms), number):
            start, processor = time.perf_counter(), time.process_time()
            jax.block_until_ready(forms[name](*given))
            if number:
                seconds[name].append([time.perf_counter() - start])
                busy[name].append(time.process_time() - processor)
    return Found(
        summarise(seconds, peers=[WHOLE]),
        {name: form.memory_analysis().temp_size_in_bytes for name, form in forms.items()},
        {WHOLE: float(want), BLOCKED: float(got)},
        max(jax.tree.leaves(apart)),
        ratio_of(busy[BLOCKED], busy[WHOLE]),
        block_positions(sizes.batch, sizes.length, readout.columns),
    )


def checks_of(found: Found, length: int) -> list[Check]:
    """Return what has to hold; nothing where one block holds all positions."""
    if found.block >= length:
        return []
    memory = found.memory[BLOCKED] / found.memory[WHOLE]
    apart = abs(found.loss[BLOCKED] - found.loss[WHOLE]) / abs(found.loss[WHOLE])
    (ratio,) = (row.ratio for row in found.rows if row.name == BLOCKED)
    assert ratio is not None
    return [
        Check("compiled memory, blocked / whole", f"{memory:.3f}", (memory, memory), MEMORY_BOUND),
        Check("loss, |blocked - whole| / whole", f"{apart:.1e}", (apart, apart), VALUE_BOUND),
        Check("seconds, blocked / whole", ratio_words(ratio), ratio.interval, TIME_BOUND),
    ]


def record(sizes: argparse.Namespace, found: Found, checks: Sequence[Check]) -> dict[str, Any]:
    """Return everything that is printed, as JSON has it."""
    shape = {name: getattr(sizes, name) for name in ("batch", "length", "width", "vocabulary", "rounds")}
    forms = [
        {
            "form": row.name,
            "temporary_bytes": found.memory[row.name],
            "ms": [1e3 * x for x in row.seconds],
            "ratio_to_whole": row.ratio and list(row.ratio.spread),
            "ratio_interval_95": row.ratio and list(row.ratio.interval),
            "loss": found.loss[row.name],
        }
        for row in found.rows
    ]
    return {
        "benchmark": "vocabulary_loss",
        **shape,
        "block_positions": found.block,
        "forms": forms,
        "gradient_apart": found.gradient_apart,
        "processor_ratio": list(found.busy.spread),
        "processor_ratio_interval_95": list(found.busy.interval),
        "checks": [{**check._asdict(), "verdict": check.verdict} for check in checks],
    }


def text(sizes: argparse.Namespace, found: Found, checks: Sequence[Check]) -> str:
    """Return the table, the ratios, and what has to hold of them."""
    lines = []
    for row in found.rows:
        median, low, high = (1e3 * x for x in row.seconds)
        lines.append(
            (row.name, f"{found.memory[row.name] / 2**20:.1f}", f"{median:.2f} [{low:.2f}, {high:.2f}]")
        )
    words = [words_of(sizes), table(("form", "compiled MB", "ms [quartiles]"), lines)]
    if not checks:
        words.append(
            f"{sizes.batch} x {sizes.length} positions fit in one block ({found.block} positions of each row): "
            "both forms hold all logits, so nothing is compared"
        )
        return "\n".join(words)
    words += [f"{one.name}: {one.words}; {one.verdict} (at most {one.bound:.3g})" for one in checks]
    words.append(f"processor seconds, blocked / whole: {ratio_words(found.busy)}")
    words.append(f"gradients apart, of their largest entry: {found.gradient_apart:.1e}")
    return "\n".join(words)


def words_of(sizes: argparse.Namespace) -> str:
    """Return the sizes in words."""
    return (
        f"vocabulary {sizes.vocabulary}, batch {sizes.batch}, length {sizes.length}, width {sizes.width}, "
        f"float32, {sizes.rounds} rounds"
    )


def whole(x_BTD: Array, readout: Readout, targets_BT: Array) -> CrossEntropy:
    """Return the loss of whole logits."""
    return cross_entropy(read_out(x_BTD, readout), targets_BT)


def blocked(x_BTD: Array, readout: Readout, targets_BT: Array) -> CrossEntropy:
    """Return the loss in blocks."""
    return cross_entropy_blocked(x_BTD, readout, targets_BT)


def compiled(loss: Any, given: tuple[Any, ...]) -> Any:
    """Return the compiled loss with its gradient by states and table."""
    both = jax.value_and_grad(lambda *given: loss(*given).loss, argnums=(0, 1))
    return jax.jit(both).lower(*given).compile()


if __name__ == "__main__":
    main()
