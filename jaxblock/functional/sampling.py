"""From logits to the next token: the largest, or a draw from softmax(logits / temperature) after filters.

Filters set logits to -inf. They run in the order vocabulary, temperature, top-k, top-p, each on what the one
before it left. Everything is pure, float32, and works on any leading axes, under jit and under vmap.
"""

import dataclasses

import chex
import jax
import jax.numpy as jnp

from jaxblock.contracts import check_integer, check_number
from jaxblock.types import Array

_TINY = float(jnp.finfo(jnp.float32).tiny)
"""The smallest normal float32; a temperature below it would be flushed to 0 on most devices."""


@dataclasses.dataclass(frozen=True)
class SamplingRule:
    """How a token is chosen; the defaults draw from the model's own distribution. ValueError out of range."""

    temperature: float = 1.0
    """Logits are divided by it; below 1 sharpens, 0 is exactly `greedy` (no randomness, filters idle)."""
    top_k: int | None = None
    """Draw from the k most probable tokens only. None: from all."""
    top_p: float | None = None
    """Draw from the smallest set of most probable tokens that reaches probability p in (0, 1]. None: all."""
    vocab_size: int | None = None
    """The real vocabulary when the logits are wider; ids from here on are never emitted. None: all real."""

    def __post_init__(self) -> None:
        check_number("temperature", self.temperature, least=0.0)
        if self.top_k is not None:
            check_integer("top_k", self.top_k, least=1)
        if self.top_p is not None:
            check_number("top_p", self.top_p, above=0.0, most=1.0)
        if self.vocab_size is not None:
            check_integer("vocab_size", self.vocab_size, least=1)


def greedy(logits: Array, *, vocab_size: int | None = None) -> Array:
    """Return the id of the largest logit, [..., V] -> [...] int32; the lowest id where several are largest.

    A row with NaN gives -1, which is no token: NaN must not become one. Ids at or above `vocab_size` are never
    returned. Raises ValueError for a vocab_size above V.
    """
    real = _real_logits(logits, vocab_size)
    return _unless_nan(real, jnp.argmax(real, axis=-1).astype(jnp.int32))


def sample(logits: Array, key: Array, rule: SamplingRule) -> Array:
    """Draw one id per row of logits by `rule`, [..., V] -> [...] int32.

    One key serves all rows, each with its own draw; the rule is static (close over it, or mark it static in
    jit). Each row needs a finite logit; one with NaN gives -1. Raises ValueError for a vocab_size above V.
    """
    if rule.temperature == 0:
        return greedy(logits, vocab_size=rule.vocab_size)
    real = _real_logits(logits, rule.vocab_size)
    # The maximum goes first, so that a tiny temperature gives -inf for the others and never inf - inf.
    real = (real - jnp.max(real, axis=-1, keepdims=True)) / max(rule.temperature, _TINY)
    if rule.top_k is not None:
        real = keep_top_k(real, rule.top_k)
    if rule.top_p is not None:
        real = keep_top_p(real, rule.top_p)
    return _unless_nan(real, jax.random.categorical(key, real, axis=-1).astype(jnp.int32))


def _unless_nan(logits: Array, ids: Array) -> Array:
    """Return the ids, -1 where a row's logits hold NaN."""
    return jnp.where(jnp.isnan(logits).any(axis=-1), -1, ids)


def keep_top_k(logits: Array, k: int) -> Array:
    """Keep exactly min(k, V) logits per row, the largest, and set the others to -inf; float32.

    Among equal logits the lower id stays, so that k = 1 is `greedy`. Raises ValueError for k below 1.
    """
    check_integer("top_k", k, least=1)
    real = _real_logits(logits, None)
    _, ids = jax.lax.top_k(real, min(k, real.shape[-1]))
    return _keep(real, ids, jnp.ones(ids.shape, bool))


def keep_top_p(logits: Array, p: float) -> Array:
    """Keep the smallest set of largest logits whose probability reaches p, others -inf; float32.

    A token stays while the probability of all before it in descending order is below p, so at least one does;
    among equal logits the lower id comes first. p = 1 keeps all. Raises ValueError for p outside (0, 1].
    Source: arXiv 1904.09751, eq. 2.
    """
    check_number("top_p", p, above=0.0, most=1.0)
    real = _real_logits(logits, None)
    if p == 1:
        return real
    ids = jnp.argsort(-real, axis=-1, stable=True)
    probability = jnp.take_along_axis(jax.nn.softmax(real, axis=-1), ids, axis=-1)
    before = jnp.cumsum(probability, axis=-1)[..., :-1]
    first = jnp.ones((*real.shape[:-1], 1), bool)
    return _keep(real, ids, jnp.concatenate([first, before < p], axis=-1))


def _real_logits(logits: Array, vocab_size: int | None) -> Array:
    chex.assert_type(logits, float)
    columns = logits.shape[-1]
    wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    if vocab_size is None:
        return wide
    if vocab_size > columns:
        raise ValueError(f"vocab_size is {vocab_size}; it must be at most {columns}, the width of the logits")
    real = jnp.broadcast_to(jnp.arange(columns) < vocab_size, wide.shape)
    return jnp.where(real, wide, -jnp.inf)


def _keep(real: Array, ids: Array, kept: Array) -> Array:
    """Set all logits to -inf but those of the `ids` that are `kept`; both [..., n], ids distinct per row."""
    mask = jnp.put_along_axis(jnp.zeros(real.shape, bool), ids, kept, axis=-1, inplace=False)
    return jnp.where(mask, real, -jnp.inf)
