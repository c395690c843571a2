"""Captured messages: written as they crossed the wire, read back, bounded, and free when nobody asks."""

import contextlib
from pathlib import Path

import numpy as np
import pytest
from support import Ledger
from wire import SCHEMA, make_update, serving

from fedreuse.proto import federation_pb2 as pb
from fedreuse.proto.captures import Capture, label_of, read_capture
from fedreuse.proto.channel import Channel
from fedreuse.proto.errors import ProtocolError
from fedreuse.proto.frames import chunk_frames, outgoing
from fedreuse.proto.ledger import Row


def row(round: int, way: str = "down", kind: str = "heartbeat", client: int = 7) -> Row:
    return Row(round, client, way, kind)  # type: ignore[arg-type]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_the_schema_and_the_frames(tmp_path: Path) -> None:
    """Byte by byte: 4 bytes of length before each entry."""
    Capture(tmp_path, SCHEMA, 0, 1)(row(0, "up", "update"), pb.SparseUpdate(), [b"abc", b"d" * 300])
    schema = SCHEMA.to_proto().SerializeToString()
    data = (tmp_path / "r0001-c00007-up-update.frames").read_bytes()
    assert data == (
        len(schema).to_bytes(4, "little") + schema + b"\3\0\0\0abc" + b"\x2c\x01\0\0" + b"d" * 300
    )
    captured = read_capture(tmp_path / "r0001-c00007-up-update.frames")
    assert captured.frames == (b"abc", b"d" * 300)
    assert captured.schema == SCHEMA
    label = captured.label
    assert (label.round, label.client, label.direction, label.kind, label.side) == (
        1,
        7,
        "up",
        "update",
        "client",
    )


def test_both_directions_pass_the_tap(tmp_path: Path) -> None:
    server = Channel("server", 3, Ledger(), lambda _k, _r: 0, SCHEMA, tap=Capture(tmp_path, SCHEMA, 0, 1))
    server.send("train_order", pb.TrainOrder(round=0, cause=pb.AGE))
    message, body = make_update(0)
    out = outgoing("client", "update", message, chunks=chunk_frames("client", body), body=len(body))
    for frame in out.frames:
        server.feed(frame)
    assert names(tmp_path) == ["r0001-c00003-down-train_order.frames", "r0001-c00003-up-update.frames"]
    assert read_capture(tmp_path / "r0001-c00003-up-update.frames").frames == out.frames


def test_a_join_is_filed_under_who_says_to_speak(tmp_path: Path) -> None:
    server = Channel("server", -1, Ledger(), lambda _k, _r: 0, tap=Capture(tmp_path, SCHEMA, 0, 1))
    server.feed(outgoing("client", "join", pb.Join(client=12)).frames[0])
    assert names(tmp_path) == ["r0000-c00012-up-join.frames"]


def test_only_the_first_rounds_are_written(tmp_path: Path) -> None:
    capture = Capture(tmp_path, SCHEMA, first=4, rounds=2)
    for message in (
        row(3),
        row(-1),
        row(4),
        row(5),
        row(4_000_000_000, "up"),
        row(-1, client=8),
        row(6),
        row(-1),
    ):
        capture(message, None, [b"x"])
    assert names(tmp_path) == [
        "r0000-c00007-down-heartbeat.frames",
        "r0000-c00008-down-heartbeat.frames",
        "r0005-c00007-down-heartbeat.frames",
        "r0006-c00007-down-heartbeat.frames",
    ]


def test_messages_of_one_name_are_numbered_and_bounded(tmp_path: Path) -> None:
    capture = Capture(tmp_path, SCHEMA, 0, 1)
    for _ in range(150):
        capture(row(-1), None, [b"x"])
    assert len(names(tmp_path)) == 100
    label = label_of(tmp_path / "r0000-c00007-down-heartbeat-100.frames")
    assert label is not None
    assert label.kind == "heartbeat"
    Capture(tmp_path, SCHEMA, 0, 1)(row(0), None, [b"y"])  # another process goes on in the same folder
    assert len(names(tmp_path)) == 101


def test_there_are_never_too_many_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger that joins under ever new names."""
    monkeypatch.setattr("fedreuse.proto.captures.MOST_FILES", 5)
    capture = Capture(tmp_path, SCHEMA, 0, 1)
    for client in range(20):
        capture(row(-1, "up", "join"), pb.Join(client=client), [b"x"])
    assert len(names(tmp_path)) == 5


def test_a_full_disk_ends_the_capture_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    capture = Capture(tmp_path / "gone", SCHEMA, 0, 1)
    (tmp_path / "gone").rmdir()
    capture(row(0), None, [b"x"])
    capture(row(0), None, [b"x"])
    assert [record.message.split(":")[0] for record in caplog.records] == ["no more messages are captured"]


def test_without_a_tap_nothing_is_kept() -> None:
    server = Channel("server", 3, Ledger(), lambda _k, _r: 0, SCHEMA)
    message, body = make_update(0)
    server.feed(outgoing("client", "update", message, chunks=chunk_frames("client", body)).frames[0])
    assert server._frames == []


async def test_a_real_server_captures_what_it_hears_and_says(tmp_path: Path) -> None:
    async with serving(tmp_path / "run", clients=1, rounds=1) as running:
        running.service._sessions._tap = Capture(tmp_path / "cap", SCHEMA, 0, 1)
        async with running.client() as client:
            await client.join(0)
            await client.work()
    kinds = {label.kind for path in (tmp_path / "cap").iterdir() if (label := label_of(path))}
    assert {"join", "welcome", "model", "train_order", "update", "round_closed"} <= kinds
    update = read_capture(tmp_path / "cap" / "r0001-c00000-up-update.frames")
    assert pb.ClientMessage.FromString(update.frames[0]).update.steps == 1


NAME = "r0001-c00007-up-update.frames"
SPEC = SCHEMA.to_proto().SerializeToString()
ENTRY = len(SPEC).to_bytes(4, "little") + SPEC


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "0 entries"),
        (ENTRY, "1 entries"),
        (ENTRY + b"\x05\0\0\0abc", "an entry of 5 bytes, 3 are left"),
        (ENTRY + b"\x05\0", "are left"),
        (b"\xff\xff\xff\xff" + b"a" * 50, "an entry of 4294967295 bytes"),
        (b"\x03\0\0\0\xff\xff\xff\x01\0\0\0a", "does not begin with a schema"),
        (b"\0\0\0\0\x01\0\0\0a", "schema hashes to"),
    ],
)
def test_a_file_that_is_no_capture_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / NAME).write_bytes(content)
    with pytest.raises(ProtocolError, match=words):
        read_capture(tmp_path / NAME)


@pytest.mark.parametrize("name", ["a.frames", "r1-c1-up-update.frames", "r0001-c00001-left-update.frames"])
def test_a_name_that_says_nothing_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(ENTRY)
    with pytest.raises(ProtocolError, match="not the name of a capture"):
        read_capture(tmp_path / name)


def test_no_cut_or_changed_byte_is_more_than_a_protocol_error(tmp_path: Path) -> None:
    data, random = ENTRY + b"\x02\0\0\0ab", np.random.default_rng(5)
    path = tmp_path / NAME
    for n in range(len(data)):
        changed = bytearray(data)
        changed[n] ^= int(random.integers(1, 256))
        for content in (data[:n], bytes(changed)):
            path.write_bytes(content)
            with contextlib.suppress(ProtocolError):
                read_capture(path)
