"""Implementations of attention against sequence length: `python -m experiments.benchmarks.attention [--figure FILE]`.

Every implementation of `jaxblock.functional.attention` that runs on this backend, and `jax.nn.dot_product_attention`
as a reference from outside, causal and not: seconds of the forward pass, and of forward and backward together (the
gradient of a weighted sum by query, key and value), with the temporaries that the compiler states. A batch has a fixed
number of tokens, so a longer sequence is a smaller batch. All programs of one length and mask take turns; ratios are to
the reference, in the same round (`summary.py`).

Expected: the time of a token grows with length for all; `xla` keeps weights [B, H, T, T], so its temporaries grow with
length, too, and those of `blocked` do not.
"""

import argparse
import functools
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from experiments.benchmarks.arguments import Help, figure_path, positive
from experiments.benchmarks.contest import tell, turn_order
from experiments.benchmarks.summary import Row, ratio_words, summarise, table
from jaxblock.functional import attention
from jaxblock.functional.attention import IMPLEMENTATIONS, AttentionPattern
from jaxblock.training.host_memory import keep_freed_memory

REFERENCE = "jax.nn"
PASSES = ("forward", "forward+backward")
LENGTHS = (128, 256, 512, 1024, 2048)


class Program(NamedTuple):
    """A compiled pass and its arguments."""

    compiled: Any
    arguments: tuple[jax.Array, ...]
    temporaries: int
    """Bytes."""

    def seconds(self) -> float:
        """Run it once."""
        begin = time.perf_counter()
        jax.block_until_ready(self.compiled(*self.arguments))
        return time.perf_counter() - begin


class Result(NamedTuple):
    """One length, mask and pass."""

    length: int
    causal: bool
    passes: str
    rows: list[Row]
    temporaries: dict[str, int]
    left_out: dict[str, str]


def main() -> None:
    """Print the tables, or one line of JSON."""
    arguments = parse()
    keep_freed_memory()
    results = [
        measure(arguments, length, causal=causal, passes=passes)
        for causal in (False, True)
        for passes in PASSES
        for length in arguments.lengths
    ]
    print(json.dumps(record(arguments, results)) if arguments.json else text(arguments, results))
    if arguments.figure:
        draw(arguments, results, arguments.figure)


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument("--lengths", type=positive, nargs="+", default=list(LENGTHS), help="of a sequence")
    parser.add_argument(
        "--tokens", type=positive, default=2048, help="of a batch, whatever the length; at least one row"
    )
    parser.add_argument("--heads", type=positive, default=4, help="of queries, keys and values")
    parser.add_argument("--head-size", type=positive, default=64, help="width of a head")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="of all arrays"
    )
    parser.add_argument("--rounds", type=positive, default=15, help="turns that count")
    parser.add_argument("--steps", type=positive, default=3, help="calls of a turn")
    parser.add_argument("--json", action="store_true", help="one line of JSON in place of the table")
    parser.add_argument("--figure", type=figure_path, help="where to draw times and temporaries")
    return parser.parse_args(words)


def contenders(*, causal: bool) -> dict[str, Callable[..., jax.Array]]:
    """Return name -> (q, k, v) -> y, all [B, T, H, K]."""
    pattern = AttentionPattern(causal=causal)
    own = {name: functools.partial(_own, pattern=pattern, name=name) for name in IMPLEMENTATIONS}
    return {**own, REFERENCE: functools.partial(jax.nn.dot_product_attention, is_causal=causal)}


def _own(
    q_BTHK: jax.Array, k_BTHK: jax.Array, v_BTHK: jax.Array, *, pattern: AttentionPattern, name: str
) -> jax.Array:
    return attention(q_BTHK, k_BTHK, v_BTHK, pattern, implementation=name)


def compile_pass(attend: Callable[..., jax.Array], arguments: tuple[jax.Array, ...], passes: str) -> Program:
    """Return the compiled pass.

    Args:
      attend: (q, k, v) -> y.
      arguments: q, k, v and the weights of the sum that is differentiated.
      passes: one of PASSES.

    Raises:
      ValueError: what this implementation cannot do here.
    """

    def forward(q: jax.Array, k: jax.Array, v: jax.Array, weights: jax.Array) -> jax.Array:
        del weights
        return attend(q, k, v)

    def total(q: jax.Array, k: jax.Array, v: jax.Array, weights: jax.Array) -> jax.Array:
        return (attend(q, k, v).astype(jnp.float32) * weights).sum()

    function = forward if passes == "forward" else jax.value_and_grad(total, argnums=(0, 1, 2))
    compiled = jax.jit(function, keep_unused=True).lower(*arguments).compile()
    return Program(compiled, arguments, compiled.memory_analysis().temp_size_in_bytes)


