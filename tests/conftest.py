"""Strict numerics for every test: no silent rank promotion, full-precision products, warnings as errors."""

import gc
import os
from importlib.metadata import version

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Compiling is what is slow: without LLVM's optimizations it takes an eighth of the time; the HLO is the same. Loops
# written by the older emitters take half of that again; releases after 0.10 do not know the flag.
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_backend_optimization_level=0",
        *(["--xla_cpu_use_fusion_emitters=false"] if version("jaxlib").startswith("0.10.") else []),
    ]
)

# After compiling, tracing and lowering take the time: no op needs to say where in the source it came from, and what
# they allocate is seldom garbage in cycles, which a collection of the young looks for after every 700 objects.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")

import jax
import pytest

gc.set_threshold(100_000, 20, 10)

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")


def pytest_configure(config: pytest.Config) -> None:
    """`pytest` leaves the `full` tests out; `pytest -m full` runs everything."""
    if config.option.markexpr == "full":
        config.option.markexpr = ""
    elif not config.option.markexpr:
        config.option.markexpr = "not full"
