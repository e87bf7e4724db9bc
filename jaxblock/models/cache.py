"""The key/value cache of a decoder: a pytree passed in and returned; decoding is on exactly when one is passed.

Each row reads at its own pace: a real token takes the next slot of its row, padding (left, right, anywhere) takes
none. Axis S of this file: slots. What a row's next token sees is in `functional.kv_cache`.
"""

import dataclasses
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxblock.config import ModelConfig
from jaxblock.contracts import check_boolean, check_integer
from jaxblock.functional.kv_cache import slot_positions, target_slots, token_positions, write_slots
from jaxblock.functional.masks import AttentionPattern
from jaxblock.types import Array


class Cache(NamedTuple):
    """Keys and values of the tokens read so far, for every block."""

    keys_LBGSK: Array
    """In the config's `dtype`, rotated where positions are rotary."""
    values_LBGSK: Array
    """In the config's `dtype`."""
    lengths_B: Array
    """Real tokens each row has read, int32; the position of its next one."""

    @property
    def slots(self) -> int:
        """S, the number of slots."""
        return self.keys_LBGSK.shape[3]


class LayeredCache(NamedTuple):
    """A cache with an array for each block, whose newest tokens are written when it is next read.

    It is what a loop over tokens carries. Where the stack is unrolled, the compiler reads a block's array where it
    lies; a slice of `Cache` it copies. And as a write comes before all reads of its round, it is made in place; after
    them, the compiler would keep a copy of each array for reads that it might run late.
    """

    keys_BGSK: tuple[Array, ...]
    values_BGSK: tuple[Array, ...]
    lengths_B: Array
    """As in `Cache`, with those that are not written yet."""
    new_keys_LBTGK: Array
    new_values_LBTGK: Array
    new_slots_BT: Array
    """Where they are to be written; S = nowhere."""

    @property
    def slots(self) -> int:
        """S, the number of slots."""
        return self.keys_BGSK[0].shape[2]

    @classmethod
    def of(cls, cache: Cache) -> "LayeredCache":
        """Return the cache, its layers apart, for a loop that reads one token at a time."""
        # What stands in for new tokens is cut from the cache, not made: under shard_map or vmap a loop's carry must
        # be of one kind from the start. It is written nowhere.
        keys, values = (x[:, :, :, :1].swapaxes(2, 3) for x in cache[:2])
        nowhere = jnp.full_like(cache.lengths_B[:, None], cache.slots)
        return cls(tuple(cache.keys_LBGSK), tuple(cache.values_LBGSK), cache.lengths_B, keys, values, nowhere)

    def written(self) -> "LayeredCache":
        """Return the cache with its newest tokens in their slots, and none left to be written."""

        def write(layers: tuple[Array, ...], new_LBTGK: Array) -> tuple[Array, ...]:
            pairs = zip(layers, new_LBTGK, strict=True)
            return tuple(write_slots(old[None], new[None], self.new_slots_BT)[0] for old, new in pairs)

        return self._replace(
            keys_BGSK=write(self.keys_BGSK, self.new_keys_LBTGK),
            values_BGSK=write(self.values_BGSK, self.new_values_LBTGK),
            new_slots_BT=jnp.full_like(self.new_slots_BT, self.slots),
        )

    def grown(self, slots: int) -> "LayeredCache":
        """Return the cache with more slots, the new ones empty; no row may have read more tokens than it had slots."""
        settled, more = self.written(), ((0, 0), (0, 0), (0, slots - self.slots), (0, 0))
        keys, values = (tuple(jnp.pad(x, more) for x in xs) for xs in settled[:2])
        nowhere = jnp.full_like(self.new_slots_BT, slots)
        return settled._replace(keys_BGSK=keys, values_BGSK=values, new_slots_BT=nowhere)


CacheT = TypeVar("CacheT", Cache, LayeredCache)


class CachedCall(NamedTuple):
    """What one call of a decoder with a cache reads and writes, beside keys and values."""

    positions_BT: Array
    """Position of each token, int32; of padding, and of tokens that do not fit, some position that exists."""
    key_positions_BT: Array
    """Positions of what attention reads: all slots, then the new tokens, int32 [B, S + T]."""
    key_valid_BT: Array
    """Whether they hold a token that has been read, boolean [B, S + T]."""
    slots_BT: Array
    """The slot each new token is written to; S = nowhere."""
    lengths_B: Array
    """Tokens read, these included."""
    refused_BT: Array
    """Real tokens that do not fit, boolean."""
    limit: int | None
    """What all positions are below (`cache_limit`)."""

    def seen(self, pattern: AttentionPattern) -> AttentionPattern:
        """Return the pattern over what attention reads: the slots, then the new tokens."""
        return dataclasses.replace(
            pattern,
            key_valid_BT=self.key_valid_BT,
            query_positions_BQ=self.positions_BT,
            key_positions_BT=self.key_positions_BT,
        )

    def mark_refused(self, logits_BTV: Array) -> Array:
        """Return the logits, NaN at tokens that do not fit."""
        if self.limit is None:
            return logits_BTV
        return jnp.where(self.refused_BT[..., None], jnp.nan, logits_BTV)


