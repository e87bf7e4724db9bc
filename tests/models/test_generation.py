"""Continuations: token for token what full forwards draw, however a row is padded, and however long it gets."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblock import generate, init_cache, prefill, stream
from jaxblock.functional import SamplingRule, sample
from jaxblock.models import cache as cache_module
from jaxblock.models import generation
from jaxblock.models.cache import LayeredCache
from jaxblock.models.generation import PIECE, SLOTS, _slots, _unrolled
from tests.small import built, config, tokens

GREEDY, FREE = SamplingRule(temperature=0.0), SamplingRule()
V = 29
FEW = {
    "norm": "rms_norm",
    "bias": False,
    "feed_forward": "relu",
    "head": "untied",
    "depth": 1,
    "vocab_size": V,
}
LEARNED = config(context=6, vocab_multiple=8, **FEW)
ROLLING = config(context=6, positions="rope", window=(3,), **FEW)
LONGEST = 16
PROMPT_BT = np.asarray(tokens(2, 3, seed=6))


def key(seed: int = 0) -> jax.Array:
    """Return a key of XLA's own generator: its draws compile in a tenth of the time threefry's take."""
    return jax.random.key(seed, impl="unsafe_rbg")


@functools.cache
def model_of(model_config):
    """Return the model with parameters large enough that tokens, not positions, decide."""
    model, params = built(model_config)
    return model, jax.tree.map(lambda x: 3 * x, params)


@functools.cache
def forward(model_config):
    """Return ids [n] -> the logits after the last of them; one compiled forward, as what follows is not read."""
    model, params = model_of(model_config)
    length = LONGEST if model_config is ROLLING else model_config.context
    full = jax.jit(lambda tokens_BT: model.apply({"params": params}, tokens_BT))

    def last(ids: list[int]) -> np.ndarray:
        row = np.zeros((1, length), np.int32)
        row[0, : len(ids)] = ids
        return np.asarray(full(row))[0, len(ids) - 1, : model_config.vocab_size]

    return last


def continuation(model_config, prompt: list[int], length: int, *, draw=np.argmax) -> list[int]:
    """Return what the docstring of `generate` says, one full forward a token."""
    context, rolls = model_config.context, model_config is ROLLING
    read, drawn = list(prompt) if rolls else list(prompt)[-context:], []
    for _ in range(length):
        token = int(draw(forward(model_config)(read)))
        drawn.append(token)
        if not rolls and len(read) == context:
            kept = max(1, context // 2) - 1  # and the new one
            read = read[len(read) - kept :]
        read.append(token)
    return drawn


def continued(model_config, prompt_BT, length, *, rule=GREEDY, seed=0, valid_BT=None) -> np.ndarray:
    model, params = model_of(model_config)
    return np.asarray(
        generate(model, params, prompt_BT, key(seed), length=length, rule=rule, valid_BT=valid_BT)
    )


# What is read ----------------------------------------------------------------------------------------------


def test_greedy_generation_is_the_argmax_of_the_full_forward():
    """Three tokens and four new ones, of which three are read, in a context of six: nothing is read twice."""
    got = continued(LEARNED, PROMPT_BT, 4)
    assert got.tolist() == [continuation(LEARNED, list(row), 4) for row in PROMPT_BT]
    assert len(np.unique(got)) > 3


@pytest.mark.parametrize("prompt", [3, pytest.param(9, marks=pytest.mark.full)])
def test_a_continuation_longer_than_the_context_goes_on_with_half_of_it(prompt):
    """A row that has read six reads its last three, at positions from 0, and goes on."""
    prompt_BT = np.asarray(tokens(2, prompt, seed=6))
    got = continued(LEARNED, prompt_BT, 13)
    assert got.tolist() == [continuation(LEARNED, list(row), 13) for row in prompt_BT]
    assert len(np.unique(got)) > 4
    # The control: with one token less or more kept, it says something else.
    for kept in (2, 4):
        assert got.tolist() != [reread(list(row), 13, kept=kept) for row in prompt_BT], kept


def reread(prompt: list[int], length: int, *, kept: int) -> list[int]:
    """Return the continuation with another number of old tokens kept."""
    read, drawn = prompt[-LEARNED.context :], []
    for _ in range(length):
        drawn.append(int(np.argmax(forward(LEARNED)(read))))
        read = [*(read[len(read) - kept + 1 :] if len(read) == LEARNED.context else read), drawn[-1]]
    return drawn


@pytest.mark.full
@pytest.mark.parametrize("context", [1, 2, 3])
def test_the_shortest_contexts_go_on_too(context):
    model_config = config(context=context, positions="rope", **FEW)
    prompt_BT = np.asarray(tokens(2, 2, seed=6))
    got = continued(model_config, prompt_BT, 7)
    assert got.tolist() == [continuation(model_config, list(row), 7) for row in prompt_BT]


def test_a_rolling_cache_reads_nothing_twice_however_long_it_gets():
    """Prompt and continuation are longer than the context and than the window; each token sees its windows."""
    prompt_BT = np.asarray(tokens(2, 7, seed=6))
    got = continued(ROLLING, prompt_BT, 9)
    assert got.tolist() == [continuation(ROLLING, list(row), 9) for row in prompt_BT]
    assert len(np.unique(got)) > 4


def test_a_cache_grows_and_loses_nothing():
    """Two rows of which one reaches the smallest cache's end, and both then go on in the whole."""
    model_config = config(context=SLOTS + 9, positions="rope", **FEW)
    prompt_BT = np.asarray(tokens(2, SLOTS - 3, seed=6))
    valid_BT = np.arange(SLOTS - 3)[None] >= np.asarray([[0], [5]])
    got = continued(model_config, prompt_BT, 7, valid_BT=valid_BT)
    assert got.tolist() == [
        continuation(model_config, list(row[valid]), 7)
        for row, valid in zip(prompt_BT, valid_BT, strict=True)
    ]
    sizes = [_slots(model_of(model_config)[0], read) for read in (1, SLOTS, SLOTS + 1, SLOTS + 9, 999)]
    assert sizes == [SLOTS, SLOTS, SLOTS + 9, SLOTS + 9, SLOTS + 9]


