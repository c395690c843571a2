"""Whole messages to gRPC messages ("frames") and back, with the bytes of every layer counted on the way.

A whole message is one envelope, or a header envelope followed by chunks of at most 1 MiB. gRPC carries raw
bytes here, so the length of a frame is exactly the serialized protobuf message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from google.protobuf.message import DecodeError

from fedreuse.proto import federation_pb2 as pb
from fedreuse.proto.codec import Block, Buffer, Payload, check_layout
from fedreuse.proto.errors import ProtocolError
from fedreuse.proto.ledger import GRPC_PREFIX_BYTES
from fedreuse.proto.schema import Schema

CHUNK_BYTES = 1 << 20
MAX_FRAME_BYTES = 16 << 20
"""gRPC's receive limit on both sides: room for the schema or the headers of MAX_TENSORS tensors."""

Envelope = pb.ClientMessage | pb.ServerMessage
Side = Literal["client", "server"]

_ENVELOPE: dict[Side, type[pb.ClientMessage] | type[pb.ServerMessage]] = {
    "client": pb.ClientMessage,
    "server": pb.ServerMessage,
}
_CHUNK_FIELD: dict[Side, int] = {
    side: envelope.DESCRIPTOR.fields_by_name["chunk"].number for side, envelope in _ENVELOPE.items()
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of one whole message: its body, its serialized frames, and those with gRPC's prefixes."""

    payload: int
    message: int
    grpc: int


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A whole message ready to send."""

    kind: str
    frames: tuple[bytes, ...]
    sizes: Sizes


@dataclass(frozen=True, slots=True)
class Incoming:
    """A whole message received. `refusal` is set if its body was not admitted; the body was discarded.

    `payload` has the body as it came; `transfers.open_body` makes the payload of it.
    """

    kind: str
    message: Any
    payload: Payload | None
    received: int | None
    sizes: Sizes
    refusal: ProtocolError | None = None
    counters: pb.Counters | None = None


def outgoing(
    side: Side,
    kind: str,
    message: Any,
    *,
    received: int = 0,
    chunks: Iterable[bytes] = (),
    body: int = 0,
    counters: pb.Counters | None = None,
) -> Outgoing:
    """Serialize a message of `side`; `chunks` are frames made by `chunk_frames` from `body` bytes.

    `counters`, of clients only, travel on the same envelope.
    """
    fields = {kind: message} if counters is None else {kind: message, "counters": counters}
    header = _ENVELOPE[side](**fields, received=received).SerializeToString()
    frames = (header, *chunks)
    total = sum(map(len, frames))
    return Outgoing(kind, frames, Sizes(body, total, total + GRPC_PREFIX_BYTES * len(frames)))


def chunk_frames(side: Side, body: Buffer) -> list[bytes]:
    """The chunk envelopes of a body.

    Written by hand in protobuf's wire format (equal to SerializeToString, as a test shows): protobuf would
    copy every body three more times.
    """
    view = memoryview(body).cast("B")
    return [_chunk_frame(side, at, view[at : at + CHUNK_BYTES]) for at in range(0, len(view), CHUNK_BYTES)]


def _chunk_frame(side: Side, offset: int, data: memoryview) -> bytes:
    inner = (b"\x08" + _varint(offset) if offset else b"") + b"\x12" + _varint(len(data))
    tag = bytes([_CHUNK_FIELD[side] << 3 | 2])
    return b"".join((tag, _varint(len(inner) + len(data)), inner, data))


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(frame: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = frame[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise IndexError("a varint of more than ten bytes")


def _read_chunk(side: Side, frame: bytes) -> tuple[int, memoryview] | None:
    """Offset and data of a chunk envelope laid out as `_chunk_frame` does; None for anything else."""
    if not frame or frame[0] != _CHUNK_FIELD[side] << 3 | 2:
        return None
    try:
        length, at = _read_varint(frame, 1)
        if at + length != len(frame):
            return None
        offset = 0
        if frame[at] == 0x08:
            offset, at = _read_varint(frame, at + 1)
        if frame[at] != 0x12:
            return None
        length, at = _read_varint(frame, at + 1)
    except IndexError:
        return None
    return (offset, memoryview(frame)[at:]) if at + length == len(frame) else None


@dataclass(slots=True)
class _Assembly:
    kind: str
    message: Any
    blocks: tuple[Block, ...]
    length: int
    received: int | None
    body: memoryview | None
    refusal: ProtocolError | None
    filled: int
    message_bytes: int
    frames: int


Admit = Callable[[str, Any], None]


class Receiver:
    """Puts the frames of one direction together again; sans-IO.

    `admit(kind, header)` may refuse a body before memory is reserved for it by raising ProtocolError;
    the chunks are then counted and thrown away. `feed` raises ProtocolError if the stream itself is broken
    (unreadable frame, chunk out of place), after which the session cannot go on.
    """

    def __init__(self, side: Side, schema: Schema | None, admit: Admit = lambda _kind, _header: None) -> None:
        self._side: Side = side
        self.schema = schema
        self.admit = admit
        self._open: _Assembly | None = None
        self.received = 0
        """Whole messages received so far."""

    def feed(self, frame: bytes) -> Incoming | None:
        """One frame in; the whole message it completes, if any, out."""
        chunk = _read_chunk(self._side, frame)
        if chunk is not None:
            return self._chunk(*chunk, len(frame))
        envelope = _ENVELOPE[self._side]()
        try:
            envelope.ParseFromString(frame)
        except DecodeError as error:
            raise ProtocolError(
                pb.MALFORMED, f"a message of {len(frame)} bytes is not protobuf: {error}"
            ) from None
        kind = envelope.WhichOneof("body")
        if kind is None:
            raise ProtocolError(pb.MALFORMED, "an envelope without a body this version knows")
        if kind == "chunk":
            return self._chunk(envelope.chunk.offset, memoryview(envelope.chunk.data), len(frame))
        message = getattr(envelope, kind)
        received = envelope.received if envelope.HasField("received") else None
        if "transfer" not in message.DESCRIPTOR.fields_by_name:
            sizes = Sizes(0, len(frame), len(frame) + GRPC_PREFIX_BYTES)
            counters = None
            if isinstance(envelope, pb.ClientMessage) and envelope.HasField("counters"):
                counters = envelope.counters
            return self._whole(kind, message, None, received, sizes, counters=counters)
        return self._header(kind, message, received, len(frame))

    def _header(self, kind: str, message: Any, received: int | None, size: int) -> Incoming | None:
        if self._open is not None:
            raise ProtocolError(pb.MALFORMED, f"{kind} header inside the body of {self._open.kind}")
        if self.schema is None:
            raise ProtocolError(pb.NOT_JOINED, f"{kind} before the schema is known")
        blocks = check_layout(self.schema, message.transfer)
        refusal, body = None, None
        try:
            self.admit(kind, message)
            # Not a bytearray: that would be zeroed first. Every byte is filled before anybody sees it.
            body = np.empty(message.transfer.length, np.uint8).data
        except ProtocolError as error:
            refusal = error
        self._open = _Assembly(
            kind, message, blocks, message.transfer.length, received, body, refusal, 0, size, 1
        )
        return self._finish_if_complete()

    def _chunk(self, offset: int, data: memoryview, size: int) -> Incoming | None:
        part = self._open
        if part is None:
            raise ProtocolError(pb.MALFORMED, "a chunk without a header")
        if len(data) > CHUNK_BYTES:
            raise ProtocolError(pb.TOO_LARGE, f"a chunk of {len(data)} bytes; 1 to {CHUNK_BYTES} are allowed")
        if len(data) == 0 or offset != part.filled or offset + len(data) > part.length:
            raise ProtocolError(
                pb.MALFORMED,
                f"chunk of {len(data)} bytes at offset {offset} of the {part.kind} body; "
                f"{part.filled} of {part.length} bytes are here",
            )
        if part.body is not None:
            memoryview(part.body)[offset : offset + len(data)] = data  # slicing a bytearray copies twice
        part.filled += len(data)
        part.message_bytes += size
        part.frames += 1
        return self._finish_if_complete()

    def _finish_if_complete(self) -> Incoming | None:
        part = self._open
        if part is None or part.filled < part.length:
            return None
        self._open = None
        sizes = Sizes(part.length, part.message_bytes, part.message_bytes + GRPC_PREFIX_BYTES * part.frames)
        payload = None if part.body is None else Payload(part.blocks, part.body)
        return self._whole(part.kind, part.message, payload, part.received, sizes, part.refusal)

    def _whole(
        self,
        kind: str,
        message: Any,
        payload: Payload | None,
        received: int | None,
        sizes: Sizes,
        refusal: ProtocolError | None = None,
        counters: pb.Counters | None = None,
    ) -> Incoming:
        self.received += 1
        return Incoming(kind, message, payload, received, sizes, refusal, counters)
