"""Cross-entropy over real target tokens: sum_t -log softmax(logits_t)[target_t] / number of real targets.

A result carries its sum and its weight, so micro-batches, devices and processes combine exactly: add the
totals, add the weights, divide once with `mean_over_targets`. The mean of means is a different number.
"""

import dataclasses
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from jaxblock.contracts import check_boolean, check_integer, check_number
from jaxblock.types import Array


@dataclasses.dataclass(frozen=True)
class LossOptions:
    """What is added to plain cross-entropy; the defaults add nothing. Raises ValueError out of range."""

    z_loss: float = 0.0
    """Coefficient of logsumexp(logits)**2 per target, which keeps logits from drifting (PaLM: 1e-4)."""
    label_smoothing: float = 0.0
    """Probability in [0, 1) taken from the target and spread evenly over the vocabulary, target included."""
    vocab_size: int | None = None
    """The real vocabulary when the logits are wider; columns from here on count as -inf. None: all real."""

    def __post_init__(self) -> None:
        check_number("z_loss", self.z_loss, least=0.0)
        check_number("label_smoothing", self.label_smoothing, least=0.0, below=1.0)
        if self.vocab_size is not None:
            check_integer("vocab_size", self.vocab_size, least=1)


class CrossEntropy(NamedTuple):
    """Float32 scalars; every field but `loss` is a sum, to be added across micro-batches and devices."""

    loss: Array
    """total / weight, the objective per real target; 0 when there is no real target."""
    total: Array
    """Sum of the objective: nats, with smoothing where asked, plus the z-loss."""
    weight: Array
    """Number of real targets (counts above 2**24 lose units in float32)."""
    nats: Array
    """Sum of -log p(target) alone, without smoothing and z-loss: what perplexity is made of."""
    z_loss: Array
    """Sum of the z-loss part of `total`."""


class NextTokens(NamedTuple):
    """What a decoder reads, what it predicts, and which predictions count; all [B, T - 1]."""

    inputs: Array
    targets: Array
    valid: Array


def mean_over_targets(total: Array, weight: Array) -> Array:
    """Return total / weight, and 0 where the weight is 0 (nothing to learn from, finite gradient)."""
    return total / jnp.maximum(weight, 1)


def cross_entropy(
    logits_BTV: Array,
    targets_BT: Array,
    *,
    valid_BT: Array | None = None,
    options: LossOptions = LossOptions(),
) -> CrossEntropy:
    """Return -sum_v q_v log p_v + z_loss * (log Z)**2, summed and averaged over the real targets.

    p = softmax of the logits, log Z their log-sum-exp, q one-hot at the target, or with smoothing a
    (1 - a) * one-hot + a / V over the entries that exist. Computed in float32 whatever the logits' dtype
    (float64 for float64 logits).
    An entry exists when its id is below `vocab_size` and its logit is above -inf; one that does not takes no
    probability, no smoothing mass and no gradient. Where valid_BT is False, logits and target may hold
    anything, NaN and id -1 included, without effect. An id's value cannot be checked while tracing: a real
    target outside the vocabulary makes the loss NaN, so that it is loud.

    Raises ValueError for a valid_BT that is not boolean or a vocab_size above V, AssertionError (chex) for
    shapes that do not match. Sources: smoothing arXiv 1512.00567, section 7; z-loss arXiv 2204.02311, section 5.
    """
    chex.assert_rank([logits_BTV, targets_BT], [3, 2])
    chex.assert_type([logits_BTV, targets_BT], [float, int])
    targets_BT = targets_BT.astype(jnp.int32)  # a narrow type would wrap where ids are compared
    chex.assert_equal_shape_prefix([logits_BTV, targets_BT], 2)
    valid_BT = _checked_mask(valid_BT, targets_BT)

    vocabulary = _vocabulary(logits_BTV.shape[-1], options)
    logits_BTV = _real_logits(logits_BTV, valid_BT, vocabulary)
    log_p_BTV, log_z_BT = _log_softmax(logits_BTV)
    nats_BT = _target_nats(log_p_BTV, targets_BT, vocabulary)
    # The options are skipped at 0: 0 * inf, from an infinite or overflowing logit, would be NaN.
    smooth, objective_BT = options.label_smoothing, nats_BT
    if smooth:
        objective_BT = (1.0 - smooth) * nats_BT + smooth * _spread_nats(log_p_BTV)
    z_loss = jnp.zeros((), log_z_BT.dtype)
    if options.z_loss:
        z_loss = options.z_loss * _sum_where(valid_BT, jnp.square(log_z_BT))
    total, nats = _sum_where(valid_BT, objective_BT) + z_loss, _sum_where(valid_BT, nats_BT)
    weight = jnp.sum(valid_BT).astype(jnp.float32)
    return CrossEntropy(mean_over_targets(total, weight), total, weight, nats, z_loss)