def test_the_newest_token_waits_and_is_written_before_the_cache_grows():
    model, params = model_of(LEARNED)
    _, cache = prefill(model, params, PROMPT_BT, init_cache(LEARNED, 2, capacity=4))
    token_B1, apply = tokens(2, 1), jax.jit(lambda *x: model.apply({"params": params}, x[0], cache=x[1]))
    _, layered = apply(token_B1, LayeredCache.of(cache))
    _, stacked = apply(token_B1, cache)
    grown = layered.grown(6)
    assert grown.slots == 6
    np.testing.assert_array_equal(jnp.stack(grown.keys_BGSK)[:, :, :, :4], stacked.keys_LBGSK)
    np.testing.assert_array_equal(jnp.stack(grown.values_BGSK)[:, :, :, :4], stacked.values_LBGSK)
    assert not np.any(jnp.stack(grown.keys_BGSK)[:, :, :, 4:])
    assert not np.array_equal(jnp.stack(layered.keys_BGSK), stacked.keys_LBGSK)  # until then it is not there
    # Written once more, nothing changes: none is left.
    np.testing.assert_array_equal(grown.written().values_BGSK[0], grown.values_BGSK[0])


def test_the_loop_over_tokens_copies_neither_cache_nor_parameters():
    """Counted in the compiled text; the control, a stacked cache that is written after it was read, is copied."""
    model_config = config(context=40, positions="rope", **{**FEW, "depth": 2})
    model, params = built(model_config)
    cache = init_cache(model_config, 2)
    layered, token_B1 = LayeredCache.of(cache), jnp.zeros((2, 1), jnp.int32)

    def copies(carry, shape) -> int:
        unrolled, whole = _unrolled(model, params)

        def step(_, carry):
            logits_BTV, cache = unrolled.apply({"params": whole()}, *carry[:1], cache=carry[1])
            return jnp.argmax(logits_BTV, -1).astype(jnp.int32), cache

        loop = jax.jit(lambda carry: jax.lax.fori_loop(0, 9, step, carry))
        text = loop.lower(carry).compile().as_text()
        body = text[: text.index("ENTRY")]
        return len(re.findall(rf" = f32\[{','.join(map(str, shape))}\]\S* copy\(", body))

    shape = layered.keys_BGSK[0].shape
    assert copies((token_B1, layered), shape) == copies((token_B1, layered), (1, *shape)) == 0
    assert copies((token_B1, cache), cache.keys_LBGSK.shape) > 0


@pytest.mark.full
def test_a_window_with_learned_positions_rolls_until_its_table_ends():
    model_config = config(context=6, window=(3,), **FEW)
    got = continued(model_config, PROMPT_BT, 13)
    assert got.tolist() == [continuation(model_config, list(row), 13) for row in PROMPT_BT]


