"""Numbers at the door: ranges hold for the value, and for what float32 makes of it."""

import pytest

from jaxblock.contracts import check_number


@pytest.mark.parametrize(
    ("value", "bounds"),
    [
        (float("nan"), {}),
        (float("inf"), {}),
        (10**400, {}),
        (True, {}),
        ("1", {}),
        (1e39, {}),  # inf in float32
        (-1e39, {}),
        (1e-50, {"above": 0.0}),  # 0 in float32
        (1e-40, {"above": 0.0}),  # not normal in float32: 0 on most devices
        (1.0 - 1e-9, {"below": 1.0}),  # 1 in float32
        (1.0, {"below": 1.0}),
        (-0.1, {"least": 0.0}),
        (1.1, {"most": 1.0}),
    ],
)
def test_a_number_out_of_range_is_refused(value, bounds):
    with pytest.raises(ValueError, match=r"^field is .*; it must be a finite number"):
        check_number("field", value, **bounds)


@pytest.mark.parametrize(
    ("value", "bounds"),
    [
        (3e38, {}),
        (0, {"least": 0.0}),
        (1e-300, {"least": 0.0, "most": 1.0}),  # 0 is allowed as well
        (2e-38, {"above": 0.0}),
        (1.0 - 1e-7, {"below": 1.0}),
        (1.0, {"most": 1.0}),
        (-5, {"below": 0.0}),
    ],
)
def test_a_number_in_range_passes(value, bounds):
    check_number("field", value, **bounds)
