"""How long a training step takes, beside other libraries and the machine's ceiling.

    python -m experiments.benchmarks.train_step [--preset small|deep|wide|124m|350m] [--best] [--json] [--figure FILE]

Ours, with any residual connection (`--residual`, as often as wanted), and the peers that are installed do the same job
(`sizes.py`): same sizes, same type, AdamW, random tokens. Each is a process of its own, compiled before the first turn;
one computes at a time, in an order that rotates from round to round (`contest.py`). The ceiling is the best rate at
which XLA multiplies matrices here, measured in the same rounds; GFLOP/s of every contender count the same FLOPs.

Printed are medians over rounds with quartiles, and ratios to the fastest peer with quartiles and the 95 % interval of
the median (`summary.py`): below 1 is faster. Quote ratios and shares, and only from a machine without other work: with
it they are not even of the right order, as contenders with more threads lose more.

Ours is the step that `jaxblock train` compiles, with its guard, metrics and schedule. `--best` first tries a few
execution settings and says which was kept: it changes nothing of the model.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.benchmarks.arguments import Help, figure_path, positive
from experiments.benchmarks.contest import Contender, Outcome, contest, jax_platform
from experiments.benchmarks.sizes import PRESETS, Sizes
from experiments.benchmarks.summary import Row, draw_times, fastest_peer, ratio_words, summarise, table

PEERS: dict[str, Contender] = {
    "flax": Contender("flax.linen", "experiments.benchmarks.peers.flax_linen", {"loop": "unrolled"}),
    "flax_scan": Contender("flax.linen nn.scan", "experiments.benchmarks.peers.flax_linen", {"loop": "scan"}),
    "torch": Contender("torch", "experiments.benchmarks.peers.torch_encoder", {"compile": False}),
    "torch_compile": Contender(
        "torch.compile", "experiments.benchmarks.peers.torch_encoder", {"compile": True}
    ),
    "x_transformers": Contender("x-transformers", "experiments.benchmarks.peers.x_transformers_lm"),
}
CEILING = "ceiling"
LOOP_DEPTH = 24  # above it a loop's compile time is no longer worth trying
TRIAL_ROUNDS, TRIAL_STEPS = 3, 2


def main() -> None:
    """Print the table, or one line of JSON."""
    arguments = parse()
    sizes, execution = sizes_of(arguments), execution_of(arguments)
    try:
        for residual in arguments.residual:
            check_ours(sizes, residual, execution, stream_dtype=arguments.stream_dtype)
    except ValueError as error:
        sys.exit(str(error))
    platform = jax_platform()
    shared = {**dataclasses.asdict(sizes), "platform": platform}
    settings = {
        residual: best_execution(shared, residual, execution, arguments) if arguments.best else execution
        for residual in arguments.residual
    }
    mine = [ours(shared, residual, settings[residual], arguments.stream_dtype) for residual in settings]
    peers = [
        dataclasses.replace(peer, options={**shared, **peer.options})
        for peer in (PEERS[name] for name in arguments.peers)
    ]
    ceiling = Contender(CEILING, "experiments.benchmarks.peers.matmul", shared)
    outcome = contest([*mine, *peers, ceiling], rounds=arguments.rounds, steps=arguments.steps)
    lost = [f"{one.name}: {outcome.left_out[one.name]}" for one in mine if one.name in outcome.left_out]
    if lost:
        sys.exit("\n".join(lost))
    has_ceiling = CEILING in outcome.rounds
    names = [peer.name for peer in peers]
    rows = summarise(outcome.rounds, peers=names, ceiling=CEILING if has_ceiling else None)
    found = record(sizes, rows, outcome, names, {one.name: settings[one.options["residual"]] for one in mine})
    print(json.dumps(found) if arguments.json else text(found, rows))
    if arguments.figure:
        rate = found["ceiling_gflops"]
        line = (sizes.flops / rate / 1e9, "best matrix-product rate") if rate else None
        draw_times(rows, arguments.figure, title=f"one training step: {sizes.words()}", line=line)


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line."""
    from jaxblock.config import REMAT_POLICIES
    from jaxblock.functional.attention import IMPLEMENTATIONS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument(
        "--preset", choices=PRESETS, default="small", help="sizes; those below replace its own"
    )
    for field in dataclasses.fields(Sizes):
        if field.name != "dtype":
            parser.add_argument(f"--{field.name}", type=positive, help="default: the preset's")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: the preset's")
    parser.add_argument(
        "--residual",
        action="append",
        help="a connection, as in a config; again for another (default: pre_norm)",
    )
    parser.add_argument("--rounds", type=positive, default=15, help="turns that count")
    parser.add_argument("--steps", type=positive, default=3, help="steps of a turn")
    parser.add_argument(
        "--scan-unroll", type=positive, default=1, help="blocks compiled into one step over depth"
    )
    parser.add_argument("--remat", choices=REMAT_POLICIES, default="none", help="what is recomputed")
    parser.add_argument("--attention", choices=IMPLEMENTATIONS, default="xla", help="implementation")
    parser.add_argument(
        "--loss", choices=("whole", "blocked"), default="whole", help="how the head and loss run"
    )
    parser.add_argument(
        "--stream-dtype", choices=("float32", "bfloat16"), default="float32", help="of our stream"
    )
    parser.add_argument(
        "--best",
        action="store_true",
        help="keep the fastest of the settings given and of --scan-unroll 1 and (up to depth 24) depth, each with "
        "--attention xla, blocked and, on a GPU in bfloat16, cudnn; --remat and --loss stay as given",
    )
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS), help="that run beside ours")
    parser.add_argument("--json", action="store_true", help="one line of JSON in place of the table")
    parser.add_argument("--figure", type=figure_path, help="where to draw the times")
    arguments = parser.parse_args(words)
    arguments.residual = list(dict.fromkeys(arguments.residual or ["pre_norm"]))
    return arguments


