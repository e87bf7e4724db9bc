"""Seed 002, what a norm does to one vector, and what attention, feed-forward, depth and width cost: exact counts."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxblock import ModelConfig
from jaxblock.functional.attention_xla import chunk_ranges, chunk_size
from jaxblock.functional.masks import AttentionPattern
from jaxblock.functional.norms import layer_norm, rms_norm
from jaxblock.modules import FeedForward
from tests.claims import depth
from tests.claims.depth import SIX, count, product_flops, real

EIGHT = jnp.asarray([2.0, -1.0, 4.0, 0.5, 3.0, 1.0, -2.0, 4.5])
BRANCHES = "blocks/(attention|feed_forward)/"
exact_layer_norm = functools.partial(layer_norm, epsilon=0.0)
exact_rms_norm = jax.jit(functools.partial(rms_norm, epsilon=0.0))
norm_rows = jax.jit(layer_norm)


# ------------------------------------------------------------------ norms


def test_s2_06_layer_norm_of_an_8_vector_in_two_steps():
    centred = EIGHT - EIGHT.mean()
    np.testing.assert_allclose(exact_layer_norm(EIGHT), centred / EIGHT.std(), rtol=1e-6)
    y = np.asarray(exact_layer_norm(EIGHT), np.float64)
    assert y.mean() == pytest.approx(0.0, abs=1e-6)
    assert y.std() == pytest.approx(1.0, abs=1e-6)
    # Controls: the first step alone leaves the spread, the second alone (RMSNorm) the offset.
    assert float(centred.std()) == pytest.approx(math.sqrt(75 / 16), rel=1e-6)
    assert float(exact_rms_norm(EIGHT).mean()) > 0.5


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 999), token=st.integers(0, 3))
def test_s2_07_statistics_belong_to_one_vector(seed, token):
    draw = np.random.default_rng(seed)
    x, others = draw.normal(size=(2, 4, 8)).astype(np.float32), 9 * draw.normal(size=(2, 4, 8)) + 5
    mixed = others.astype(np.float32)
    mixed[1, token] = x[1, token]
    np.testing.assert_array_equal(norm_rows(mixed)[1, token], norm_rows(x)[1, token])

    def batch_norm(x):
        return (x - x.mean((0, 1))) / x.std((0, 1))

    assert (
        np.abs(batch_norm(mixed)[1, token] - batch_norm(x)[1, token]).max() > 0.05
    )  # control: BatchNorm reads all


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 999), offset=st.sampled_from([-3.0, 0.4, 2.0]), spread=st.sampled_from([0.1, 5.0]))
def test_s2_08_rms_norm_rescales_the_mean(seed, offset, spread):
    """(!) mean(out) = mean(x) / rms(x): neither removed nor kept."""
    x = (offset + spread * np.random.default_rng(seed).normal(size=8)).astype(np.float32)
    wide = x.astype(np.float64)
    mean, rms = wide.mean(), np.sqrt(np.square(wide).mean())
    got = float(exact_rms_norm(x).mean())
    assert got == pytest.approx(mean / rms, abs=1e-6)
    kept, removed = abs(got - mean) < 1e-3 * abs(mean), abs(got) < 1e-3 * abs(mean)
    assert not kept
    assert not removed


def test_s2_08_the_mean_is_zero_exactly_where_it_was_and_kept_only_at_rms_one():
    offset, centred = jnp.asarray([1.0, 3.0, 2.0, 2.0]), jnp.asarray([-1.0, 1.0, 0.0, 0.0])
    assert float(exact_rms_norm(centred).mean()) == 0.0
    assert float(exact_rms_norm(offset).mean()) == pytest.approx(2 / math.sqrt(4.5), rel=1e-6)
    assert abs(float(exact_rms_norm(offset).mean()) - 2.0) > 1.0
    unit = offset / math.sqrt(4.5)
    assert float(exact_rms_norm(unit).mean()) == pytest.approx(float(unit.mean()), rel=1e-6)
    assert float(exact_layer_norm(offset).mean()) == 0.0  # control: LayerNorm removes it


def textbook_layer_norm(x, scale, bias=None):
    """The formula as it stands, the mean subtracted once."""
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    y = centred * jax.lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + 1e-5) * scale
    return y if bias is None else y + bias


@pytest.mark.parametrize(
    ("width", "saved", "saved_with_bias"),
    [
        (768, 1_536, 2_304),
        (1024, 2_048, 3_072),
        (1280, 2_560, 3_840),
        (1600, 3_200, 4_800),
        (8192, 16_384, 24_576),
        (12288, 24_576, 36_864),
    ],
)
def test_s2_10_rms_norm_saves_two_operations_per_feature_and_three_with_a_bias(width, saved, saved_with_bias):
    vector = jax.ShapeDtypeStruct((width,), jnp.float32)

    def operations(norm, *arguments):
        return depth.full_width_operations(norm, width, *arguments)

    rms = operations(rms_norm, vector, vector)
    assert rms == 4 * width  # square, sum, divide by the root, scale
    assert operations(textbook_layer_norm, vector, vector) - rms == saved
    assert operations(textbook_layer_norm, vector, vector, vector) - rms == saved_with_bias
    # Control: our LayerNorm subtracts the mean twice, because of rounding (B29), and is found to cost 2 D more.
    assert operations(layer_norm, vector, vector) - rms == 2 * saved
    assert operations(layer_norm, vector, vector, vector) - rms == saved_with_bias + 2 * width


# ------------------------------------------------------------------ what a block costs


def costs(model_config: ModelConfig) -> tuple[int, int]:
    """Return the parameters of attention and of the feed-forward in one block, without norms."""
    blocks = model_config.depth
    return count(model_config, "blocks/attention/") // blocks, count(
        model_config, "blocks/feed_forward/"
    ) // blocks


@pytest.mark.parametrize("name", SIX)
def test_s2_25_feed_forward_is_exactly_twice_attention_without_biases(name):
    width = SIX[name][1]
    attention, feed_forward = costs(real(name))
    assert (attention, feed_forward) == (4 * width**2, 8 * width**2)
    # (!) Control: a bias moves it.
    attention, feed_forward = costs(real(name, bias=True))
    assert (attention, feed_forward) == (4 * width**2 + 4 * width, 8 * width**2 + 5 * width)
    assert 2 * attention - feed_forward == 3 * width


@pytest.mark.parametrize(
    ("changes", "ratio"),
    [
        ({}, 2.0),
        ({"kv_heads": 8}, 8 / 2.25),
        ({"feed_forward": "swiglu", "hidden": 28672}, 2.625),
        ({"kv_heads": 8, "feed_forward": "swiglu", "hidden": 28672}, 4.6667),
        ({"hidden": 8192}, 0.5),
    ],
)
def test_s2_25_the_ratio_is_another_with_fewer_kv_heads_a_gate_or_another_width(changes, ratio):
    """(!) Twice holds for full heads, F = 4 D and no gate; Llama 2 70B, for one, stands at 4.67."""
    attention, feed_forward = costs(real("llama2_70b", **changes))
    assert feed_forward / attention == pytest.approx(ratio, rel=1e-4)


@pytest.mark.parametrize(
    ("name", "want"),
    [("gpt2_small", 31.2), ("gpt2_medium", 14.6), ("gpt2_large", 8.3), ("gpt2_xl", 5.2), ("gpt3", 0.35)],
)
def test_s2_26_share_of_the_embedding(name, want):
    def percent(model_config):
        table, blocks = count(model_config, "embedding/"), count(model_config, BRANCHES)
        return round(100 * table / (table + blocks), 1 if want > 1 else 2)

    assert percent(real(name)) == want
    # Controls: another vocabulary, a narrower feed-forward.
    assert percent(real(name, vocab_size=32000)) < want
    assert percent(real(name, hidden=SIX[name][1])) > want


def test_s2_27_feed_forward_is_two_thirds_of_a_block():
    for name in SIX:
        matrices = count(real(name), BRANCHES)
        assert 3 * count(real(name), "blocks/feed_forward/") == 2 * matrices
    grouped = real("llama2_70b", kv_heads=8)
    assert 3 * count(grouped, "blocks/feed_forward/") > 2 * count(grouped, BRANCHES)  # control


def block_flops(model_config: ModelConfig, length: int) -> int:
    """Return the FLOPs of one block's matrix products per token, counted in its jaxpr, as if no score were left out."""
    block, x_BTD = depth.abstract_block(model_config), depth.stream_like(model_config, length)
    total = product_flops(functools.partial(depth.run_block, model_config), block, x_BTD)
    left_out = length**2 - scores_made(length)
    total += 4 * left_out * model_config.width
    assert total % length == 0
    return total // length


