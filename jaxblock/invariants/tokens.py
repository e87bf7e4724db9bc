"""Value checks between positions: causality (no token sees a later one) and padding (no token sees a padded one).

Pure functions of (apply, tokens), for jit and vmap. Each report carries its own control: a check that nothing moved
proves nothing unless something else did.
"""

from collections.abc import Callable
from typing import NamedTuple

import chex
import jax.numpy as jnp

from jaxblock.contracts import check_boolean
from jaxblock.types import Array


class CausalityReport(NamedTuple):
    """What changes when one token does."""

    earlier_equal: Array
    """bool: every output before the token is the same in every bit."""
    error: Array
    """float32: the largest difference before the token."""
    first_leak: Array
    """int32: the first position before the token that changed; -1 = none."""
    moved: Array
    """bool, control: the output at the token changed."""
    moved_later: Array
    """bool, control: an output after it changed; False where the token is the last one."""


class PaddingReport(NamedTuple):
    """What changes at real tokens when padded tokens do; [N] where `apply` returns N arrays, else a scalar."""

    equal: Array
    """bool: every output at a real token is the same in every bit."""
    error: Array
    """float32: the largest difference at a real token."""
    unmasked: Array
    """float32, control: the same with every token declared real. 0 when no real token could have seen a padded one
    (padding to the right of a causal model's tokens), and then the check has shown nothing."""


def probe_causality(
    apply: Callable[[Array], Array], tokens_BT: Array, other_BT: Array, *, position: int | Array
) -> CausalityReport:
    """Replace the token at one position and compare the outputs before, at and after it.

    Args:
      apply: token ids [B, T] -> logits [B, T, V], without dropout.
      tokens_BT: token ids.
      other_BT: token ids that differ from `tokens_BT` at `position`, in every row.
      position: may be traced: vmap over jnp.arange(T) checks every position in one call.
    """
    chex.assert_rank(tokens_BT, 2)
    chex.assert_equal_shape([tokens_BT, other_BT])
    index_T = jnp.arange(tokens_BT.shape[1])
    replaced_BT = jnp.where((index_T == position)[None], other_BT, tokens_BT)
    before, after = apply(_batched_as(replaced_BT, tokens_BT)), apply(replaced_BT)
    chex.assert_equal_shape_prefix([before, tokens_BT], 2)
    changed_T = jnp.any(_differs(before, after), axis=(0, 2))
    early_T = index_T < position
    leaked_T = changed_T & early_T
    distance_T = jnp.max(_distance(before, after), axis=(0, 2))
    return CausalityReport(
        earlier_equal=~jnp.any(leaked_T),
        error=jnp.max(jnp.where(early_T, distance_T, 0.0)),
        first_leak=jnp.where(jnp.any(leaked_T), jnp.argmax(leaked_T), -1).astype(jnp.int32),
        moved=jnp.any(changed_T & (index_T == position)),
        moved_later=jnp.any(changed_T & (index_T > position)),
    )


def probe_padding(
    apply: Callable[[Array, Array], Array], tokens_BT: Array, other_BT: Array, valid_BT: Array
) -> PaddingReport:
    """Replace every padded token, keep the mask, and compare the outputs at real tokens.

    Args:
      apply: (token ids [B, T], valid [B, T]) -> logits [B, T, V], or one array per depth, [N, B, T, D]: the error is
        then reported for each.
      tokens_BT: token ids.
      other_BT: what stands in the padded places the second time.
      valid_BT: boolean, True = real token.

    Raises:
      ValueError: a mask that is not boolean.
    """
    chex.assert_rank(tokens_BT, 2)
    chex.assert_equal_shape([tokens_BT, other_BT, valid_BT])
    check_boolean("valid_BT", valid_BT)
    replaced_BT = jnp.where(valid_BT, tokens_BT, other_BT)
    tokens_BT = _batched_as(replaced_BT, tokens_BT)
    before, after = apply(tokens_BT, valid_BT), apply(replaced_BT, valid_BT)
    everything_BT = jnp.ones_like(valid_BT)
    bare = _distance(apply(tokens_BT, everything_BT), apply(replaced_BT, everything_BT))
    real = valid_BT.reshape(*(1,) * (before.ndim - 3), *valid_BT.shape, 1)
    last = (-3, -2, -1)
    return PaddingReport(
        equal=~jnp.any(_differs(before, after) & real, axis=last),
        error=jnp.max(jnp.where(real, _distance(before, after), 0.0), axis=last),
        unmasked=jnp.max(jnp.where(real, bare, 0.0), axis=last),
    )


def _batched_as(like_BT: Array, tokens_BT: Array) -> Array:
    """Return `tokens_BT`, with the batch axes that vmap gave to `like_BT`.

    A product of more rows may round differently, so both calls must have the same shapes. Ids are never negative.
    """
    return jnp.where(like_BT < 0, like_BT, tokens_BT)


def _differs(x: Array, y: Array) -> Array:
    """Return where two arrays differ; NaN against NaN is no difference."""
    return (x != y) & ~(jnp.isnan(x) & jnp.isnan(y))


def _distance(x: Array, y: Array) -> Array:
    """Return |x - y| in float32, 0 where they are the same."""
    return jnp.where(_differs(x, y), jnp.abs(x.astype(jnp.float32) - y.astype(jnp.float32)), 0.0)
