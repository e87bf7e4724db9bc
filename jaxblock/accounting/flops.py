"""Model FLOPs per token, in four conventions that the literature mixes up; a training step costs three forwards.

Counted are the products of matrices, a multiply-add as 2: norms, softmax, activations, biases, rematerialisation and
rows that pad the vocabulary are not. Per token forward, with T tokens and no window:

    blocks    2 L (2 D^2 + 2 D G K + (2 or 3) D F)
    scores    4 L D T over every key, 2 L D T over the causal half
    head      2 D V

The causal half is T / 2 keys a query, the triangle's area, as published figures have it; a query really sees
(T + 1) / 2 keys on average. With a window of W <= T it is the band's area, W - W^2 / (2 T).
"""

from typing import NamedTuple

from jaxblock.accounting.depth_mixing import depth_mixing_flops
from jaxblock.accounting.feed_forward import feed_forward_flops
from jaxblock.accounting.token_mixing import projection_flops, score_flops
from jaxblock.config import ModelConfig
from jaxblock.contracts import check_integer

TRAINING_FACTOR = 3
"""A backward pass has two products for every product of the forward pass."""


class FlopParts(NamedTuple):
    """Forward FLOPs per token by part."""

    projections: int
    """Query, key, value and output of all blocks."""
    feed_forward: int
    """Up, gate where there is one, and down of all blocks."""
    scores_full: float
    """q k^T and weights v over every key of the sequence, hidden or not."""
    scores_causal: float
    """The same over the keys that causality and windows leave, a half where there is no window."""
    depth_mixing: int | None
    """Reads over depth; None where no formula is known."""
    head: int
    """The logits, tied or not."""


class Convention(NamedTuple):
    """One way to count, per token."""

    name: str
    forward: float
    training: float
    counts: str
    """What it counts, in a sentence."""


def flop_parts(config: ModelConfig, length: int | None = None) -> FlopParts:
    """Return the forward FLOPs per token by part.

    Args:
      config: the model.
      length: T, tokens of a sequence; left out, `config.context`.
    """
    length = config.context if length is None else length
    check_integer("length", length, least=1)
    return FlopParts(
        projections=projection_flops(config),
        feed_forward=feed_forward_flops(config),
        scores_full=config.depth * score_flops(config, length),
        scores_causal=sum(
            score_flops(config, visible_keys(length, window)) for window in block_windows(config)
        ),
        depth_mixing=depth_mixing_flops(config),
        head=2 * config.width * config.vocab_size,
    )


def block_windows(config: ModelConfig) -> list[int]:
    """Return each block's window, 0 = unlimited: `config.window` repeated over the depth."""
    return [
        config.window[block % len(config.window)] if config.window else 0 for block in range(config.depth)
    ]


def visible_keys(length: int, window: int = 0) -> float:
    """Return W - W^2 / (2 T), the keys a query sees by area; W is the window, or T where it is longer or 0.

    By number of keys the mean is W / (2 T) more: T / 2 here is (T + 1) / 2 there.
    """
    seen = min(window or length, length)
    return seen - seen * seen / (2 * length)


def flop_conventions(config: ModelConfig, length: int | None = None) -> tuple[Convention, ...]:
    """Return full, causal, 6N_total and 6N_blocks; arguments as in `flop_parts`.

    The N's are those of matrices: position table, biases and norms, which multiply no matrix, are in none of them.
    """
    parts = flop_parts(config, length)
    blocks = parts.projections + parts.feed_forward
    common = blocks + (parts.depth_mixing or 0) + parts.head
    tables = 2 * config.width * config.padded_vocab_size * (2 if config.head == "untied" else 1)
    rows = (
        ("full", common + parts.scores_full, "every product; attention over all T keys, hidden or not"),
        (
            "causal",
            common + parts.scores_causal,
            "every product; attention over the keys that are not hidden",
        ),
        (
            "6N_total",
            blocks + tables,
            "6 per weight of the blocks' matrices, token table and head; no scores",
        ),
        ("6N_blocks", blocks, "6 per weight of the blocks' matrices; no head, no scores"),
    )
    return tuple(Convention(name, float(x), float(TRAINING_FACTOR * x), counts) for name, x, counts in rows)


def training_flops_per_token(config: ModelConfig, length: int | None = None) -> float:
    """Return the FLOPs of forward and backward per token in the causal convention: what utilisation is made of."""
    (causal,) = (convention for convention in flop_conventions(config, length) if convention.name == "causal")
    return causal.training
