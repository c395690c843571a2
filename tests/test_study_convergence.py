"""When a target counts as reached."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedreuse.sim.study.convergence import reached


@pytest.mark.parametrize(
    ("accuracies", "due"),
    [
        ([0.1, 0.5, 0.6, 0.7], 2),
        ([0.5, 0.5, 0.5], 1),  # the target itself counts
        ([0.1, 0.6, 0.4, 0.6, 0.6, 0.6], 4),  # fell back once
        ([0.6, 0.6, 0.4, 0.6, 0.6], None),  # nobody knows whether it would have stayed
        ([0.1, 0.2, 0.3, 0.4], None),
        ([0.9, 0.9], None),
        ([], None),
    ],
)
def test_the_first_round_that_stays(accuracies: list[float], due: int | None) -> None:
    assert reached(list(enumerate(accuracies, 1)), 0.5) == due


def test_rounds_are_those_that_were_evaluated() -> None:
    assert reached([(1, 0.1), (5, 0.6), (10, 0.7), (15, 0.8)], 0.5) == 5


@given(st.lists(st.booleans(), max_size=12))
def test_as_a_pattern_in_a_word(high: list[bool]) -> None:
    word = "".join("x" if one else "." for one in high)
    due = word.find("xxx")
    found = reached([(n, 1.0 if one else 0.0) for n, one in enumerate(high, 1)], 0.5)
    assert found == (None if due < 0 else due + 1)
