"""Cached decoding is the full forward: for every connection, kind of heads, positions, window, padding and chunk."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxblock import Decoder, ExecutionConfig, init_cache, prefill
from jaxblock.config import POSITIONS
from jaxblock.models import Cache, cache_limit
from tests import small
from tests.small import CONNECTIONS, SCANNED, built, tokens

TIGHT = {"rtol": 1e-5, "atol": 1e-5}


def config(**changes):
    """Return a small config of few kinds of operations: compiling is what these tests cost."""
    few = {"depth": 2, "norm": "rms_norm", "bias": False, "feed_forward": "relu"}
    return small.config(**{**few, **changes})


@functools.cache
def forms(model_config, execution=SCANNED):
    """Return the full forward, and a call with a cache, each compiled once per shape."""
    model, params = Decoder(model_config, execution), built(model_config)[1]
    full = jax.jit(lambda tokens_BT: model.apply({"params": params}, tokens_BT))
    jitted = jax.jit(
        lambda cache, tokens_BT, valid_BT: model.apply(
            {"params": params}, tokens_BT, valid_BT=valid_BT, cache=cache
        )
    )

    def call(cache, tokens_BT, valid_BT=None):
        valid_BT = np.ones(tokens_BT.shape, bool) if valid_BT is None else valid_BT
        return jitted(cache, tokens_BT, valid_BT)

    return full, call


def check_decoding(model_config, sizes, *, capacity=None, execution=SCANNED, tolerance=TIGHT):
    """Read tokens in parts of these sizes; every logit is the full forward's, and not so one position off."""
    full, _ = forms(model_config)
    _, call = forms(model_config, execution)
    tokens_BT = tokens(2, sum(sizes))
    want = np.asarray(full(tokens_BT))
    cache, start = init_cache(model_config, 2, capacity=capacity), 0
    for size in sizes:
        part_BT, before = tokens_BT[:, start : start + size], cache
        got, cache = call(before, part_BT)
        np.testing.assert_allclose(got, want[:, start : start + size], **tolerance)
        start += size
    assert np.asarray(cache.lengths_B).tolist() == [start, start]
    off, _ = call(before._replace(lengths_B=before.lengths_B - 1), part_BT)
    assert not np.allclose(off, want[:, start - size :], atol=1e-3)
    return cache


# Every connection, heads, positions, window ----------------------------------------------------------------

HEADS = ({}, {"heads": 4, "kv_heads": 2}, {"kv_heads": 1})
PLACES = ("learned", "rope", "alibi")
# Sums of two blocks, in a stack of three: a whole group of blocks, and a ragged one.
OPTIONS = {"block_attention_residual": "block_attention_residual(sublayers=4)"}
# The first two rows are configs that other tests here compile too.
NAMES = ("pre_norm", "pre_norm", *(OPTIONS.get(name, name) for name in CONNECTIONS if name != "pre_norm"))


