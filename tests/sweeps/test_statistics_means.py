"""Means, proportions and paired comparisons: against scipy's own, by coverage, and by what they refuse."""

import numpy as np
import pytest
from scipy import stats

from jaxblock.sweeps.statistics import (
    RULES,
    Equivalence,
    Estimate,
    Paired,
    Refusal,
    detectable_effect,
    equivalence,
    holm,
    mean_interval,
    paired_difference,
    proportion_interval,
)

DRAWS = 200
LEAST = int(stats.binom.ppf(1e-5, DRAWS, 0.95))
"""Fewer hits of 200 than this happen once in 100,000 to an interval that covers 95 %."""


def bounds(found: Estimate | Refusal) -> tuple[float, float]:
    assert isinstance(found, Estimate)
    return found.low, found.high


@pytest.mark.parametrize(
    ("n", "words"), [(2, "95 % t, small n"), (4, "95 % t, small n"), (5, "95 % t"), (30, "95 % t")]
)
def test_the_mean_has_students_interval_and_few_values_are_flagged(n, words):
    x_S = np.random.default_rng(n).normal(2.0, 0.5, n)
    found = mean_interval(x_S)
    reference = stats.ttest_1samp(x_S, 0.0).confidence_interval(0.95)
    assert bounds(found) == pytest.approx((reference.low, reference.high), rel=1e-12)
    assert (found.n, found.interval) == (n, words)
    normal = 1.96 * x_S.std(ddof=1) / n**0.5  # control: the interval of a known variance is shorter
    assert found.high - found.value > normal


def test_one_value_has_no_interval_and_none_has_no_mean():
    assert mean_interval([1.0]).rule == "one_value"
    assert mean_interval([]).rule == "no_values"
    assert isinstance(mean_interval([1.0, 2.0]), Estimate)
    with pytest.raises(ValueError, match="leave failed runs out"):
        mean_interval([1.0, float("nan")])


def test_an_estimate_is_finite_and_a_refusal_has_a_rule_of_the_table():
    with pytest.raises(ValueError, match="finite"):
        Estimate(value=float("nan"), low=0.0, high=1.0, n=2, interval="95 % t")
    with pytest.raises(ValueError, match="finite"):
        Estimate(value=0.0, low=0.0, high=float("inf"), n=2, interval="95 % t")
    with pytest.raises(ValueError, match="low <= high"):
        Estimate(value=0.0, low=1.0, high=0.0, n=2, interval="95 % t")
    with pytest.raises(ValueError, match="none of"):
        Refusal(rule="because", sentence="it is so")
    assert all(RULES.values())


@pytest.mark.parametrize(("count", "total"), [(0, 5), (1, 7), (3, 6), (12, 12)])
def test_a_proportion_has_the_exact_interval(count, total):
    reference = stats.binomtest(count, total).proportion_ci(0.95, method="exact")
    assert bounds(proportion_interval(count, total)) == pytest.approx(
        (reference.low, reference.high), abs=1e-12
    )


def test_clopper_pearson_covers_at_least_95_percent_for_every_truth_and_the_normal_interval_does_not():
    total = 8
    k_K = np.arange(total + 1)
    found = [bounds(proportion_interval(int(k), total)) for k in k_K]
    share = k_K / total
    half = 1.96 * np.sqrt(share * (1 - share) / total)
    coverage, normal = [], []
    for truth in np.linspace(0.02, 0.98, 49):
        weight_K = stats.binom.pmf(k_K, total, truth)
        coverage.append(sum(weight_K[k] for k in k_K if found[k][0] <= truth <= found[k][1]))
        normal.append(sum(weight_K[k] for k in k_K if abs(share[k] - truth) <= half[k]))
    assert min(coverage) >= 0.95
    assert min(normal) < 0.6
    assert proportion_interval(0, 0).rule == "no_values"


