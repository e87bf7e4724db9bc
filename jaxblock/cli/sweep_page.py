"""What `jaxblock sweep --dry-run` prints: every program of a plan with what it costs, before anything is run."""

import contextlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxblock.sweeps.runner import Prepared

COMPILE_SECONDS = 8.0
"""A program's start and compilation on two cores, roughly."""
OVERHEAD = 4.0
"""A small model's step takes about so many times its products alone."""


def arms(prepared: "Prepared", folder: Path) -> list[dict[str, Any]]:
    """Return one row a program: its axes, runs, those that have a result, parameters, FLOPs, seconds and bytes."""
    from jaxblock.sweeps.identity import program_key
    from jaxblock.sweeps.plan import LANE_FIELDS

    rows: dict[str, dict[str, Any]] = {}
    results = _results(folder)
    for run in prepared.runs:
        key = program_key(run.config)
        done = int(prepared.id_of(run) in results)
        if key in rows:
            rows[key]["runs"] += 1
            rows[key]["done"] += done
            continue
        known, model = prepared.surveys[key], run.config.model
        axes = {path: value for path, value in run.axes.items() if path not in LANE_FIELDS}
        convention = next(iter(known.flops_per_token), None)
        tokens = known.tokens_per_step * run.config.run.steps + known.validation_tokens / 3
        flops = known.flops_per_token[convention] * tokens if convention else None
        rows[key] = {
            "axes": axes,
            "blocks": model.depth,
            "sublayers": model.sublayers,
            "width": model.width,
            "runs": 1,
            "done": done,
            "parameters": known.parameters,
            "flops_per_token": known.flops_per_token,
            "convention": convention,
            "flops_per_run": flops,
            "bytes_per_lane": known.lane_bytes,
        }
    speeds: dict[int, float] = {}
    for row in rows.values():
        speed = speeds.setdefault(row["width"], products_per_second(row["width"]))
        lanes = min(row["runs"], prepared.plan.sweep.lanes)
        row["bytes"] = row["bytes_per_lane"] * lanes
        row["lanes"] = lanes
        if row["flops_per_run"] is not None:
            left = row["runs"] - row["done"]
            training = OVERHEAD * left * row["flops_per_run"] / speed
            row["seconds"] = COMPILE_SECONDS * -(-left // lanes) + training
        else:
            row["seconds"] = None
    return list(rows.values())


def _results(folder: Path) -> set[str]:
    """Return the runs that have a result in a store; none where there is no store yet."""
    from jaxblock.sweeps.store import FILE, Store

    if not (folder / FILE).exists() or not Store.has_begun(folder):
        return set()
    with contextlib.closing(Store.open(folder)) as store:
        return set(store.results())


def products_per_second(width: int) -> float:
    """Return the FLOPs per second that a product of [1024, D] and [D, D] reaches on this device, measured now."""
    import jax
    import jax.numpy as jnp

    x, w = jnp.ones((1024, width)), jnp.ones((width, width))
    product = jax.jit(lambda x: jax.lax.fori_loop(0, 20, lambda _, x: jnp.tanh(x @ w), x))
    product(x).block_until_ready()
    best = float("inf")
    for _ in range(3):
        begin = time.perf_counter()
        product(x).block_until_ready()
        best = min(best, time.perf_counter() - begin)
    return 20 * 2 * 1024 * width * width / best


def page(prepared: "Prepared", rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as a table, with their sums and what they rest on."""
    from jaxblock.sweeps.findings.plan_warnings import warnings_of
    from jaxblock.sweeps.plan import notes_of

    sweep = prepared.plan.sweep
    names = list(rows[0]["axes"]) if rows else []
    head = [*names, "runs", "done", "lanes", "parameters", "TFLOP/run", "memory", "time"]
    table = [head]
    for row in rows:
        flops = row["flops_per_run"]
        table.append(
            [
                *(str(row["axes"][name]) for name in names),
                str(row["runs"]),
                str(row["done"]),
                str(row["lanes"]),
                f"{row['parameters']['total']:,}",
                "" if flops is None else f"{flops / 1e12:.3g}",
                f"{row['bytes'] / 2**20:,.0f} MiB",
                "" if row["seconds"] is None else _minutes(row["seconds"]),
            ]
        )
    widths = [max(len(line[column]) for line in table) for column in range(len(head))]
    lines = ["  ".join(text.rjust(size) for text, size in zip(line, widths, strict=True)) for line in table]
    known = [row["seconds"] for row in rows if row["seconds"] is not None]
    total = f", about {_minutes(sum(known) / sweep.workers)} in all" if len(known) == len(rows) else ""
    axes = "\n".join(
        f"  {path}: {', '.join(map(str, values))}" for path, values in prepared.plan.axes.items()
    )
    convention = rows[0]["convention"] if rows else None
    return "\n".join(
        [
            f"{sweep.name}: {len(prepared.runs)} runs in {len(rows)} programs{total}; nothing was written",
            axes,
            *(
                f"note: {sentence}"
                for sentence in (*warnings_of(prepared.plan.axes), *notes_of(prepared.plan))
            ),
            "",
            *lines,
            "",
            f"parameters: total. FLOPs: training, {convention} convention. Memory: parameters, gradients, optimizer",
            "and what the backward pass keeps, of all lanes; the compiled program is measured when it runs, and",
            f"lanes are halved where it has no room. Time: {OVERHEAD:g} x the products alone at the speed measured",
            f"just now, and {COMPILE_SECONDS:g} s a program for compiling; other work on the machine makes it longer.",
        ]
    )


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