def init_cache(config: ModelConfig, batch: int, *, capacity: int | None = None) -> Cache:
    """Return an empty cache: keys and values [L, B, G, S, K], lengths [B].

    A row is full when it has read `cache_limit` tokens. With a window in every block (none 0) that covers at most
    `capacity` tokens the cache rolls: old tokens make room, and only a position table can end.

    Args:
      config: the decoder's.
      batch: B, number of rows.
      capacity: S, number of slots. Left out: the config's context.

    Raises:
      ValueError: batch or capacity below 1; a capacity that the learned position table does not reach; one smaller
        than the largest window, where every block has one, and than the context; another token mixer than attention;
        experts with a capacity.
    """
    check_cacheable(config)
    check_integer("batch", batch, least=1)
    capacity = config.context if capacity is None else capacity
    check_integer("capacity", capacity, least=1)
    if config.position_choice.name == "learned" and capacity > config.context:
        raise ValueError(
            f"capacity is {capacity}; with learned positions it must be at most the model's context, {config.context}"
        )
    window = widest_window(config)
    if window is not None and capacity < min(window, config.context):
        raise ValueError(
            f"capacity is {capacity}; it must be at least {min(window, config.context)}, to hold the largest window "
            f"(model.window is {config.window}) or the context"
        )
    return empty_cache(config, batch, capacity)


def empty_cache(config: ModelConfig, batch: int, slots: int) -> Cache:
    """Return what `init_cache` returns, of any size: one below the largest window is to grow before it is full."""
    shape = (config.depth, batch, config.num_kv_heads, slots, config.head_dim)
    empty = jnp.zeros(shape, config.dtype)
    return Cache(empty, empty, jnp.zeros((batch,), jnp.int32))


def widest_window(config: ModelConfig) -> int | None:
    """Return the largest window where every block has one; None where some block sees all earlier tokens."""
    return max(config.window) if config.window and 0 not in config.window else None


def cache_limit(config: ModelConfig, capacity: int) -> int | None:
    """Return how many tokens a row of a cache of that capacity can read; None = any number.

    Without rolling, its capacity. Rolling: any number, but what comes from a table of positions ends with it: at
    the context for learned, at the larger of context and capacity for sinusoidal positions.
    """
    window = widest_window(config)
    if window is None or capacity < window:
        return capacity
    tables = {"learned": config.context, "sinusoidal": max(config.context, capacity)}
    return tables.get(config.position_choice.name)


def plan_call(
    config: ModelConfig, cache: Cache | LayeredCache, tokens_BT: Array, valid_BT: Array | None
) -> CachedCall:
    """Return what a call with these tokens reads and writes.

    Raises:
      ValueError: a cache of another config or batch; a mask that is not boolean or does not fit; as `check_room`.
    """
    check_cache(config, cache, batch=tokens_BT.shape[0])
    given_BT, valid_BT = valid_BT, spread_valid(tokens_BT, valid_BT)
    check_room(config, cache, tokens_BT, given_BT)
    slots = cache.slots
    limit = cache_limit(config, slots)
    positions_BT = token_positions(cache.lengths_B, valid_BT)
    fits_BT = valid_BT if limit is None else valid_BT & (positions_BT < limit)
    held_BT = slot_positions(cache.lengths_B, slots)
    # A table has no row for what is no position, and the NaN it gives would reach every value it meets.
    existing_BT = jnp.clip(positions_BT, 0, None if limit is None else limit - 1)
    return CachedCall(
        positions_BT=existing_BT,
        key_positions_BT=jnp.concatenate([held_BT, existing_BT], axis=1),
        key_valid_BT=jnp.concatenate([held_BT >= 0, fits_BT], axis=1),
        slots_BT=target_slots(positions_BT, fits_BT, slots),
        lengths_B=cache.lengths_B + jnp.sum(fits_BT, axis=1, dtype=jnp.int32),
        refused_BT=valid_BT & ~fits_BT,
        limit=limit,
    )


def read_cache(cache: CacheT) -> tuple[CacheT, dict[str, Any]]:
    """Return the cache as it is read, and what the blocks' attention reads of it: a collection, leaves [L, ...]."""
    if isinstance(cache, LayeredCache):
        cache = cache.written()
    stacked = _stacked(cache)
    return cache, {"attention": {"keys": stacked.keys_LBGSK, "values": stacked.values_LBGSK}}


