"""The run folder: what was committed is there, all of it and nothing else, whatever was killed when."""

import csv
import errno
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest

from fedreuse.proto import federation_pb2 as pb
from fedreuse.proto.codec import Block, Payload
from fedreuse.server import disk
from fedreuse.server.memory import CachedUpdate
from fedreuse.server.store import RunError, RunState, RunStore, read_weights

HEADERS = {"rounds.csv": ("round", "fresh"), "bytes.csv": ("round", "client", "kind")}


def cached(round: int, *numbers: float) -> CachedUpdate:
    """A dense block of float32 numbers and a bitmap block that keeps the first."""
    dense = np.array(numbers, "<f4").tobytes()
    bitmap = b"\x01" + np.array(numbers[:1], "<f4").tobytes()
    blocks = (
        Block(0, pb.DENSE, len(numbers), len(dense)),
        Block(3, pb.BITMAP, 1, len(bitmap)),
    )
    return CachedUpdate(round, Payload(blocks, dense + bitmap))


def fresh_state() -> RunState:
    return RunState("00c0ffee00c0ffee", (1 << 64) - 3, 0, np.arange(256, dtype=np.uint8))


def started(folder: Path) -> tuple[RunStore, RunState]:
    run, state = RunStore(folder), fresh_state()
    run.initialise(state, HEADERS)
    return run, state


def play_round(run: RunStore, state: RunState) -> None:
    """One more committed round with a row, two byte rows and an event."""
    state.committed += 1
    state.flat = np.full(256, state.committed, np.uint8)
    n = state.committed
    run.commit(
        state,
        rows={"rounds.csv": [[n, 3]], "bytes.csv": [[n, 0, "model"], [n, 1, "model"]]},
        events=[{"type": "committed", "round": n}],
    )


def same(one: RunState | None, other: RunState) -> bool:
    """For states without clients; the tables of `other` may be closed."""
    return (
        one is not None
        and one.flat.dtype == np.uint8
        and one.flat.tobytes() == other.flat.tobytes()
        and (one.run, one.schema_hash, one.committed) == (other.run, other.schema_hash, other.committed)
        and (one.examples, one.caches, one.holdings, one.notes) == ({}, {}, {}, other.notes)
    )


def table(path: Path) -> list[list[str]]:
    with path.open(newline="") as handle:
        return list(csv.reader(handle))


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def texts(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in ("rounds.csv", "bytes.csv", "events.jsonl")}


# ---------------------------------------------------------------- round trip


def test_a_new_folder_has_no_state(tmp_path: Path) -> None:
    with RunStore(tmp_path / "deep" / "run") as run:
        assert run.load() is None


def test_a_fresh_run_has_headers_and_its_initial_state(tmp_path: Path) -> None:
    run, state = started(tmp_path)
    assert same(run.load(), state)
    run.close()
    assert texts(tmp_path) == {
        "rounds.csv": b"round,fresh\n",
        "bytes.csv": b"round,client,kind\n",
        "events.jsonl": b"",
    }


def test_everything_comes_back(tmp_path: Path) -> None:
    run, state = started(tmp_path)
    state.committed = 7
    state.flat = np.frombuffer(os.urandom(5000), np.uint8).copy()
    examples = {0: 1, 3: 200, 999_999_999: (1 << 64) - 1}
    caches = {0: cached(6, 1.5, -2.0), 999_999_999: cached(2, 0.25), 12: cached(0, 3.0, 4.0, 5.0)}
    state.examples.update(examples)
    state.caches.update(caches)
    state.holdings.update({12: 7, 3: 0})
    state.notes = {"best": 0.75, "best_round": 5, "stopped_early": False, "list": [1, None, "ä"]}
    run.commit(state)
    run.close()
    with RunStore(tmp_path) as again:
        loaded = again.load()
        assert loaded is not None
        assert (loaded.examples, loaded.caches, loaded.holdings) == (examples, caches, {12: 7, 3: 0})
        assert (loaded.run, loaded.schema_hash, loaded.committed, loaded.notes, loaded.flat.tobytes()) == (
            *(state.run, state.schema_hash, 7, state.notes, state.flat.tobytes()),
        )
        # The loaded weights are the caller's own: writing to them does not reach the store.
        loaded.flat[:] = 0
        once_more = again.load()
        assert once_more is not None
        assert once_more.flat.tobytes() == state.flat.tobytes()


def test_rows_and_events_are_appended(tmp_path: Path) -> None:
    run, state = started(tmp_path)
    run.commit(
        state,
        rows={"rounds.csv": [[1, None], [2, 'a "quoted", text']], "bytes.csv": []},
        events=[{"type": "fault", "detail": "Zeile\neins ä"}, {"type": "committed"}],
    )
    run.close()
    assert table(tmp_path / "rounds.csv") == [["round", "fresh"], ["1", ""], ["2", 'a "quoted", text']]
    assert table(tmp_path / "bytes.csv") == [["round", "client", "kind"]]
    assert events(tmp_path) == [{"type": "fault", "detail": "Zeile\neins ä"}, {"type": "committed"}]


