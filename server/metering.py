"""The layers below gRPC of one client's connection, from both ends' counters into the server's books."""

from __future__ import annotations

import logging
from dataclasses import replace
from math import inf

from fedreuse.proto import federation_pb2 as pb
from fedreuse.proto.channel import NO_ROUND
from fedreuse.proto.ledger import Direction
from fedreuse.proto.meter import (
    NOTHING,
    Address,
    Meter,
    Reading,
    UnobservableError,
    receiver_row,
    sender_row,
    unobserved_row,
)
from fedreuse.server.books import Books

log = logging.getLogger("fedreuse.server")


class ConnectionMeter:
    """Downlink rows come from this side's socket, uplink rows from what the client reports of its own.

    A client that does not report leaves only what arrived here. `address` is the client's end of the connection,
    `reports` whether the client said that it would.
    """

    def __init__(
        self,
        books: Books,
        meter: Meter,
        client: int,
        address: Address | None,
        *,
        encrypted: bool,
        reports: bool,
    ) -> None:
        self._books, self._meter, self._client = books, meter, client
        self._address, self._encrypted = address, encrypted
        self._down = self._up = self._arrived = NOTHING
        self._reports = reports
        self._silent = "the client reports none"
        self._said: set[tuple[Direction, str]] = set()
        self.due = False
        """True from a client's update until the counters it sends after it; never for one that sends none."""

    @property
    def reports(self) -> bool:
        return self._reports

    def read(self, round: int = NO_ROUND) -> None:
        """Enter what the connection carried since it was last read under `round`."""
        try:
            if self._address is None:
                raise UnobservableError("not a TCP connection")
            now = self._meter.read(self._address)
        except UnobservableError as error:
            self._unobserved(round, str(error))
            return
        if now.segments > self._down.segments:
            self._books.record(sender_row(round, self._client, "down", self._encrypted, now, self._down))
        if not self._reports and now.received > self._arrived.received:
            self._books.record(
                receiver_row(round, self._client, "up", self._encrypted, now, self._arrived, self._silent)
            )
            self._arrived = now
        self._down = now

    def report(self, counters: pb.Counters, round: int = NO_ROUND) -> None:
        """The client says what it has sent; enter what is new under `round`.

        Once it said none, or something impossible, it is not listened to any more on this connection.
        """
        self.due = False
        if not self._reports:
            return
        if counters.absent:
            reason = "".join(c for c in counters.absent[:200] if c.isprintable())  # it ends up on terminals
            self._give_up_reports(f"at the client: {reason}")
            return
        now = Reading.from_proto(counters)
        if not now.follows(self._up) or now.once > self._received():
            log.warning("client %d: its TCP counters cannot be right; not used any more", self._client)
            self._give_up_reports("the client's counters cannot be right")
            return
        if now.segments > self._up.segments:
            self._books.record(sender_row(round, self._client, "up", self._encrypted, now, self._up))
        self._up = now

    def abandon(self) -> None:
        """The client went without a last report: what arrived since the one before has no sender's counters."""
        told = replace(NOTHING, received=self._up.once)
        if self._reports and self._down.received > told.received:
            self._give_up_reports("the client went without its last report")
            self._books.record(
                receiver_row(NO_ROUND, self._client, "up", self._encrypted, self._down, told, self._silent)
            )

    def _received(self) -> float:
        """Bytes that came on this connection, where that is known: more than its client has ever reported."""
        try:
            return inf if self._address is None else self._meter.read(self._address).received
        except UnobservableError:
            return inf

    def _give_up_reports(self, why: str) -> None:
        """From now on only what arrives here is known; what was reported before stands."""
        if self._reports:
            self._arrived = replace(NOTHING, received=self._up.once)
        self._reports, self._silent = False, why

    def _unobserved(self, round: int, why: str) -> None:
        """Say once per connection and direction that nothing can be said; what was read before stands."""
        if self._down is not NOTHING:
            return
        self._say_unobserved(round, "down", why)
        if not self._reports:
            self._say_unobserved(round, "up", f"{why}; {self._silent}")

    def _say_unobserved(self, round: int, way: Direction, why: str) -> None:
        if (way, why) not in self._said:
            self._said.add((way, why))
            self._books.record(unobserved_row(round, self._client, way, why))
