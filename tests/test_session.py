"""The client's side of the conversation, sans-IO: what the server says becomes work, results become frames."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support import Ledger

from fedreuse.client.held import Held
from fedreuse.client.results import LocalUpdate, Score
from fedreuse.client.session import ClientSession, Closed, DoScore, DoTrain, Stop, Welcomed
from fedreuse.client.settings import ClientPlan, CompressorSettings, ProxySettings
from fedreuse.proto import PROTOCOL_VERSION
from fedreuse.proto import federation_pb2 as pb
from fedreuse.proto.channel import Channel
from fedreuse.proto.codec import Payload, dense_payload, encode, transfer_header
from fedreuse.proto.errors import ProtocolError
from fedreuse.proto.frames import Incoming, Outgoing, chunk_frames
from fedreuse.proto.schema import FLOAT_BUFFER, INTEGER_BUFFER, PARAMETER, Schema, TensorSpec
from fedreuse.proto.transfers import plain

# 5 and 2 coordinates and an int64 counter: B_0 = 20 + 8 + 8 = 36 bytes.
SCHEMA = Schema.of(
    [
        TensorSpec("w", "float32", (5,), PARAMETER),
        TensorSpec("mean", "float32", (2,), FLOAT_BUFFER),
        TensorSpec("count", "int64", (), INTEGER_BUFFER),
    ]
)
PLAN = ClientPlan(seed=1, compressor=CompressorSettings(kind="topk", ratio=0.2), proxy=ProxySettings())
VALUES = np.arange(7, dtype=np.float32)
WEIGHTS = dense_payload(SCHEMA, np.concatenate([VALUES.view(np.uint8), np.zeros(8, np.uint8)]))


class Conversation:
    """A client's session and the server's end of it, without a network."""

    def __init__(self, client: int = 3) -> None:
        self.ledger, self.server_ledger = Ledger(), Ledger()
        self.session = ClientSession(client, self.ledger)
        self.server = Channel("server", client, self.server_ledger, lambda _kind, _round: 0, SCHEMA)

    def say(self, kind: str, message: Any, payload: Payload | None = None) -> list[Any]:
        """The server says something; the client's actions."""
        chunks = chunk_frames("server", payload.body) if payload else ()
        out = self.server.send(kind, message, chunks=chunks, body=payload.nbytes if payload else 0)
        return [action for frame in out.frames for action in self.session.feed(frame)]

    def hear(self, out: Outgoing) -> Incoming:
        """What the server reads when the client sends `out`."""
        wholes = [whole for frame in out.frames if (whole := self.server.feed(frame))]
        assert len(wholes) == 1
        return wholes[0][0]

    def welcome(self, session: int = 77, **more: Any) -> list[Any]:
        fields = {
            "protocol_version": PROTOCOL_VERSION,
            "run": "cafe",
            "session": session,
            "schema": SCHEMA.to_proto(),
            "plan": PLAN.to_proto(),
            "rounds": 9,
            "heartbeat_seconds": 2.5,
        }
        return self.say("welcome", pb.Welcome(**(fields | more)))

    def model(self, round: int, payload: Payload = WEIGHTS, **header: Any) -> list[Any]:
        transfer = transfer_header(SCHEMA, payload)
        for name, value in header.items():
            setattr(transfer, name, value)
        return self.say("model", pb.ModelBroadcast(round=round, transfer=transfer), payload)


@pytest.fixture
def joined() -> Conversation:
    conversation = Conversation()
    conversation.hear(conversation.session.join(12, Held(), instance=5))
    conversation.welcome()
    return conversation


def rows(conversation: Conversation, kind: str) -> list[tuple[Any, ...]]:
    return [
        (row.round, row.direction, row.modelled, row.status)
        for row in conversation.ledger.written
        if row.kind == kind
    ]


def local_update() -> LocalUpdate:
    arrays = {0: np.array([0, 3, 0, 0, 0], np.float32), 1: np.array([1, 2], np.float32)}
    return LocalUpdate(plain(encode(SCHEMA, arrays, {0: 1, 1: 2}.__getitem__)), steps=4, train_loss=0.5)


# Joining


def test_join_names_what_the_client_holds() -> None:
    conversation = Conversation(client=3)
    held = Held(run="cafe", current=4, staged=6, slot=1)
    join = conversation.hear(conversation.session.join(12, held, instance=1 << 63)).message
    assert (join.protocol_version, join.client, join.examples, join.instance) == (
        PROTOCOL_VERSION,
        3,
        12,
        1 << 63,
    )
    assert (join.run, join.held_round, join.staged_round) == ("cafe", 4, 6)
    assert not join.HasField("previous_session")
    assert not join.HasField("model_round")


def test_a_held_round_0_is_not_the_same_as_nothing_held() -> None:
    def join(held: Held) -> pb.Join:
        conversation = Conversation()
        return conversation.hear(conversation.session.join(12, held, instance=5)).message

    assert join(Held("cafe", current=0)).HasField("held_round")
    assert not join(Held("cafe", staged=0)).HasField("held_round")
    assert join(Held("cafe", staged=0)).HasField("staged_round")
    assert not join(Held()).HasField("staged_round")