def scores_made(length: int) -> int:
    """Return how many of a head's T^2 scores our attention makes under a causal mask."""
    parts = chunk_ranges(AttentionPattern(causal=True), length, length, chunk_size(length))
    return sum((last - first) * (stop - start) for (first, last), (start, stop) in parts)


@pytest.mark.parametrize(("name", "length"), [("gpt2_small", 128), ("gpt2_small", 1024), ("gpt3", 2048)])
def test_s2_27_feed_forward_does_most_of_a_tokens_products_until_the_sequence_is_long(name, length):
    model_config, width = real(name), SIX[name][1]

    def feed_forward(params, x_BTD):
        return FeedForward(model_config).apply({"params": params}, x_BTD)

    own = depth.abstract_block(model_config)["feed_forward"]
    fed = product_flops(feed_forward, own, depth.stream_like(model_config, length))
    assert fed == 16 * width**2 * length
    # Every score counted, hidden or not: 2 T D for the scores, 2 T D for the sum of values.
    assert block_flops(model_config, length) == 24 * width**2 + 4 * length * width
    # Its share falls from 2 / 3: a half at T = 2 D, a third at T = 6 D.
    assert 1 / 2 < 16 * width**2 / block_flops(model_config, length) < 2 / 3
    assert 2 * 16 * width**2 == block_flops(model_config, 2 * width)
    assert 3 * 16 * width**2 == block_flops(model_config, 6 * width)


