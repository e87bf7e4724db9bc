"""Value residual: attention's values are mixed with those of the first block, V_l <- first * V_1 + own * V_l.

Source: arXiv 2410.17897 (ResFormer); first = 1, own = 0 is its SVFormer, whose blocks all share the first one's values.
"""

import chex
import jax.numpy as jnp

from jaxblock.types import Array


def mix_values(own_BTGK: Array, first_BTGK: Array, mix_2: Array, *, exist: Array) -> Array:
    """Return mix_2[0] * first + mix_2[1] * own in own's dtype; own itself where the first values do not exist.

    Args:
      own_BTGK: this block's values.
      first_BTGK: the first block's, before any mixing.
      mix_2: the two weights; the sum is float32.
      exist: boolean scalar, False in the first block.

    Raises:
      AssertionError: shapes that differ, weights that are not two, an `exist` that is no boolean scalar.
    """
    chex.assert_equal_shape([own_BTGK, first_BTGK])
    chex.assert_shape(mix_2, (2,))
    chex.assert_rank(exist, 0)
    chex.assert_type(exist, bool)
    first, own = mix_2.astype(jnp.float32)
    mixed = first * first_BTGK.astype(jnp.float32) + own * own_BTGK.astype(jnp.float32)
    return jnp.where(exist, mixed.astype(own_BTGK.dtype), own_BTGK)