def sizes_of(arguments: argparse.Namespace) -> Sizes:
    """Return the preset with the sizes given by themselves."""
    given = {field.name: getattr(arguments, field.name) for field in dataclasses.fields(Sizes)}
    changes = {name: value for name, value in given.items() if value is not None}
    return dataclasses.replace(PRESETS[arguments.preset], **changes)


def execution_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the execution settings given."""
    return {name: getattr(arguments, name) for name in ("scan_unroll", "remat", "attention", "loss")}


def check_ours(sizes: Sizes, residual: str, execution: dict[str, Any], *, stream_dtype: str) -> None:
    """Raise ValueError, before any process starts, for what the library refuses."""
    from jaxblock import ExecutionConfig
    from jaxblock.residual import topology

    ExecutionConfig(**execution)
    topology(model_of(sizes, residual=residual, stream_dtype=stream_dtype).residual)


def model_of(sizes: Sizes, *, residual: str, stream_dtype: str = "float32") -> Any:
    """Return the `ModelConfig` of the sizes: what its own FLOPs and utilisation are computed from."""
    from jaxblock import ModelConfig

    return ModelConfig(
        vocab_size=sizes.vocab,
        context=sizes.seq,
        depth=sizes.depth,
        width=sizes.width,
        heads=sizes.heads,
        residual=residual,
        dtype=sizes.dtype,
        stream_dtype=stream_dtype,
    )


def ours(shared: dict[str, Any], residual: str, execution: dict[str, Any], stream_dtype: str) -> Contender:
    """Return our contender for one connection."""
    options = {**shared, **execution, "residual": residual, "stream_dtype": stream_dtype}
    return Contender(f"ours {residual}", "experiments.benchmarks.peers.ours", options)


def candidates(shared: dict[str, Any], execution: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the settings to try, those given first; remat and loss are kept, as their reason is memory."""
    depth, half_on_gpu = shared["depth"], shared["platform"] == "gpu" and shared["dtype"] == "bfloat16"
    unrolls = [1, *([depth] if depth <= LOOP_DEPTH else [])]
    attentions = ["xla", "blocked", *(["cudnn"] if half_on_gpu else [])]
    tried = [execution]
    for unroll in unrolls:
        for attention in attentions:
            one = {**execution, "scan_unroll": unroll, "attention": attention}
            if one not in tried:
                tried.append(one)
    return tried


def best_execution(
    shared: dict[str, Any], residual: str, execution: dict[str, Any], arguments: argparse.Namespace
) -> dict[str, Any]:
    """Return the fastest of the candidates in a short contest; one that cannot run is passed over."""
    tried = {
        json.dumps(one): dataclasses.replace(
            ours(shared, residual, one, arguments.stream_dtype), name=json.dumps(one)
        )
        for one in candidates(shared, execution)
    }
    outcome = contest(list(tried.values()), rounds=TRIAL_ROUNDS, steps=TRIAL_STEPS)
    if not outcome.rounds:
        sys.exit(f"ours {residual}: no setting ran: {outcome.left_out}")
    times = {name: float(np.median(seconds)) for name, seconds in outcome.rounds.items()}
    print(
        *(f"{residual}: {name} {1e3 * time:.1f} ms" for name, time in times.items()),
        sep="\n",
        file=sys.stderr,
    )
    return json.loads(min(times, key=times.__getitem__))


