"""What bytes.csv and tensors.csv of a run come to: entries by kind, connections by layer, the make-up of bodies.

A layer counts as observed only where every message, or every row of a connection, has it; otherwise it is None,
shown as a dash, and never 0.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from fedreuse.proto.ledger import (
    CONNECTION,
    CONNECTION_LAYERS,
    MESSAGE_LAYERS,
    ConnectionLayer,
    Direction,
    Layer,
    MessageLayer,
    Row,
    Status,
)
from fedreuse.sim.folder import check_ending, damage, repair
from fedreuse.sim.records import read_rows

Layers = Mapping[MessageLayer, int | None]
"""Bytes by layer; None where the layer was not observed."""

WAYS: tuple[Direction, ...] = ("up", "down")
STATUSES: tuple[Status, ...] = ("ok", "lost", "refused", "fault")
KINDS = (
    *("update", "score_reply", "model", "train_order", "score_request", "reuse_notice", "round_closed"),
    *("join", "welcome", "heartbeat", "abort", "reuse", "fault"),
)
"""The order of kinds in tables; unknown ones follow."""
COUNTED: tuple[ConnectionLayer, ...] = ("segments", "pure_acks")
"""Layers that are numbers of segments, not bytes."""
TENSORS = "tensors.csv"

Key = tuple[Direction, str, Status]


# ---------------------------------------------------------------- messages


@dataclass(frozen=True)
class Entry:
    """All rows of bytes.csv of one direction, kind and status.

    `events` counts charges of the byte model that no message carried: a reuse (16 bytes), and what is
    charged where a client failed (status "fault").
    """

    direction: Direction
    kind: str
    status: Status
    messages: int
    events: int
    bytes: Layers


def total(entries: Iterable[Entry]) -> dict[MessageLayer, int | None]:
    """Sums by layer; None where a message was not observed. Events, which only the modelled layer can
    show, do not count as missing from the others."""
    entries = list(entries)
    result: dict[MessageLayer, int | None] = {}
    for layer in MESSAGE_LAYERS:
        observed = [value for e in entries if (value := e.bytes[layer]) is not None]
        missing = any(e.messages and e.bytes[layer] is None for e in entries)
        result[layer] = None if missing or not observed else sum(observed)
    return result


@dataclass(frozen=True)
class Cost:
    """What a message of one kind comes to, on average over `messages` of them; None where not observed.

    `paper` is what the paper's convention charges for the same.
    """

    direction: Direction
    kind: str
    messages: int
    message: float | None
    grpc: float | None
    paper: int


# ---------------------------------------------------------------- connections


@dataclass(frozen=True)
class Connections:
    """The rows of connections of one direction: `rows` of them, and by layer how many have it and its sum.

    `how` counts the sentences on how numbers were obtained; `lacking` has, by layer, those of the rows that lack it.
    """

    rows: int
    seen: Mapping[ConnectionLayer, int]
    sums: Mapping[ConnectionLayer, int]
    how: Mapping[str, int]
    lacking: Mapping[ConnectionLayer, tuple[str, ...]]

    @property
    def socket(self) -> int | None:
        """What crossed the sockets, encrypted or not; None unless every row says it."""
        if not self.rows or self.seen["http2"] + self.seen["tls"] != self.rows:
            return None
        return self.sums["http2"] + self.sums["tls"]

    def layer(self, layer: ConnectionLayer) -> int | None:
        """A layer's sum, if it is complete.

        Each connection has http2 or tls, so each of these two is complete where every row has one of them.
        """
        if layer in ("http2", "tls"):
            return self.sums[layer] if self.socket is not None and self.seen[layer] else None
        return self.sums[layer] if self.rows and self.seen[layer] == self.rows else None

    def applies(self, layer: ConnectionLayer) -> bool:
        """False for tls if no connection was encrypted, and for http2 if all were."""
        return self.socket is None or layer not in ("http2", "tls") or self.seen[layer] > 0


class _Gathering:
    """Connections in the making."""

    def __init__(self) -> None:
        self.rows = 0
        self.seen: Counter[ConnectionLayer] = Counter()
        self.sums: Counter[ConnectionLayer] = Counter()
        self.how: Counter[str] = Counter()
        self.lacking: dict[ConnectionLayer, dict[str, None]] = {layer: {} for layer in CONNECTION_LAYERS}

    def add(self, row: Row) -> None:
        if row.http2 is not None and row.tls is not None:
            raise ValueError("a connection with both http2 and tls")
        self.rows += 1
        self.how[row.how] += 1
        for layer in CONNECTION_LAYERS:
            value = getattr(row, layer)
            other = {"http2": row.tls, "tls": row.http2}.get(layer)
            if value is not None:
                self.seen[layer] += 1
                self.sums[layer] += value
            elif other is None:
                self.lacking[layer][row.how] = None

    def done(self) -> Connections:
        lacking = {layer: tuple(texts) for layer, texts in self.lacking.items()}
        return Connections(self.rows, self.seen, self.sums, self.how, lacking)


# ---------------------------------------------------------------- the ledger


@dataclass(frozen=True)
class Sums:
    """`partial` names directions and layers that were observed in part only, and therefore count as absent."""

    entries: tuple[Entry, ...]
    connections: Mapping[Direction, Connections]
    partial: tuple[str, ...]
    partial_connections: tuple[str, ...]

    def layers(self, way: Direction) -> dict[Layer, int | None]:
        """Everything of one direction, by layer; None where a layer is not complete."""
        there = self.connections[way]
        mine = total(e for e in self.entries if e.direction == way)
        result: dict[Layer, int | None] = {layer: count for layer, count in mine.items()}
        return result | {layer: there.layer(layer) for layer in CONNECTION_LAYERS}


def read_sums(folder: Path, rounds: int | None) -> Sums:
    """The ledger's rows, up to a round if given. Raises RunError."""
    rows: Counter[Key] = Counter()
    seen: Counter[tuple[Direction, str, Status, MessageLayer]] = Counter()
    sums: Counter[tuple[Direction, str, Status, MessageLayer]] = Counter()
    gathered = {way: _Gathering() for way in WAYS}
    path = folder / "bytes.csv"
    with damage(path, repair(folder)):
        for row in read_rows(folder):
            if row.direction not in WAYS or row.status not in STATUSES:
                raise ValueError(f"direction {row.direction!r}, status {row.status!r}")
            if rounds is not None and row.round > rounds:
                continue  # a round that is still open or was broken off: it belongs to no m
            if row.kind == CONNECTION:
                gathered[row.direction].add(row)
                continue
            key = row.direction, row.kind, row.status
            rows[key] += 1
            for layer in MESSAGE_LAYERS:
                value = getattr(row, layer)
                if value is not None:
                    seen[*key, layer] += 1
                    sums[*key, layer] += value
        check_ending(path)
    entries, partial = [], []
    for key in sorted(rows, key=_place):
        layers = {
            layer: sums[*key, layer] if seen[*key, layer] == rows[key] else None for layer in MESSAGE_LAYERS
        }
        messages, events = (0, rows[key]) if _is_event(key) else (rows[key], 0)
        entries.append(Entry(*key, messages, events, layers))
    for way in WAYS:
        sent = [key for key in rows if key[0] == way and not _is_event(key)]
        whole = sum(rows[key] for key in sent)
        found = {layer: sum(seen[*key, layer] for key in sent) for layer in MESSAGE_LAYERS}
        partial += [f"{way}link {layer}" for layer in MESSAGE_LAYERS if 0 < found[layer] < whole]
    connections = {way: gathering.done() for way, gathering in gathered.items()}
    partly = [text for way in WAYS for text in _partly(way, connections[way])]
    return Sums(tuple(entries), connections, tuple(partial), tuple(partly))