def row(number: int, turn: int) -> tuple:
    """Return (connection, heads, positions, window): over the numbers of turn 0 all pairs of the last three occur."""
    heads, positions = (number // 3 + turn) % 3, (number + turn) % 3
    return NAMES[number], heads, PLACES[positions], (3,) if (heads + positions) % 3 == 1 else ()


BY_DEFAULT = (
    "pre_norm",
    "post_norm",
    "dense_former",
    "attention_residual",
    "block_attention_residual(sublayers=4)",
    "muddformer",
    "manifold_hyper_connections",
)
"""One of each kind of stream; under `full` every connection."""
# By default one row per connection, under `full` the two more with which each connection meets every value.
ROWS = {(number, turn): row(number, turn) for turn in range(3) for number in range(len(NAMES))}


def test_the_rows_cover_every_pair():
    default = {row for (_, turn), row in ROWS.items() if turn == 0}
    domains = [NAMES, (0, 1, 2), PLACES, ((), (3,))]
    for a, b in itertools.combinations(range(4), 2):
        pairs = set(itertools.product(domains[a], domains[b]))
        assert {(row[a], row[b]) for row in (ROWS.values() if a == 0 else default)} == pairs, (a, b)


@pytest.mark.parametrize(
    ("residual", "heads", "positions", "window"),
    [
        pytest.param(
            *row,
            marks=[] if turn == 0 and row[0] in BY_DEFAULT else pytest.mark.full,
            id="-".join(map(str, row)),
        )
        for (_, turn), row in ROWS.items()
    ],
)
def test_decoding_equals_the_full_forward(residual, heads, positions, window):
    depth = 3 if residual in OPTIONS.values() else 2
    model_config = config(residual=residual, positions=positions, window=window, depth=depth, **HEADS[heads])
    # How the stack is run, and its attention, changes nothing: with a cache, attention is xla's.
    execution = ExecutionConfig(scan_unroll=3, attention="blocked") if depth == 3 else SCANNED
    check_decoding(model_config, [1] * 8, capacity=3 if window else None, execution=execution)


@pytest.mark.full
@pytest.mark.parametrize("residual", ["pre_norm", "dense_former", "attention_residual"])
@pytest.mark.parametrize(
    "execution",
    [ExecutionConfig(scan_unroll=2), ExecutionConfig(remat="full", history="plain", attention="blocked")],
)
def test_decoding_does_not_ask_how_the_stack_is_run(residual, execution):
    check_decoding(config(residual=residual, depth=3), [3, 1, 1], execution=execution)


@pytest.mark.full
@pytest.mark.parametrize("positions", [name for name in POSITIONS if name not in PLACES])
@pytest.mark.parametrize("window", [(), (3,)])
def test_decoding_with_the_other_positions(positions, window):
    check_decoding(config(positions=positions, window=window), [3, 1, 1, 2, 1])


@pytest.mark.full
def test_sinusoidal_positions_go_as_far_as_the_cache():
    check_decoding(config(positions="sinusoidal"), [1] * 12, capacity=12)


@pytest.mark.full
@pytest.mark.parametrize(
    "changes",
    [
        {"wiring": "parallel"},
        {"soft_cap": 2.0},
        {"head": "untied", "residual": "block_attention_residual"},
        {"bias": True, "norm": "layer_norm", "feed_forward": "swiglu"},
    ],
)
def test_decoding_with_other_parts(changes):
    check_decoding(config(**changes), [3, 1, 1])


@pytest.mark.full
def test_decoding_in_bfloat16_keeps_its_cache_in_bfloat16():
    model_config = config(dtype="bfloat16", stream_dtype="bfloat16", positions="rope")
    cache = check_decoding(model_config, [3, 1, 1], tolerance={"rtol": 0.05, "atol": 0.1})
    assert cache.keys_LBGSK.dtype == cache.values_LBGSK.dtype == jnp.bfloat16


# Lengths ---------------------------------------------------------------------------------------------------

BAND = config(positions="rope", window=(3,))


@pytest.mark.parametrize("positions", ["learned", "rope"])
def test_s2_38_b11_prefill_of_three_and_five_steps_equal_the_full_forward(positions):
    check_decoding(config(positions=positions), [3, 1, 1, 1, 1, 1])


@pytest.mark.parametrize(
    "sizes",
    [[1, 4, 1, 2, 3, 1], [2, 1, 4, 4, 1], [3, 1, 3, 1, 4], [4, 1, 1, 1, 1, 1, 3]],
    ids=["1", "W-1", "W", "W+1"],
)
def test_prefill_and_chunks_around_the_window(sizes):
    """Window 3, a cache of 3 slots, twelve tokens where the context is eight."""
    check_decoding(BAND, sizes, capacity=3)


def test_b18_a_cache_rolls_rightly_when_it_reaches_the_window():
    model_config = config(positions="rope", window=(8,))
    full, call = forms(model_config)
    tokens_BT = tokens(2, 12)
    want = np.asarray(full(tokens_BT))
    _, cache = call(init_cache(model_config, 2, capacity=8), tokens_BT[:, :6])
    for t in range(6, 12):
        got, after = call(cache, tokens_BT[:, t : t + 1])
        np.testing.assert_allclose(got[:, 0], want[:, t], **TIGHT, err_msg=f"{t + 1} tokens")
        if t >= 7:  # rolled by one slot, it is another row
            rolled = cache._replace(values_LBGSK=jnp.roll(cache.values_LBGSK, 1, axis=3))
            wrong, _ = call(rolled, tokens_BT[:, t : t + 1])
            assert not np.allclose(wrong[:, 0], want[:, t], atol=1e-3)
        cache = after


@pytest.mark.parametrize(
    ("positions", "capacity"),
    [("rope", 3), *(pytest.param(*x, marks=pytest.mark.full) for x in (("alibi", 3), ("none", 5)))],
)
def test_a_rolling_cache_equals_the_banded_forward_far_beyond_its_window(positions, capacity):
    check_decoding(config(positions=positions, window=(3,)), [1] * 60, capacity=capacity)


@pytest.mark.parametrize(
    ("window", "capacity"), [((4, 0), None), pytest.param((4, 2), 4, marks=pytest.mark.full)]
)
def test_windows_may_differ_between_blocks(window, capacity):
    model_config = config(positions="rope", window=window)
    assert cache_limit(model_config, capacity or 8) == (8 if 0 in window else None)
    check_decoding(model_config, [4, 4], capacity=capacity)


# Padding ---------------------------------------------------------------------------------------------------

VALID = np.asarray(
    [
        [[0, 0, 1, 1, 1], [1, 0, 0, 0, 0], [0, 1, 0, 0, 1]],
        [[1, 1, 1, 0, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0]],
        [[1, 0, 0, 1, 0], [0, 0, 0, 0, 1], [1, 1, 1, 1, 1]],
        [[1, 1, 1, 1, 1], [0, 0, 1, 0, 0], [0, 1, 1, 0, 0]],
        [[0, 0, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 0, 0, 1]],
    ],
    bool,
)


@pytest.mark.parametrize(
    "model_config",
    [config(), BAND, pytest.param(config(positions="alibi"), marks=pytest.mark.full)],
    ids=["learned", "rope-rolling", "alibi"],
)
def test_padding_takes_no_slot_and_each_row_is_that_row_alone(model_config):
    """A prompt padded left, right, within or altogether, then rows that go on at their own pace."""
    full, call = forms(model_config)
    cache = init_cache(model_config, 5, capacity=3 if model_config.window else None)
    read: list[list[int]] = [[] for _ in range(5)]
    found: list[list[np.ndarray]] = [[] for _ in range(5)]
    for number in range(3):
        valid_BT, tokens_BT = VALID[:, number], np.asarray(tokens(5, 5, seed=number))
        logits, cache = call(cache, tokens_BT, valid_BT)
        assert np.isfinite(logits).all()
        for b, t in np.argwhere(valid_BT):
            read[b].append(tokens_BT[b, t])
            found[b].append(np.asarray(logits[b, t]))
    assert np.asarray(cache.lengths_B).tolist() == [len(ids) for ids in read] == [6, 4, 8, 8, 3]
    alone = np.zeros((5, 8), np.int32)
    for b, ids in enumerate(read):
        alone[b, : len(ids)] = ids
    want = np.asarray(full(alone))
    for b, logits in enumerate(found):
        np.testing.assert_allclose(np.stack(logits), want[b, : len(logits)], **TIGHT)


# Full caches -----------------------------------------------------------------------------------------------

FULL = {
    "b19": (config(positions="rope"), 8),
    "b88 learned": (config(), 8),
    "learned, rolling": (config(window=(3,)), 3),
    "sinusoidal, rolling": (config(window=(3,), positions="sinusoidal"), 3),
}


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=[] if name[0] == "b" else pytest.mark.full) for name in FULL]
)
def test_b19_b88_the_ninth_token_of_eight_is_refused(case):
    """Outside jit by an error; inside, its logits are NaN and the cache stays: slot 7 still holds token 8."""
    model_config, capacity = FULL[case]
    model, params = built(model_config)
    _, call = forms(model_config)
    tokens_BT = tokens(2, 12)
    # Row 1 starts with padding: when row 0 is full, it still has room for two.
    _, cache = call(
        init_cache(model_config, 2, capacity=capacity),
        tokens_BT[:, :3],
        np.asarray([[1, 1, 1], [0, 0, 1]], bool),
    )
    for start, stop in ((3, 6), (6, 7), (7, 8)):
        logits, cache = call(cache, tokens_BT[:, start:stop])
        assert np.isfinite(logits).all()
    assert np.asarray(cache.lengths_B).tolist() == [8, 6]
    words = (
        rf"rows have read \[8, 6\] tokens and are to read \[1, 1\] more.*\(capacity {capacity}\) can read 8"
    )
    with pytest.raises(ValueError, match=words):
        model.apply({"params": params}, tokens_BT[:, 8:9], cache=cache)
    logits, after = call(cache, tokens_BT[:, 8:9])
    assert np.isnan(logits[0]).all()
    assert np.isfinite(logits[1]).all()
    np.testing.assert_array_equal(after.keys_LBGSK[:, 0], cache.keys_LBGSK[:, 0])
    np.testing.assert_array_equal(after.values_LBGSK[:, 0], cache.values_LBGSK[:, 0])
    assert np.abs(after.keys_LBGSK[:, 1] - cache.keys_LBGSK[:, 1]).max() > 1e-3
    assert np.asarray(after.lengths_B).tolist() == [8, 7]


