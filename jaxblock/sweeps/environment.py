"""Where and with what a sweep runs: what its report says of the machine."""

import os
from typing import Any

import jax

from jaxblock.training.summary import versions


def environment(*, code: str, data: str) -> dict[str, Any]:
    """Return versions, device, cores and load; `code` and `data` are fingerprints."""
    device = jax.devices()[0]
    return {
        **versions(),
        "device": device.device_kind,
        "platform": device.platform,
        "devices": jax.device_count(),
        "cores": os.cpu_count(),
        "load_average_at_start": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "matmul_precision": str(jax.config.jax_default_matmul_precision),
        "code": code,
        "data": data,
    }