def test_committed_rows_are_readable_while_the_run_is_open(tmp_path: Path) -> None:
    run, state = started(tmp_path)
    play_round(run, state)
    assert table(tmp_path / "rounds.csv") == [["round", "fresh"], ["1", "3"]]
    assert events(tmp_path) == [{"type": "committed", "round": 1}]
    run.close()


def test_reopening_and_going_on_appends_to_the_same_tables(tmp_path: Path) -> None:
    run, state = started(tmp_path)
    play_round(run, state)
    run.close()
    for _ in range(2):
        with RunStore(tmp_path) as again:
            loaded = again.load()
            assert loaded is not None
            play_round(again, loaded)
    assert table(tmp_path / "rounds.csv") == [["round", "fresh"], ["1", "3"], ["2", "3"], ["3", "3"]]
    assert [event["round"] for event in events(tmp_path)] == [1, 2, 3]


def test_cached_updates_change_and_go(tmp_path: Path) -> None:
    run, state = started(tmp_path)
    state.caches.update({1: cached(0, 1.0), 2: cached(0, 2.0), 3: cached(0, 3.0)})
    run.commit(state)
    state.caches[1] = cached(4, 10.0, 11.0)
    del state.caches[2]
    run.commit(state)
    run.close()
    with RunStore(tmp_path) as again:
        loaded = again.load()
        assert loaded is not None
        assert loaded.caches == {1: cached(4, 10.0, 11.0), 3: cached(0, 3.0)}


# ---------------------------------------------------------------- after a crash


def test_what_was_appended_after_the_last_commit_is_cut_off(tmp_path: Path) -> None:
    run, state = started(tmp_path)
    play_round(run, state)
    run.close()
    whole = texts(tmp_path)
    torn = {"rounds.csv": b"2,3\n3,", "bytes.csv": b"\xff\x00" * 5000, "events.jsonl": b'{"type": "comm'}
    for name, rest in torn.items():
        (tmp_path / name).write_bytes(whole[name] + rest)
    with RunStore(tmp_path) as again:
        assert texts(tmp_path) == whole
        assert same(again.load(), state)
        play_round(again, state)
    assert table(tmp_path / "rounds.csv") == [["round", "fresh"], ["1", "3"], ["2", "3"]]


def test_a_run_killed_before_its_first_commit_starts_anew(tmp_path: Path) -> None:
    RunStore(tmp_path).close()
    (tmp_path / "rounds.csv").write_text("round,fresh\n")
    run, _ = started(tmp_path)
    run.close()
    assert (tmp_path / "rounds.csv").read_text() == "round,fresh\n"


def test_a_missing_table_of_a_committed_run_is_damage(tmp_path: Path) -> None:
    run, _ = started(tmp_path)
    run.close()
    (tmp_path / "rounds.csv").unlink()
    with pytest.raises(RunError, match=r"rounds\.csv is shorter than the 12 bytes"):
        RunStore(tmp_path)


@pytest.mark.parametrize("name", ["rounds.csv", "bytes.csv", "events.jsonl"])
def test_a_shortened_file_is_refused(tmp_path: Path, name: str) -> None:
    run, state = started(tmp_path)
    play_round(run, state)
    run.close()
    path = tmp_path / name
    length = path.stat().st_size
    os.truncate(path, length - 1)
    with pytest.raises(RunError) as caught:
        RunStore(tmp_path)
    assert str(path) in str(caught.value)
    assert f"shorter than the {length} bytes" in str(caught.value)
    # Nothing was made worse.
    assert path.stat().st_size == length - 1


CHILD = """
import sys
from pathlib import Path

import numpy as np

from fedreuse.proto import federation_pb2 as pb
from fedreuse.proto.codec import Block, Payload
from fedreuse.server.memory import CachedUpdate
from fedreuse.server.store import RunState, RunStore

run = RunStore(Path(sys.argv[1]))
state = run.load()
if state is None:
    state = RunState("feed", 1, 0, np.zeros(40_000, np.uint8))
    run.initialise(state, {"rounds.csv": ["round"], "bytes.csv": ["round", "client"]})
print("ready", flush=True)
while True:
    state.committed = n = state.committed + 1
    state.flat[:] = n % 251
    body = n.to_bytes(4, "little")
    state.caches[n % 5] = CachedUpdate(n, Payload((Block(0, pb.DENSE, 1, 4),), body))
    state.examples[n] = n
    run.commit(
        state,
        rows={"rounds.csv": [[n]], "bytes.csv": [[n, client] for client in range(3)]},
        events=[{"type": "train", "round": n}, {"type": "committed", "round": n}],
    )
"""


