"""Scripts of this suite in processes of their own, with simulated devices: their number is fixed when JAX starts."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def environment(devices: int) -> dict[str, str]:
    """Return this process's environment with so many CPU devices, and programs that are compiled fast."""
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"  # conftest.py's
    return {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}


def printed_by(module: str, *arguments: str, devices: int = 8) -> Any:
    """Return the JSON that a module prints when it is run on so many devices."""
    run = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env=environment(devices),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout)
