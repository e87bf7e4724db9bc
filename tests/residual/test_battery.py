"""The battery over topologies of one stream; `pytest -m full` runs every check on every entry."""

import pytest

from jaxblock.residual import REGISTRY, topology
from tests.residual.battery import CHECKS
from tests.residual.battery.cost import memory_exponent
from tests.residual.entries import HISTORIES, NAMES, PLAIN_STREAMS, cases
from tests.residual.given import Entry


@pytest.mark.parametrize(("name", "check"), cases(PLAIN_STREAMS))
def test_entry_is_accepted(name, check):
    CHECKS[check](Entry(name, topology(name)))


@pytest.mark.full
@pytest.mark.parametrize("name", PLAIN_STREAMS)
def test_gradient_memory_grows_at_most_as_depth_from_8_to_64_blocks(name):
    exponent = memory_exponent(topology(name), (8, 16, 32, 64))
    print(f"{name}: L^{exponent:.3f}")
    assert exponent <= 1.1


def test_every_name_of_the_registry_is_under_test():
    assert set(REGISTRY) <= set(NAMES)
    assert set(HISTORIES) | set(PLAIN_STREAMS) == set(NAMES)
