"""The server's byte ledger between the messages and the disk: sums, rows, and what still waits for its fate."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import fields
from threading import Lock
from typing import Any

from fedreuse.proto.ledger import CONNECTION, CONNECTION_LAYERS, LAYERS, Direction, Row, Totals
from fedreuse.proto.transfers import Part

PART_COLUMNS = (
    *("round", "direction", "tensors", "modes", "index_coding", "value_coding"),
    *("bodies", "stored", "modelled", "index_bytes", "value_bytes"),
)
"""tensors.csv: the bodies of a round and direction by the parts they are made of, summed over `bodies`."""


class Books:
    """Rows and their sums; safe to use from the event loop and the commit's thread at once.

    `dense_bytes` and `update_bytes` are the model's charges B_0 and B_i; `round` is the open or coming round.
    """

    def __init__(self, dense_bytes: int, update_bytes: int, round: int, notes: Mapping[str, Any]) -> None:
        self.dense_bytes, self.update_bytes, self.round = dense_bytes, update_bytes, round
        self.totals = Totals()
        self.totals.restore(notes.get("totals", ()))
        self._rows: deque[Row] = deque()
        # Sent and not confirmed yet; what belongs to a round survives a kill, so that no charge is forgotten.
        self._waiting: dict[int, Row] = {}
        self._left_over: dict[int, list[Row]] = {}
        for dumped in notes.get("waiting", ()):
            left = Row(*dumped)
            self._left_over.setdefault(left.client, []).append(left)
        self._charged: set[int] = set()
        self._parts: dict[tuple[Any, ...], list[int]] = {}
        self._sums: Counter[tuple[str, str]] = Counter()
        # Layers that some connection of the open round did not show: no sum of the others is given for them.
        self._partial: set[tuple[str, str]] = set()
        self._lock = Lock()

    # -- rows

    def count(self, row: Row) -> None:
        """Add a message to the sums as soon as it was sent or received."""
        with self._lock:
            if row.position >= 0:
                self._waiting[id(row)] = row
            self.totals.add([row])
            for layer in LAYERS:
                value = getattr(row, layer)
                if value is not None and row.round == self.round:
                    self._sums[row.direction, layer] += value
            if row.kind == CONNECTION and row.round == self.round:
                self._partial.update((row.direction, layer) for layer in _lacking(row))

    def write(self, row: Row) -> None:
        """Enter a counted row, its fate now known, into bytes.csv with the next commit."""
        with self._lock:
            self._waiting.pop(id(row), None)
            self._rows.append(row)

    def record(self, row: Row) -> None:
        self.count(row)
        self.write(row)

    def compose(self, round: int, way: Direction, parts: Iterable[Part]) -> None:
        """Add what a body was made of to tensors.csv."""
        with self._lock:
            for part in parts:
                key = (round, way, part.tensors, part.modes, part.index_coding, part.value_coding)
                sums = self._parts.setdefault(key, [0] * 5)
                counts = int(part.first), part.stored, part.modelled, part.index_bytes, part.value_bytes
                self._parts[key] = [a + b for a, b in zip(sums, counts, strict=True)]

    # -- the model's charges

    def open_round(self, round: int) -> None:
        """From now on messages of `round` are summed and charged."""
        with self._lock:
            self.round = round
            self._charged.clear()
            self._sums.clear()
            self._partial.clear()

    def modelled_bytes(self, kind: str, client: int, round: int) -> int:
        """What the papers' model charges for a message as it is sent or comes in: a dense model once per
        selected client and round (the symmetric convention), nothing for control traffic. An update is
        charged when it is accepted."""
        if kind != "model" or round < self.round:
            return 0
        return self.dense_bytes if self.first_charge(client) else 0

    def first_charge(self, client: int) -> bool:
        """True once per client and round: its dense model is charged now."""
        with self._lock:
            first = client not in self._charged
            self._charged.add(client)
        return first

    def charge(self, row: Row) -> None:
        """An accepted update: its row, counted before, gets the model's charge B_i."""
        with self._lock:
            row.modelled = self.update_bytes
            self.totals.add([Row(row.round, row.client, row.direction, row.kind, modelled=self.update_bytes)])
            self._sums[row.direction, "modelled"] += self.update_bytes

    def waive(self) -> None:
        """The open round is broken off and will be run, and charged, again: take its charges back."""
        with self._lock:
            for row in (*self._rows, *self._waiting.values()):
                if row.round >= self.round:
                    self.totals.waive(row)

    def lacks(self, way: Direction) -> None:
        """Connections of one direction are not complete in the open round: no sums of their layers."""
        with self._lock:
            self._partial.update((way, layer) for layer in CONNECTION_LAYERS)

    # -- sums

    def round_sums(self) -> dict[str, int | None]:
        """Bytes of the open round so far, by column of rounds.csv; None where a layer was not observed, or for
        some connections only."""
        with self._lock:
            return {
                f"{way}link_{layer}": None if (way, layer) in self._partial else self._sums.get((way, layer))
                for way in ("up", "down")
                for layer in LAYERS
            }

    def layers(self, way: Direction) -> dict[str, int | None]:
        """Bytes of the whole run so far, by layer."""
        with self._lock:
            return self.totals.layers(way)

    # -- to and from the disk

    @property
    def open(self) -> bool:
        """True if there is anything that the disk does not know."""
        return bool(self._rows or self._waiting or self._parts)

    def drain_parts(self) -> list[list[Any]]:
        """Rows of tensors.csv; rounds from 1."""
        with self._lock:
            parts, self._parts = self._parts, {}
        return [[key[0] + 1, *key[1:], *sums] for key, sums in parts.items()]

    def drain(self, *, last: bool) -> tuple[list[list[Any]], dict[str, Any]]:
        """Finished rows as cells (rounds from 1), and notes that let another process go on.

        Heartbeats and welcomes of all connected clients are worth noting only once, at the `last` time.
        """
        with self._lock:
            rows = [self._rows.popleft() for _ in range(len(self._rows))]
            waiting = [row for row in self._waiting.values() if row.round >= 0 or last]
            waiting += [row for left in self._left_over.values() for row in left]
            notes = {"totals": self.totals.dump(), "waiting": [_dumped(row) for row in waiting]}
        return [[row.round + 1, *row.cells()[1:]] for row in rows], notes

    def settle_left_over(self, client: int, session: int | None = None, received: int = 0) -> None:
        """The fate of what this client was sent before the server was last killed or stopped.

        It arrived if it was among the first `received` messages of `session`; otherwise it is lost.
        """
        for row in self._left_over.pop(client, ()):
            row.status = "ok" if row.session == session and row.position < received else "lost"
            self.write(row)

    def settle_all_left_over(self) -> None:
        """The run is over: what nobody confirmed is lost."""
        for client in list(self._left_over):
            self.settle_left_over(client)


def _dumped(row: Row) -> list[Any]:
    return [getattr(row, field.name) for field in fields(Row)]


def _lacking(row: Row) -> list[str]:
    """Layers that a connection's row does not have; it needs only one of http2 and tls."""
    return [
        layer
        for layer in CONNECTION_LAYERS
        if getattr(row, layer) is None and {"http2": row.tls, "tls": row.http2}.get(layer) is None
    ]
