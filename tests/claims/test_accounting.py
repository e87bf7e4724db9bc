"""Seeds 001 and 002, what a block costs, as `jaxblock.accounting` counts it: exact values of the tables."""

import dataclasses

import pytest

from jaxblock import ModelConfig
from jaxblock.accounting import (
    ParameterCount,
    abstract_parameters,
    count_parameters,
    flop_parts,
    pre_norm_parameters,
    training_flops_per_token,
)
from tests.claims.depth import SIX, real

KERNELS = ("query", "key", "value", "output", "up", "down")


def counted(model_config: ModelConfig) -> ParameterCount:
    return count_parameters(abstract_parameters(model_config))


def kernels(count: ParameterCount) -> int:
    """Return 12 L D^2, the weights of the blocks' matrices."""
    return sum(count.by_role[role] for role in KERNELS)


def test_s1_58_counts_at_width_512_and_twice_the_sequence():
    """D = 512, F = 2048, H = 8: 2 to 1; T from 512 to 1024 makes scores 4 times as many and changes no parameter."""
    sizes = {"vocab_size": 11, "depth": 1, "width": 512, "heads": 8, "bias": False, "positions": "rope"}
    short, long = (ModelConfig(context=context, **sizes) for context in (512, 1024))
    assert counted(short) == counted(long)
    block = counted(short).per_block
    assert (block["attention"], block["feed_forward"]) == (1_048_576, 2_097_152)
    # An entry of the scores costs 2 K products forward and 2 K for the weighted values.
    entries = [flop_parts(config).scores_full * config.context // (4 * 64) for config in (short, long)]
    assert entries == [2_097_152, 8_388_608]
    # Control: with another width of the feed-forward the ratio is another.
    narrow = counted(dataclasses.replace(short, hidden=1024)).per_block
    assert narrow["feed_forward"] == narrow["attention"]


@pytest.mark.parametrize(
    ("name", "percent", "digits"),
    [
        ("gpt2_small", 31.2, 1),
        ("gpt2_medium", 14.6, 1),
        ("gpt2_large", 8.3, 1),
        ("gpt2_xl", 5.2, 1),
        ("gpt3", 0.35, 2),
    ],
)
def test_s2_26_embedding_against_all_blocks(name, percent, digits):
    """V D / (V D + 12 L D^2), V = 50257."""
    blocks, width, _ = SIX[name]
    count = counted(real(name))
    assert kernels(count) == 12 * blocks * width**2
    table = count.by_place["embedding"]
    assert table == 50257 * width
    assert round(100 * table / (table + kernels(count)), digits) == percent
    untied = counted(real(name, head="untied"))  # control: a second table
    assert round(100 * (untied.total - untied.blocks) / untied.total, digits) != percent


def test_s2_30_depth_times_four_and_width_times_four_both_totals():
    """(!) Exact for the blocks and their matrices; the totals grow by 3.06 and 12.24 at GPT-2 small."""
    small = real("gpt2_small", bias=True)
    deep, wide = dataclasses.replace(small, depth=48), dataclasses.replace(small, width=4 * 768)
    of_small, of_deep, of_wide = counted(small), counted(deep), counted(wide)
    assert (of_deep.blocks, kernels(of_deep)) == (4 * of_small.blocks, 4 * kernels(of_small))
    assert kernels(of_wide) == 16 * kernels(of_small)
    for role in ("embedding", "bias", "norm"):
        assert of_wide.by_role[role] == 4 * of_small.by_role[role]
    assert of_deep.by_place["embedding"] == of_small.by_place["embedding"]
    totals = (of_small.total, of_deep.total, of_wide.total)
    assert totals == (123_653_376, 378_816_768, 1_513_829_376)
    assert totals == tuple(pre_norm_parameters(config) for config in (small, deep, wide))
    assert of_wide.blocks != 16 * of_small.blocks  # control: norms and biases are in there


@pytest.mark.parametrize(
    ("blocks", "width", "flops"), [(2, 256, 9_830_400), (8, 128, 10_223_616), (32, 64, 11_010_048)]
)
def test_s2_31_one_budget_of_parameters_is_three_of_flops(blocks, width, flops):
    """Training, causal, head excluded, per token at T = 128: 9.83, 10.22 and 11.01 MFLOP for 1,572,864 weights."""
    model_config = ModelConfig(
        vocab_size=256, context=128, depth=blocks, width=width, heads=4, bias=False, positions="none"
    )
    assert kernels(counted(model_config)) == 1_572_864
    assert training_flops_per_token(model_config) - 3 * flop_parts(model_config).head == flops
    # Control: at another length the three are others; without scores they would be one.
    assert training_flops_per_token(model_config, 1) - 3 * flop_parts(model_config).head != flops
    parts = flop_parts(model_config)
    assert 3 * (parts.projections + parts.feed_forward) == 6 * 1_572_864