def test_welcome_brings_run_schema_and_plan() -> None:
    conversation = Conversation()
    conversation.hear(conversation.session.join(12, Held(), instance=5))
    (action,) = conversation.welcome(confirmed_round=3)
    assert isinstance(action, Welcomed)
    assert action.welcome.confirmed_round == 3
    session = conversation.session
    assert (session.run, session.number, session.rounds) == ("cafe", 77, 9)
    assert session.heartbeat_seconds == 2.5
    assert session.schema == SCHEMA
    assert session.plan == PLAN


def test_another_protocol_version_ends_it_and_names_both() -> None:
    conversation = Conversation()
    conversation.hear(conversation.session.join(12, Held(), instance=5))
    with pytest.raises(ProtocolError, match="speaks protocol version 2, the server version 7") as caught:
        conversation.welcome(protocol_version=7)
    assert caught.value.code == pb.VERSION_MISMATCH


def test_a_schema_or_plan_that_cannot_be_ends_it() -> None:
    schema = SCHEMA.to_proto()
    schema.hash += 1
    with pytest.raises(ProtocolError, match="SCHEMA_MISMATCH"):
        Conversation().welcome(schema=schema)
    plan = PLAN.to_proto()
    plan.momentum = 2.0
    with pytest.raises(ProtocolError, match=r"bad train\.momentum"):
        Conversation().welcome(plan=plan)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_heartbeats_are_never_without_a_pause(seconds: float) -> None:
    conversation = Conversation()
    conversation.welcome(heartbeat_seconds=seconds)
    assert conversation.session.heartbeat_seconds == 0.05


# A round


def test_model_then_score_then_train_then_closed(joined: Conversation) -> None:
    assert joined.model(round=2) == []
    assert joined.session.open_round == 2
    weights = joined.session.weights
    assert weights is not None
    assert bytes(weights.body) == VALUES.tobytes()
    assert joined.say("score_request", pb.ScoreRequest(round=2)) == [DoScore(2)]
    reply = joined.hear(joined.session.score_reply(2, Score(0.25, 1))).message
    assert (reply.round, reply.score, reply.signature_round) == (2, 0.25, 1)
    assert joined.say("train_order", pb.TrainOrder(round=2)) == [DoTrain(2)]
    update = joined.hear(joined.session.update(2, local_update()))
    assert (update.message.round, update.message.steps, update.message.train_loss) == (2, 4, 0.5)
    assert bytes(update.payload.body) == bytes(local_update().sealed.body)
    assert joined.say("round_closed", pb.RoundClosed(round=2, accepted=True)) == [Closed(2, True)]
    assert (joined.session.open_round, joined.session.weights) == (None, None)


def test_a_score_without_a_signature_says_so(joined: Conversation) -> None:
    reply = joined.hear(joined.session.score_reply(2, Score(1.0, None))).message
    assert not reply.HasField("signature_round")


def test_the_close_of_another_round_leaves_the_open_one(joined: Conversation) -> None:
    joined.model(round=2)
    assert joined.say("round_closed", pb.RoundClosed(round=1)) == [Closed(1, False)]
    assert joined.session.open_round == 2


@pytest.mark.parametrize(
    ("kind", "message"), [("score_request", pb.ScoreRequest), ("train_order", pb.TrainOrder)]
)
def test_an_order_without_its_model_ends_it(joined: Conversation, kind: str, message: Any) -> None:
    with pytest.raises(ProtocolError, match="order for round 0 without its model") as caught:
        joined.say(kind, message(round=0))
    assert caught.value.code == pb.WRONG_ROUND
    joined.model(round=2)
    with pytest.raises(ProtocolError, match="order for round 3 without its model"):
        joined.say(kind, message(round=3))


def test_a_model_before_the_welcome_ends_it() -> None:
    conversation = Conversation()
    with pytest.raises(ProtocolError, match="NOT_JOINED"):
        conversation.model(round=0)


def test_a_damaged_model_ends_it_and_is_not_used(joined: Conversation) -> None:
    with pytest.raises(ProtocolError, match="CHECKSUM"):
        joined.model(round=2, checksum=12345)
    assert joined.session.weights is None


def test_a_model_with_nan_ends_it(joined: Conversation) -> None:
    values = VALUES.copy()
    values[3] = np.nan
    with pytest.raises(ProtocolError, match=r"NOT_FINITE.*'w'"):
        joined.model(2, dense_payload(SCHEMA, np.concatenate([values.view(np.uint8), np.zeros(8, np.uint8)])))
    assert joined.session.weights is None


