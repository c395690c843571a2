"""How the in-process engine and its virtual clients talk: directly, or through real messages."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import Any, Protocol

from fedreuse.client.held import Held
from fedreuse.client.results import Learned, LocalUpdate, Score
from fedreuse.client.session import Action, ClientSession, Closed
from fedreuse.client.settings import ClientPlan
from fedreuse.client.shelf import Shelf
from fedreuse.proto import federation_pb2 as pb
from fedreuse.proto.channel import Channel, Tap
from fedreuse.proto.codec import Payload, dense_payload
from fedreuse.proto.errors import ProtocolError
from fedreuse.proto.frames import Incoming, Outgoing
from fedreuse.proto.ledger import Row
from fedreuse.server.federation import Federation
from fedreuse.server.messages import Broadcast, closed, held_versions, order, welcome
from fedreuse.server.outcome import Closing
from fedreuse.server.round import AskScore, Reuse, Train

Received = tuple[pb.SparseUpdate, Payload, Row]
"""A verified update and the row of its message, not charged yet."""


class Link(Protocol):
    """One round trip per method; scores and updates go straight into the federation.

    `training` is what a worker is asked for: an update coded for a wire (`train`), or as it is (`learn`).
    """

    training: str

    def join(self, client: int, examples: int, held: Held) -> int | None:
        """Register a client; the round of its confirmed update."""

    def open_round(self, round: int) -> None: ...

    def send_model(self, client: int) -> None: ...

    def order(self, client: int, command: AskScore | Train | Reuse) -> None: ...

    def score(self, client: int, score: Score) -> pb.ScoreReply: ...

    def update(self, client: int, local: Any, *, garbage: bool) -> Received:
        """A verified update. Raises ProtocolError if the server refuses it."""

    def failed(self, client: int, code: pb.Code, detail: str) -> None: ...

    def close(self, closing: Closing) -> None: ...

    def drop(self, client: int) -> None:
        """The client died."""

    def finish(self) -> None: ...


class DirectLink:
    """Nothing is coded or serialized: only the modelled layer is there, all measured ones stay absent."""

    training = "learn"

    def __init__(self, federation: Federation) -> None:
        self._federation = federation

    def join(self, client: int, examples: int, held: Held) -> int | None:
        return self._federation.join(client, examples, held.run, held.current, held.staged)

    def open_round(self, round: int) -> None:
        pass

    def send_model(self, client: int) -> None:
        books, round = self._federation.books, self._federation.next_round
        books.record(
            Row(round, client, "down", "model", modelled=books.modelled_bytes("model", client, round))
        )

    def order(self, client: int, command: AskScore | Train | Reuse) -> None:
        pass

    def score(self, client: int, score: Score) -> pb.ScoreReply:
        round = self._federation.next_round
        return pb.ScoreReply(round=round, score=score.value, signature_round=score.signature_round)

    def update(self, client: int, local: Learned, *, garbage: bool) -> Received:
        round = self._federation.next_round
        row = Row(round, client, "up", "update", "refused" if garbage else "ok", modelled=0)
        self._federation.books.record(row)
        if garbage:
            raise ProtocolError(pb.CHECKSUM, "planned fault")
        message = pb.SparseUpdate(round=round, steps=local.steps, train_loss=local.train_loss)
        return message, local.payload, row

    def failed(self, client: int, code: pb.Code, detail: str) -> None:
        pass

    def close(self, closing: Closing) -> None:
        pass

    def drop(self, client: int) -> None:
        pass

    def finish(self) -> None:
        pass


class _Forget:
    """The virtual clients' own ledgers are not kept: the server's holds the same rows."""

    def count(self, row: Row) -> None:
        pass

    def write(self, row: Row) -> None:
        pass


class WireLink:
    """Every message is serialized, cut into frames, put together again and checked, as over gRPC.

    `tap`, if given, sees every message as the server does. Only the ends of clients in the open round live; of the
    others a few numbers are kept, so that a hundred thousand of them cost little.
    """

    training = "train"

    def __init__(self, federation: Federation, plan: ClientPlan, tap: Tap | None = None) -> None:
        self._federation, self._plan, self._tap = federation, plan, tap
        self._ends: dict[int, tuple[Channel, ClientSession]] = {}
        self._parked: dict[int, tuple[int, int]] = {}
        """Whole messages that went up and down in the sessions of clients that are not in the round."""
        self._holdings = federation.state.holdings
        self._broadcasts: dict[int | None, Broadcast] = {}
        self._shelf = Shelf()
        self._round = 0

    def join(self, client: int, examples: int, held: Held) -> int | None:
        federation = self._federation
        _, session = self._ends[client] = self._new_ends(client)
        join = self._receive(client, session.join(examples, held, secrets.randbits(64)))[0].message
        confirmed = federation.join(client, join.examples, join.run, *held_versions(join))
        message = welcome(federation, self._plan.to_proto(), secrets.randbits(64), confirmed, heartbeat=10.0)
        self._send(client, "welcome", message)
        return confirmed

    def _new_ends(self, client: int) -> tuple[Channel, ClientSession]:
        federation = self._federation
        channel = Channel(
            "server",
            client,
            federation.books,
            lambda kind, number: federation.books.modelled_bytes(kind, client, number),
            federation.schema,
            lambda _kind, header: federation.admit(client, header),
            self._tap,
        )
        session = ClientSession(client, _Forget(), self._shelf)
        session.model = self._model_of(client)
        return channel, session

    def _both(self, client: int) -> tuple[Channel, ClientSession]:
        """The two ends of a client's session."""
        if client not in self._ends:
            up, down = self._parked.pop(client)
            channel, session = self._ends[client] = self._new_ends(client)
            channel.go_on(received=up, sent=down)
            session.go_on(self._federation.schema, self._plan, received=down, sent=up)
        return self._ends[client]

    def _park(self, client: int) -> None:
        channel, _ = self._ends.pop(client)
        self._parked[client] = channel.received, channel.sent

    def _model_of(self, client: int) -> tuple[int, Payload] | None:
        """What the client received before its ends were made here."""
        round = self._holdings.get(client)
        flat = None if round is None else self._federation.versions.get(round)
        if round is None or flat is None:
            return None
        return round, dense_payload(self._federation.schema, flat)

    def open_round(self, round: int) -> None:
        self._round, self._broadcasts = round, {}

    def send_model(self, client: int) -> None:
        release, schema = self._federation.versions.current, self._federation.schema
        base = release.base(self._holdings.get(client))
        sealed = release.sealed(base)
        self._federation.sent(release, sealed)
        if base not in self._broadcasts:
            self._broadcasts[base] = Broadcast.of(schema, release.round, sealed)
        broadcast = self._broadcasts[base]
        channel, session = self._both(client)
        out = channel.send("model", broadcast.message, chunks=broadcast.chunks, body=broadcast.body)
        self._deliver(channel, session, out)
        self._holdings[client] = release.round

    def order(self, client: int, command: AskScore | Train | Reuse) -> None:
        self._send(client, *order(self._round, command))

    def score(self, client: int, score: Score) -> pb.ScoreReply:
        _, session = self._both(client)
        reply = self._receive(client, session.score_reply(self._round, score))[0].message
        assert isinstance(reply, pb.ScoreReply)
        return reply

    def update(self, client: int, local: LocalUpdate, *, garbage: bool) -> Received:
        _, session = self._both(client)
        incoming, row = self._receive(client, session.update(self._round, local, garbage=garbage))
        assert incoming.payload is not None
        return incoming.message, incoming.payload, row

    def failed(self, client: int, code: pb.Code, detail: str) -> None:
        _, session = self._both(client)
        self._receive(client, session.failed(self._round, code, detail))

    def close(self, closing: Closing) -> None:
        if closing.client in self._ends:
            actions = self._send(closing.client, "round_closed", closed(closing))
            assert actions == [Closed(closing.round, closing.accepted)]
            self._park(closing.client)

    def drop(self, client: int) -> None:
        channel, _ = self._both(client)
        del self._ends[client]
        channel.settle(None)
        self._holdings.pop(client, None)

    def finish(self) -> None:
        for client in (*self._ends, *self._parked):
            channel, session = self._both(client)
            self._send(client, "abort", pb.Abort(code=pb.FINISHED))
            self._receive(client, session.heartbeat())
            channel.settle(None)
            del self._ends[client]

    def _send(self, client: int, kind: str, message: object) -> list[Action]:
        channel, session = self._both(client)
        return self._deliver(channel, session, channel.send(kind, message))

    def _deliver(self, channel: Channel, session: ClientSession, out: Outgoing) -> list[Action]:
        actions = [action for frame in out.frames for action in session.feed(frame)]
        channel.confirm(session.channel.received)  # no need to wait for the client's next message
        return actions

    def _receive(self, client: int, out: Outgoing) -> tuple[Incoming, Row]:
        channel, _ = self._both(client)
        for frame in out.frames:
            whole = channel.feed(frame)
        if whole is None:
            raise ProtocolError(pb.MALFORMED, f"an incomplete {out.kind}")
        incoming, row = whole
        try:
            if incoming.refusal is not None:
                raise incoming.refusal
            if incoming.payload is not None:
                payload = self._federation.verify(incoming.message, incoming.payload)
                incoming = replace(incoming, payload=payload)
        except ProtocolError:
            row.status = "refused"
            raise
        finally:
            self._federation.books.write(row)
        return incoming, row