def record(
    sizes: Sizes,
    rows: Sequence[Row],
    outcome: Outcome,
    peers: Sequence[str],
    settings: dict[str, dict[str, Any]],
) -> dict[str, Any]:
    """Return everything that is printed, as JSON has it."""
    ceiling = outcome.rounds.get(CEILING)
    best_s = float(np.median([min(steps) for steps in ceiling])) if ceiling else None
    return {
        "benchmark": "train_step",
        **dataclasses.asdict(sizes),
        "flops_per_step": sizes.flops,
        "library_flops_per_step": library_flops(sizes),
        "rounds": len(next(iter(outcome.rounds.values()))),
        "ceiling_gflops": best_s and sizes.flops / best_s / 1e9,
        "fastest_peer": fastest_peer(rows, peers),
        "contenders": [contender_record(sizes, row, outcome, settings.get(row.name)) for row in rows],
        "left_out": outcome.left_out,
    }


def contender_record(
    sizes: Sizes, row: Row, outcome: Outcome, execution: dict[str, Any] | None
) -> dict[str, Any]:
    """Return one contender's numbers."""
    facts, seconds = outcome.facts[row.name], row.seconds.median
    kind = facts.get("device_kind")
    return {
        "name": row.name,
        "step_ms": [1e3 * x for x in row.seconds],
        "tokens_per_s": sizes.tokens / seconds,
        "gflops": sizes.flops / seconds / 1e9,
        "share_of_ceiling": row.share and list(row.share),
        "ratio_to_fastest_peer": row.ratio and list(row.ratio.spread),
        "ratio_interval_95": row.ratio and list(row.ratio.interval),
        "model_flops_utilisation": kind and utilisation(sizes, sizes.tokens / seconds, kind),
        "execution": execution,
        "ready_s": facts["ready_s"],
        "peak_mb": facts["peak_bytes"] / 2**20,
        "facts": facts,
    }


def library_flops(sizes: Sizes) -> float:
    """Return our own count of the same products, to set beside `Sizes.flops`: they are equal."""
    from jaxblock.accounting import flop_conventions

    full = next(one for one in flop_conventions(model_of(sizes, residual="pre_norm")) if one.name == "full")
    return sizes.tokens * full.training


def utilisation(sizes: Sizes, tokens_per_s: float, device_kind: str) -> float | None:
    """Return the share of the device's published peak, causality discounted; None where no peak is known."""
    from jaxblock.accounting import model_flops_utilisation

    return model_flops_utilisation(
        tokens_per_s, model_of(sizes, residual="pre_norm"), device_kind=device_kind
    )


def text(found: dict[str, Any], rows: Sequence[Row]) -> str:
    """Return the table with what has to be known to read it."""
    header = (
        "one step",
        "ms [quartiles]",
        "tokens/s",
        "GFLOP/s",
        "of ceiling",
        "over the fastest peer",
        "ready s",
        "MB",
    )
    lines = []
    for row, one in zip(rows, found["contenders"], strict=True):
        median, low, high = one["step_ms"]
        share = "-" if row.share is None else f"{100 * row.share.median:.1f} %"
        cells = (
            f"{median:.1f} [{low:.1f}, {high:.1f}]",
            f"{one['tokens_per_s']:.0f}",
            f"{one['gflops']:.1f}",
        )
        costs = (f"{one['ready_s']:.1f}", f"{one['peak_mb']:.0f}")
        lines.append((row.name, *cells, share, ratio_words(row.ratio), *costs))
    words = [HEAD.format(**found, words=Sizes(**{k: found[k] for k in dataclasses.asdict(Sizes())}).words())]
    words.append(table(header, lines))
    for one in found["contenders"]:
        if one["execution"]:
            words.append(f"{one['name']}: {', '.join(f'{k} {v}' for k, v in one['execution'].items())}")
        if one["model_flops_utilisation"] is not None:
            words.append(
                f"{one['name']}: {100 * one['model_flops_utilisation']:.1f} % of the device's published peak"
            )
    if found["ceiling_gflops"]:
        words.append(f"ceiling: {found['ceiling_gflops']:.1f} GFLOP/s, the best matrix-product rate")
    if found["fastest_peer"]:
        words.append(
            f"fastest peer: {found['fastest_peer']}; ratio [quartiles] (95 % interval of the median)"
        )
    else:
        words.append("no peer ran, so there is no ratio")
    words += [f"left out: {name}: {why}" for name, why in found["left_out"].items()]
    return "\n".join(words)


HEAD = (
    "{words}\n{flops_per_step:.4g} FLOPs a step (products of matrices, forward and twice that backward, "
    "causality not discounted); the library counts {library_flops_per_step:.4g}; {rounds} rounds"
)


if __name__ == "__main__":
    main()
