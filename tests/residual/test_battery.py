"""The battery over the registry; `pytest -m full` runs every check on every entry and on every option."""

import pytest

from jaxblock.residual import REGISTRY, topology
from tests.residual.battery import CHEAP, CHECKS, Entry, memory_exponent

REPRESENTATIVE = (
    "pre_norm",
    "post_norm",
    "dense_former",
    "attention_residual",
    "block_attention_residual(sublayers=4)",
)
VARIANTS = (
    "dense_former(dilation=2, period=3)",
    "dense_former(period=2)",
    "block_attention_residual(sublayers=1)",
    "block_attention_residual(sublayers=3)",
    "block_attention_residual(sublayers=4, query='dynamic', key='layer')",
    "block_attention_residual(sublayers=4, query='static', key='layer', window=1)",
    "attention_residual(score='sigmoid')",
    "attention_residual(query='dynamic')",
    "attention_residual(query='dynamic', key='layer')",
    "attention_residual(key='layer', heads=2)",
    "attention_residual(key_norm='none')",
    "attention_residual(window=2)",
    "attention_residual(heads=4)",
)
NAMES = tuple(dict.fromkeys((*REPRESENTATIVE, *REGISTRY, *VARIANTS)))
ENTRIES = {name: Entry(name, topology(name)) for name in NAMES}


WITH_HISTORY = ("plain_derivative_equals_reverse", "memory_is_linear")  # for others an ordinary scan


def cases():
    for name in NAMES:
        for check in CHECKS:
            default = name in REPRESENTATIVE or (name in REGISTRY and check in CHEAP)
            if check in WITH_HISTORY and name in ("pre_norm", "post_norm"):
                default = False
            marks = () if default else (pytest.mark.full,)
            yield pytest.param(name, check, marks=marks, id=f"{name}-{check}")


@pytest.mark.parametrize(("name", "check"), list(cases()))
def test_entry_is_accepted(name, check):
    CHECKS[check](ENTRIES[name])


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_gradient_memory_grows_at_most_as_depth_from_8_to_64_blocks(name):
    exponent = memory_exponent(topology(name), (8, 16, 32, 64))
    print(f"{name}: L^{exponent:.3f}")
    assert exponent <= 1.1


def test_the_plain_derivative_of_a_history_is_the_control_of_linear_memory():
    assert memory_exponent(topology("attention_residual"), (8, 32), history="plain") > 1.2