def test_b19_of_a_chunk_the_tokens_that_fit_are_read():
    model_config = config(positions="rope")
    full, call = forms(model_config)
    tokens_BT = tokens(2, 8)
    cache = init_cache(model_config, 2)
    for start in (0, 3):
        _, cache = call(cache, tokens_BT[:, start : start + 3])
    got, cache = call(cache, jnp.pad(tokens_BT[:, 6:], ((0, 0), (0, 1))))
    np.testing.assert_allclose(got[:, :2], full(tokens_BT)[:, 6:], **TIGHT)
    assert np.isnan(got[:, 2]).all()
    assert np.asarray(cache.lengths_B).tolist() == [8, 8]


@pytest.mark.parametrize("positions", ["learned", "rope"])
def test_b88_more_tokens_than_a_cache_reads_are_an_error_when_traced(positions):
    model_config = config(positions=positions)
    model = Decoder(model_config)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens(1, 2))["params"]

    def call(params, cache, tokens_BT, valid_BT=None):
        return model.apply({"params": params}, tokens_BT, cache=cache, valid_BT=valid_BT)

    cache = jax.eval_shape(lambda: init_cache(model_config, 1))
    with pytest.raises(
        ValueError, match=r"9 tokens came; a row of this cache \(capacity 8\) can read 8 tokens"
    ):
        jax.eval_shape(call, params, cache, tokens(1, 9))
    jax.eval_shape(call, params, cache, tokens(1, 8))
    # A padded row may be longer: how many of its tokens are real is not known yet.
    logits, _ = jax.eval_shape(call, params, cache, tokens(1, 9), jnp.ones((1, 9), bool))
    assert logits.shape == (1, 9, 11)


