"""The bidirectional stack: every token's state from all real tokens of its row, on both sides of it."""

from typing import ClassVar

import flax.linen as nn

from jaxblock.models.trunk import Trunk
from jaxblock.types import Array


class Encoder(Trunk):
    """A `Trunk` whose attention is not causal: the decoder's parameters without a head, `config.head` is not read.

    What is one-sided in a decoder is symmetric here: a window of W tokens reaches W - 1 tokens to each side, and
    ALiBi subtracts slope * |i - j| on both. Source: arXiv 1810.04805, section 3.
    """

    causal: ClassVar[bool] = False

    @nn.compact
    def __call__(
        self,
        tokens_BT: Array,
        *,
        valid_BT: Array | None = None,
        segments_BT: Array | None = None,
        positions_BT: Array | None = None,
    ) -> Array:
        """Return the states after the final norm, [B, T] -> [B, T, D] in the compute dtype.

        Args:
          tokens_BT: token ids, any integer dtype; a real id >= V gives NaN, never another token's state.
          valid_BT: boolean [B, T], True = real token. Padding is not read, whatever its ids: no bit of a real
            place's state depends on it. States at padded places are finite and mean nothing.
          segments_BT: integer document ids of packed rows; attention stays within a document.
          positions_BT: position of each token. Left out: its index, counted from its document's start.

        Raises:
          AssertionError: ranks or dtypes other than these.
          ValueError: more tokens than the learned position table has rows, a mask that is not boolean or does not fit.
        """
        return self.states(tokens_BT, valid_BT=valid_BT, segments_BT=segments_BT, positions_BT=positions_BT)[
            0
        ]