def test_a_model_must_be_whole(joined: Conversation) -> None:
    only_w = encode(SCHEMA, {0: VALUES[:5]}, lambda _index: 5)
    with pytest.raises(ProtocolError, match="WRONG_CONTENT: 1 tensors, the plan says 2"):
        joined.model(2, only_w)
    sparse = encode(SCHEMA, {0: VALUES[:5], 1: VALUES[5:]}, {0: 1, 1: 2}.__getitem__)
    with pytest.raises(ProtocolError, match="WRONG_CONTENT: tensor 'w' keeps 1 coordinates, the plan says 5"):
        joined.model(2, sparse)


def test_abort_is_the_end_and_its_reason(joined: Conversation) -> None:
    assert joined.say("abort", pb.Abort(code=pb.FINISHED, detail="all done")) == [
        Stop(pb.FINISHED, "all done")
    ]


def test_a_heartbeat_is_no_work(joined: Conversation) -> None:
    assert joined.say("heartbeat", pb.Heartbeat()) == []


def test_a_failure_is_reported_with_its_round_and_a_bounded_text(joined: Conversation) -> None:
    abort = joined.hear(joined.session.failed(0, pb.NOT_FINITE, "x" * 9999)).message
    assert (abort.code, abort.round, abort.HasField("round")) == (pb.NOT_FINITE, 0, True)
    assert len(abort.detail) == 500


def test_garbage_is_an_update_that_does_not_match_its_checksum(joined: Conversation) -> None:
    good = joined.hear(joined.session.update(2, local_update()))
    bad = joined.hear(joined.session.update(2, local_update(), garbage=True))
    assert bad.message == good.message
    assert bad.sizes == good.sizes
    assert bytes(bad.payload.body) != bytes(good.payload.body)


# Modelled bytes on the client's own ledger


def test_modelled_bytes_by_hand(joined: Conversation) -> None:
    joined.model(round=2)
    joined.hear(joined.session.update(2, local_update()))
    joined.say("round_closed", pb.RoundClosed(round=2))  # confirms the update
    assert rows(joined, "model") == [(2, "down", 36, "ok")]
    # k = max(1, floor(0.2 d)): w 5 -> 1: 20, 8, 4 + 1 = 5. mean 2 -> 1: 8, 8, 4 + 1 = 5. count 1: 8, 12, 9.
    assert rows(joined, "update") == [(2, "up", 5 + 5 + 8, "ok")]
    assert rows(joined, "join") == [(-1, "up", 0, "ok")]
    assert rows(joined, "round_closed") == [(2, "down", 0, "ok")]


def test_a_reuse_notice_charges_16_modelled_bytes_upwards(joined: Conversation) -> None:
    joined.model(round=2)
    notice = pb.ReuseNotice(round=2, source_round=1, age=1, factor=0.5)
    assert joined.say("reuse_notice", notice) == []
    assert rows(joined, "reuse") == [(2, "up", 16, "ok")]
    (event,) = [row for row in joined.ledger.counted if row.kind == "reuse"]
    # An event of the model, no message: nothing was measured.
    assert (event.payload, event.message, event.grpc) == (None, None, None)
    assert rows(joined, "reuse_notice") == [(2, "down", 0, "ok")]


# After a broken connection


def reconnect(old: Conversation, **welcome: Any) -> tuple[Conversation, pb.Join, list[Any]]:
    new = Conversation()
    out = new.session.join(12, Held("cafe", staged=2), instance=5, previous=old.session)
    join = new.hear(out).message
    return new, join, new.welcome(session=78, **welcome)


def broken_after_an_upload() -> Conversation:
    conversation = Conversation()
    conversation.hear(conversation.session.join(12, Held(), instance=5))
    conversation.welcome()
    conversation.model(round=2)
    conversation.session.update(2, local_update())  # sent; whether it arrived is not known
    return conversation


def test_join_names_the_broken_session_and_the_open_round() -> None:
    old = broken_after_an_upload()
    new, join, _ = reconnect(old)
    assert (join.previous_session, join.previous_received) == (77, 2)  # welcome and model
    assert join.model_round == 2
    # The model need not be sent again.
    assert new.say("train_order", pb.TrainOrder(round=2)) == [DoTrain(2)]
    assert new.session.weights is old.session.weights


@pytest.mark.parametrize(("received", "fate"), [(2, "ok"), (1, "lost"), (None, "lost")])
def test_the_welcome_settles_what_the_broken_session_left_open(received: int | None, fate: str) -> None:
    old = broken_after_an_upload()
    assert rows(old, "update") == []
    more = {} if received is None else {"previous_received": received}
    reconnect(old, **more)
    assert rows(old, "update") == [(2, "up", 18, fate)]


def test_an_impossible_account_of_the_broken_session_ends_it() -> None:
    old = broken_after_an_upload()
    with pytest.raises(ProtocolError, match="confirms 9 messages"):
        reconnect(old, previous_received=9)


def test_a_session_that_was_never_welcomed_has_no_name_and_is_lost() -> None:
    old = Conversation()
    old.session.join(12, Held(), instance=5)
    _, join, _ = reconnect(old)
    assert not join.HasField("previous_session")
    assert rows(old, "join") == [(-1, "up", 0, "lost")]