def measure(arguments: argparse.Namespace, length: int, *, causal: bool, passes: str) -> Result:
    """Return what one length costs."""
    tell(f"length {length}, {'causal' if causal else 'all keys'}, {passes}")
    shape = (max(1, arguments.tokens // length), length, arguments.heads, arguments.head_size)
    keys = jax.random.split(jax.random.key(length), 4)
    arrays = tuple(jax.random.normal(key, shape, arguments.dtype) for key in keys)
    programs: dict[str, Program] = {}
    left_out: dict[str, str] = {}
    for name, attend in contenders(causal=causal).items():
        try:
            programs[name] = compile_pass(attend, arrays, passes)
        except (ValueError, NotImplementedError) as error:
            left_out[name] = str(error).splitlines()[0]
    rounds: dict[str, list[list[float]]] = {name: [] for name in programs}
    for number in range(arguments.rounds + 1):
        for name in turn_order(list(programs), number):
            seconds = [programs[name].seconds() for _ in range(arguments.steps)]
            if number:
                rounds[name].append(seconds)
    rows = summarise(rounds, peers=[REFERENCE])
    sizes = {name: program.temporaries for name, program in programs.items()}
    return Result(length, causal, passes, rows, sizes, left_out)


def record(arguments: argparse.Namespace, results: Sequence[Result]) -> dict[str, Any]:
    """Return everything that is printed, as JSON has it."""
    shape = {name: getattr(arguments, name) for name in ("tokens", "heads", "head_size", "dtype", "rounds")}
    cells = [
        {
            "length": result.length,
            "causal": result.causal,
            "passes": result.passes,
            "implementation": row.name,
            "ms": [1e3 * x for x in row.seconds],
            "ratio_to_reference": row.ratio and list(row.ratio.spread),
            "ratio_interval_95": row.ratio and list(row.ratio.interval),
            "temporary_bytes": result.temporaries[row.name],
        }
        for result in results
        for row in result.rows
    ]
    return {"benchmark": "attention", **shape, "cells": cells, "left_out": left_out_of(results)}


def left_out_of(results: Sequence[Result]) -> dict[str, str]:
    """Return name -> why it did not run, the first reason given."""
    found: dict[str, str] = {}
    for result in results:
        found = {**result.left_out, **found}
    return found


def text(arguments: argparse.Namespace, results: Sequence[Result]) -> str:
    """Return a table per mask and pass."""
    header = ("length", "implementation", "ms [quartiles]", f"over {REFERENCE}", "temporaries MB")
    words = [
        f"{arguments.tokens} tokens, {arguments.heads} heads of {arguments.head_size}, {arguments.dtype}, "
        f"{arguments.rounds} rounds"
    ]
    for kind, group in grouped(results).items():
        lines = []
        for result in group:
            for row in result.rows:
                median, low, high = (1e3 * x for x in row.seconds)
                times = f"{median:.2f} [{low:.2f}, {high:.2f}]"
                size = f"{result.temporaries[row.name] / 2**20:.2f}"
                lines.append((str(result.length), row.name, times, ratio_words(row.ratio), size))
        words += ["", kind, table(header, lines)]
    words += [f"left out: {name}: {why}" for name, why in left_out_of(results).items()]
    return "\n".join(words)


def grouped(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Return the results by mask and pass, in words."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        mask = "causal" if result.causal else "all keys"
        groups.setdefault(f"{mask}, {result.passes}", []).append(result)
    return groups


def draw(arguments: argparse.Namespace, results: Sequence[Result], path: Path) -> None:
    """Draw times above and temporaries below, a column per mask and pass, a line per implementation."""
    from matplotlib.figure import Figure

    groups = grouped(results)
    figure = Figure(figsize=(3.2 * len(groups), 5.5), layout="constrained")
    figure.suptitle(
        f"{arguments.tokens} tokens a batch (rows = tokens / length), {arguments.heads} heads of "
        f"{arguments.head_size}, {arguments.dtype}",
        fontsize=10,
    )
    panels = figure.subplots(2, len(groups), sharex=True, squeeze=False)
    for column, (kind, group) in enumerate(groups.items()):
        lines: dict[str, list[tuple[int, float, float]]] = {}
        for result in group:
            for row in result.rows:
                point = (result.length, 1e3 * row.seconds.median, result.temporaries[row.name] / 2**20)
                lines.setdefault(row.name, []).append(point)
        for place, (name, points) in enumerate(lines.items()):
            # Hollow marks of sizes that shrink and lines that thin: one that lies on another is seen inside it.
            mark: dict[str, Any] = {
                "marker": "osD^v"[place % 5],
                "markersize": max(3, 11 - 2.5 * place),
                "linewidth": max(0.8, 3 - 0.7 * place),
                "fillstyle": "none",
                "linestyle": ":" if name == REFERENCE else "-",
                "color": "black" if name == REFERENCE else f"C{place}",
            }
            lengths, times, sizes = zip(*points, strict=True)
            panels[0, column].plot(lengths, times, label=name, **mark)
            panels[1, column].plot(lengths, sizes, label=name, **mark)
        panels[0, column].set(title=kind, yscale="log")
        panels[1, column].set(xlabel="length", xscale="log")
        panels[1, column].set_xticks([result.length for result in group], [str(one.length) for one in group])
        panels[1, column].minorticks_off()
    panels[0, 0].set_ylabel("ms")
    panels[1, 0].set_ylabel("temporaries, MB")
    panels[0, 0].legend(fontsize=8)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