# Transformations and types ---------------------------------------------------------------------------------


def test_b21_decoding_in_64_bit_mode_is_the_same():
    model_config = config(positions="rope")
    model, params = built(model_config)

    def decode(call, token_B1):
        cache, drawn = init_cache(model_config, 2), []
        for _ in range(3):
            logits, cache = call(cache, token_B1)
            token_B1 = jnp.argmax(logits[:, -1:, :11], axis=-1)
            drawn.append(np.asarray(token_B1))
        return np.concatenate(drawn, axis=1), cache, token_B1.dtype

    want, want_cache, _ = decode(forms(model_config)[1], tokens(2, 1))
    with jax.enable_x64(True):
        call = jax.jit(lambda cache, tokens_BT: model.apply({"params": params}, tokens_BT, cache=cache))
        got, cache, dtype = decode(call, jnp.asarray(np.asarray(tokens(2, 1)), jnp.int64))
    assert dtype == np.int64  # the mode was on
    np.testing.assert_array_equal(got, want)
    assert [x.dtype.name for x in cache] == ["float32", "float32", "int32"]
    for x, y in zip(cache, want_cache, strict=True):
        np.testing.assert_allclose(x, y, **TIGHT)


@pytest.mark.parametrize("residual", ["pre_norm", pytest.param("dense_former", marks=pytest.mark.full)])
def test_decoding_under_vmap_is_each_model_alone(residual):
    model_config = config(residual=residual)
    model, params = built(model_config)
    _, call = forms(model_config)
    _, cache = call(init_cache(model_config, 2), tokens(2, 3))
    both = jax.tree.map(lambda x: jnp.stack([x, 0.5 * x]), params)
    caches = jax.tree.map(lambda x: jnp.stack([x, x]), cache)

    @jax.jit
    @jax.vmap
    def run(params, cache):
        return model.apply({"params": params}, tokens(2, 1, seed=1), cache=cache)

    got, after = run(both, caches)
    want, want_cache = call(cache, tokens(2, 1, seed=1))
    np.testing.assert_allclose(got[0], want, **TIGHT)
    assert not np.allclose(got[1], want, atol=1e-2)
    np.testing.assert_allclose(after.keys_LBGSK[0], want_cache.keys_LBGSK, **TIGHT)


