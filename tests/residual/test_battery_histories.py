"""The battery over topologies that read earlier layers; `pytest -m full` runs it on every entry and option."""

import pytest

from jaxblock.residual import topology
from tests.residual.battery import CHECKS
from tests.residual.battery.cost import memory_exponent
from tests.residual.entries import HISTORIES, cases
from tests.residual.given import Entry


@pytest.mark.parametrize(("name", "check"), cases(HISTORIES))
def test_entry_is_accepted(name, check):
    CHECKS[check](Entry(name, topology(name)))


@pytest.mark.full
@pytest.mark.parametrize("name", HISTORIES)
def test_gradient_memory_grows_at_most_as_depth_from_8_to_64_blocks(name):
    exponent = memory_exponent(topology(name), (8, 16, 32, 64))
    print(f"{name}: L^{exponent:.3f}")
    assert exponent <= 1.1


def test_the_plain_derivative_of_a_history_is_the_control_of_linear_memory():
    assert memory_exponent(topology("attention_residual"), (8, 32), history="plain") > 1.2
