"""The tables of `jaxblock count`, for a person."""

from collections.abc import Mapping, Sequence
from typing import Any

Row = tuple[str, ...]


def page(figures: Mapping[str, Any]) -> str:
    """Return the tables of `jaxblock.cli.count.figures`."""
    sections = (
        *_parameters(figures["parameters"]),
        *_flops(figures["flops_per_token"]),
        *_memory(figures["bytes"]),
    )
    return "\n\n".join(sections)


def table(title: str, rows: Sequence[Row], *, words: int = 0) -> str:
    """Return a title and aligned rows: the first column and the last `words` to the left, numbers to the right."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    numbers = range(1, len(widths) - words)

    def line(row: Row) -> str:
        cells = (
            cell.rjust(width) if i in numbers else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        return ("  " + "  ".join(cells)).rstrip()

    return "\n".join([title, *(line(row) for row in rows)])


def quantity(number: float) -> str:
    """Return a number with a decimal prefix: 854438400 -> "854.4 M"."""
    for power, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= power:
            return f"{number / power:.4g} {prefix}"
    return f"{number:,.0f}  "


def size(number: float) -> str:
    """Return a number of bytes with a binary prefix: 2**30 -> "1.00 GiB"."""
    for power, prefix in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if number >= 2**power:
            return f"{number / 2**power:,.2f} {prefix}"
    return f"{number:,.0f} B"


def _parameters(counts: Mapping[str, Any]) -> list[str]:
    total = counts["total"]

    def shares(numbers: Mapping[str, int]) -> list[Row]:
        return [(name, f"{n:,}", f"{100 * n / total:.1f} %") for name, n in numbers.items()]

    depth = counts["by_place"]["blocks"] // sum(counts["per_block"].values())
    active: list[Row] = []
    if counts["active"] != total:
        active = [("active", f"{counts['active']:,}", "without the experts that a token is not sent to")]
    return [
        table("parameters by role", shares(counts["by_role"])),
        table("parameters by place", shares(counts["by_place"])),
        table(
            f"parameters of one block, of {depth}",
            [(name, f"{n:,}") for name, n in counts["per_block"].items()],
        ),
        table(
            "the three N's",
            [
                ("blocks", f"{counts['blocks']:,}", "the blocks alone"),
                (
                    "non-embedding",
                    f"{counts['non_embedding']:,}",
                    "without token table, position table, untied head",
                ),
                ("total", f"{total:,}", "every parameter"),
                *active,
            ],
            words=1,
        ),
    ]


def _flops(flops: Mapping[str, Any]) -> list[str]:
    rows: list[Row] = [("", "forward", "training", "counts")]
    for row in flops["conventions"].values():
        rows.append((row["name"], quantity(row["forward"]), quantity(row["training"]), row["counts"]))
    names = {"scores_full": "attention scores, full", "scores_causal": "attention scores, causal"}
    parts: list[Row] = [
        (
            names[name] if name in names else name.replace("_", " "),
            "not counted" if n is None else quantity(n),
        )
        for name, n in flops["forward_parts"].items()
    ]
    return [
        table(f"FLOPs per token, sequences of {flops['length']:,} (training = 3 forward)", rows, words=1),
        table("forward FLOPs per token, by part", parts),
    ]


def _memory(memory: Mapping[str, Any]) -> list[str]:
    held = [
        (name, size(memory[name]))
        for name in ("parameters", "gradients", "optimizer", "average")
        if memory[name]
    ]
    kept: list[Row] = [("remat", "per block", "blocks", "history", "logits", "total", "")]
    for policy, of in memory["kept_for_backward"].items():
        cells = (size(of[name]) for name in ("per_block", "blocks", "history", "logits", "total"))
        kept.append((policy, *cells, "<- this config" if policy == memory["remat"] else ""))
    batch = f"{memory['rows']:,} sequences of {memory['length']:,} tokens"
    how = f"remat {memory['remat']!r} and loss {memory['loss']!r}"
    step = [(f"held, and kept with {how}", size(memory["training_step"]))]
    one = memory["kv_cache_one_sequence"]
    cache = [
        (f"one sequence of {memory['length']:,}", size(one) if one else "none: it cannot decode with one")
    ]
    return [
        table("bytes held by training", held),
        table(f"bytes kept for the backward pass of {batch}", kept, words=1),
        table("bytes of a training step, working memory of its arithmetic not counted", step),
        table("bytes of the key/value cache", cache),
    ]