def test_a_cached_call_gives_its_intermediates_too():
    model_config = config()
    model, params = built(model_config)

    def call(cache):
        return model.apply({"params": params}, tokens(2, 3), cache=cache, mutable=["intermediates"])

    (logits, cache), collected = jax.eval_shape(call, init_cache(model_config, 2))
    assert logits.shape == (2, 3, 11)
    assert cache.keys_LBGSK.shape == (2, 2, 2, 8, 4)
    assert collected["intermediates"]["blocks"]["resid_pre"].shape == (2, 2, 3, 8)
    assert set(collected["intermediates"]["blocks"]) == {
        *("resid_pre", "resid_mid", "resid_post"),
        *(f"{part}_{end}" for part in ("attention", "feed_forward") for end in ("in", "out")),
    }


def test_s2_38_a_step_costs_more_the_longer_the_text_it_can_look_back_on():
    """Each slot costs two products per head and block, and little besides; all else costs the same."""
    model_config = config(positions="rope", width=32)
    model = Decoder(model_config, ExecutionConfig(scan_unroll=2))  # in a loop, one block is counted
    params = jax.eval_shape(model.init, jax.random.key(0), tokens(1, 2))["params"]

    @jax.jit
    def step(params, cache):
        return model.apply({"params": params}, tokens(1, 1), cache=cache)

    def flops(capacity):
        cache = jax.eval_shape(lambda: init_cache(model_config, 1, capacity=capacity))
        return step.lower(params, cache).cost_analysis()["flops"]

    costs = [flops(capacity) for capacity in (64, 128, 192)]
    first, second = np.diff(costs)
    products = 64 * 2 * (2 * 2 * 32)  # slots, blocks, two products of multiply and add over H * K = D = 32
    assert first == second
    assert products < first < 1.5 * products


# Prefill ---------------------------------------------------------------------------------------------------


def test_prefill_in_chunks_gives_the_last_real_tokens_logits():
    _, call = forms(BAND)
    model, params = built(BAND)
    cache, tokens_BT, valid_BT = init_cache(BAND, 5, capacity=3), tokens(5, 5), jnp.asarray(VALID[:, 0])
    want, want_cache = call(cache, tokens_BT, VALID[:, 0])
    # What pads may be no token at all.
    last_BV, cache = prefill(
        model, params, jnp.where(valid_BT, tokens_BT, -1), cache, chunk=2, valid_BT=valid_BT
    )
    for b, last in enumerate((4, 2, 3, 4)):
        np.testing.assert_allclose(last_BV[b], want[b, last], **TIGHT)
    assert np.isnan(last_BV[4]).all()
    for got, wanted in zip(cache, want_cache, strict=True):
        np.testing.assert_allclose(got, wanted, **TIGHT)


def test_prefill_refuses_before_it_compiles():
    model, params = built(config())
    cache = init_cache(model.config, 2)
    with pytest.raises(ValueError, match="chunk is 0; it must be a whole number of at least 1"):
        prefill(model, params, tokens(2, 3), cache, chunk=0)
    with pytest.raises(ValueError, match=r"rows have read \[7, 0\] tokens and are to read \[3, 3\] more"):
        prefill(model, params, tokens(2, 3), cache._replace(lengths_B=jnp.asarray([7, 0])))


