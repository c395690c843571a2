"""Captured messages: a file per whole message, as it stood in gRPC's messages; written by a `Capture`.

A file is a list of entries, each a 4-byte little-endian length and that many bytes. The first entry is the run's
serialized `Schema`, which a reader needs to make sense of a body; each other one is a gRPC message as it was sent:
one envelope, or a header envelope and its chunks in order. The name says what the bytes do not:
`r0001-c00007-up-update.frames` is round 1 (from 1; 0 is outside any round), client 7, client to server, kind update;
`-2`, `-3` and so on follow the kind of further messages of the same name.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from fedreuse.proto import federation_pb2 as pb
from fedreuse.proto.errors import ProtocolError
from fedreuse.proto.frames import Side
from fedreuse.proto.ledger import Direction, Row
from fedreuse.proto.schema import Schema

SUFFIX = ".frames"
LENGTH_BYTES = 4
MOST_ALIKE = 100
"""Files of one round, client, direction and kind; a peer that repeats itself does not fill the disk."""
MOST_FILES = 50_000
"""Files of one capture: whoever joins under ever new names fills no disk either."""
MAX_FILE_BYTES = 8 << 30
_NAME = re.compile(r"r(\d{4,10})-c(\d{5,10})-(up|down)-([a-z_]+?)(?:-(\d+))?\.frames")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CaptureTo:
    """Where captures go, and of how many rounds."""

    folder: Path
    rounds: int

    def tap(self, schema: Schema, first: int) -> Capture:
        """The capture of a run whose next round is `first`."""
        return Capture(self.folder, schema, first, self.rounds)


class Capture:
    """A `channel.Tap` that writes every message of `rounds` rounds from `first` on into `folder`.

    Messages outside any round are written until the last of these rounds is over. A disk that is full ends the
    capture and not the run.
    """

    def __init__(self, folder: Path, schema: Schema, first: int, rounds: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._schema = folder, _entry(schema.to_proto().SerializeToString())
        self._first, self._end = first, first + rounds
        self._names: Counter[str] = Counter()
        self._over, self._written = False, 0

    def __call__(self, row: Row, message: Any, frames: Sequence[bytes]) -> None:
        # Only what this side sends is trusted to say that the rounds are over.
        self._over = self._over or (row.direction == "down" and row.round >= self._end)
        if self._over or not (row.round < 0 or self._first <= row.round < self._end):
            return
        # Until a Join was accepted its sender is known from the Join alone.
        client = message.client if isinstance(message, pb.Join) else row.client
        stem = f"r{row.round + 1:04d}-c{max(client, 0):05d}-{row.direction}-{row.kind}"
        while (path := self._folder / self._name(stem)).exists():
            pass  # of an earlier run of this server
        if self._names[stem] > MOST_ALIKE:
            return
        try:
            with path.open("wb") as handle:
                handle.write(self._schema)
                for frame in frames:
                    handle.write(_entry(frame))
        except OSError as error:
            log.warning("no more messages are captured: %s", error)
            self._over = True
        self._written += 1
        if self._written >= MOST_FILES:
            log.warning("no more messages are captured: %d files are enough", MOST_FILES)
            self._over = True

    def _name(self, stem: str) -> str:
        self._names[stem] += 1
        count = self._names[stem]
        return f"{stem}{SUFFIX}" if count == 1 else f"{stem}-{count}{SUFFIX}"


def _entry(data: bytes) -> bytes:
    return len(data).to_bytes(LENGTH_BYTES, "little") + data


@dataclass(frozen=True, slots=True)
class Label:
    """What a file's name says; `round` counts from 1."""

    round: int
    client: int
    direction: Direction
    kind: str

    @property
    def side(self) -> Side:
        """Who sent it."""
        return "client" if self.direction == "up" else "server"


@dataclass(frozen=True, slots=True)
class Captured:
    label: Label
    schema: Schema
    frames: tuple[bytes, ...]


def label_of(path: Path) -> Label | None:
    """What a file's name says, if it is the name of a capture."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        return None
    way: Direction = "up" if match[3] == "up" else "down"
    return Label(int(match[1]), int(match[2]), way, match[4])


def read_capture(path: Path) -> Captured:
    """A file's schema and gRPC messages. Raises ProtocolError if it is not a capture, OSError if it cannot be read."""
    label = label_of(path)
    if label is None:
        raise ProtocolError(
            pb.MALFORMED,
            f"{path.name} is not the name of a capture; one looks like r0001-c00007-up-update{SUFFIX}, and says "
            "who sent the message",
        )
    if path.stat().st_size > MAX_FILE_BYTES:
        raise ProtocolError(pb.TOO_LARGE, f"{path} is larger than {MAX_FILE_BYTES} bytes")
    data, at, entries = path.read_bytes(), 0, []
    while at < len(data):
        length = int.from_bytes(data[at : at + LENGTH_BYTES], "little")
        start = at + LENGTH_BYTES
        if start + length > len(data):
            raise ProtocolError(
                pb.MALFORMED,
                f"{path}, byte {at}: an entry of {length} bytes, {max(0, len(data) - start)} are left",
            )
        entries.append(data[start : start + length])
        at = start + length
    if len(entries) < 2:
        raise ProtocolError(
            pb.MALFORMED, f"{path} has {len(entries)} entries; a schema and a message are due"
        )
    try:
        schema = Schema.from_proto(pb.Schema.FromString(entries[0]))
    except DecodeError:
        raise ProtocolError(pb.MALFORMED, f"{path} does not begin with a schema") from None
    return Captured(label, schema, tuple(entries[1:]))
