"""Client-held state: staged on upload, current once the server confirms that round, void otherwise.

The rules are restated below as a plain dictionary and played against both stores.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from fedreuse.client.held import Held, HeldStore, Tensors

CLIENTS = (0, 1)
RUNS = ("", "run a", "run b")


def signature(value: int) -> Tensors:
    return {"signature": np.array([value, value + 0.5], np.float32)}


@dataclass
class Expected:
    """What one client should hold: rounds with the value that was staged in them."""

    run: str = ""
    current: tuple[int, int] | None = None
    staged: tuple[int, int] | None = None


class HeldRules(RuleBasedStateMachine):
    """Any sequence of steps; at any moment the process may end and another open the same store."""

    folder: Path | None = None

    @initialize()
    def start(self) -> None:
        self.store = HeldStore(self.folder)
        self.expected = {client: Expected() for client in CLIENTS}
        self.value = 0

    @rule(client=st.sampled_from(CLIENTS), run=st.sampled_from(RUNS), round=st.integers(0, 3))
    def stage(self, client: int, run: str, round: int) -> None:
        self.value += 1
        self.store.stage(client, run, round, signature(self.value))
        one = self.expected[client]
        if one.run != run:
            one = self.expected[client] = Expected(run)
        one.staged = round, self.value

    @rule(
        client=st.sampled_from(CLIENTS),
        run=st.sampled_from(RUNS),
        confirmed=st.one_of(st.none(), st.integers(0, 3)),
        pending=st.one_of(st.none(), st.integers(0, 3)),
    )
    def settle(self, client: int, run: str, confirmed: int | None, pending: int | None = None) -> None:
        self.store.settle(client, run, confirmed, pending)
        one = self.expected[client]
        after = Expected(run)
        if one.run == run and one.staged is not None and one.staged[0] == pending:
            after.staged = one.staged  # its round is still open
            if one.current is not None and one.current[0] == confirmed:
                after.current = one.current
        elif one.run == run and confirmed is not None:
            for version in (one.staged, one.current):  # the newer one first
                if version is not None and version[0] == confirmed:
                    after.current = version
                    break
        self.expected[client] = after

    @rule(client=st.sampled_from(CLIENTS), accepted=st.booleans())
    def end_of_round(self, client: int, accepted: bool) -> None:
        """What a client does that stayed connected: the staged round counted, or the current one stays."""
        one = self.expected[client]
        staged = one.staged
        if staged is None:
            return
        current = one.current and one.current[0]
        self.settle(client, one.run, staged[0] if accepted else current)

    @rule(client=st.sampled_from(CLIENTS))
    def forget(self, client: int) -> None:
        self.store.forget(client)
        self.expected[client] = Expected()

    @rule()
    def reopen(self) -> None:
        if self.folder is not None:
            self.store.close()
            self.store = HeldStore(self.folder)

    @invariant()
    def holds_what_the_rules_say(self) -> None:
        for client, one in self.expected.items():
            held = self.store.versions(client)
            rounds = (one.current and one.current[0], one.staged and one.staged[0])
            assert (held.run, held.current, held.staged) == (one.run, *rounds)
            tensors = self.store.current(client)
            if one.current is None:
                assert tensors is None
            else:
                assert tensors is not None
                assert tensors.keys() == {"signature"}
                assert tensors["signature"].tobytes() == signature(one.current[1])["signature"].tobytes()

    def teardown(self) -> None:
        self.store.close()


class HeldRulesOnDisk(HeldRules):
    @initialize()
    def start(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        super().start()

    def teardown(self) -> None:
        super().teardown()
        assert self.folder is not None
        shutil.rmtree(self.folder)


TestInMemory = HeldRules.TestCase
TestInMemory.settings = settings(deadline=None, max_examples=60, stateful_step_count=25)
TestOnDisk = HeldRulesOnDisk.TestCase
TestOnDisk.settings = settings(deadline=None, max_examples=15, stateful_step_count=25)


# The same rules one by one, in words


@pytest.fixture(params=["memory", "disk"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[HeldStore]:
    made = HeldStore(None if request.param == "memory" else tmp_path / "held")
    yield made
    made.close()


def test_a_new_client_holds_nothing(store: HeldStore) -> None:
    assert store.versions(3) == Held(run="", current=None, staged=None)
    assert store.current(3) is None


def test_staged_state_is_not_used_before_it_is_confirmed(store: HeldStore) -> None:
    store.stage(0, "run", 4, signature(1))
    assert (store.versions(0).current, store.versions(0).staged) == (None, 4)
    assert store.current(0) is None
    store.settle(0, "run", 4)
    assert (store.versions(0).current, store.versions(0).staged) == (4, None)
    assert store.current(0)["signature"].tolist() == [1.0, 1.5]


def test_an_update_that_did_not_count_leaves_the_current_state(store: HeldStore) -> None:
    store.stage(0, "run", 4, signature(1))
    store.settle(0, "run", 4)
    store.stage(0, "run", 6, signature(2))
    store.settle(0, "run", 4)
    assert (store.versions(0).current, store.versions(0).staged) == (4, None)
    assert store.current(0)["signature"].tolist() == [1.0, 1.5]


@pytest.mark.parametrize("confirmed", [None, 5, 7])
def test_a_mismatch_voids_everything(store: HeldStore, confirmed: int | None) -> None:
    store.stage(0, "run", 4, signature(1))
    store.settle(0, "run", 4)
    store.stage(0, "run", 6, signature(2))
    store.settle(0, "run", confirmed)
    assert store.versions(0) == Held("run")
    assert store.current(0) is None


@pytest.mark.parametrize(("confirmed", "current"), [(4, 4), (3, None), (None, None)])
def test_what_is_staged_for_the_open_round_waits_for_its_end(
    store: HeldStore, confirmed: int | None, current: int | None
) -> None:
    # A client that reconnects after its upload, before the round is closed.
    store.stage(0, "run", 4, signature(1))
    store.settle(0, "run", 4)
    store.stage(0, "run", 6, signature(2))
    store.settle(0, "run", confirmed, pending=6)
    assert (store.versions(0).current, store.versions(0).staged) == (current, 6)
    store.settle(0, "run", 6)
    assert (store.versions(0).current, store.versions(0).staged) == (6, None)
    assert store.current(0)["signature"].tolist() == [2.0, 2.5]


def test_another_run_voids_everything_even_if_it_confirms_the_same_round(store: HeldStore) -> None:
    store.stage(0, "first", 4, signature(1))
    store.settle(0, "first", 4)
    store.settle(0, "second", 4)
    assert store.versions(0) == Held("second")
    assert store.current(0) is None


def test_clients_do_not_see_each_other(store: HeldStore) -> None:
    for client in (1, 11):
        store.stage(client, "run", client, signature(client))
        store.settle(client, "run", client)
    store.forget(1)
    assert store.versions(1) == Held()
    assert store.current(11)["signature"].tolist() == [11.0, 11.5]


# Killed at any moment

_PRELUDE = """
import itertools, sys
from pathlib import Path
import numpy as np
from fedreuse.client.held import HeldStore