PADDED = np.asarray(
    [
        [0, 0, 1, 1, 1, 1, 1, 1],
        [1, 1, 1, 1, 1, 1, 0, 0],
        [1, 0, 1, 1, 0, 1, 0, 1],
        [0, 0, 0, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 1, 1, 1, 1],
    ],
    bool,
)


@pytest.mark.parametrize(
    "model_config", [LEARNED, pytest.param(ROLLING, marks=pytest.mark.full)], ids=["learned", "rolling"]
)
def test_each_padded_row_is_continued_as_it_would_be_alone(model_config):
    """Rows of six, five, one and seven real tokens become full at different times; of seven the first is not read."""
    prompt_BT = np.asarray(tokens(5, 8, seed=6))
    got = continued(model_config, prompt_BT, 9, valid_BT=PADDED)
    want = [
        continuation(model_config, list(row[valid]), 9) for row, valid in zip(prompt_BT, PADDED, strict=True)
    ]
    assert got.tolist() == want
    unmasked = continued(model_config, prompt_BT, 9, valid_BT=np.ones_like(PADDED))
    assert [row.tolist() != alone for row, alone in zip(unmasked, want, strict=True)][1:4] == [True] * 3


# What is drawn ---------------------------------------------------------------------------------------------


def test_sampled_tokens_are_those_that_full_forwards_draw_with_the_same_keys():
    """Both rows draw with one key a token, and are read half anew when they are full."""
    length, read = 2 + PIECE, [list(row) for row in PROMPT_BT]
    want: list[list[int]] = [[], []]
    draw = jax.jit(lambda logits_BV, key: sample(logits_BV, key, FREE))
    for key_of_token in jax.random.split(key(3), length):
        logits_BV = np.stack([forward(LEARNED)(ids) for ids in read])
        for b, token in enumerate(np.asarray(draw(logits_BV, key_of_token)).tolist()):
            want[b].append(token)
            read[b] = [*(read[b][-2:] if len(read[b]) == 6 else read[b]), token]
    assert continued(LEARNED, PROMPT_BT, length, rule=FREE, seed=3).tolist() == want
    assert continued(LEARNED, PROMPT_BT, length, rule=FREE, seed=4).tolist() != want


@pytest.mark.full
def test_generation_under_jit_follows_its_key_and_never_emits_a_padded_id():
    """The padded columns of the head are made to win, under a rule that does not exclude them."""
    model, params = model_of(LEARNED)
    kernel = params["head"]["kernel"]
    params = {**params, "head": {"kernel": kernel.at[:, V:].set(10 * kernel[:, :3])}}
    run = jax.jit(lambda params, key: generate(model, params, tokens(8, 3), key, length=7, rule=FREE))
    first, again, other = (np.asarray(run(params, key(seed))) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
    assert first.shape == (8, 7)
    assert first.dtype == np.int32
    assert first.min() >= 0
    assert max(first.max(), other.max()) < LEARNED.vocab_size
    logits_BTV = jax.jit(lambda params: model.apply({"params": params}, tokens(8, 3)))(params)
    assert np.any(np.argmax(logits_BTV, -1) >= LEARNED.vocab_size)


@pytest.mark.parametrize("rule", [GREEDY, SamplingRule(temperature=0.5)], ids=["greedy", "sampled"])
def test_b72_cached_decoding_never_emits_the_padded_id(rule):
    """V = 3 padded to 4, the pad's logit forced to 50: the last state is the final norm's bias, all ones."""
    model_config = config(
        **{**FEW, "vocab_size": 3, "vocab_multiple": 4, "head": "tied", "norm": "layer_norm", "bias": True}
    )
    model, params = built(model_config)
    norm, table_VD = params["final_norm"], params["embedding"]["table"]
    norm = {"scale": jnp.zeros_like(norm["scale"]), "bias": jnp.ones_like(norm["bias"])}
    table_VD = table_VD.at[3].set(50.0 / model_config.width)
    params = {**params, "embedding": {"table": table_VD}, "final_norm": norm}
    prompt_BT = tokens(4, 2, vocab_size=3)
    got = np.asarray(generate(model, params, prompt_BT, key(), length=6, rule=rule))
    assert set(np.unique(got)) <= {0, 1, 2}
    if rule is GREEDY:
        last_BV, _ = prefill(model, params, prompt_BT, init_cache(model_config, 4))
        np.testing.assert_allclose(last_BV[:, 3], 50.0, rtol=1e-6)
        assert np.all(np.argmax(last_BV, -1) == 3)


def test_the_loop_over_tokens_goes_through_shard_map_and_vmap():
    """A loop's carry must vary from its start as it does at its end; the control, zeros, does not and is refused."""
    model, params = model_of(LEARNED)
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
    rows = jax.sharding.PartitionSpec("data")

    def mapped(function):
        return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=rows, out_specs=rows))

    def draw(prompt_BT):
        return generate(model, params, prompt_BT, key(), length=4, rule=GREEDY)

    def from_zeros(prompt_BT):
        return jax.lax.fori_loop(0, 2, lambda _, x: x + prompt_BT, jnp.zeros_like(PROMPT_BT))

    assert jax.eval_shape(mapped(draw), PROMPT_BT).shape == (2, 4)
    with pytest.raises(TypeError, match="carry"):
        jax.eval_shape(mapped(from_zeros), PROMPT_BT)
    # Under vmap all of the carry is donated: what could not be would be a warning, which fails.
    got = jax.vmap(lambda row_T: draw(row_T[None])[0])(jnp.asarray(PROMPT_BT))
    np.testing.assert_array_equal(got, continued(LEARNED, PROMPT_BT, 4))


