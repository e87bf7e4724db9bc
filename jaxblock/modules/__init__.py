"""Linen modules that declare parameters and call `functional`."""

from jaxblock.modules.attention import Attention, AttentionInputs
from jaxblock.modules.dropout import Dropout
from jaxblock.modules.embedding import Embedding, PositionTable
from jaxblock.modules.feed_forward import FeedForward
from jaxblock.modules.kernel import Kernel
from jaxblock.modules.norm import Norm
from jaxblock.modules.parametrization import scaling

__all__ = [
    "Attention",
    "AttentionInputs",
    "Dropout",
    "Embedding",
    "FeedForward",
    "Kernel",
    "Norm",
    "PositionTable",
    "scaling",
]
