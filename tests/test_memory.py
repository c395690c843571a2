"""The server's memory: how much an old update counts, and when it counts no more (DG paper, Eq. 4, 7, 17)."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from fedreuse.server.memory import MemorySettings

unhurried = settings(deadline=None)


def test_the_papers_constants_are_the_defaults() -> None:
    assert (MemorySettings().kind, MemorySettings().max_age, MemorySettings().decay) == ("none", 4, 0.7279635)


def test_the_papers_decay_factors() -> None:
    # 0.7279635^2 = 0.5299309, 0.7279635^3 = 0.3857703; the paper rounds to 0.728, 0.530, 0.386.
    memory = MemorySettings(kind="reuse")
    assert memory.factor(1) == 0.7279635
    assert memory.factor(2) == pytest.approx(0.5299309, abs=5e-8)
    assert memory.factor(3) == pytest.approx(0.3857703, abs=5e-8)
    assert [round(memory.factor(age), 3) for age in (1, 2, 3)] == [0.728, 0.530, 0.386]


def test_an_update_of_this_round_counts_in_full() -> None:
    assert MemorySettings(kind="reuse").factor(0) == 1


def test_an_update_is_usable_below_the_age_limit_only() -> None:
    memory = MemorySettings(kind="reuse")
    assert [memory.usable(age) for age in range(7)] == [True, True, True, True, False, False, False]
    youngest = MemorySettings(kind="reuse", max_age=1)
    assert not youngest.usable(1)


@unhurried
@given(decay=st.floats(0, 1, exclude_min=True), age=st.integers(0, 50))
def test_a_reused_update_never_weighs_more_than_when_it_was_fresh(decay: float, age: int) -> None:
    memory = MemorySettings(kind="reuse", decay=decay)
    assert 0 <= memory.factor(age + 1) <= memory.factor(age) <= 1


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("decay", 0),
        ("decay", -0.5),
        ("decay", 1.001),
        ("decay", float("nan")),
        ("max_age", 0),
        ("max_age", -1),
        ("max_age", 2.5),
        ("kind", "saga"),
        ("rho", 0.7),  # no such key
    ],
)
def test_impossible_settings_are_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        MemorySettings(**{key: value})
    assert [error["loc"] for error in caught.value.errors()] == [(key,)]
    assert key in str(caught.value)
