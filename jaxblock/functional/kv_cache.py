"""Slots of a key/value cache: where a token's key and value are written, and what each slot holds.

A real token at position p of its row (p real tokens lie before it) is written to slot p mod S; padding takes no
slot. After n tokens of a row, slot s holds position n - 1 - ((n - 1 - s) mod S), or nothing where that is negative.
As long as n <= S this is slot s = position s; beyond, the cache rolls and holds the last S tokens.

Axes of this file: S slots. Positions, slots and lengths are int32, in 64-bit mode too.
"""

import chex
import jax.numpy as jnp

from jaxblock.contracts import check_boolean
from jaxblock.types import Array


def token_positions(lengths_B: Array, valid_BT: Array) -> Array:
    """Return each token's position in its row, int32 [B, T]: lengths + cumsum(valid) - 1.

    lengths_B: real tokens read before; valid_BT: boolean, False = padding, whose entries mean nothing (they may be
    -1). Raises ValueError for a mask that is not boolean; AssertionError (chex) for shapes and dtypes.
    """
    chex.assert_rank([lengths_B, valid_BT], [1, 2])
    chex.assert_equal_shape_prefix([lengths_B, valid_BT], 1)
    chex.assert_type(lengths_B, int)
    check_boolean("valid_BT", valid_BT)
    counted_BT = jnp.cumsum(valid_BT, axis=1, dtype=jnp.int32)
    return lengths_B.astype(jnp.int32)[:, None] + counted_BT - 1


def slot_positions(lengths_B: Array, slots: int) -> Array:
    """Return the position that each slot holds after `lengths_B` tokens, int32 [B, S]; negative = it is empty."""
    chex.assert_rank(lengths_B, 1)
    newest_B1 = lengths_B.astype(jnp.int32)[:, None] - 1
    return newest_B1 - jnp.mod(newest_B1 - jnp.arange(slots, dtype=jnp.int32)[None], slots)


def target_slots(positions_BT: Array, written_BT: Array, slots: int) -> Array:
    """Return the slot each token is written to, int32 [B, T]; `slots` itself = nowhere.

    positions_BT: from `token_positions`; written_BT: boolean, which tokens are to be written. Of tokens that would
    share a slot only the last is written, so that every slot is the target of one token at most.
    """
    chex.assert_equal_shape([positions_BT, written_BT])
    check_boolean("written_BT", written_BT)
    last_B1 = jnp.max(jnp.where(written_BT, positions_BT, -1), axis=1, keepdims=True)
    kept_BT = written_BT & (positions_BT > last_B1 - slots)
    return jnp.where(kept_BT, jnp.mod(positions_BT, slots), slots).astype(jnp.int32)


def write_slots(cache_LBGSK: Array, new_LBTGK: Array, slots_BT: Array) -> Array:
    """Return the cache with new keys (or values) of all layers in their slots; slots at or past S are not written.

    cache: [L, B, G, S, K]; new: [L, B, T, G, K]; slots_BT: from `target_slots`. The cache keeps its dtype. Raises
    AssertionError (chex) for shapes that do not fit.
    """
    layers, batch, groups, slots, width = cache_LBGSK.shape
    chex.assert_shape(new_LBTGK, (layers, *slots_BT.shape, groups, width))
    if slots_BT.size == 1:
        # Of a single write XLA makes a read, a select and a write, for which it copies the cache; of two it does not.
        slots_BT = jnp.concatenate([slots_BT, jnp.full_like(slots_BT, slots)], axis=1)
        new_LBTGK = jnp.concatenate([new_LBTGK, new_LBTGK], axis=2)
    rows_B1 = jnp.arange(batch, dtype=jnp.int32)[:, None]
    new_BTLGK = new_LBTGK.transpose(1, 2, 0, 3, 4).astype(cache_LBGSK.dtype)
    return cache_LBGSK.at[:, rows_B1, :, slots_BT].set(new_BTLGK, mode="drop")