def test_the_paired_difference_is_that_of_the_paired_t_test_and_failed_seeds_are_counted():
    draw = np.random.default_rng(3)
    offset_S = draw.normal(0, 1, 6)  # what pairing takes away
    first_S, second_S = offset_S + draw.normal(0.3, 0.05, 6), offset_S + draw.normal(0, 0.05, 6)
    reference = stats.ttest_rel(first_S, second_S)
    with_failures = paired_difference(np.append(first_S, [np.nan, 1.0]), np.append(second_S, [1.0, np.nan]))
    assert isinstance(with_failures, Paired)
    assert (with_failures.pairs, with_failures.excluded) == (6, 2)
    assert with_failures.p == pytest.approx(reference.pvalue, rel=1e-9)
    interval = reference.confidence_interval(0.95)
    assert bounds(with_failures.difference) == pytest.approx((interval.low, interval.high), rel=1e-9)
    assert stats.ttest_ind(first_S, second_S).pvalue > 0.3  # control: unpaired, nothing is found


def test_a_paired_difference_is_refused_with_one_pair_and_without_spread():
    one = paired_difference(np.array([1.0, np.nan, 2.0]), np.array([np.nan, 1.0, 1.0]))
    assert isinstance(one, Refusal)
    assert one.rule == "few_pairs"
    same = paired_difference(np.array([1.0, 2.0, 3.0]), np.array([1.0, 2.0, 3.0]))
    assert isinstance(same, Refusal)
    assert same.rule == "no_spread"
    assert isinstance(paired_difference(np.array([1.0, 2.0, 3.5]), np.array([1.0, 2.0, 3.0])), Paired)
    with pytest.raises(ValueError, match="one length"):
        paired_difference(np.zeros(2), np.zeros(3))


def test_holms_adjustment_is_that_of_his_example_in_any_order():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx((0.03, 0.06, 0.06, 0.02))
    assert holm([0.005, 0.01, 0.03, 0.04]) == pytest.approx((0.02, 0.03, 0.06, 0.06))
    assert holm([0.6, 0.5]) == pytest.approx((1.0, 1.0))
    assert holm([]) == ()
    with pytest.raises(ValueError, match="between 0 and 1"):
        holm([1.5])


def test_holm_keeps_the_family_error_and_no_adjustment_does_not():
    p_DC = np.random.default_rng(5).uniform(size=(400, 6))
    adjusted = sum(min(holm(p_C)) < 0.05 for p_C in p_DC)
    raw = sum(min(p_C) < 0.05 for p_C in p_DC)
    assert adjusted <= stats.binom.ppf(1 - 1e-5, 400, 0.05)
    assert raw > 60


def test_the_detectable_effect_is_found_in_80_percent_of_experiments():
    n, spread, experiments = 4, 0.02, 4000
    effect = detectable_effect(spread, n)
    d_ES = np.random.default_rng(7).normal(effect, spread, (experiments, n))
    found = int((stats.ttest_1samp(d_ES, 0.0, axis=1).pvalue < 0.05).sum())
    assert abs(found / experiments - 0.8) < 4 * (0.16 / experiments) ** 0.5
    # control: the formula for a known variance promises too much with four pairs
    assert effect > 1.3 * 2.8 * spread / n**0.5
    assert detectable_effect(1.0, 10_000) == pytest.approx(2.8 / 100, rel=2e-3)
    with pytest.raises(ValueError, match="n >= 2"):
        detectable_effect(1.0, 1)


def test_equivalence_needs_precision_and_no_significance_is_not_enough():
    draw = np.random.default_rng(11)
    base_S = draw.normal(size=6)
    precise = equivalence(base_S + draw.normal(0, 0.002, 6), base_S, margin=0.01)
    assert isinstance(precise, Equivalence)
    assert precise.equivalent
    assert abs(precise.interval.low) < 0.01 > abs(precise.interval.high)
    noisy_S = base_S + draw.normal(0, 0.02, 6)
    noisy = equivalence(noisy_S, base_S, margin=0.01)
    assert isinstance(noisy, Equivalence)
    assert stats.ttest_rel(noisy_S, base_S).pvalue > 0.05
    assert not noisy.equivalent
    refused = equivalence(base_S, base_S, margin=0.01)
    assert isinstance(refused, Refusal)
    assert refused.rule == "no_spread"


