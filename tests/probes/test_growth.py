"""The growth laws: each is found in sizes that obey it, with its own number, and refused where there is none."""

import numpy as np
import pytest

from jaxblock.probes.growth import growth_laws

S = np.arange(25.0)
LAWS = {
    "exponential": (np.exp(0.1 + 0.045 * S), 0.045),
    "additive": (2.0 * np.sqrt(1.0 + 0.7 * S), 0.7),
    "power": (np.concatenate([[1.0], 3.0 * S[1:] ** 1.3]), 1.3),
}


@pytest.mark.parametrize("name", LAWS)
def test_a_law_is_found_where_it_holds(name):
    sizes, number = LAWS[name]
    noise = np.exp(0.01 * np.random.default_rng(0).normal(size=(6, 25)))
    best, second, _ = growth_laws(sizes * noise)
    assert best.name == name
    assert second.aicc - best.aicc > 4
    assert best.low < number < best.high
    assert best.residual < 0.015


@pytest.mark.parametrize("name", LAWS)
def test_without_noise_the_number_is_exact_and_one_run_has_no_interval(name):
    sizes, number = LAWS[name]
    best = growth_laws(sizes)[0]
    assert best.name == name
    np.testing.assert_allclose(best.number, number, rtol=1e-3)
    assert (best.low, best.high) == (None, None)


def test_the_unit_of_the_stream_changes_nothing():
    sizes = LAWS["additive"][0] * np.exp(0.01 * np.random.default_rng(1).normal(size=25))
    for one, other in zip(growth_laws(sizes), growth_laws(1e3 * sizes), strict=True):
        np.testing.assert_allclose(one.number, other.number, rtol=1e-4)
        np.testing.assert_allclose(one.aicc, other.aicc, rtol=1e-4)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (np.ones(5), "at least 5 sublayers"),
        (np.ones((2, 3, 9)), "must be"),
        (np.r_[np.ones(8), 0.0], "not a finite number above 0"),
        (np.r_[np.ones(8), np.nan], "not a finite number above 0"),
    ],
)
def test_sizes_without_a_law_are_refused(sizes, words):
    with pytest.raises(ValueError, match=words):
        growth_laws(sizes)


def test_a_stream_that_outgrows_every_additive_law_has_no_number_of_one():
    """r ~ s has a power of 1, and the additive law, of at most 1/2, runs off to where r_0 no longer matters."""
    laws = {law.name: law for law in growth_laws(np.arange(1.0, 33.0))}
    assert np.isnan(laws["additive"].number)
    assert laws["power"].number > 0.8
