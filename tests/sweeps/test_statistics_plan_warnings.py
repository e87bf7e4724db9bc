"""Warnings of a plan: what its report will refuse is said before the hours are spent."""

import pytest

from jaxblock.sweeps.findings.plan_warnings import warnings_of

RATES = tuple(5e-4 * 2.0**i for i in range(7))
GOOD_AXES = {
    "optimizer.learning_rate": RATES,
    "run.seed": (0, 1, 2),
    "model.depth": (2, 4, 8, 16, 32),
    "model.residual": ("pre_norm",),
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"optimizer.learning_rate": RATES[:3]}, "3 learning rates: no optimum can be fitted"),
        ({"optimizer.learning_rate": ()}, "1 learning rate: no optimum"),
        ({"optimizer.learning_rate": (1e-3, 2e-3, 4e-3, 1.6e-2)}, "a factor 4 apart"),
        ({"run.seed": (0, 1)}, "2 seeds: no optimum has an interval"),
        ({"run.seed": (0, 0, 0)}, "1 seed: "),
        ({"model.depth": (2, 4, 8, 16)}, "4 depths: no law in depth"),
    ],
)
def test_a_plan_is_warned_of_what_its_report_will_refuse(change, words):
    found = warnings_of({**GOOD_AXES, **change})
    assert len(found) == 1
    assert words in found[0]
    assert warnings_of(GOOD_AXES) == ()


def test_rates_rounded_to_a_few_digits_pass_and_order_and_repeats_do_not_matter():
    rounded = {**GOOD_AXES, "optimizer.learning_rate": (8e-3, 5e-4, 1e-3, 2.4e-3, 4e-3, 1e-3)}
    assert warnings_of(rounded) == ()
    assert len(warnings_of({})) == 3
    with pytest.raises(ValueError, match="above zero"):
        warnings_of({"optimizer.learning_rate": (0.0, 1e-3)})
