"""Token and position tables: the stream's first value, and the tied head."""

import flax.linen as nn
import jax.numpy as jnp

from jaxblock import axes
from jaxblock.config import ModelConfig
from jaxblock.functional.dense import embed
from jaxblock.functional.positions import learned, sinusoidal
from jaxblock.functional.readout import Readout, read_out
from jaxblock.modules.kernel import kernel_init
from jaxblock.modules.parametrization import scaling
from jaxblock.types import Array


class Embedding(nn.Module):
    """A table [V, D] that reads tokens into the stream and, when tied, reads logits out of it."""

    config: ModelConfig

    def setup(self) -> None:
        """Declare the table; its fan-in is D, as the head's is."""
        shape = (self.config.padded_vocab_size, self.config.width)
        gain = scaling(self.config).table_gain
        init = kernel_init(self.config, "embedding", fan_in=self.config.width, gain=gain)
        self.table = self.param("table", init, shape, jnp.dtype(self.config.param_dtype))

    def __call__(self, tokens_BT: Array) -> Array:
        """Return the rows of `tokens_BT`, [B, T] -> [B, T, D] in the stream's dtype; NaN for an id that is no token."""
        rows = self.table.shape[0]
        # The rows that pad the table are no tokens either: their ids are sent past its end.
        ids_BT = tokens_BT.astype(jnp.int32)  # in uint8, 256 would wrap to 0
        real_BT = jnp.where(ids_BT < self.config.vocab_size, ids_BT, rows)
        # On a mesh a token's whole row is read, and the rows that are made lie as the tokens do.
        table_VD = axes.constrain(self.table, "vocab", None)
        return embed(table_VD, real_BT).astype(self.config.stream_dtype)

    def attend(self, x_BTD: Array) -> Array:
        """Return float32 logits against the table, [B, T, D] -> [B, T, V]."""
        return read_out(x_BTD, self.readout())

    def readout(self) -> Readout:
        """Return the table as a head: what makes logits of states."""
        return Readout(self.table, "table", scaling(self.config).logits)


class PositionTable(nn.Module):
    """Learned (a table [context, D]) or sinusoidal positions, added to the token embedding."""

    config: ModelConfig

    @nn.compact
    def __call__(self, positions_BT: Array, *, limit: int | None = None) -> Array:
        """Return position vectors, [B or 1, T] -> [B or 1, T, D] in the stream's dtype.

        Args:
          positions_BT: integers.
          limit: what they lie below, however many they are (positions in a cache). Left out: their number T.

        Raises:
          ValueError: more positions than the learned table has rows.
        """
        config = self.config
        if config.position_choice.name == "sinusoidal":
            table = sinusoidal(max(config.context, limit or positions_BT.shape[-1]), config.width)
        else:
            gain = scaling(config).table_gain
            init = kernel_init(config, "position", fan_in=config.width, gain=gain)
            shape = (config.context, config.width)
            table = self.param("table", init, shape, jnp.dtype(config.param_dtype))
        if limit is not None:  # as single positions: padding may make the row longer than the table
            return learned(table, positions_BT[..., None])[..., 0, :].astype(config.stream_dtype)
        return learned(table, positions_BT).astype(config.stream_dtype)