def write_cache(cache: CacheT, call: CachedCall, written: dict[str, Any]) -> CacheT:
    """Return the cache after a call in which the blocks' attention made `written`, leaves [L, B, T, G, K]."""
    keys, values = written["attention"]["keys"], written["attention"]["values"]
    if isinstance(cache, LayeredCache):
        return LayeredCache(cache.keys_BGSK, cache.values_BGSK, call.lengths_B, keys, values, call.slots_BT)
    return Cache(
        write_slots(cache.keys_LBGSK, keys, call.slots_BT),
        write_slots(cache.values_LBGSK, values, call.slots_BT),
        call.lengths_B,
    )


def _stacked(cache: Cache | LayeredCache) -> Cache:
    """Return the cache with its layers in one array each, without what is not written yet."""
    if isinstance(cache, Cache):
        return cache
    return Cache(jnp.stack(cache.keys_BGSK), jnp.stack(cache.values_BGSK), cache.lengths_B)


def check_cache(config: ModelConfig, cache: Any, *, batch: int) -> None:
    """Raise ValueError unless `cache` is one that `init_cache` makes for this config and batch."""
    check_cacheable(config)
    if isinstance(cache, LayeredCache):
        cache = jax.eval_shape(_stacked, cache)
    if not isinstance(cache, Cache):
        raise ValueError(
            f"cache is a {type(cache).__name__}; it must be a jaxblock.models.Cache, from init_cache"
        )
    slots = cache.slots if cache.keys_LBGSK.ndim == 5 else "S"
    keys = (config.depth, batch, config.num_kv_heads, slots, config.head_dim), config.dtype
    wanted = (keys, keys, ((batch,), "int32"))
    for name, x, (shape, dtype) in zip(Cache._fields, cache, wanted, strict=True):
        if x.shape != shape or x.dtype != dtype:
            raise ValueError(
                f"cache.{name} is {x.dtype}{list(x.shape)}; for this model and a batch of {batch} it must be "
                f"{dtype}{list(shape)}"
            )


def spread_valid(tokens_BT: Array, valid_BT: Array | None) -> Array:
    """Return the mask of real tokens, boolean [B, T]; all of them where none is given.

    Raises:
      ValueError: it is not boolean, or of another shape than [B or 1, T].
    """
    if valid_BT is None:
        return jnp.ones(tokens_BT.shape, bool)
    check_boolean("valid_BT", valid_BT)
    batch, length = tokens_BT.shape
    if valid_BT.shape not in ((batch, length), (1, length)):
        raise ValueError(
            f"valid_BT has shape {valid_BT.shape}; for tokens of shape {tokens_BT.shape} it is [{batch} or 1, {length}]"
        )
    return jnp.broadcast_to(valid_BT, tokens_BT.shape)


def check_room(
    config: ModelConfig, cache: Cache | LayeredCache, tokens_BT: Array, valid_BT: Array | None
) -> None:
    """Raise ValueError if a row has no room for its tokens, where that can be known.

    Known are the tokens' number without a mask, and, outside jit, how full each row is. What is not known is met
    at run time: such a token is not written, and its logits are NaN.
    """
    slots, length = cache.slots, tokens_BT.shape[1]
    limit = cache_limit(config, slots)
    if limit is None:
        return
    of = f"a row of this cache (capacity {slots}) can read {limit} tokens"
    if valid_BT is None and length > limit:
        raise ValueError(f"{length} tokens came; {of}")
    if not is_known(cache.lengths_B) or (valid_BT is not None and not is_known(valid_BT)):
        return
    lengths_B = np.asarray(cache.lengths_B)
    new_B = np.full(lengths_B.shape, length)
    if valid_BT is not None:
        new_B = np.broadcast_to(np.asarray(valid_BT).sum(axis=1), lengths_B.shape)
    if np.any(lengths_B + new_B > limit):
        raise ValueError(
            f"the cache is full: its rows have read {lengths_B.tolist()} tokens and are to read "
            f"{new_B.tolist()} more; {of}"
        )


def check_cacheable(config: ModelConfig) -> None:
    """Raise ValueError for a model that cannot go on from a cache: its token mixer, or experts with a capacity."""
    _check_attention(config)
    _check_experts(config)


def _check_attention(config: ModelConfig) -> None:
    """Raise ValueError where there are no keys and values to keep."""
    if config.token_mixer_choice.name != "attention":
        raise ValueError(
            f"model.token_mixer is {config.token_mixer!r}, and a cache holds attention's keys and values; without "
            "one, a decoder reads all tokens at every step"
        )


def _check_experts(config: ModelConfig) -> None:
    """Raise ValueError where the slots that earlier tokens took would decide what a later one gets."""
    if config.experts_choice.name == "capacity":
        raise ValueError(
            f"model.experts is {config.experts!r}, and a cache does not hold which slots of the experts earlier tokens "
            'took, so decoding would not be the full forward: use "dropless", whose parameters are the same, or read '
            "all tokens at every step"
        )


def is_known(x: Array) -> bool:
    """Return whether an array has values to look at: outside jit, vmap and the like."""
    return not isinstance(x, Tracer)
