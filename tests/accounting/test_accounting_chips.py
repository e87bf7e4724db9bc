"""Peaks of known chips, and utilisation: a quotient for those, None for any other device."""

import pytest

from jaxblock import ModelConfig
from jaxblock.accounting import (
    CHIPS,
    flop_conventions,
    model_flops_utilisation,
    peak_flops,
    training_flops_per_token,
)

GPT2 = ModelConfig(vocab_size=50257, context=1024, depth=12, width=768, heads=12, dtype="bfloat16")

KINDS = {
    "TPU v2": (23e12, None, 23e12),
    "TPU v3": (61.5e12, None, 61.5e12),
    "TPU v4": (275e12, None, 275e12),
    "TPU v5 lite": (197e12, None, 197e12),
    "TPU v5p": (459e12, None, 459e12),
    "TPU v6 lite": (918e12, None, 918e12),
    "TPU7x": (1153.5e12, None, 1153.5e12),
    "Tesla V100-SXM2-16GB": (None, 125e12, 15.7e12),
    "Tesla V100-PCIE-32GB": (None, 112e12, 14e12),
    "Tesla T4": (None, 65e12, 8.1e12),
    "NVIDIA A100-SXM4-80GB": (312e12, 312e12, 156e12),
    "NVIDIA A100-PCIE-40GB": (312e12, 312e12, 156e12),
    "NVIDIA A100 80GB PCIe": (312e12, 312e12, 156e12),
    "NVIDIA A10": (125e12, 125e12, 62.5e12),
    "NVIDIA L4": (121e12, 121e12, 60e12),
    "NVIDIA L40S": (362e12, 362e12, 183e12),
    "NVIDIA H100 80GB HBM3": (989.5e12, 989.5e12, 494.5e12),
    "NVIDIA H100 PCIe": (756.5e12, 756.5e12, 378e12),
    "NVIDIA H100 NVL": (835.5e12, 835.5e12, 417.5e12),
    "NVIDIA H200": (989.5e12, 989.5e12, 494.5e12),
    "NVIDIA H200 NVL": (835.5e12, 835.5e12, 417.5e12),
    "NVIDIA GH200 480GB": (989.5e12, 989.5e12, 494.5e12),
    "NVIDIA B200": (2250e12, 2250e12, 1125e12),
}
UNKNOWN = ("cpu", "", "TPU", "TPU v9", "NVIDIA GeForce RTX 4090", "NVIDIA L400", "NVIDIA H100", "Apple M3")


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_has_one_row_and_its_slice_has_none(kind):
    peaks = tuple(peak_flops(kind, dtype) for dtype in ("bfloat16", "float16", "float32"))
    assert peaks == KINDS[kind]
    assert peak_flops(f"{kind} MIG 1g.10gb", "float32") is None


def test_every_row_is_named_above():
    assert {(chip.bfloat16, chip.float16, chip.float32) for chip in CHIPS} == set(KINDS.values())


@pytest.mark.parametrize("kind", UNKNOWN)
def test_an_unknown_chip_has_no_peak_and_no_utilisation(kind):
    assert peak_flops(kind, "bfloat16") is None
    assert model_flops_utilisation(1e5, GPT2, device_kind=kind) is None


def test_utilisation_is_model_flops_over_peak():
    kind = "NVIDIA A100-SXM4-40GB"
    found = model_flops_utilisation(150_000, GPT2, device_kind=kind)
    assert found == pytest.approx(150_000 * 797_815_296 / 312e12)
    assert model_flops_utilisation(8 * 150_000, GPT2, device_kind=kind, devices=8) == pytest.approx(found)
    assert model_flops_utilisation(150_000, GPT2, device_kind=kind, length=512) < found
    # Controls: with the masked half of attention credited (MaxText #1972), or the peak with sparsity, it is another.
    full = flop_conventions(GPT2)[0].training
    assert found * full / training_flops_per_token(GPT2) == pytest.approx(1.071 * found, rel=1e-3)
    assert model_flops_utilisation(150_000, GPT2, device_kind="Tesla T4") is None  # no bfloat16 units


@pytest.mark.parametrize(
    ("tokens_per_second", "devices", "words"),
    [
        (-1.0, 1, "tokens_per_second is -1.0"),
        (float("nan"), 1, "tokens_per_second is nan"),
        (1.0, 0, "devices is 0; it must be a whole number of at least 1"),
    ],
)
def test_bad_arguments_are_a_sentence(tokens_per_second, devices, words):
    with pytest.raises(ValueError, match=words):
        model_flops_utilisation(tokens_per_second, GPT2, device_kind="TPU v4", devices=devices)


def test_an_unknown_dtype_is_refused():
    with pytest.raises(ValueError, match="dtype is 'float8'; it must be one of"):
        peak_flops("TPU v4", "float8")
