"""Sizes of a model's logits: they and log Z drift where nothing holds them (arXiv 2309.14322, section 3.2)."""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from jaxblock.contracts import check_boolean, check_integer
from jaxblock.functional.losses import mean_over_targets
from jaxblock.types import Array


class OutputLogits(NamedTuple):
    """Float32 scalars, over real tokens and the real vocabulary; 0 without a real token."""

    rms: Array
    """sqrt(mean logit^2)."""
    log_z: Array
    """Mean of log sum_v exp(logit_v)."""
    log_z_squared: Array
    """Mean of its square: what the z-loss is a multiple of."""


def output_logits(logits_BTV: Array, *, vocab_size: int, valid_BT: Array | None = None) -> OutputLogits:
    """Return the sizes of a decoder's logits.

    Args:
      logits_BTV: [B, T, V], V >= vocab_size.
      vocab_size: ids that exist, `config.vocab_size`; padded ones behind them do not count.
      valid_BT: boolean, which tokens are real; None = all. The others may hold anything.

    Raises:
      ValueError: a vocab_size below 1 or above V, a mask that is not boolean.
      AssertionError: other ranks or shapes.
    """
    chex.assert_rank(logits_BTV, 3)
    check_integer("vocab_size", vocab_size, least=1, most=logits_BTV.shape[-1])
    valid_BT = jnp.ones(logits_BTV.shape[:2], jnp.bool_) if valid_BT is None else valid_BT
    check_boolean("valid_BT", valid_BT)
    chex.assert_shape(valid_BT, logits_BTV.shape[:2])
    real_BTV = jnp.where(valid_BT[..., None], logits_BTV[..., :vocab_size].astype(jnp.float32), 0.0)
    log_z_BT = jnp.where(valid_BT, jax.nn.logsumexp(real_BTV, axis=-1), 0.0)
    weight = jnp.sum(valid_BT)
    square, log_z, log_z_squared = (
        mean_over_targets(jnp.sum(x_BT), weight)
        for x_BT in (jnp.square(real_BTV).mean(-1), log_z_BT, jnp.square(log_z_BT))
    )
    return OutputLogits(jnp.sqrt(square), log_z, log_z_squared)