@pytest.mark.full
def test_the_memory_of_prefill_in_chunks_does_not_grow_with_the_prompt():
    model_config = config(positions="rope", window=(4,), vocab_size=512)
    model, params = built(model_config)

    def size(length, chunk):
        read = jax.jit(lambda tokens_BT, cache: prefill(model, params, tokens_BT, cache, chunk=chunk))
        compiled = read.lower(tokens(1, length), init_cache(model_config, 1, capacity=4)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert size(1024, 16) < 1.3 * size(128, 16)
    assert size(1024, None) > 6 * size(128, None)


# What a cache is -------------------------------------------------------------------------------------------


def test_a_cache_has_the_models_sizes():
    model_config = config(heads=4, kv_heads=2, dtype="bfloat16", positions="rope")
    cache = init_cache(model_config, 5)
    assert cache.keys_LBGSK.shape == cache.values_LBGSK.shape == (2, 5, 2, 8, 2)
    assert cache.keys_LBGSK.dtype == jnp.bfloat16
    assert cache.lengths_B.tolist() == [0] * 5
    assert init_cache(model_config, 5, capacity=20).keys_LBGSK.shape == (2, 5, 2, 20, 2)
    assert isinstance(cache, Cache)


@pytest.mark.parametrize(
    ("changes", "capacity", "limit"),
    [
        ({}, 8, 8),
        ({"positions": "rope"}, 20, 20),
        ({"positions": "rope", "window": (3,)}, 3, None),
        ({"positions": "rope", "window": (3, 5)}, 5, None),
        ({"positions": "rope", "window": (3, 0)}, 4, 4),
        ({"positions": "rope", "window": (20,)}, 8, 8),  # the window is never met
        ({"window": (3,)}, 3, 8),
        ({"positions": "sinusoidal", "window": (3,)}, 20, 20),
    ],
)
def test_what_a_row_can_read(changes, capacity, limit):
    model_config = config(**changes)
    init_cache(model_config, 1, capacity=capacity)
    assert cache_limit(model_config, capacity) == limit


@pytest.mark.parametrize(
    ("changes", "given", "words"),
    [
        (
            {},
            {"capacity": 9},
            "capacity is 9; with learned positions it must be at most the model's context, 8",
        ),
        ({}, {"capacity": 0}, "capacity is 0; it must be a whole number of at least 1"),
        ({}, {"batch": 0}, "batch is 0; it must be a whole number of at least 1"),
        (
            {"window": (3, 5), "positions": "rope"},
            {"capacity": 4},
            r"capacity is 4; it must be at least 5, .*\(3, 5\)",
        ),
    ],
)
def test_a_cache_that_cannot_be_is_refused(changes, given, words):
    with pytest.raises(ValueError, match=words):
        init_cache(config(**changes), **{"batch": 1, **given})


EMPTY = init_cache(config(), 2)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"cache": 3}, "cache is a int; it must be a jaxblock.models.Cache"),
        ({"cache": init_cache(config(), 3)}, r"cache.keys_LBGSK is float32\[2, 3, 2, 8, 4\]; .* batch of 2"),
        (
            {"cache": init_cache(config(depth=3), 2)},
            r"cache.keys_LBGSK is float32\[3, 2, 2, 8, 4\]; .*float32\[2, 2",
        ),
        ({"cache": init_cache(config(dtype="bfloat16"), 2)}, "cache.keys_LBGSK is bfloat16"),
        ({"cache": EMPTY._replace(lengths_B=jnp.zeros(2))}, r"cache.lengths_B is float32\[2\]; .*int32\[2\]"),
        ({"segments_BT": jnp.zeros((2, 3), int)}, "segments_BT and positions_BT do not go with a cache"),
        ({"positions_BT": jnp.zeros((2, 3), int)}, "segments_BT and positions_BT do not go with a cache"),
        ({"valid_BT": jnp.ones((2, 3), int)}, "valid_BT has dtype int32; masks are boolean"),
        ({"valid_BT": jnp.ones((2, 4), bool)}, r"valid_BT has shape \(2, 4\); .* it is \[2 or 1, 3\]"),
    ],
)
def test_what_does_not_go_with_a_cache_is_refused(given, words):
    model, params = built(config())
    with pytest.raises(ValueError, match=words):
        jax.eval_shape(lambda: model.apply({"params": params}, tokens(2, 3), **{"cache": EMPTY, **given}))
