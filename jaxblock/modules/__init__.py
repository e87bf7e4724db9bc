"""Linen modules that declare parameters and call `functional`."""

from jaxblock.modules.attention import Attention, AttentionInputs
from jaxblock.modules.dropout import Dropout, DropRows
from jaxblock.modules.embedding import Embedding, PositionTable
from jaxblock.modules.experts import Experts
from jaxblock.modules.feed_forward import FeedForward
from jaxblock.modules.kernel import Kernel
from jaxblock.modules.norm import Norm
from jaxblock.modules.parametrization import scaling
from jaxblock.modules.token_mixer import TokenMixer

__all__ = [
    "Attention",
    "AttentionInputs",
    "DropRows",
    "Dropout",
    "Embedding",
    "Experts",
    "FeedForward",
    "Kernel",
    "Norm",
    "PositionTable",
    "TokenMixer",
    "scaling",
]