# ------------------------------------------------------------------ depth against width, and the head


def test_s2_30_four_times_the_depth_is_four_times_the_parameters_of_the_blocks():
    """(!) Of the blocks only: embedding and final norm stay, so the total does not grow by 4."""
    small, deep = real("gpt2_small", bias=True), real("gpt2_small", bias=True, depth=48)
    assert count(deep, "blocks/") == 4 * count(small, "blocks/")
    assert count(deep, "embedding/") == count(small, "embedding/")
    assert (count(small), count(deep)) == (123_653_376, 378_816_768)  # 3.06 times


def test_s2_30_four_times_the_width_is_sixteen_times_the_matrices():
    """(!) Of the matrices only: norms, biases and embedding grow by 4, so neither blocks nor total grow by 16."""
    small, wide = real("gpt2_small", bias=True), real("gpt2_small", bias=True, width=4 * 768)
    for pattern, factor in (
        (BRANCHES + ".*/kernel", 16),
        (BRANCHES + ".*/bias", 4),
        ("norm", 4),
        ("embedding/", 4),
    ):
        assert count(wide, pattern) == factor * count(small, pattern)
    assert (count(small, "blocks/"), count(wide, "blocks/")) == (85_054_464, 1_359_433_728)  # 15.98 times
    assert (count(small), count(wide)) == (123_653_376, 1_513_829_376)  # 12.24 times


@pytest.mark.parametrize(
    ("blocks", "width", "mega_flops"), [(2, 256, 9.83), (8, 128, 10.22), (32, 64, 11.01)]
)
def test_s2_31_equal_parameters_are_not_equal_flops(blocks, width, mega_flops):
    """N D^2 = const buys 16 times the blocks at a quarter of the width; attention's scores are not in that budget."""
    sizes = {"vocab_size": 256, "context": 128, "heads": 4, "bias": False, "positions": "none"}
    model_config = ModelConfig(depth=blocks, width=width, **sizes)
    assert count(model_config, BRANCHES) == 1_572_864
    scores = blocks * block_flops(model_config, 128) - 2 * 1_572_864
    causal = 2 * 1_572_864 + scores // 2  # half of the scores are hidden
    assert 3 * causal / 1e6 == pytest.approx(mega_flops, abs=0.005)  # forward once, backward twice
    assert scores == blocks * width * 4 * 128
    # Control: with the width halved once more at the same depth the budget is not kept.
    halved = ModelConfig(depth=blocks, width=width // 2, **sizes)
    assert count(halved, BRANCHES) == 1_572_864 // 4


@pytest.mark.parametrize("vocab_multiple", [1, 128])
def test_s2_36_a_tied_head_saves_width_times_vocabulary(vocab_multiple):
    tied, untied = (
        real("gpt2_small", head=head, vocab_multiple=vocab_multiple) for head in ("tied", "untied")
    )
    saved = count(untied) - count(tied)
    assert saved == 768 * untied.padded_vocab_size
    assert (saved == 768 * 50257) == (vocab_multiple == 1)  # control: rows that pad the table are saved too
    assert count(untied, "^head/") == saved
    assert count(tied, "^head/") == 0
