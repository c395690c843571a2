"""Paired statistics against tables, textbook examples and second implementations."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import ttest_1samp
from statsmodels.stats.weightstats import ttost_paired

from fedreuse.sim.study.statistics import half_width, holm, paired, seeds_needed, spread

# Differences -0.4, 0.1, -0.3, 0.2, -0.1: mean -0.1, squares about it 0.09 + 0.04 + 0.04 + 0.09 + 0 = 0.26,
# so sd = sqrt(0.26 / 4) = 0.254951 and standard error sqrt(0.065 / 5) = 0.1140175.
CONTROL = [90.0, 91.0, 92.0, 93.0, 94.0]
METHOD = [89.6, 91.1, 91.7, 93.2, 93.9]
ERROR = 0.1140175


def test_mean_and_sample_standard_deviation() -> None:
    assert spread([2.0, 4.0, 9.0]) == spread([9.0, 2.0, 4.0])
    found = spread([2.0, 4.0, 9.0])  # squares about 5: 9 + 1 + 16 = 26, of n - 1 = 2: 13
    assert (found.n, found.mean, found.sd) == (3, 5.0, pytest.approx(math.sqrt(13)))
    assert spread([7.0]).sd is None
    with pytest.raises(ValueError, match="no values"):
        spread([])


def test_differences_are_paired_and_their_interval_is_students() -> None:
    """t(0.975, 4) = 2.776445 and t(0.95, 4) = 2.131847, from a table."""
    found = paired(METHOD, CONTROL, margin=1.0, confidence=0.95)
    assert found.differences == pytest.approx((-0.4, 0.1, -0.3, 0.2, -0.1))
    assert (found.mean, found.sd) == (pytest.approx(-0.1), pytest.approx(0.254951, abs=1e-6))
    assert found.interval == pytest.approx((-0.1 - 2.776445 * ERROR, -0.1 + 2.776445 * ERROR), abs=1e-6)
    assert found.inner == pytest.approx((-0.1 - 2.131847 * ERROR, -0.1 + 2.131847 * ERROR), abs=1e-6)


def test_equivalence_is_the_larger_of_two_one_sided_tests() -> None:
    found = paired(METHOD, CONTROL, margin=0.4, confidence=0.95)
    # The nearer bound decides: t = (-0.1 + 0.4) / 0.1140175 = 2.631176 with 4 degrees of freedom. For 4 of them
    # P(T > t) = 1/2 - s (3 - s^2) / 4 with s = t / sqrt(4 + t^2) (the integral of the density).
    t = 0.3 / math.sqrt(0.013)
    s = t / math.sqrt(4 + t * t)
    by_hand = 0.5 - s * (3 - s * s) / 4
    assert found.p == pytest.approx(by_hand)
    differences = [m - c for m, c in zip(METHOD, CONTROL, strict=True)]
    above = ttest_1samp(differences, -0.4, alternative="greater").pvalue
    below = ttest_1samp(differences, 0.4, alternative="less").pvalue
    assert found.p == pytest.approx(max(above, below))


@given(
    st.lists(st.floats(-3, 3), min_size=3, max_size=12),
    st.floats(0.1, 3),
    st.sampled_from([0.9, 0.95, 0.99]),
)
def test_equivalence_holds_exactly_where_the_inner_interval_is_inside_the_margin(
    shifts: list[float], margin: float, confidence: float
) -> None:
    if max(shifts) - min(shifts) < 1e-3:
        return
    control = [80.0] * len(shifts)
    method = [80 + shift for shift in shifts]
    found = paired(method, control, margin, confidence)
    assert found.inner is not None
    assert found.p is not None
    low, high = found.inner
    slack = min(abs(low + margin), abs(high - margin))
    if slack > 1e-9:
        assert (found.p < 1 - confidence) == (-margin < low and high < margin)
    assert found.p == pytest.approx(ttost_paired(np.array(method), np.array(control), -margin, margin)[0])


def test_one_seed_has_a_difference_and_nothing_more() -> None:
    found = paired([90.0], [91.0], margin=1.0, confidence=0.95)
    assert (found.mean, found.sd, found.interval, found.inner, found.p) == (-1.0, None, None, None, None)


@pytest.mark.parametrize(("shift", "p"), [(0.5, 0.0), (-0.5, 0.0), (1.0, 1.0), (2.0, 1.0)])
def test_differences_without_spread_are_compared_as_they_are(shift: float, p: float) -> None:
    found = paired([80 + shift] * 3, [80.0] * 3, margin=1.0, confidence=0.95)
    assert (found.interval, found.p) == ((shift, shift), p)


def test_runs_that_do_not_pair_are_refused() -> None:
    with pytest.raises(ValueError, match="shape"):
        paired([1.0, 2.0], [1.0, 2.0, 3.0], margin=1.0, confidence=0.95)


def test_holm_multiplies_in_rising_order_and_never_lets_a_value_fall() -> None:
    """0.01 x 4, 0.005 x 5 in front; 0.03 x 2 is below 0.04 x ... and so on; worked out by Holm's rule:

    sorted 0.005, 0.01, 0.03, 0.04, 0.3 -> 0.025, 0.04, 0.09, max(0.09, 0.08), 0.3.
    """
    assert holm([0.01, 0.04, 0.03, 0.005, 0.3]) == pytest.approx([0.04, 0.09, 0.09, 0.025, 0.3])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([0.04]) == [pytest.approx(0.04)]
    assert holm([]) == []


def test_half_widths_are_those_of_the_protocol() -> None:
    """2.776 / sqrt(5) and 2.262 / sqrt(10)."""
    assert half_width(5, 0.95) == pytest.approx(1.2416, abs=1e-4)
    assert half_width(10, 0.95) == pytest.approx(0.7154, abs=1e-4)


def test_seeds_needed_is_the_first_number_whose_interval_fits() -> None:
    """At 90 %, in standard deviations: n = 3 is 2.920 / 1.732 = 1.686, n = 4 is 2.353 / 2 = 1.177, n = 5 0.953."""
    assert seeds_needed(sd=1.0, margin=1.0, confidence=0.95) == 5
    assert seeds_needed(sd=0.8, margin=1.0, confidence=0.95) == 4
    assert seeds_needed(sd=0.5, margin=1.0, confidence=0.95) == 3
    assert seeds_needed(sd=100.0, margin=1.0, confidence=0.95) is None
