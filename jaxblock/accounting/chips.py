"""Peak dense FLOP/s of known accelerators, and model FLOPs utilisation; an unknown chip has neither.

Peaks are per JAX device, without sparsity, for a product at JAX's default precision: float32 operands are multiplied
in bfloat16 on TPUs and in TF32 on NVIDIA GPUs from Ampere on (docs.jax.dev, "Matmul precision"), so the float32 peak
is that of those units. Utilisation is model FLOPs, causal attention counted as half, over that peak
(arXiv 2204.02311, appendix B): what rematerialisation computes again earns nothing.
"""

import re
from typing import NamedTuple

from jaxblock.accounting.flops import training_flops_per_token
from jaxblock.config import DTYPES, ModelConfig
from jaxblock.contracts import check_choice, check_integer, check_number


class Chip(NamedTuple):
    """Peak FLOP/s of one JAX device; None where its matrix units do not have the type."""

    device_kind: str
    """Regular expression that matches the whole of `jax.Device.device_kind`; a MIG slice therefore matches none."""
    bfloat16: float | None
    float16: float | None
    float32: float


def _tpu(device_kind: str, bfloat16: float) -> Chip:
    return Chip(device_kind, bfloat16, None, bfloat16)


def _gpu(device_kind: str, half: float, tf32: float) -> Chip:
    return Chip(device_kind, half, half, tf32)


CHIPS: tuple[Chip, ...] = (
    # cloud.google.com/tpu/docs, "Peak compute per chip (bf16)": v2 46, v3 123, v4 275, v5e 197, v5p 459, v6e 918,
    # cloud.google.com/tpu/docs, "Peak compute per chip (bf16)" in TFLOP/s: v3 123, v4 275, v5e 197, v5p 459, v6e 918,
    # TPU7x 2307; v2 46 and the names of kinds: jax/_src/pallas/mosaic/tpu_info.py. A chip of v2, v3 and TPU7x is two
    # JAX devices, one of v4 and v5p is one (its two cores together).
    _tpu("TPU v2", 23e12),
    _tpu("TPU v3", 61.5e12),
    _tpu("TPU v4", 275e12),
    _tpu("TPU v5 lite|TPU v5e", 197e12),
    _tpu("TPU v5|TPU v5p", 459e12),
    _tpu("TPU v6 lite|TPU v6e", 918e12),
    _tpu("TPU7x", 1153.5e12),
    # NVIDIA data sheets; where they print only figures "with sparsity", half of those. V100 and T4 multiply float16
    # in their tensor cores and have no TF32: their float32 is the CUDA cores'.
    Chip(r"(Tesla|NVIDIA) V100-SXM2-\d+GB", None, 125e12, 15.7e12),
    Chip(r"(Tesla|NVIDIA) V100-PCIE-\d+GB", None, 112e12, 14e12),
    Chip(r"(Tesla|NVIDIA) T4", None, 65e12, 8.1e12),
    _gpu(r"(NVIDIA )?A100-(SXM4|SXM|PCIE|PCIe)-\d+GB|NVIDIA A100 80GB PCIe", 312e12, 156e12),
    _gpu(r"NVIDIA A10", 125e12, 62.5e12),
    _gpu(r"NVIDIA L4", 121e12, 60e12),
    _gpu(r"NVIDIA L40S", 362e12, 183e12),
    _gpu(r"NVIDIA H100 80GB HBM3", 989.5e12, 494.5e12),  # SXM: 1,979 and 989 with sparsity
    _gpu(r"NVIDIA H100 PCIe", 756.5e12, 378e12),  # 1,513 and 756
    _gpu(r"NVIDIA H100 NVL", 835.5e12, 417.5e12),  # 1,671 and 835
    _gpu(r"NVIDIA H200", 989.5e12, 494.5e12),
    _gpu(r"NVIDIA H200 NVL", 835.5e12, 417.5e12),
    _gpu(r"NVIDIA GH200 (480GB|144G HBM3e)", 989.5e12, 494.5e12),
    _gpu(r"NVIDIA B200", 2250e12, 1125e12),  # HGX B200: 36 and 18 PFLOP/s with sparsity on eight
)


def peak_flops(device_kind: str, dtype: str) -> float | None:
    """Return the peak dense FLOP/s of one JAX device for products of a dtype; None where it is not known.

    Raises:
      ValueError: a dtype that no model computes in.
    """
    check_choice("dtype", dtype, DTYPES)
    for chip in CHIPS:
        if re.fullmatch(chip.device_kind, device_kind):
            return getattr(chip, dtype)
    return None


def model_flops_utilisation(
    tokens_per_second: float,
    config: ModelConfig,
    *,
    device_kind: str,
    devices: int = 1,
    length: int | None = None,
) -> float | None:
    """Return the share of the devices' peak that training at this speed uses; None where no peak is known.

    tokens_per_second * training_flops_per_token / (devices * peak_flops), in the model's compute dtype.

    Args:
      tokens_per_second: of all devices together.
      config: the model.
      device_kind: `jax.devices()[0].device_kind`.
      devices: JAX devices that share the work.
      length: T, tokens of a sequence; left out, `config.context`.
    """
    check_number("tokens_per_second", tokens_per_second, least=0.0)
    check_integer("devices", devices, least=1)
    peak = peak_flops(device_kind, config.dtype)
    if peak is None:
        return None
    return tokens_per_second * training_flops_per_token(config, length) / (devices * peak)