# Streaming -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [2 + PIECE, pytest.param(1, marks=pytest.mark.full)])
def test_a_stream_is_the_same_tokens_in_pieces(length):
    model, params = model_of(LEARNED)
    pieces = list(stream(model, params, PROMPT_BT, key(3), length=length, rule=FREE))
    sizes = [piece.shape[1] for piece in pieces]
    assert sizes == ([1, PIECE, 1] if length > 1 else [1])
    whole = continued(LEARNED, PROMPT_BT, length, rule=FREE, seed=3)
    np.testing.assert_array_equal(np.concatenate(pieces, axis=1), whole)


def test_no_tokens_are_no_pieces():
    model, params = model_of(LEARNED)
    assert list(stream(model, params, tokens(2, 3), key(), length=0, rule=GREEDY)) == []
    assert continued(LEARNED, tokens(2, 3), 0).shape == (2, 0)


@pytest.mark.parametrize("function", [generate, stream])
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"length": -1}, "length is -1; it must be a whole number of at least 0"),
        ({"valid_BT": np.asarray([[True] * 3, [False] * 3])}, "row 1 of valid_BT has no real token"),
        ({"valid_BT": np.ones((2, 3), int)}, "valid_BT has dtype int64; masks are boolean"),
        ({"valid_BT": np.ones((3, 3), bool)}, r"valid_BT has shape \(3, 3\); .* it is \[2 or 1, 3\]"),
    ],
)
def test_what_cannot_be_continued_is_refused_before_anything_runs(function, changes, words):
    model, params = model_of(LEARNED)
    with pytest.raises(ValueError, match=words):
        function(model, params, tokens(2, 3), key(), **{"length": 2, "rule": GREEDY, **changes})


def cache_copies(rows: int) -> int:
    """Return how many copies of a block's cache the compiled loop over tokens makes."""
    (model, params), rule = built(config(context=16)), SamplingRule(temperature=0.0)
    keys = jax.random.split(jax.random.key(0), 6)
    start = functools.partial(generation._start.__wrapped__, model, rule=rule)
    state, _ = jax.eval_shape(start, params, tokens(rows, 4), jnp.ones((rows, 4), bool), keys[0])
    loop = jax.jit(functools.partial(generation._advance.__wrapped__, model, rule=rule, limit=None))
    drawn_BT, part = jnp.zeros((rows, 6), jnp.int32), jnp.asarray([0, 5], jnp.int32)
    text = loop.lower(params, state, keys, drawn_BT, part).compile().as_text()
    group, slots, width = state.cache.keys_BGSK[0].shape[1:]
    return len(re.findall(rf"= f32\[(?:1,)*(?:{rows},)?{group},{slots},{width}\]\S* copy\(", text))


def test_a_tokens_keys_are_written_into_the_cache_where_it_lies(monkeypatch):
    """The cache of one row is copied no more often than that of three: once, when the loop begins."""
    once = 2 * config().depth
    assert (cache_copies(1), cache_copies(3)) == (once, once)

    def plain(cache_LBGSK, new_LBTGK, slots_BT):
        rows_B1 = jnp.arange(cache_LBGSK.shape[1], dtype=jnp.int32)[:, None]
        return cache_LBGSK.at[:, rows_B1, :, slots_BT].set(new_LBTGK.transpose(1, 2, 0, 3, 4), mode="drop")

    monkeypatch.setattr(cache_module, "write_slots", plain)
    assert cache_copies(1) > 2 * once  # the control: a single write, as XLA has it by itself
