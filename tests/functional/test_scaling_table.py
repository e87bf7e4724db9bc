"""CompleteP's table: each cell against its own formula, what holds for every alpha, and the base, where all is 1."""

import math

import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxblock.functional.parametrization import Scaling, complete_p, scaled

RATIOS = st.floats(0.05, 200.0)
ALPHAS = st.floats(0.0, 1.0)
# (m_L, m_N, alpha) -> branch, logits, table_gain, hidden_rate, vector_rate, hidden_decay, block_epsilon, by hand.
CELLS = {
    (4.0, 1.0, 1.0): (1 / 4, 1, 1, 1, 1, 1, 1 / 4),
    (4.0, 1.0, 0.5): (1 / 2, 1, 1, 1 / 2, 1 / 2, 1, 1 / 2),
    (4.0, 1.0, 0.0): (1, 1, 1, 1 / 4, 1 / 4, 1, 1),
    (1.0, 4.0, 1.0): (1, 1 / 4, 2, 1 / 4, 1, 4, 1 / 4),
    (1.0, 0.25, 0.5): (1, 4, 1 / 2, 4, 1, 1 / 4, 4),
    (16.0, 4.0, 1.0): (1 / 16, 1 / 4, 2, 1 / 4, 1, 4, 1 / 64),
    (16.0, 4.0, 0.5): (1 / 4, 1 / 4, 2, 1 / 16, 1 / 4, 4, 1 / 16),
    (0.25, 9.0, 0.5): (2, 1 / 9, 3, 2 / 9, 2, 9, 2 / 9),
}


@pytest.mark.parametrize("case", CELLS)
def test_the_cells(case):
    depth, width, alpha = case
    assert complete_p(depth, width, alpha=alpha) == pytest.approx(Scaling(*CELLS[case]), rel=1e-12)


@settings(deadline=None, max_examples=50)
@given(RATIOS, RATIOS, ALPHAS)
def test_each_column_is_its_own_power(depth, width, alpha):
    """In logarithms: a column is a linear function of log m_L and log m_N."""
    powers = {
        "branch": (-alpha, 0),
        "logits": (0, -1),
        "table_gain": (0, 0.5),
        "hidden_rate": (alpha - 1, -1),
        "vector_rate": (alpha - 1, 0),
        "hidden_decay": (0, 1),
        "block_epsilon": (-alpha, -1),
    }
    assert set(powers) == set(Scaling._fields)
    found = complete_p(depth, width, alpha=alpha)._asdict()
    for name, (of_depth, of_width) in powers.items():
        want = of_depth * math.log(depth) + of_width * math.log(width)
        assert math.log(found[name]) == pytest.approx(want, abs=1e-9), name


@settings(deadline=None, max_examples=50)
@given(RATIOS, RATIOS, ALPHAS)
def test_what_holds_for_every_alpha(depth, width, alpha):
    found = complete_p(depth, width, alpha=alpha)
    # What an update of one block moves the stream by, relative to the base: 1 / m_L, so that the sum over blocks stays.
    assert found.branch * found.vector_rate == pytest.approx(1 / depth)
    # The decay applied, rate * decay, knows no width.
    assert found.hidden_rate * found.hidden_decay == pytest.approx(found.vector_rate)
    assert complete_p(depth, width, alpha=alpha, scale_epsilon=False) == found._replace(block_epsilon=1.0)


@settings(deadline=None, max_examples=20)
@given(ALPHAS, st.booleans())
def test_at_the_base_every_factor_is_exactly_1(alpha, flag):
    assert complete_p(1.0, 1.0, alpha=alpha, scale_epsilon=flag) == Scaling()
    assert complete_p(2.0, 1.0, alpha=alpha, scale_epsilon=flag) != Scaling()


@settings(deadline=None, max_examples=20)
@given(RATIOS, RATIOS, RATIOS, ALPHAS)
def test_scaling_twice_is_scaling_once(first, second, width, alpha):
    """A base of a base: the factors multiply."""
    steps = complete_p(first, width, alpha=alpha), complete_p(second, 1.0, alpha=alpha)
    whole = complete_p(first * second, width, alpha=alpha)
    assert [a * b for a, b in zip(*steps, strict=True)] == pytest.approx(list(whole), rel=1e-9)


@pytest.mark.parametrize(
    ("arguments", "alpha", "message"),
    [
        ((0.0, 1.0), 1.0, r"depth_ratio is 0\.0; .* above 0"),
        ((1.0, -2.0), 1.0, r"width_ratio is -2\.0"),
        ((1.0, 1.0), 1.5, r"alpha is 1\.5"),
        ((1.0, 1.0), -0.5, r"alpha is -0\.5"),
        ((math.inf, 1.0), 1.0, "depth_ratio is inf"),
    ],
)
def test_a_number_outside_the_table_is_refused(arguments, alpha, message):
    with pytest.raises(ValueError, match=message):
        complete_p(*arguments, alpha=alpha)


def test_a_factor_of_1_is_no_product_and_another_keeps_the_dtype():
    x = jnp.arange(3, dtype=jnp.bfloat16)
    assert scaled(x, 1.0) is x
    assert scaled(x, 0.5).dtype == jnp.bfloat16
    assert (scaled(x, 0.5) == x / 2).all()
