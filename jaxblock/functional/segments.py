"""Packed documents in one row: positions that start again at every seam."""

import chex
import jax
import jax.numpy as jnp

from jaxblock.types import Array


def segment_positions(length: int, segments_BT: Array | None = None) -> Array:
    """Return each token's position in its document, int32 [1, T] without segments, else [B, T].

    Args:
      length: T.
      segments_BT: integer document ids; a new document starts wherever the id changes.
    """
    index_1T = jnp.arange(length, dtype=jnp.int32)[None]
    if segments_BT is None:
        return index_1T
    chex.assert_shape(segments_BT, (None, length))
    chex.assert_type(segments_BT, int)
    starts_BT = jnp.pad(segments_BT[:, 1:] != segments_BT[:, :-1], ((0, 0), (1, 0)))
    first_BT = jax.lax.cummax(jnp.where(starts_BT, index_1T, 0), axis=1)
    return index_1T - first_BT
