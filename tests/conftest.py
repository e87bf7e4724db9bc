"""Strict numerics for every test: no silent rank promotion, full-precision products, warnings as errors."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the `full` tests out unless they were asked for; `-m full` keeps every test."""
    if config.option.markexpr == "full":
        config.option.markexpr = ""
        return
    chosen = [item for item in items if "full" not in item.keywords]
    config.hook.pytest_deselected(items=[item for item in items if "full" in item.keywords])
    items[:] = chosen
