"""The job that every contender of `train_step` does: sizes, presets, and its FLOPs.

A causal language model of pre-norm blocks (GELU, learned positions, biases), one AdamW step on random tokens. Counted
are the products of matrices, forward and twice that backward, the hidden half of attention's scores included:

    3 B T (L (8 D^2 + 16 D^2 + 4 T D) + 2 D V)
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of the model and its batch, and the type its products are computed in."""

    depth: int = 6
    width: int = 256
    heads: int = 4
    seq: int = 256
    batch: int = 8
    vocab: int = 256
    dtype: str = "float32"
    """float32, or bfloat16: parameters and optimizer in float32, products in bfloat16."""

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch * self.seq

    @property
    def flops(self) -> int:
        """FLOPs of a step: forward and backward, causality not discounted."""
        block = 24 * self.width**2 + 4 * self.seq * self.width
        return 3 * self.tokens * (self.depth * block + 2 * self.width * self.vocab)

    def words(self) -> str:
        """Return the sizes in words."""
        return (
            f"depth {self.depth}, width {self.width}, {self.heads} heads, sequence {self.seq}, "
            f"batch {self.batch}, vocabulary {self.vocab}, {self.dtype}"
        )


PRESETS = {
    "small": Sizes(),
    "deep": Sizes(depth=12, width=128, seq=64, batch=32),
    "wide": Sizes(depth=4, width=512, heads=8, seq=512, batch=2, vocab=8192),
    # The vocabulary of GPT-2 in rows of 128: 50257 of them are ever asked for.
    "124m": Sizes(depth=12, width=768, heads=12, seq=1024, vocab=50304, dtype="bfloat16"),
    "350m": Sizes(depth=24, width=1024, heads=16, seq=1024, vocab=50304, dtype="bfloat16"),
}


def sizes_of(options: Mapping[str, Any]) -> Sizes:
    """Return the sizes among a contender's options."""
    return Sizes(**{name: options[name] for name in asdict(Sizes())})
