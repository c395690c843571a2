"""Fairness over clients, by hand; and what a run did and how old its updates were, from its events."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedreuse.server.store import RunError
from fedreuse.sim.chronology import Staleness, staleness, work
from fedreuse.sim.fairness import fairness
from fedreuse.sim.testset import ClientTest


def clients(*accuracies: float) -> list[ClientTest]:
    return [ClientTest(n, 10, accuracy, 1.0) for n, accuracy in enumerate(accuracies)]


def test_fairness_by_hand() -> None:
    """1, 1/2, 0, 1/2: mean 1/2, squares about it 1/4 + 0 + 1/4 + 0 of 4 clients: 1/8; Jain 2^2 / (4 * 3/2)."""
    found = fairness(clients(1.0, 0.5, 0.0, 0.5))
    assert found is not None
    assert (found.clients, found.mean, found.min, found.max) == (4, 0.5, 0.0, 1.0)
    assert (found.variance, found.std) == (0.125, pytest.approx(0.125**0.5))
    assert found.worst_tenth == 0.0
    assert found.jain == pytest.approx(4 / 6)


def test_the_worst_tenth_is_rounded_up_to_whole_clients() -> None:
    accuracies = [n / 20 for n in range(20, 9, -1)]  # eleven clients: 1, 0.95, ..., 0.5
    found = fairness(clients(*accuracies))
    assert found is not None
    assert found.worst_tenth == pytest.approx((0.5 + 0.55) / 2)


def test_clients_with_fewer_than_ten_examples_do_not_count() -> None:
    few = [ClientTest(9, 9, 0.0, 1.0)]
    found = fairness([*clients(0.5, 0.7), *few])
    assert found is not None
    assert (found.clients, found.min) == (2, 0.5)
    assert fairness(few) is None
    assert fairness([]) is None


@pytest.mark.parametrize(
    ("accuracies", "jain"), [((0.3, 0.3, 0.3), 1.0), ((0.0, 0.0, 0.8), 1 / 3), ((0.0, 0.0), None)]
)
def test_jain_is_1_for_equals_and_1_over_n_where_one_has_all(accuracies: Any, jain: float | None) -> None:
    found = fairness(clients(*accuracies))
    assert found is not None
    assert found.jain == (None if jain is None else pytest.approx(jain))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40))
def test_order_between_the_figures(accuracies: list[float]) -> None:
    found = fairness(clients(*accuracies))
    assert found is not None
    slack = 1e-12
    assert found.min - slack <= found.worst_tenth <= found.mean + slack <= found.max + 2 * slack
    assert found.variance <= 0.25 + slack
    if found.jain is not None:
        assert 1 / len(accuracies) - 1e-9 <= found.jain <= 1 + 1e-9


# ---------------------------------------------------------------- events


def write(folder: Path, *events: dict[str, Any], void: tuple[int, ...] = (), rounds: int = 4) -> Path:
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    lines = [f"{n},{'too few' if n in void else ''}" for n in range(1, rounds + 1)]
    (folder / "rounds.csv").write_text("\n".join(["round,void", *lines, ""]))
    return folder


def event(round: int, type: str, **fields: Any) -> dict[str, Any]:
    return {"round": round, "type": type, **fields}


def opening(round: int) -> dict[str, Any]:
    return event(round, "round_opened")


def done(round: int) -> dict[str, Any]:
    return event(round, "committed")


RUN = (
    opening(1),
    event(1, "update", client=0),
    event(1, "update", client=1),
    done(1),
    opening(2),  # broken off, and done again
    event(2, "score", client=0, signature_round=1),
    event(2, "update", client=2),
    opening(2),
    event(2, "score", client=0, signature_round=1),
    event(2, "score", client=2, signature_round=None),  # nothing held, nothing computed
    event(2, "reuse", client=0, age=1),
    event(2, "update", client=2),
    done(2),
    opening(3),  # without effect
    event(3, "update", client=1),
    event(3, "reuse", client=0, age=2),
    done(3),
    opening(4),
    event(
        4, "fault", client=1, bridged=True
    ),  # its update of round 1 stands in, since that of round 3 is void
    event(4, "fault", client=0, bridged=False),
    event(4, "update", client=2),
    done(4),
    opening(5),  # not committed yet
    event(5, "update", client=2),
)


def test_staleness_is_the_age_of_what_was_aggregated(tmp_path: Path) -> None:
    """Fresh: 2 + 1 + 1; reused in round 2 with age 1; bridged in round 4 with age 3: 4 in 6, at most 3."""
    write(tmp_path, *RUN, void=(3,))
    assert staleness(tmp_path) == Staleness(contributions=6, mean=pytest.approx(4 / 6), max=3)


def test_work_is_that_of_committed_rounds(tmp_path: Path) -> None:
    """A training whose round had no effect was work all the same."""
    found = work(write(tmp_path, *RUN, void=(3,)))
    assert found.trained == {0: 1, 1: 2, 2: 2}
    assert found.scored == {0: 1}


def test_a_run_in_which_nothing_was_aggregated_has_no_staleness(tmp_path: Path) -> None:
    assert staleness(write(tmp_path, opening(1), done(1), void=(1,))) is None
    assert staleness(write(tmp_path)) is None


def test_damaged_events_are_named(tmp_path: Path) -> None:
    write(tmp_path, *RUN)
    with (tmp_path / "events.jsonl").open("a") as handle:
        handle.write('{"round": 5')
    with pytest.raises(RunError, match=r"events\.jsonl is damaged"):
        staleness(tmp_path)
    with pytest.raises(RunError, match=r"events\.jsonl is damaged"):
        work(tmp_path)
