"""Where a run is put, by its config and the devices there are; on real devices, tests/parallel/test_many_devices.py."""

import jax
import pytest

from jaxblock.parallel import Mapped, OneDevice
from jaxblock.training.config import DataConfig, ParallelConfig, ProbeConfig
from jaxblock.training.prepare import place
from tests.small_training import training


def run(*, batch: int = 8, accumulation: int = 1, probe: int = 0, model: dict | None = None, **parallel):
    """Return a run with a [parallel] section."""
    config = training(**(model or {}))
    changes = {
        "data": DataConfig(batch=batch, accumulation=accumulation),
        "parallel": ParallelConfig(**parallel),
        "probe": ProbeConfig(every=probe),
    }
    return config.model_copy(update=changes)


@pytest.fixture
def devices(monkeypatch):
    """Have JAX say that there are so many devices."""
    return lambda count: monkeypatch.setattr(jax, "device_count", lambda: count)


def test_one_device_is_no_mesh():
    assert isinstance(place(run()), OneDevice)
    assert isinstance(place(run(form="pmap")), Mapped)


@pytest.mark.parametrize(
    ("batch", "accumulation", "parallel", "words"),
    [
        (6, 1, {}, "data.batch is 6, and 4 devices split its rows .*must be a multiple of 4"),
        (8, 4, {}, "data.batch is 8 in data.accumulation = 4 pieces, and 4 devices .* multiple of 16"),
        (6, 1, {"fsdp": 4}, "data.batch is 6, and 4 devices"),
        (6, 1, {"form": "pmap"}, "data.batch is 6, and 4 devices"),
    ],
)
def test_b107_rows_that_the_devices_do_not_divide_are_refused_with_the_config(
    devices, batch, accumulation, parallel, words
):
    devices(4)
    with pytest.raises(ValueError, match=words):
        place(run(batch=batch, accumulation=accumulation, **parallel))
    devices(1)  # the control: one device takes any number
    assert place(run(batch=6)).devices == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"probe": 2}, "takes no probes, and probe.every is 2"),
        ({"model": {"experts": "dropless(experts=2)", "hidden_dropout": 0.1}}, "whose draws are not by rows"),
    ],
)
def test_what_pmap_does_not_do_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        place(run(form="pmap", **changes))
    assert isinstance(place(run(**changes)), OneDevice)
