"""What the PyTorch contenders share: the device, the tokens, and a step of AdamW."""

import contextlib
from collections.abc import Callable
from typing import Any

from experiments.benchmarks.contest import AbsentError, Job, need, timed
from experiments.benchmarks.sizes import Sizes


def torch_device(platform: str | None) -> Any:
    """Return the device that stands for JAX's platform; raise `AbsentError` where torch is missing or cannot use it."""
    torch = need("torch")
    if platform in (None, "cpu"):
        return torch.device("cpu")
    if platform == "gpu" and torch.cuda.is_available():
        return torch.device("cuda")
    raise AbsentError(f"this build of torch cannot compute on the {platform}")


def torch_job(sizes: Sizes, model: Any, device: Any, forward: Callable[[Any], Any] | None = None) -> Job:
    """Return the step of a model that maps tokens [B, T] to logits [B, T, V].

    Args:
      sizes: of the model and its batch.
      model: whose parameters are trained.
      device: where.
      forward: what is called in its place: the model, compiled.
    """
    torch = need("torch")
    model = model.to(device)
    logits_of = model if forward is None else forward
    optimizer = torch.optim.AdamW(model.parameters(), 3e-4, fused=True)
    tokens = torch.randint(sizes.vocab, (sizes.batch, sizes.seq + 1), device=device)
    inputs_BT, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].reshape(-1)
    half = sizes.dtype == "bfloat16"
    precision = torch.autocast(device.type, torch.bfloat16) if half else contextlib.nullcontext()

    def step() -> float:
        with precision:
            logits = logits_of(inputs_BT).reshape(-1, sizes.vocab)
            loss = torch.nn.functional.cross_entropy(logits.float(), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    def peak_bytes() -> int | None:
        return torch.cuda.max_memory_allocated() if device.type == "cuda" else None

    return Job(timed(step), {"torch": torch.__version__, "threads": torch.get_num_threads()}, peak_bytes)
