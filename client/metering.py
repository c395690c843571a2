"""The layers below gRPC of one client's connection: rows for its own ledger, counters for the server's."""

from __future__ import annotations

import asyncio

from fedreuse.proto import federation_pb2 as pb
from fedreuse.proto.channel import NO_ROUND, Ledger
from fedreuse.proto.ledger import Row
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

DRAIN_SECONDS = 2.0
"""How long an upload may take to leave the machine before its counters are reported as they are."""
_STEP = 0.002


class ConnectionMeter:
    """`address` is this client's end of the connection, as the server sees it."""

    def __init__(
        self, ledger: Ledger, meter: Meter, client: int, address: Address | None, *, encrypted: bool
    ) -> None:
        self._ledger, self._meter, self._client = ledger, meter, client
        self._address, self._encrypted = address, encrypted
        self._last = NOTHING
        self._absent = ""

    @property
    def last(self) -> pb.Counters | None:
        """The newest counters that were read, if any were."""
        return self._last.to_proto() if self._last is not NOTHING else None

    def read(self, round: int | None = None) -> pb.Counters:
        """Enter what the connection carried since it was last read; the counters, or why there are none."""
        number = NO_ROUND if round is None else round
        try:
            now = self.peek()
        except UnobservableError as error:
            return self._unobserved(number, str(error))
        if now.segments > self._last.segments or now.received > self._last.received:
            why = "only the server knows its own"
            self._enter(sender_row(number, self._client, "up", self._encrypted, now, self._last))
            self._enter(receiver_row(number, self._client, "down", self._encrypted, now, self._last, why))
        self._last = now
        return now.to_proto()

    def peek(self) -> Reading:
        """The counters now. Raises UnobservableError."""
        if self._address is None:
            raise UnobservableError("the server did not see a TCP address of this client")
        return self._meter.read(self._address)

    async def drained(self, sent: int, before: int) -> bool:
        """Wait until `sent` bytes more than `before` have left this machine; False if the counters cannot be read.

        Not until they are acknowledged: a peer with nothing to say may put that off for 40 ms.
        """
        try:
            for _ in range(int(DRAIN_SECONDS / _STEP)):
                now = self.peek()
                if now.once >= before + sent and not now.unsent:
                    break
                await asyncio.sleep(_STEP)
        except UnobservableError:
            return False
        return True

    def once(self) -> int:
        """Bytes that have crossed the socket so far; 0 if that is not known."""
        try:
            return self.peek().once
        except UnobservableError:
            return 0

    def _unobserved(self, round: int, why: str) -> pb.Counters:
        """Say once that nothing can be said; what was read before stands."""
        if self._last is NOTHING and not self._absent:
            self._absent = why
            self._enter(unobserved_row(round, self._client, "up", why))
            self._enter(unobserved_row(round, self._client, "down", why))
        return pb.Counters(absent=why)

    def _enter(self, row: Row) -> None:
        self._ledger.count(row)
        self._ledger.write(row)
