"""Both ends of a session count every message to the same byte, and agree on what arrived."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import Ledger

from fedreuse.proto import federation_pb2 as pb
from fedreuse.proto.channel import NO_ROUND, Channel
from fedreuse.proto.codec import Payload, encode, transfer_header
from fedreuse.proto.errors import ProtocolError
from fedreuse.proto.frames import CHUNK_BYTES, Outgoing, chunk_frames
from fedreuse.proto.ledger import Row
from fedreuse.proto.schema import PARAMETER, Schema, TensorSpec

SCHEMA = Schema.of([TensorSpec("w", "float32", (5,), PARAMETER), TensorSpec("b", "float32", (2,), PARAMETER)])
LARGE = Schema.of([TensorSpec("w", "float32", (600_000,), PARAMETER)])  # 2.4 MB: three chunks


def charge(kind: str, _round: int) -> int:
    return {"model": 28, "update": 10}.get(kind, 0)


class Pair:
    """A client and a server with a queue of frames in each direction."""

    def __init__(self, schema: Schema = SCHEMA) -> None:
        self.ledgers = {"client": Ledger(), "server": Ledger()}
        self.ends = {
            side: Channel(side, 3, ledger, charge, schema)  # type: ignore[arg-type]
            for side, ledger in self.ledgers.items()
        }
        self.under_way: dict[str, deque[bytes]] = {"client": deque(), "server": deque()}
        self.schema = schema

    def send(self, side: str, kind: str, message: Any, payload: Payload | None = None) -> Outgoing:
        """Send as `side`; the frames wait until they are delivered."""
        chunks = chunk_frames(side, payload.body) if payload else ()  # type: ignore[arg-type]
        body = payload.nbytes if payload else 0
        out = self.ends[side].send(kind, message, chunks=chunks, body=body)
        self.under_way[side] += out.frames
        return out

    def deliver(self, side: str) -> list[Row]:
        """Everything that `side` has sent so far reaches the other end; the rows of whole messages."""
        other = self.ends["server" if side == "client" else "client"]
        ledger = self.ledgers["server" if side == "client" else "client"]
        rows = []
        while self.under_way[side]:
            if whole := other.feed(self.under_way[side].popleft()):
                rows.append(whole[1])
                ledger.write(whole[1])
        return rows

    def written(self, side: str, way: str) -> list[Row]:
        return [row for row in self.ledgers[side].written if row.direction == way]


def update(schema: Schema = SCHEMA, round: int = 0) -> tuple[str, pb.SparseUpdate, Payload]:
    arrays = {i: np.arange(1, t.size + 1, dtype=np.float32) for i, t in enumerate(schema.tensors)}
    payload = encode(schema, arrays, lambda index: schema.tensors[index].size)
    return "update", pb.SparseUpdate(round=round, transfer=transfer_header(schema, payload)), payload


def model(schema: Schema = SCHEMA, round: int = 0) -> tuple[str, pb.ModelBroadcast, Payload]:
    _, message, payload = update(schema)
    return "model", pb.ModelBroadcast(round=round, transfer=message.transfer), payload


def cells(row: Row) -> tuple[Any, ...]:
    """A row without its fate."""
    return (
        row.round,
        row.client,
        row.direction,
        row.kind,
        row.modelled,
        row.payload,
        row.message,
        row.grpc,
    )


# What a row says


def test_a_row_holds_the_bytes_of_its_frames() -> None:
    pair = Pair()
    frames = pair.send("client", *update(round=4)).frames
    (row,) = pair.deliver("client")
    # The body: seven float32. Two frames: header and one chunk. gRPC puts 5 bytes before each.
    assert row.payload == 7 * 4
    assert len(frames) == 2
    assert row.message == sum(map(len, frames))
    assert row.grpc == row.message + 2 * 5
    assert (row.round, row.client, row.direction, row.kind, row.modelled) == (4, 3, "up", "update", 10)


def test_a_large_body_is_one_row_of_many_frames() -> None:
    pair = Pair(LARGE)
    out = pair.send("server", *model(LARGE))
    (row,) = pair.deliver("server")
    # 2,400,000 bytes: two chunks of 1 MiB and one of 302,848; with the header four frames.
    assert [len(frame) > CHUNK_BYTES for frame in out.frames] == [False, True, True, False]
    assert row.payload == 2_400_000
    assert row.message == sum(map(len, out.frames))
    assert row.grpc == row.message + 4 * 5
    assert (row.direction, row.kind) == ("down", "model")


def test_rounds_of_messages_that_name_one_and_of_those_that_do_not() -> None:
    pair = Pair()
    pair.send("client", "join", pb.Join(held_round=5))
    pair.send("client", "heartbeat", pb.Heartbeat())
    pair.send("client", "score_reply", pb.ScoreReply(round=0))
    pair.send("client", "abort", pb.Abort(code=pb.CLIENT_FAILED, round=0))
    pair.send("client", "abort", pb.Abort(code=pb.CLIENT_FAILED))
    assert (
        [row.round for row in pair.deliver("client")]
        == [NO_ROUND, NO_ROUND, 0, 0, NO_ROUND]
        == [-1, -1, 0, 0, -1]
    )


def test_a_sent_message_is_counted_at_once_and_written_when_its_fate_is_known() -> None:
    pair = Pair()
    ledger = pair.ledgers["client"]
    pair.send("client", "join", pb.Join())
    assert ([row.kind for row in ledger.counted], ledger.written) == (["join"], [])
    pair.deliver("client")
    assert ledger.written == []  # it arrived, but nobody said so yet
    pair.send("server", "welcome", pb.Welcome())
    pair.deliver("server")
    assert [(row.kind, row.status) for row in ledger.written] == [("join", "ok"), ("welcome", "ok")]


# Both ends agree

sends = st.tuples(st.sampled_from(["client", "server"]), st.sampled_from(["plain", "body"]))
deliveries = st.tuples(st.sampled_from(["client", "server"]), st.just("deliver"))


def play(pair: Pair, steps: list[tuple[str, str]]) -> None:
    for number, (side, what) in enumerate(steps):
        if what == "deliver":
            pair.deliver(side)
        elif what == "body":
            pair.send(side, *(update if side == "client" else model)(round=number))
        elif side == "client":
            pair.send(side, "score_reply", pb.ScoreReply(round=number, score=number / 7))
        else:
            pair.send(side, "round_closed", pb.RoundClosed(round=number, detail="x" * number))


@given(st.lists(st.one_of(sends, deliveries), max_size=30))
def test_ledgers_agree_to_the_byte_when_everything_arrives(steps: list[tuple[str, str]]) -> None:
    pair = Pair()
    play(pair, steps)
    for side in ("client", "server", "client"):  # the last two confirm what came before
        pair.send(side, "heartbeat", pb.Heartbeat())
        pair.deliver(side)
    for side, other, way in (("client", "server", "up"), ("server", "client", "down")):
        received = pair.written(other, way)
        # Only the very last heartbeat is still unconfirmed.
        pair.ends[side].settle(pair.ends[other].received)
        sent = pair.written(side, way)
        assert [cells(row) for row in sent] == [cells(row) for row in received]
        assert {row.status for row in sent + received} == {"ok"}


@given(st.lists(st.one_of(sends, deliveries), max_size=30), st.booleans())
def test_when_the_line_breaks_every_row_has_one_fate(steps: list[tuple[str, str]], told: bool) -> None:
    pair = Pair()
    play(pair, steps)
    for side, other, way in (("client", "server", "up"), ("server", "client", "down")):
        arrived = [cells(row) for row in pair.written(other, way)]
        confirmed = len(pair.written(side, way))
        pair.ends[side].settle(len(arrived) if told else None)
        sent = pair.written(side, way)
        counted = [row for row in pair.ledgers[side].counted if row.direction == way]
        # Each message was counted once and written once, in the order of sending.
        assert [id(row) for row in sent] == [id(row) for row in counted]
        # What is known to have arrived is ok, the rest is lost; if the peer tells, it is what arrived.
        fine = len(arrived) if told else confirmed
        assert [row.status for row in sent] == ["ok"] * fine + ["lost"] * (len(sent) - fine)
        assert [cells(row) for row in sent[: len(arrived)]] == arrived
        assert fine <= len(arrived)


def test_unconfirmed_is_lost_unless_the_peer_comes_back_and_says_otherwise() -> None:
    fates = {}
    for received in (None, 1, 2, 3):
        pair = Pair()
        for number in range(3):
            pair.send("client", "score_reply", pb.ScoreReply(round=number))
        pair.deliver("client")  # all three arrive, and the line breaks before anything comes back
        pair.ends["client"].settle(received)
        fates[received] = [row.status for row in pair.ledgers["client"].written]
    assert fates == {
        None: ["lost", "lost", "lost"],
        1: ["ok", "lost", "lost"],
        2: ["ok", "ok", "lost"],
        3: ["ok", "ok", "ok"],
    }


def test_settling_twice_writes_nothing_twice() -> None:
    pair = Pair()
    pair.send("client", "heartbeat", pb.Heartbeat())
    pair.ends["client"].settle(None)
    pair.ends["client"].settle(None)
    assert [row.status for row in pair.ledgers["client"].written] == ["lost"]


# Confirmations that cannot be


def confirm(pair: Pair, received: int) -> None:
    frame = pb.ServerMessage(heartbeat=pb.Heartbeat(), received=received).SerializeToString()
    pair.ends["client"].feed(frame)


@pytest.mark.parametrize("received", [3, 1 << 31])
def test_more_than_was_sent_cannot_be_confirmed(received: int) -> None:
    pair = Pair()
    for _ in range(2):
        pair.send("client", "heartbeat", pb.Heartbeat())
    with pytest.raises(ProtocolError, match=f"confirms {received} messages; 0 .* 2 sent") as caught:
        confirm(pair, received)
    assert caught.value.code == pb.MALFORMED


def test_confirmations_never_go_back() -> None:
    pair = Pair()
    for _ in range(3):
        pair.send("client", "heartbeat", pb.Heartbeat())
    confirm(pair, 2)
    confirm(pair, 2)
    with pytest.raises(ProtocolError, match="confirms 1 messages; 2 were confirmed before and 3 sent"):
        confirm(pair, 1)


def test_a_peer_that_comes_back_cannot_confirm_more_either() -> None:
    pair = Pair()
    pair.send("client", "heartbeat", pb.Heartbeat())
    with pytest.raises(ProtocolError, match="confirms 2 messages"):
        pair.ends["client"].settle(2)


def test_a_refused_body_is_counted_all_the_same() -> None:
    def admit(_kind: str, _header: Any) -> None:
        raise ProtocolError(pb.UNEXPECTED, "nobody asked")

    pair = Pair()
    server = Channel("server", 3, pair.ledgers["server"], charge, SCHEMA, admit)
    out = pair.send("client", *update())
    whole = [result for frame in out.frames if (result := server.feed(frame))]
    ((incoming, row),) = whole
    assert incoming.refusal is not None
    assert incoming.payload is None
    assert cells(row) == cells(pair.ledgers["client"].counted[0])
    assert server.received == 1  # it arrived; what became of it is another matter
