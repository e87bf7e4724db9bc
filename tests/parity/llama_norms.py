"""A tiny random Llama of transformers in bfloat16 as a reference: what each of its norms reads and writes.

    python -m tests.parity.llama_norms

writes the golden file beside this one (needs the extra `parity`). Bfloat16 is held by its bits, as numpy has no such
type.
"""

import importlib.util
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

GOLDEN = Path(__file__).with_suffix(".npz")
BATCH, LENGTH, WIDTH, LAYERS, EPSILON = 2, 5, 16, 2, 1e-6
NORMS = 2 * LAYERS + 1


class NormRecord(NamedTuple):
    """The norms in the order in which they run, uint16 bits of bfloat16."""

    weights_ND: np.ndarray
    read_NBTD: np.ndarray
    written_NBTD: np.ndarray


def installed() -> bool:
    """Return whether transformers and torch can be imported."""
    specs = [importlib.util.find_spec(name) for name in ("torch", "transformers")]
    return all(spec is not None and spec.origin is not None for spec in specs)


def live() -> NormRecord:
    """Run the model once, its norms' weights moved off their ones."""
    import torch
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        vocab_size=32,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
        rms_norm_eps=EPSILON,
    )
    model: Any = LlamaModel(config)
    draw = np.random.default_rng(0)
    for name, parameter in model.named_parameters():
        centre, scale = (1.0, 0.3) if "norm" in name else (0.0, 0.35)
        values = torch.from_numpy(draw.normal(centre, scale, tuple(parameter.shape)))
        parameter.data = values.to(torch.bfloat16)
    found: list[tuple[Any, Any, Any]] = []
    for name, module in model.named_modules():
        if name.endswith("norm"):
            module.register_forward_hook(
                lambda module, read, written: found.append((module.weight, read[0], written))
            )
    with torch.no_grad():
        model.to(torch.bfloat16).eval()(torch.from_numpy(draw.integers(0, 32, (BATCH, LENGTH))))
    weights, read, written = ([bits(row[i]) for row in found] for i in range(3))
    return NormRecord(np.stack(weights), np.stack(read), np.stack(written))


def bits(tensor: Any) -> np.ndarray:
    """Return the bits of a bfloat16 tensor."""
    import torch

    assert tensor.dtype == torch.bfloat16
    return tensor.detach().contiguous().view(torch.int16).numpy().view(np.uint16)


def read_golden() -> NormRecord:
    """Return what was written."""
    with np.load(GOLDEN) as file:
        return NormRecord(**file)


if __name__ == "__main__":
    np.savez_compressed(GOLDEN, **live()._asdict())