def test_equivalence_is_wrong_in_at_most_5_percent_where_the_difference_is_the_margin():
    draw = np.random.default_rng(13)
    wrong = 0
    for _ in range(DRAWS):
        found = equivalence(draw.normal(0.01, 0.004, 5), np.zeros(5), margin=0.01)
        assert isinstance(found, Equivalence)
        wrong += found.equivalent
    assert 0 < wrong <= stats.binom.ppf(1 - 1e-5, DRAWS, 0.05)


def test_students_interval_covers_the_mean():
    draw = np.random.default_rng(17)
    hits = sum(not mean_interval(draw.normal(1.0, 0.3, 3)).excludes(1.0) for _ in range(DRAWS))
    assert hits >= LEAST


def test_the_interval_for_several_comparisons_leaves_0_out_exactly_where_p_times_their_number_is_below_5_percent():
    draw = np.random.default_rng(19)
    excluded, plain = 0, 0
    for misfit in (0.0, 0.01, 0.04):
        for _ in range(40):
            first_S, second_S = draw.normal(0.06, 0.02, 4), draw.normal(0.0, 0.02, 4)
            found = paired_difference(first_S, second_S, comparisons=6, misfit=misfit)
            assert isinstance(found, Paired)
            assert found.difference.excludes(0.0) == (6 * found.p < 0.05)
            assert found.detectable > found.difference.high - found.difference.value
            excluded += found.difference.excludes(0.0)
            plain += not paired_difference(first_S, second_S).difference.excludes(0.0)
    assert 10 < excluded < 120 - plain  # both sides of the equivalence occur, and adjusting costs something
    assert "Bonferroni for 6 comparisons" in found.difference.interval
    assert "widened by the misfits" in found.difference.interval


def test_a_misfit_widens_a_difference_by_itself_and_a_larger_one_than_the_difference_leaves_nothing():
    first_S, second_S = np.array([1.00, 1.02, 1.01, 1.03]), np.array([0.90, 0.93, 0.90, 0.92])
    plain, widened = paired_difference(first_S, second_S), paired_difference(first_S, second_S, misfit=0.03)
    assert isinstance(plain, Paired)
    assert isinstance(widened, Paired)
    assert widened.difference.low == pytest.approx(plain.difference.low - 0.03)
    assert widened.detectable == pytest.approx(plain.detectable + 0.03)
    assert plain.p < widened.p
    assert paired_difference(first_S, second_S, misfit=0.2).p == 1.0
    with pytest.raises(ValueError, match="misfit >= 0"):
        paired_difference(first_S, second_S, misfit=-0.1)


def test_intervals_of_several_comparisons_hold_at_once_and_single_ones_do_not():
    d_DCS = np.random.default_rng(23).normal(0, 0.01, (DRAWS, 5, 4))
    missed = {1: 0, 5: 0}
    for comparisons in missed:
        t = stats.t.isf(0.025 / comparisons, 3)
        bounds_DC = t * d_DCS.std(axis=2, ddof=1) / 2
        missed[comparisons] = int((np.abs(d_DCS.mean(axis=2)) > bounds_DC).any(axis=1).sum())
        found = paired_difference(d_DCS[0, 0], np.zeros(4), comparisons=comparisons)
        assert isinstance(found, Paired)
        assert found.difference.high - found.difference.value == pytest.approx(bounds_DC[0, 0])
    assert missed[5] <= DRAWS - LEAST < missed[1]


def test_widening_by_nothing_changes_nothing_and_by_something_says_so():
    one = Estimate(value=1.0, low=0.5, high=1.5, n=3, interval="95 % t")
    assert one.widened(0.0, "the misfit") is one
    wider = one.widened(0.25, "the misfit")
    assert (wider.low, wider.high, wider.interval) == (0.25, 1.75, "95 % t, widened by the misfit")
    with pytest.raises(ValueError, match="0 or more"):
        one.widened(-0.1, "the misfit")