def next_token_targets(
    tokens_BT: Array, *, valid_BT: Array | None = None, segments_BT: Array | None = None
) -> NextTokens:
    """Shift tokens by one: position t predicts token t + 1, [B, T] -> three arrays of [B, T - 1].

    A target is real when it and the token that predicts it are both real (`valid_BT`, boolean) and lie in the
    same document (`segments_BT`, integers that differ between neighbouring documents): the last token of a
    document is never trained to predict the first of the next. Segment numbers mark seams only; valid_BT
    says what is padding. Raises ValueError when it is not boolean, AssertionError (chex) for shapes.
    """
    chex.assert_rank(tokens_BT, 2)
    valid_BT = _checked_mask(valid_BT, tokens_BT)
    real_BT = valid_BT[:, :-1] & valid_BT[:, 1:]
    if segments_BT is not None:
        chex.assert_equal_shape([tokens_BT, segments_BT])
        chex.assert_type(segments_BT, int)
        real_BT = real_BT & (segments_BT[:, :-1] == segments_BT[:, 1:])
    return NextTokens(tokens_BT[:, :-1], tokens_BT[:, 1:], real_BT)


def _checked_mask(valid_BT: Array | None, ids_BT: Array) -> Array:
    if valid_BT is None:
        return jnp.ones(ids_BT.shape, bool)
    check_boolean("valid_BT", valid_BT)
    chex.assert_equal_shape([ids_BT, valid_BT])
    return valid_BT


def _vocabulary(columns: int, options: LossOptions) -> int:
    vocabulary = columns if options.vocab_size is None else options.vocab_size
    if vocabulary > columns:
        raise ValueError(f"vocab_size is {vocabulary}; it must be at most {columns}, the width of the logits")
    return vocabulary


def _real_logits(logits_BTV: Array, valid_BT: Array, vocabulary: int) -> Array:
    """Raise to float32, then put 0 where nothing is predicted and -inf where the vocabulary has ended."""
    wide_BTV = logits_BTV.astype(jnp.promote_types(logits_BTV.dtype, jnp.float32))
    wide_BTV = jnp.where(valid_BT[..., None], wide_BTV, 0.0)
    if vocabulary == logits_BTV.shape[-1]:
        return wide_BTV
    return jnp.where(jnp.arange(logits_BTV.shape[-1])[None, None] < vocabulary, wide_BTV, -jnp.inf)


def _log_softmax(logits_BTV: Array) -> tuple[Array, Array]:
    """Return log p and log Z; the maximum goes first, so log p keeps its digits under a large offset."""
    top_BT1 = jax.lax.stop_gradient(jnp.max(logits_BTV, axis=-1, keepdims=True))
    shifted_BTV = logits_BTV - top_BT1
    log_sum_BT1 = jnp.log(jnp.sum(jnp.exp(shifted_BTV), axis=-1, keepdims=True))
    return shifted_BTV - log_sum_BT1, (top_BT1 + log_sum_BT1)[..., 0]


def _target_nats(log_p_BTV: Array, targets_BT: Array, vocabulary: int) -> Array:
    """-log p of each target: a select and a sum, which fuse, where a gather's gradient is a scatter.

    Never a product with a one-hot row: 0 * -inf is NaN.
    """
    known_BT = (targets_BT >= 0) & (targets_BT < vocabulary)
    columns_V = jnp.arange(log_p_BTV.shape[-1], dtype=targets_BT.dtype)
    hit_BTV = columns_V[None, None] == targets_BT[..., None]
    return jnp.where(known_BT, -_sum_where(hit_BTV, log_p_BTV, axis=-1), jnp.nan)


def _spread_nats(log_p_BTV: Array) -> Array:
    """Mean of -log p over the entries that exist: cross-entropy against the uniform distribution."""
    exists_BTV = log_p_BTV > -jnp.inf
    return -_sum_where(exists_BTV, log_p_BTV, axis=-1) / jnp.sum(exists_BTV, axis=-1)


def _sum_where(mask: Array, x: Array, *, axis: int | None = None) -> Array:
    return jnp.sum(jnp.where(mask, x, 0.0), axis=axis)
