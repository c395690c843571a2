"""One end of a session, sans-IO: frames out, frames in, and a ledger row for every whole message.

Rows of sent messages wait until the peer's `received` count shows that they arrived; when a session ends,
what is still waiting is lost, unless the peer says otherwise when it comes back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from fedreuse.proto import federation_pb2 as pb
from fedreuse.proto.errors import ProtocolError
from fedreuse.proto.frames import Admit, Incoming, Outgoing, Receiver, Side, Sizes, outgoing
from fedreuse.proto.ledger import Direction, Row
from fedreuse.proto.schema import Schema
from fedreuse.proto.transfers import form

NO_ROUND = -1
"""Round of messages that belong to no round: joins, heartbeats, endings."""


class Ledger(Protocol):
    """Where rows go: `count` as soon as a message was sent or received, `write` once its fate is known."""

    def count(self, row: Row) -> None: ...

    def write(self, row: Row) -> None: ...


Charge = Callable[[str, int], int]
Tap = Callable[[Row, Any, Sequence[bytes]], None]
"""Sees every whole message: its row, the message (of a body the header), and its frames."""


class Channel:
    """The `side` end of client `client`'s session.

    `modelled(kind, round)` is what the papers' byte model charges for a message of that kind. `tap`, if given, is
    shown every whole message as it is sent or received (`captures` writes them to files).
    """

    def __init__(
        self,
        side: Side,
        client: int,
        ledger: Ledger,
        modelled: Charge,
        schema: Schema | None = None,
        admit: Admit = lambda _kind, _header: None,
        tap: Tap | None = None,
    ) -> None:
        peer: Side = "server" if side == "client" else "client"
        self.client = client
        self._side: Side = side
        self._ways: tuple[Direction, Direction] = ("up", "down") if side == "client" else ("down", "up")
        self._ledger, self._modelled = ledger, modelled
        self._receiver = Receiver(peer, schema, admit)
        self._tap = tap
        self._frames: list[bytes] = []
        """Of a message that is coming in, if somebody wants to see it."""
        self._waiting: deque[Row] = deque()
        self._confirmed = 0
        self.session = 0
        """The session's number, once it has one."""

    @property
    def received(self) -> int:
        """Whole messages received in this session."""
        return self._receiver.received

    @property
    def sent(self) -> int:
        """Whole messages sent in this session."""
        return self._confirmed + len(self._waiting)

    @property
    def unconfirmed(self) -> int:
        """Messages sent that the peer has not confirmed."""
        return len(self._waiting)

    def go_on(self, *, received: int, sent: int) -> None:
        """Be where this end was after so many whole messages, all of them confirmed."""
        self._receiver.received, self._confirmed = received, sent

    def learn_schema(self, schema: Schema) -> None:
        """Bodies can be received from now on."""
        self._receiver.schema = schema

    def admit_with(self, schema: Schema, admit: Admit, modelled: Charge) -> None:
        """The server knows now who speaks: what it may send, and what its messages are charged."""
        self._receiver.schema, self._receiver.admit, self._modelled = schema, admit, modelled

    def send(
        self,
        kind: str,
        message: Any,
        *,
        chunks: Iterable[bytes] = (),
        body: int = 0,
        counters: pb.Counters | None = None,
    ) -> Outgoing:
        """Serialize and count a message; the caller puts its frames on the wire at once."""
        out = outgoing(
            self._side,
            kind,
            message,
            received=self.received,
            chunks=chunks,
            body=body,
            counters=counters,
        )
        row = self._row(self._ways[0], kind, message, out.sizes)
        row.session, row.position = self.session, self.sent
        self._ledger.count(row)
        self._waiting.append(row)
        if self._tap is not None:
            self._tap(row, message, out.frames)
        return out

    def feed(self, frame: bytes) -> tuple[Incoming, Row] | None:
        """A frame came in; the whole message it completes, if any, with its counted row.

        The caller sets the row's status if the message is refused, then writes it. Raises ProtocolError if
        the stream is broken.
        """
        if self._tap is not None:
            self._frames.append(frame)
        incoming = self._receiver.feed(frame)
        if incoming is None:
            return None
        row = self._row(self._ways[1], incoming.kind, incoming.message, incoming.sizes)
        if self._tap is not None:
            self._tap(row, incoming.message, self._frames)
            self._frames = []
        self._ledger.count(row)
        if incoming.received is not None:
            self.confirm(incoming.received)
        return incoming, row

    def settle(self, received: int | None) -> None:
        """The session is over and the peer got `received` messages (None: no more than it confirmed)."""
        if received is not None:
            self.confirm(received)
        while self._waiting:
            row = self._waiting.popleft()
            row.status = "lost"
            self._ledger.write(row)

    def confirm(self, received: int) -> None:
        """The peer has received `received` messages so far. Raises ProtocolError if that cannot be."""
        if not self._confirmed <= received <= self.sent:
            raise ProtocolError(
                pb.MALFORMED,
                f"the peer confirms {received} messages; {self._confirmed} were confirmed before and "
                f"{self.sent} sent",
            )
        while self._confirmed < received:
            self._ledger.write(self._waiting.popleft())
            self._confirmed += 1

    def _row(self, way: Direction, kind: str, message: Any, sizes: Sizes) -> Row:
        names = message.DESCRIPTOR.fields_by_name
        number = NO_ROUND
        if "round" in names and (not names["round"].has_presence or message.HasField("round")):
            number = message.round
        how = ""
        if "transfer" in names:
            base = message.transfer.base if message.transfer.HasField("base") else None
            how = form(message.transfer.coding, base)
        return Row(
            number,
            self.client,
            way,
            kind,
            modelled=self._modelled(kind, number),
            payload=sizes.payload,
            message=sizes.message,
            grpc=sizes.grpc,
            how=how,
        )
