"""What the server says, built from the round machine's commands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fedreuse.proto import PROTOCOL_VERSION
from fedreuse.proto import federation_pb2 as pb
from fedreuse.proto.frames import chunk_frames
from fedreuse.proto.schema import Schema
from fedreuse.proto.transfers import Sealed, transfer_header
from fedreuse.server.federation import Federation
from fedreuse.server.outcome import Closing
from fedreuse.server.round import AskScore, Reuse, Train


@dataclass(frozen=True, slots=True)
class Broadcast:
    """A round's model, serialized once for all clients that are sent the same body."""

    message: pb.ModelBroadcast
    chunks: tuple[bytes, ...]
    sealed: Sealed

    @property
    def body(self) -> int:
        return self.sealed.nbytes

    @staticmethod
    def of(schema: Schema, round: int, sealed: Sealed) -> Broadcast:
        message = pb.ModelBroadcast(round=round, transfer=transfer_header(schema, sealed))
        return Broadcast(message, tuple(chunk_frames("server", sealed.body)), sealed)


def order(round: int, command: AskScore | Train | Reuse) -> tuple[str, Any]:
    """Kind and message of a command that needs no body."""
    match command:
        case AskScore():
            return "score_request", pb.ScoreRequest(round=round)
        case Train():
            return "train_order", pb.TrainOrder(round=round, cause=command.cause)
        case Reuse():
            notice = pb.ReuseNotice(
                round=round, source_round=command.source_round, age=command.age, factor=command.factor
            )
            return "reuse_notice", notice


def closed(closing: Closing) -> pb.RoundClosed:
    return pb.RoundClosed(
        round=closing.round, accepted=closing.accepted, code=closing.code, detail=closing.detail[:500]
    )


def welcome(
    federation: Federation,
    plan: pb.ClientPlan,
    session: int,
    confirmed: int | None,
    *,
    heartbeat: float,
    previous_received: int | None = None,
    pending: int | None = None,
    address: str = "",
) -> pb.Welcome:
    """The answer to a Join.

    `confirmed` is the round of the client's valid cached update, `pending` the open round if an update of the
    client is due in it or has arrived; `address` is the client's end of the connection, as seen from here.
    """
    return pb.Welcome(
        protocol_version=PROTOCOL_VERSION,
        run=federation.state.run,
        session=session,
        schema=federation.schema.to_proto(),
        plan=plan,
        confirmed_round=confirmed,
        rounds=federation.settings.rounds,
        heartbeat_seconds=heartbeat,
        previous_received=previous_received,
        pending_round=pending,
        clients=federation.settings.total,
        address=address,
    )


def held_versions(join: pb.Join) -> tuple[int | None, int | None]:
    """The held and staged rounds a Join names."""
    return (
        join.held_round if join.HasField("held_round") else None,
        join.staged_round if join.HasField("staged_round") else None,
    )