def signature(value):
    return {"signature": np.array([value, value + 0.5], np.float32)}

store = HeldStore(Path(sys.argv[1]))
"""

_STAGE_AND_WAIT = """
store.stage(0, "run", 1, signature(1))
store.settle(0, "run", 1)
store.stage(0, "run", 2, signature(2))
print("ready", flush=True)
sys.stdin.read()
"""

_WORK_FOR_EVER = """
first = (store.versions(0).current or 0) + 1
for round in itertools.count(first):
    store.stage(0, "run", round, signature(round))
    store.settle(0, "run", round if round % 3 else store.versions(0).current)
    if round == first:
        print("ready", flush=True)
"""


def child(program: str, folder: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", _PRELUDE + program, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


@pytest.mark.parametrize(
    ("confirmed", "value"), [(2, 2), (1, 1)], ids=["the update counted", "the update was lost"]
)
def test_killed_between_upload_and_confirmation(tmp_path: Path, confirmed: int, value: int) -> None:
    kill(child(_STAGE_AND_WAIT, tmp_path))
    store = HeldStore(tmp_path)
    assert store.versions(0).run == "run"
    assert (store.versions(0).current, store.versions(0).staged) == (1, 2)
    assert store.current(0)["signature"].tolist() == [1.0, 1.5]
    store.settle(0, "run", confirmed)
    assert (store.versions(0).current, store.versions(0).staged) == (confirmed, None)
    assert store.current(0)["signature"].tolist() == [value, value + 0.5]
    store.close()


def test_killed_in_the_middle_of_writing(tmp_path: Path) -> None:
    newest = -1
    for attempt in range(3):
        process = child(_WORK_FOR_EVER, tmp_path)
        time.sleep(0.05 + 0.03 * attempt)
        kill(process)
        store = HeldStore(tmp_path)
        held, tensors = store.versions(0), store.current(0)
        assert held.run == "run"
        assert held.current is not None
        assert held.current >= newest  # nothing that was confirmed is ever lost
        assert held.current % 3  # every third update did not count
        assert held.staged in (None, held.current + 1, held.current + 2)
        assert tensors["signature"].tolist() == [held.current, held.current + 0.5]
        newest = held.current
        store.close()
