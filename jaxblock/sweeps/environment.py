"""Where and with what a sweep runs: what its report says of the machine. Workers say which device they have."""

import os
from typing import Any

import jax

from jaxblock.training.summary import versions


def describe_environment(*, code: str, data: str) -> dict[str, Any]:
    """Return versions, cores and load; `code` and `data` are fingerprints."""
    return {
        **versions(),
        "cores": os.cpu_count(),
        "load_average_at_start": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "matmul_precision": str(jax.config.values["jax_default_matmul_precision"]),
        "code": code,
        "data": data,
    }


def describe_device() -> dict[str, Any]:
    """Return what this process computes on."""
    device = jax.devices()[0]
    return {"device": device.device_kind, "platform": device.platform, "devices": jax.device_count()}
