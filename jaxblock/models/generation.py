"""Continue prompts: read them into a cache, then draw and read one token at a time.

The loop of `generate` is one compiled program for each size of the cache, which grows with what has been read, and
`stream` runs the same steps a few at a time. A token sees all that its row has read so far, as far as the cache holds
it; how a full one goes on is written at `generate`.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple, cast

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jaxblock.contracts import check_integer
from jaxblock.functional.sampling import SamplingRule, sample
from jaxblock.models.cache import (
    Cache,
    CacheT,
    LayeredCache,
    cache_limit,
    check_cache,
    check_room,
    empty_cache,
    is_known,
    spread_valid,
    widest_window,
)
from jaxblock.models.decoder import Decoder
from jaxblock.types import Array, Params

PROMPT_CHUNK = 256
"""Most tokens `generate` and `stream` read at once: scores are [B, H, 256, S + 256], logits [B, 256, V]."""
SLOTS = 128
"""Slots of the smallest cache; when it is full the next one has twice as many. A token reads all slots, and every size
is compiled for itself."""
UNROLLED = 24
"""Most blocks that are compiled one by one for the loop over tokens. In a scan over them each block's parameters and
cache are copied out of their stack, token by token; deeper stacks are scanned, as compiling them would take longer."""
PIECE = 8
"""Tokens that `stream` draws at once: few enough to follow, enough that calling the device costs little."""


def prefill(
    model: Decoder,
    params: Params,
    tokens_BT: Array,
    cache: Cache,
    *,
    chunk: int | None = None,
    valid_BT: Array | None = None,
) -> tuple[Array, Cache]:
    """Read tokens into a cache; compiled, once per shape.

    Args:
      model: the decoder.
      params: its parameters.
      tokens_BT: token ids [B, T]; they go on where the cache's rows end.
      cache: from `init_cache`, or what was returned after earlier tokens.
      chunk: tokens read at once, by a loop: memory grows with it and not with T. Left out: all.
      valid_BT: boolean, False = padding, wherever it stands and whatever its ids; it takes no slot of the cache.

    Returns:
      The logits [B, padded V] of each row's last real token, float32 (NaN where a row has none), and the cache.

    Raises:
      ValueError: a chunk below 1; as the decoder does for its cache. AssertionError: ranks and dtypes.
    """
    chex.assert_rank(tokens_BT, 2)
    chex.assert_type(tokens_BT, int)
    if chunk is not None:
        check_integer("chunk", chunk, least=1)
    check_cache(model.config, cache, batch=tokens_BT.shape[0])
    full_BT = spread_valid(tokens_BT, valid_BT)
    check_room(model.config, cache, tokens_BT, valid_BT)
    return _prefill(model, params, tokens_BT, full_BT, cache, chunk=chunk)


def generate(
    model: Decoder,
    params: Params,
    prompt_BT: Array,
    key: Array,
    *,
    length: int,
    rule: SamplingRule,
    valid_BT: Array | None = None,
) -> Array:
    """Draw `length` tokens after each prompt; each row is what it would be alone, were the draws the same.

    A row may grow beyond the context. With a window of at most the context in every block, and positions that come
    from no table, the cache rolls and nothing else happens: the whole prompt is read, and every token sees its
    windows. Otherwise the model holds `context` tokens of a row: of a longer prompt the last `context` are read, and
    when a row that is full is to read one more, its cache is emptied and its last max(1, context // 2) tokens, the
    new one included, are read into it, at positions from 0. A token thus sees between context // 2 and `context`
    tokens, itself included; as long as prompt and continuation fit, all of them.

    Args:
      model: the decoder.
      params: its parameters.
      prompt_BT: token ids [B, T], T >= 1.
      key: randomness; one key per token is split from it.
      length: number of new tokens.
      rule: temperature, top-k, top-p; temperature 0 is greedy.
      valid_BT: boolean [B or 1, T], False = padding, on either side or between, whatever its ids; every row needs a
        real token.

    Returns:
      The new tokens, int32 [B, length]; ids that pad the vocabulary are never among them.

    Raises:
      ValueError: a negative length, a mask that is not boolean or does not fit, a row without a real token (where
        that can be known). AssertionError: rank and dtype of the prompt.
    """
    full_BT = _check_prompt(prompt_BT, valid_BT, length, vocab_size=model.config.vocab_size)
    if length == 0:
        return jnp.zeros((prompt_BT.shape[0], 0), jnp.int32)
    keys = jax.random.split(key, length)
    state, first_B = _start(model, params, prompt_BT, full_BT, keys[0], rule=rule)
    _, rest_BT = _continue(model, params, state, keys[1:], prompt_BT.shape[1], rule=rule)
    return jnp.concatenate([first_B[:, None], rest_BT], axis=1)


def stream(
    model: Decoder,
    params: Params,
    prompt_BT: Array,
    key: Array,
    *,
    length: int,
    rule: SamplingRule,
    valid_BT: Array | None = None,
) -> Iterator[np.ndarray]:
    """Return an iterator over the tokens that `generate` returns, int32 [B, n] at a time, as they are drawn.

    First comes one token, as soon as the prompt is read, then at most PIECE at a time. Arguments and errors are those
    of `generate`; errors come from the call, before the first token is asked for.
    """
    full_BT = _check_prompt(prompt_BT, valid_BT, length, vocab_size=model.config.vocab_size)
    return _stream(model, params, prompt_BT, full_BT, key, length=length, rule=rule)


class _State(NamedTuple):
    """What the loop carries from token to token."""

    cache: LayeredCache
    recent_BR: Array
    """The last tokens of each row, newest last: the newest is drawn and not read yet."""


def _stream(
    model: Decoder,
    params: Params,
    prompt_BT: Array,
    valid_BT: Array,
    key: Array,
    *,
    length: int,
    rule: SamplingRule,
) -> Iterator[np.ndarray]:
    if length == 0:
        return
    keys = jax.random.split(key, length)
    state, first_B = _start(model, params, prompt_BT, valid_BT, keys[0], rule=rule)
    yield np.asarray(first_B)[:, None]
    for start in range(1, length, PIECE):
        # The last piece is drawn whole too, and cut: another length would be another program.
        indices = np.minimum(np.arange(start, start + PIECE), length - 1)
        read = prompt_BT.shape[1] + start - 1
        state, piece_BT = _continue(model, params, state, keys[indices], read, rule=rule)
        yield np.asarray(piece_BT)[:, : length - start]


@functools.partial(jax.jit, static_argnames=("model", "rule"))
def _start(
    model: Decoder, params: Params, prompt_BT: Array, valid_BT: Array, key: Array, *, rule: SamplingRule
) -> tuple[_State, Array]:
    """Read the prompts and draw each row's first token, [B]."""
    config = model.config
    cache = empty_cache(config, prompt_BT.shape[0], _slots(model, prompt_BT.shape[1]))
    # Real tokens to the right, in their order, so that the last ones are at one place in every row.
    order_BT = jnp.argsort(valid_BT, axis=1, stable=True)
    prompt_BT = jnp.take_along_axis(prompt_BT.astype(jnp.int32), order_BT, axis=1)
    valid_BT = jnp.take_along_axis(valid_BT, order_BT, axis=1)
    limit, count = cache_limit(config, _capacity(model)), _reread(model)
    kept = slice(None if limit is None else -limit, None)
    logits_BV, cache = _read(model, params, prompt_BT[:, kept], valid_BT[:, kept], cache, chunk=PROMPT_CHUNK)
    token_B = sample(logits_BV[:, : config.vocab_size], key, rule)
    before_BR = jnp.pad(prompt_BT, ((0, 0), (count, 0)))[:, -count:]
    return _State(LayeredCache.of(cache), _appended(before_BR, token_B)), token_B


def _continue(
    model: Decoder, params: Params, state: _State, keys: Array, read: int, *, rule: SamplingRule
) -> tuple[_State, Array]:
    """Read the newest token and draw the next, once per key; return the drawn ones, [B, T].

    read: how many tokens the longest row has read, or more.
    """
    # Of the state, as in `LayeredCache.of`; all of it is overwritten.
    drawn_BT = jnp.tile(state.recent_BR[:, -1:], (1, keys.shape[0]))
    whole, start, total = _capacity(model), 0, read + keys.shape[0]
    limit = cache_limit(model.config, whole)
    while start < keys.shape[0]:
        slots = _slots(model, read + start + 1)
        stop = keys.shape[0] if slots == whole else min(keys.shape[0], slots - read)
        if slots > state.cache.slots:
            state = _grow(state, slots)
        state, drawn_BT = _advance(
            model,
            params,
            state,
            keys,
            drawn_BT,
            jnp.asarray([start, stop], jnp.int32),
            rule=rule,
            limit=limit if slots == whole and limit is not None and total > limit else None,
        )
        start = stop
    return state, drawn_BT


@functools.partial(jax.jit, static_argnames="slots")
def _grow(state: _State, slots: int) -> _State:
    return state._replace(cache=state.cache.grown(slots))


@functools.partial(jax.jit, static_argnames=("model", "rule", "limit"), donate_argnames=("state", "drawn_BT"))
def _advance(
    model: Decoder,
    params: Params,
    state: _State,
    keys: Array,
    drawn_BT: Array,
    part: Array,
    *,
    rule: SamplingRule,
    limit: int | None,
) -> tuple[_State, Array]:
    """Read the newest token and draw the next, once per key of `part`: from its first to before its second index.

    limit: at how many tokens a row's cache is full; None where no row gets there. Which keys are drawn with is no
    constant of the program, so that one serves all prompts.
    """
    unrolled, whole = _unrolled(model, params)

    def step(index: Array, carry: tuple[_State, Array]) -> tuple[_State, Array]:
        state, drawn_BT = carry
        cache = state.cache if limit is None else _make_room(model, params, state, limit)
        logits_BTV, cache = _apply(unrolled, whole(), state.recent_BR[:, -1:], cache)
        token_B = sample(logits_BTV[:, 0, : model.config.vocab_size], keys[index], rule)
        return _State(cache, _appended(state.recent_BR, token_B)), drawn_BT.at[:, index].set(token_B)

    return jax.lax.fori_loop(part[0], part[1], step, (state, drawn_BT))


def _unrolled(model: Decoder, params: Params) -> tuple[Decoder, Callable[[], Params]]:
    """Return the model for the loop over tokens, and what gives its parameters inside the loop.

    The blocks' parameters are cut apart out here, once, and put together again in there, where the compiler sees that
    each slice of the stack is one of them, and copies nothing.
    """
    depth = model.config.depth
    if depth > UNROLLED:
        return model, lambda: params
    apart = [jax.tree.map(lambda x, i=i: x[i], params["blocks"]) for i in range(depth)]

    def whole() -> Params:
        return {**params, "blocks": jax.tree.map(lambda *layers: jnp.stack(layers), *apart)}

    return model.clone(execution=dataclasses.replace(model.execution, scan_unroll=depth)), whole


def _make_room(model: Decoder, params: Params, state: _State, limit: int) -> LayeredCache:
    """Return the cache, in full rows a new one that has read all recent tokens but the newest."""
    full_B, cache = state.cache.lengths_B >= limit, state.cache.written()

    def reread(cache: LayeredCache) -> LayeredCache:
        empty = empty_cache(model.config, full_B.shape[0], cache.slots)
        old_BT = state.recent_BR[:, :-1]
        if old_BT.shape[1]:
            _, empty = _read(model, params, old_BT, jnp.ones(old_BT.shape, bool), empty, chunk=PROMPT_CHUNK)

        def choose(fresh: Array, old: Array) -> Array:
            return jnp.where(full_B.reshape(-1, *[1] * (old.ndim - 1)), fresh, old)

        fresh = LayeredCache.of(empty)
        return cache._replace(
            keys_BGSK=jax.tree.map(choose, fresh.keys_BGSK, cache.keys_BGSK),
            values_BGSK=jax.tree.map(choose, fresh.values_BGSK, cache.values_BGSK),
            lengths_B=choose(fresh.lengths_B, cache.lengths_B),
        )

    return jax.lax.cond(jnp.any(full_B), reread, lambda cache: cache, cache)


_prefill = jax.jit(
    lambda model, params, tokens_BT, valid_BT, cache, *, chunk: _read(
        model, params, tokens_BT, valid_BT, cache, chunk=chunk
    ),
    static_argnames=("model", "chunk"),
)


def _read(
    model: Decoder, params: Params, tokens_BT: Array, valid_BT: Array, cache: Cache, *, chunk: int | None
) -> tuple[Array, Cache]:
    """Read tokens, `chunk` at a time; return the last real ones' logits [B, padded V], and the cache."""
    batch, length = tokens_BT.shape
    tokens_BT = jnp.where(
        valid_BT, tokens_BT, jnp.zeros_like(tokens_BT)
    )  # padding may be no token, such as -1

    def read(carry: tuple[Array, Cache], part: tuple[Array, Array]) -> tuple[tuple[Array, Cache], None]:
        (last_BV, cache), (tokens_BT, valid_BT) = carry, part
        logits_BTV, cache = _apply(model, params, tokens_BT, cache, valid_BT)
        # The index of the last True of each row; any index where there is none.
        index_B = valid_BT.shape[1] - 1 - jnp.argmax(valid_BT[:, ::-1], axis=1)
        logits_BV = jnp.take_along_axis(logits_BTV, index_B[:, None, None], axis=1)[:, 0]
        return (jnp.where(valid_BT.any(axis=1, keepdims=True), logits_BV, last_BV), cache), None

    start = (jnp.full((batch, model.config.padded_vocab_size), jnp.nan, jnp.float32), cache)
    if length == 0:
        return start
    if chunk is None or length <= chunk:
        return read(start, (tokens_BT, valid_BT))[0]
    extra = -length % chunk  # padding takes no slot

    def cut(x_BT: Array) -> Array:
        return jnp.pad(x_BT, ((0, 0), (0, extra))).reshape(batch, -1, chunk).swapaxes(0, 1)

    return jax.lax.scan(read, start, (cut(tokens_BT), cut(valid_BT)))[0]


def _apply(
    model: Decoder, params: Params, tokens_BT: Array, cache: CacheT, valid_BT: Array | None = None
) -> tuple[Array, CacheT]:
    """Return the logits [B, T, padded V] and the cache after these tokens."""
    made = model.apply({"params": params}, tokens_BT, valid_BT=valid_BT, cache=cache)
    return cast(tuple[Array, CacheT], made)


def _check_prompt(prompt_BT: Array, valid_BT: Array | None, length: int, *, vocab_size: int) -> Array:
    """Check what `generate` and `stream` are given; return the mask of real tokens, [B, T]."""
    chex.assert_rank(prompt_BT, 2)
    chex.assert_type(prompt_BT, int)
    chex.assert_axis_dimension_gt(prompt_BT, 1, 0)
    check_integer("length", length, least=0)
    full_BT = spread_valid(prompt_BT, valid_BT)
    if is_known(full_BT):
        empty = np.flatnonzero(~np.asarray(full_BT).any(axis=1))
        if empty.size:
            raise ValueError(f"row {empty[0]} of valid_BT has no real token; there is nothing to continue")
    if is_known(full_BT) and is_known(prompt_BT):
        real = np.asarray(prompt_BT)[np.asarray(full_BT)]
        wrong = real[(real < 0) | (real >= vocab_size)]
        if wrong.size:
            raise ValueError(
                f"the prompt holds token id {wrong[0]}; ids must be below vocab_size = {vocab_size}"
            )
    return full_BT


def _capacity(model: Decoder) -> int:
    """Return how many slots a continuation needs at most: the largest window where the cache rolls, or the context."""
    window = widest_window(model.config)
    return model.config.context if window is None else min(window, model.config.context)


def _slots(model: Decoder, tokens: int) -> int:
    """Return the size of the cache for rows of so many tokens: the smallest that holds them, or the whole."""
    whole, slots = _capacity(model), SLOTS
    while slots < min(tokens, whole):
        slots *= 2
    return min(slots, whole)


def _reread(model: Decoder) -> int:
    """Return how many tokens, the newest included, a row goes on with when its cache is full."""
    return max(1, model.config.context // 2)


def _appended(recent_BR: Array, token_B: Array) -> Array:
    return jnp.concatenate([recent_BR[:, 1:], token_B[:, None]], axis=1)
