"""The gate's threshold, quota and promotion order (DG paper, Eq. 3 and the quota rule)."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from fedreuse.server.gate import GateSettings, promotion_order

unhurried = settings(deadline=None)


def test_the_papers_constants_are_the_defaults() -> None:
    gate = GateSettings()
    assert (gate.tau_start, gate.tau_min, gate.gamma) == (0.9116988, 0.8134931, 0.01)
    assert gate.quota == 0.3
    assert gate.kind == "none"
    assert gate.score_all is False


def test_the_threshold_decays_to_its_minimum() -> None:
    # tau_0 e^(-0.01 t) with e^-0.01 = 0.99004983, e^-0.05 = 0.95122942, e^-0.11 = 0.89583414:
    #   t = 1:  0.9116988 * 0.99004983 = 0.9026272
    #   t = 5:  0.9116988 * 0.95122942 = 0.8672347
    #   t = 11: 0.9116988 * 0.89583414 = 0.8167309, still above the minimum
    #   t = 12: 0.9116988 * 0.88692044 = 0.8086043, below it
    gate = GateSettings()
    assert gate.threshold(0) == 0.9116988
    assert gate.threshold(1) == pytest.approx(0.9026272, abs=5e-8)
    assert gate.threshold(5) == pytest.approx(0.8672347, abs=5e-8)
    assert gate.threshold(11) == pytest.approx(0.8167309, abs=5e-8)
    assert {gate.threshold(t) for t in range(12, 1000)} == {0.8134931}


def test_the_threshold_falls_strictly_until_it_is_constant() -> None:
    falling = [GateSettings().threshold(t) for t in range(13)]
    assert falling == sorted(set(falling), reverse=True)


def test_a_minimum_above_the_start_wins_from_the_first_round() -> None:
    gate = GateSettings(tau_start=0.5, tau_min=0.7)
    assert [gate.threshold(t) for t in (0, 1, 100)] == [0.7, 0.7, 0.7]


def test_without_decay_the_threshold_stays_at_its_start() -> None:
    gate = GateSettings(tau_start=0.9, tau_min=0.1, gamma=0)
    assert [gate.threshold(t) for t in (0, 50, 10_000)] == [0.9, 0.9, 0.9]


# ---------------------------------------------------------------- quota


@pytest.mark.parametrize(
    ("quota", "selected", "fresh"),
    [
        (0.3, 10, 3),
        (0.1, 30, 3),
        (0.3, 11, 4),  # 3.3
        (0.3, 1, 1),  # 0.3
        (0.3, 7, 3),  # 2.1
        (0.28, 25, 7),  # 0.28 * 25 is 7.000000000000001 in binary
        (0.14, 50, 7),  # so is 0.14 * 50
        (0.0, 10, 0),
        (1.0, 10, 10),
        (0.001, 10, 1),
    ],
)
def test_the_quota_is_rounded_up(quota: float, selected: int, fresh: int) -> None:
    assert GateSettings(quota=quota).minimum_fresh(selected) == fresh


@unhurried
@given(percent=st.integers(0, 100), selected=st.integers(1, 2000))
def test_a_quota_in_percent_is_rounded_up_exactly(percent: int, selected: int) -> None:
    # ceil(a / b) in integers is -(-a // b).
    assert GateSettings(quota=percent / 100).minimum_fresh(selected) == -(-percent * selected // 100)


# ---------------------------------------------------------------- promotion


def test_the_largest_discrepancy_is_promoted_first() -> None:
    assert promotion_order([(1, 0.2, 5), (2, 0.7, 5), (3, 0.4, 5)]) == [2, 3, 1]


def test_equal_discrepancies_promote_the_oldest_cache() -> None:
    assert promotion_order([(1, 0.5, 7), (2, 0.5, 5), (3, 0.5, 6)]) == [2, 3, 1]


def test_equal_caches_promote_the_lower_index() -> None:
    assert promotion_order([(9, 0.5, 5), (4, 0.5, 5), (6, 0.5, 5)]) == [4, 6, 9]


def test_the_rules_of_promotion_apply_in_this_order() -> None:
    # 8 has the largest D although its cache is the newest; among D = 0.5 the caches decide, then the index.
    candidates = [(1, 0.5, 6), (3, 0.5, 5), (2, 0.5, 5), (8, 0.6, 9), (0, 0.1, 1)]
    assert promotion_order(candidates) == [8, 2, 3, 1, 0]


@unhurried
@given(
    candidates=st.lists(
        st.tuples(st.integers(0, 20), st.sampled_from([0.0, 0.25, 0.5]), st.integers(0, 3)),
        unique_by=lambda candidate: candidate[0],
    ),
    data=st.data(),
)
def test_promotion_does_not_depend_on_the_order_of_arrival(
    candidates: list[tuple[int, float, int]], data: st.DataObject
) -> None:
    shuffled = data.draw(st.permutations(candidates))
    assert promotion_order(shuffled) == promotion_order(candidates)
    assert sorted(promotion_order(candidates)) == sorted(client for client, _, _ in candidates)


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tau_start", -0.01),
        ("tau_start", 2.01),
        ("tau_start", float("nan")),
        ("tau_min", -0.01),
        ("tau_min", 2.01),
        ("gamma", -0.001),
        ("gamma", "fast"),
        ("quota", -0.1),
        ("quota", 1.1),
        ("kind", "lazy"),
        ("score_all", "some"),
        ("tau", 0.9),  # no such key
    ],
)
def test_impossible_settings_are_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        GateSettings(**{key: value})
    assert [error["loc"] for error in caught.value.errors()] == [(key,)]
    assert key in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [("tau_start", 0), ("tau_start", 2), ("tau_min", 0), ("tau_min", 2), ("quota", 0), ("quota", 1)],
)
def test_the_ends_of_the_ranges_are_allowed(key: str, value: float) -> None:
    assert getattr(GateSettings(**{key: value}), key) == value
