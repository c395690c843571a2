"""The byte ledger: a row per message, and a row per connection, round and direction; a column per layer.

Layers that were not observed are None (an empty cell), never 0 and never derived. Direction is seen from
the client: "up" is client to server. Up to `grpc` bytes belong to messages, below it to connections: there
one sender's counters are read now and then, and a row (kind "connection") holds what was added since.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Literal

Direction = Literal["up", "down"]
MessageLayer = Literal["modelled", "payload", "message", "grpc"]
ConnectionLayer = Literal["http2", "tls", "tcp_payload", "tcp_retransmitted", "segments", "pure_acks", "ip"]
Layer = MessageLayer | ConnectionLayer
Status = Literal["ok", "lost", "refused", "fault"]

MESSAGE_LAYERS: tuple[MessageLayer, ...] = ("modelled", "payload", "message", "grpc")
CONNECTION_LAYERS: tuple[ConnectionLayer, ...] = (
    *("http2", "tls", "tcp_payload", "tcp_retransmitted", "segments", "pure_acks", "ip"),
)
"""Bytes, but for `segments` (all that were sent) and `pure_acks` (of them without payload), which are counts.
`http2` or `tls` is what crossed the socket once; `tcp_payload` is that and what of it was sent again."""
LAYERS: tuple[Layer, ...] = (*MESSAGE_LAYERS, *CONNECTION_LAYERS)
CONNECTION = "connection"
"""The kind of rows that belong to a connection and no message."""
GRPC_PREFIX_BYTES = 5
"""gRPC puts one compression flag and a 32-bit length before every message."""


@dataclass(slots=True)
class Row:
    """Bytes of one whole message (a header with all its chunks), or of one connection since its last reading.

    `status`: "ok" (received, or not known to be lost), "lost" (sent, and the session ended without a sign
    that it arrived), "refused" (received but not accepted), "fault" (what the paper's convention charges
    where no message was exchanged because the client failed). `how` says of a connection's row how its
    numbers were obtained and why others are absent, of a message with a body how that was coded.
    """

    round: int
    client: int
    direction: Direction
    kind: str
    status: Status = "ok"
    modelled: int | None = None
    payload: int | None = None
    message: int | None = None
    grpc: int | None = None
    http2: int | None = None
    tls: int | None = None
    tcp_payload: int | None = None
    tcp_retransmitted: int | None = None
    segments: int | None = None
    pure_acks: int | None = None
    ip: int | None = None
    how: str = ""
    session: int = 0
    """Of a sent message: the session's number, and how many messages went before it there; not in the file."""
    position: int = -1

    def cells(self) -> list[str]:
        return ["" if value is None else str(value) for value in (getattr(self, name) for name in COLUMNS)]


COLUMNS = tuple(field.name for field in fields(Row) if field.name not in ("session", "position"))


class Totals:
    """Running sums of rows by direction, kind, status and layer; a layer no row observed stays absent."""

    def __init__(self) -> None:
        self._sums: Counter[tuple[str, str, str, str]] = Counter()

    def add(self, rows: Iterable[Row]) -> None:
        for row in rows:
            for layer in LAYERS:
                value = getattr(row, layer)
                if value is not None:
                    self._sums[row.direction, row.kind, row.status, layer] += value

    def waive(self, row: Row) -> None:
        """Take an added row's modelled charge back."""
        if row.modelled is not None:
            self._sums[row.direction, row.kind, row.status, "modelled"] -= row.modelled
            row.modelled = 0

    def dump(self) -> list[list[str | int]]:
        """The sums in a form that JSON can hold; `restore` reads it."""
        return [[*key, value] for key, value in self._sums.items()]

    def restore(self, dumped: Iterable[Iterable[str | int]]) -> None:
        """Go on from sums that `dump` gave."""
        for way, kind, status, layer, value in dumped:
            self._sums[str(way), str(kind), str(status), str(layer)] += int(value)

    def total(self, direction: Direction, layer: Layer, kind: str | None = None) -> int | None:
        """Sum over everything that matches, lost and refused messages included; None if never observed."""
        values = [
            value
            for (way, name, _, observed), value in self._sums.items()
            if way == direction and observed == layer and kind in (None, name)
        ]
        return sum(values) if values else None

    def kinds(self, direction: Direction) -> list[str]:
        return sorted({kind for way, kind, _, _ in self._sums if way == direction})

    def layers(self, direction: Direction) -> dict[str, int | None]:
        return {layer: self.total(direction, layer) for layer in LAYERS}