def _partly(way: Direction, there: Connections) -> Iterable[str]:
    socket = there.seen["http2"] + there.seen["tls"]
    counts = {"http2 or tls": socket} | {
        layer: there.seen[layer] for layer in CONNECTION_LAYERS if layer not in ("http2", "tls")
    }
    return [f"{way}link {what} ({n} of {there.rows})" for what, n in counts.items() if 0 < n < there.rows]


def _is_event(key: Key) -> bool:
    """The byte model charges for it, but no message carried it."""
    return key[1] == "reuse" or key[2] == "fault"


def _place(key: Key) -> tuple[int, int, str, int]:
    way, kind, status = key
    known = KINDS.index(kind) if kind in KINDS else len(KINDS)
    return WAYS.index(way), known, kind, STATUSES.index(status)


# ---------------------------------------------------------------- bodies


@dataclass(frozen=True)
class Body:
    """All parts of bodies of one direction that were coded alike, from tensors.csv."""

    direction: Direction
    index_coding: str
    value_coding: str
    stored: int
    modelled: int
    index_bytes: int
    value_bytes: int

    @property
    def wire(self) -> int:
        return self.index_bytes + self.value_bytes


def read_bodies(folder: Path, rounds: int) -> tuple[Body, ...] | None:
    """What the bodies of the first `rounds` rounds were made of; None in folders without that table."""
    path = folder / TENSORS
    if not path.exists():
        return None
    figures = ("stored", "modelled", "index_bytes", "value_bytes")
    sums: dict[tuple[Direction, str, str], Counter[str]] = {}
    with damage(path, repair(folder)), path.open(encoding="utf-8", newline="") as handle:
        for cells in csv.DictReader(handle):
            way: Direction = "up" if cells["direction"] == "up" else "down"
            if cells["direction"] != way:
                raise ValueError(f"direction {cells['direction']!r}")
            numbers = {figure: int(cells[figure]) for figure in figures}
            if int(cells["round"]) <= rounds:
                key = way, cells["index_coding"], cells["value_coding"]
                sums.setdefault(key, Counter()).update(numbers)
        check_ending(path)
    bodies = [Body(*key, *(numbers[figure] for figure in figures)) for key, numbers in sums.items()]
    return tuple(sorted(bodies, key=lambda body: (WAYS.index(body.direction), -body.wire)))