def test_a_run_killed_at_any_moment_is_whole(tmp_path: Path) -> None:
    committed = 0
    for milliseconds in (150, 60, 100):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        time.sleep(milliseconds / 1000)
        child.kill()
        child.communicate()
        with RunStore(tmp_path) as run:
            state = run.load()
            assert state is not None
            assert state.committed >= committed
            committed = n = state.committed
            numbers = range(1, n + 1)
            assert set(state.flat.tolist()) == {n % 251}
            assert state.examples == {k: k for k in numbers}
            assert {c.round: bytes(c.payload.body) for c in state.caches.values()} == {
                k: k.to_bytes(4, "little") for k in numbers[-5:]
            }
        assert table(tmp_path / "rounds.csv") == [["round"], *([str(k)] for k in numbers)]
        assert table(tmp_path / "bytes.csv")[1:] == [[str(k), str(c)] for k in numbers for c in range(3)]
        assert [e["round"] for e in events(tmp_path) if e["type"] == "committed"] == list(numbers)
    assert committed >= 3


# ---------------------------------------------------------------- a full disk


def test_a_failing_disk_leaves_the_last_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, state = started(tmp_path)
    play_round(run, state)
    whole = texts(tmp_path)

    def full(_handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            play_round(run, state)
    run.close()
    assert texts(tmp_path) != whole  # the rows were written before the disk failed
    with RunStore(tmp_path) as again:
        loaded = again.load()
        assert loaded is not None
        assert loaded.committed == 1
        assert loaded.flat.tolist() == [1] * 256
        assert texts(tmp_path) == whole


def test_a_full_state_leaves_the_last_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(disk, "MAP_BYTES", 1 << 17)
        run, state = started(tmp_path)
        play_round(run, state)
        state.flat = np.zeros(1 << 18, np.uint8)
        state.committed = 2
        with pytest.raises(
            OSError, match=f"the state in {tmp_path}/state/server could not be written"
        ) as caught:
            run.commit(state, rows={"rounds.csv": [[2, 3]]})
        assert isinstance(caught.value.__cause__, lmdb.MapFullError)
        run.close()
    with RunStore(tmp_path) as again:
        loaded = again.load()
        assert loaded is not None
        assert (loaded.committed, loaded.flat.size) == (1, 256)
    assert table(tmp_path / "rounds.csv") == [["round", "fresh"], ["1", "3"]]


@contextmanager
def files_limited_to(size: int) -> Iterator[None]:
    """No file of this process may grow beyond `size` bytes meanwhile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(("rows", "limit"), [(20_000, 100_000), (100, 100)])
def test_a_row_torn_by_a_full_disk_is_cut_off(tmp_path: Path, rows: int, limit: int) -> None:
    run, state = started(tmp_path)
    play_round(run, state)
    whole = texts(tmp_path)
    table_rows = {"bytes.csv": [[2, client, "model"] for client in range(rows)]}
    with files_limited_to(limit):
        with pytest.raises(OSError, match="File too large"):
            run.commit(replace(state, committed=2), rows=table_rows)
        # What is still in Python's buffers cannot be written on closing either; the folder is free all the same.
        with suppress(OSError):
            run.close()
        torn = texts(tmp_path)["bytes.csv"]
        with RunStore(tmp_path) as again:
            assert same(again.load(), state)
    assert len(torn) == limit
    assert texts(tmp_path) == whole


# ---------------------------------------------------------------- one owner, many readers


def test_a_run_in_use_is_refused(tmp_path: Path) -> None:
    run, state = started(tmp_path)
    with pytest.raises(RunError, match="is in use by another process") as caught:
        RunStore(tmp_path)
    assert str(tmp_path) in str(caught.value)
    play_round(run, state)
    run.close()
    with RunStore(tmp_path) as again:
        assert same(again.load(), state)


VISITOR = """
import sys
from pathlib import Path

from fedreuse.server.store import RunError, RunStore, read_weights

folder = Path(sys.argv[1])
try:
    RunStore(folder)
except RunError:
    print("refused", flush=True)
for _ in range(2):
    committed, flat = read_weights(folder)
    print(committed, flat.dtype, flat.size, flat.min(), flat.max(), flush=True)
    sys.stdin.readline()
"""


def test_another_process_may_read_the_weights_of_a_run_in_use_but_not_open_it(tmp_path: Path) -> None:
    run, state = started(tmp_path)
    before = texts(tmp_path)
    visitor = subprocess.Popen(
        [sys.executable, "-c", VISITOR, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert visitor.stdin is not None
    assert visitor.stdout is not None
    assert visitor.stdout.readline() == "refused\n"
    assert visitor.stdout.readline() == "0 uint8 256 0 255\n"
    assert texts(tmp_path) == before
    play_round(run, state)
    play_round(run, state)
    visitor.stdin.write("go on\n")
    visitor.stdin.flush()
    assert visitor.stdout.readline() == "2 uint8 256 2 2\n"
    visitor.communicate("go home\n")
    assert visitor.returncode == 0
    run.close()


def test_weights_of_a_run_without_a_commit_are_refused(tmp_path: Path) -> None:
    RunStore(tmp_path).close()
    with pytest.raises(RunError, match="has no committed state"):
        read_weights(tmp_path)
