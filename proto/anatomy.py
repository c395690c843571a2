"""What the bytes of a body and of an envelope mean, piece by piece; for people who look at a captured message.

Bodies are read by the decoder's own code with a reader that takes notes, so this cannot drift from the format.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedreuse.proto import federation_pb2 as pb
from fedreuse.proto import floats, masks, packing
from fedreuse.proto.codec import Block, Buffer
from fedreuse.proto.entropy import Bytes, Reader
from fedreuse.proto.errors import ProtocolError
from fedreuse.proto.floats import Places
from fedreuse.proto.numbers import below_leading_one, read_low_bits
from fedreuse.proto.packing import Section, State
from fedreuse.proto.schema import Array, Schema

METHODS = ("stored", "zstd")


@dataclass(frozen=True, slots=True)
class Piece:
    """`length` bytes from `at` on mean `text`; `depth` is how deep they lie inside others."""

    at: int
    length: int
    text: str
    depth: int = 0


@dataclass(frozen=True, slots=True)
class Found:
    """A section of a packed body, or a tensor of a plain one, as far as it could be read.

    `part` and `parts` count the sections of a tensor that was cut; sizes are None where they are not known.
    """

    tensors: tuple[int, ...]
    part: int
    parts: int
    stored: int
    index_coding: str
    value_coding: str
    index_bytes: int
    value_bytes: int | None


@dataclass(frozen=True)
class Anatomy:
    """`stop` says why the rest could not be read; None if everything was."""

    pieces: tuple[Piece, ...]
    found: tuple[Found, ...]
    stop: str | None


def dissect(
    schema: Schema, coding: int, blocks: Sequence[Block], body: Buffer, base: State | None = None
) -> Anatomy:
    """The structure of a body; `base` is the model its values are coded against, if it is known."""
    if coding == pb.PLAIN:
        return _plain(schema, blocks)
    walk = _Walk(schema, body, base, change=coding == pb.CHANGE)
    stop = None
    every = packing.sections(schema, [block.index for block in blocks])
    counts: dict[tuple[int, ...], int] = {}
    for section in every:
        counts[section.tensors] = counts.get(section.tensors, 0) + 1
    done: dict[tuple[int, ...], int] = {}
    try:
        for section in every:
            done[section.tensors] = done.get(section.tensors, 0) + 1
            walk.section(section, done[section.tensors], counts[section.tensors])
        walk.source.end()
    except _BaseNeeded as needed:
        stop = str(needed)
    except ProtocolError as error:
        stop = error.detail
    end = max((piece.at + piece.length for piece in walk.pieces), default=0)
    left = len(memoryview(body)) - end
    if left:
        walk.pieces.append(Piece(end, left, f"{left} bytes that cannot be told apart"))
    return Anatomy(tuple(walk.pieces), tuple(walk.found), stop)


def _plain(schema: Schema, blocks: Sequence[Block]) -> Anatomy:
    pieces, found, at = [], [], 0
    for block in blocks:
        spec, mode = schema.tensors[block.index], pb.Mode.Name(block.mode).lower()
        stored = spec.size if block.mode == pb.DENSE else block.kept
        values = stored * spec.width
        index = block.length - values
        pieces.append(Piece(at, 0, f"tensor {spec.name}, {mode}"))
        if index:
            what = "coordinates, uint32" if block.mode == pb.PAIRS else f"bitmap of {spec.size} coordinates"
            pieces.append(Piece(at, index, what, 1))
        pieces.append(Piece(at + index, values, f"{stored} values, {spec.dtype}", 1))
        coding = "all" if block.mode == pb.DENSE else mode
        found.append(Found((block.index,), 1, 1, stored, coding, "raw", index, values))
        at += block.length
    return Anatomy(tuple(pieces), tuple(found), None)


# ---------------------------------------------------------------- packed bodies


class _BaseNeeded(Exception):
    """What comes next has a length that only the base tells."""


@dataclass(frozen=True, slots=True)
class _Read:
    """One read: `size` is what a stream comes to, None for plain bytes."""

    at: int
    length: int
    size: int | None = None


class _Notes(Reader):
    """A reader that notes what was read."""

    def __init__(self, body: Buffer, where: str) -> None:
        super().__init__(body, where)
        self.reads: list[_Read] = []
        self._inside = False

    def raw(self, count: int) -> Bytes:
        at = self.position
        data = super().raw(count)
        if not self._inside:
            self.reads.append(_Read(at, count))
        return data

    def varint(self, limit: int) -> int:
        at = self.position
        with_whole = self._inside
        self._inside = True
        try:
            value = super().varint(limit)
        finally:
            self._inside = with_whole
        if not self._inside:
            self.reads.append(_Read(at, self.position - at))
        return value

    def stream(self, size: int) -> Bytes:
        at, self._inside = self.position, True
        try:
            data = super().stream(size)
        finally:
            self._inside = False
        self.reads.append(_Read(at, self.position - at, size))
        return data


class _Walk:
    def __init__(self, schema: Schema, body: Buffer, base: State | None, *, change: bool) -> None:
        self.source = _Notes(body, "body")
        self.pieces: list[Piece] = []
        self.found: list[Found] = []
        self._schema, self._change = schema, change
        self._body = memoryview(body).cast("B")
        self._old = None if base is None else schema.views(base)

    def section(self, section: Section, part: int, parts: int) -> None:
        names = [self._schema.tensors[index].name for index in section.tensors]
        title = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
        cut = f", part {part} of {parts}" if parts > 1 else ""
        source, start = self.source, self.source.position
        source.where = f"section of {title}{cut}"
        self.pieces.append(Piece(start, 0, f"section of {title}{cut}: {section.size} coordinates"))
        stored = source.varint(section.size)
        self._say(source.reads[-1], f"{stored} are stored")
        self._flush()
        mask, index_coding, grid = masks.read_mask(source, stored, section.shape)
        self._label(_index_labels(index_coding), f"indices: {masks.NAMES[index_coding].upper()}")
        middle = source.position
        at = np.flatnonzero(mask)
        places = None if grid is None else Places(at, grid)
        value_coding = int(self._body[middle]) if middle < len(self._body) else floats.RAW
        old = self._base_of(section, at)
        name = floats.NAMES[value_coding] if value_coding < len(floats.NAMES) else "unknown"
        places_bytes = middle - start

        def found(value_bytes: int | None) -> Found:
            coding = masks.NAMES[index_coding]
            return Found(section.tensors, part, parts, stored, coding, name, places_bytes, value_bytes)

        if value_coding in (floats.BASED, floats.STEPS) and old is None:
            try:
                self.found.append(found(self._without_base(stored, places, name)))
            except _BaseNeeded:
                self.found.append(found(None))
                raise
            return
        if self._change and old is not None:
            floats.read_steps(source, old, places)
        else:
            floats.read_values(source, stored, section.dtype, old, places)
        self._label(_value_labels(value_coding, places, stored), f"values: {name.upper()}")
        self.found.append(found(source.position - middle))

    def _without_base(self, stored: int, places: Places | None, name: str) -> int:
        """Read what can be read of BASED and STEPS values: all of STEPS, of BASED the symbols."""
        source, start, coding = self.source, self.source.position, self.source.byte()
        labels = _value_labels(coding, places, stored)
        if coding == floats.BASED:
            source.byte()
        symbols = floats.read_symbols(source, stored, places)
        if coding == floats.BASED:
            self._label(labels, f"values: {name.upper()}")
            raise _BaseNeeded(
                "how many low bits follow depends on the model that the values are coded against"
            )
        read_low_bits(source, below_leading_one(symbols >> floats.ONE), np.dtype(np.uint32))
        self._label(labels, f"values: {name.upper()}")
        return source.position - start

    def _base_of(self, section: Section, at: masks.Indices) -> Array | None:
        if self._old is None:
            return None
        parts = [self._old[index] for index in section.tensors]
        whole = parts[0] if len(parts) == 1 else np.concatenate(parts)
        values: Array = np.take(section.of(whole), at)
        return values

    # -- notes to pieces

    def _label(self, labels: Iterator[str], title: str) -> None:
        """The reads since the last call: the coding's byte, what `labels` name, then low bits."""
        coding, *rest = self.source.reads
        self.pieces.append(Piece(coding.at, coding.length, title, 1))
        bits: list[_Read] = []
        for read in rest:
            label = None if bits else next(labels, None)
            if label is None:
                bits.append(read)
            else:
                self._say(read, label)
        if bits:
            length = sum(read.length for read in bits)
            self.pieces.append(Piece(bits[0].at, length, f"low bits, {len(bits)} planes, {length} bytes", 2))
        self._flush()

    def _say(self, read: _Read, label: str) -> None:
        if read.size is None:
            depth = 1 if label.endswith("stored") else 2
            value = f" {self._body[read.at]}" if label.endswith(("e0", "A", "B")) else ""
            self.pieces.append(Piece(read.at, read.length, label + value, depth))
            return
        head = _varint_length(self._body, read.at)
        method = METHODS[self._body[read.at] & 1]
        length = read.length - head
        self.pieces.append(
            Piece(read.at, head, f"{label}: stream of {read.size} bytes, {method} in {length}", 2)
        )
        if length:
            self.pieces.append(Piece(read.at + head, length, f"{length} bytes", 3))

    def _flush(self) -> None:
        self.source.reads.clear()


def _varint_length(data: memoryview, at: int) -> int:
    end = at
    while data[end] >= 0x80:
        end += 1
    return end + 1 - at


def _index_labels(coding: int) -> Iterator[str]:
    """Names of what an index coding reads after its own byte, in order."""
    if coding == masks.BITMAP:
        yield "bits"
    elif coding == masks.GAPS:
        yield "bit lengths of the gaps"
    elif coding == masks.GRID:
        yield from ("row classes A", "column classes B", "class of every row", "class of every column")
        yield "group of every cell"
        yield from (f"bits of group {group}" for group in range(masks.MAX_GROUPS))


def _value_labels(coding: int, places: Places | None, stored: int) -> Iterator[str]:
    if coding == floats.RAW:
        yield f"{stored} values"
    elif coding == floats.PLANES:
        yield from (f"byte plane {plane}" for plane in range(8))
    else:
        if coding != floats.STEPS:
            yield "lowest exponent e0"
        if places is None:
            yield "symbols"
        else:
            yield "sign flips of the rows"
            yield from (f"symbols of group {group}" for group in range(len(places.counts)))


# ---------------------------------------------------------------- envelopes

PACKED = ("shape",)
"""The numbers of the protocol that repeat."""
MOST_ALIKE = 3
"""Messages of one repeated field that are shown, unless everything is."""


def envelope(frame: bytes, message: Any, *, everything: bool = False) -> list[Piece]:
    """The fields of a serialized protobuf `message`, one that was parsed from these bytes."""
    return list(_fields(frame, 0, len(frame), message.DESCRIPTOR, 0, everything))


def _fields(data: bytes, at: int, end: int, descriptor: Any, depth: int, everything: bool) -> Iterator[Piece]:
    seen: dict[int, int] = {}
    held: list[int] = []  # where repeated messages that are left out begin
    while at < end:
        start = at
        tag, at = _varint(data, at)
        field = descriptor.fields_by_number.get(tag >> 3)
        if tag & 7 == 2:
            length, at = _varint(data, at)
            seen[tag >> 3] = seen.get(tag >> 3, 0) + 1
            inner, at = at, at + length
            # A field in another form than its own is unknown to protobuf, too.
            known = field is not None and field.message_type is not None
            if known and seen[tag >> 3] > MOST_ALIKE and not everything:
                held.append(start)
                continue
            yield from _left_out(held, start, depth)
            if known:
                yield Piece(start, inner - start, f"{field.name}, {length} bytes", depth)
                yield from _fields(data, inner, at, field.message_type, depth + 1, everything)
            else:
                yield Piece(start, at - start, _text(field, data[inner:at], tag), depth)
            continue
        yield from _left_out(held, start, depth)
        if tag & 7 == 0:
            value, at = _varint(data, at)
        elif tag & 7 in (1, 5):
            width = 8 if tag & 7 == 1 else 4
            value, at = int.from_bytes(data[at : at + width], "little"), at + width
        else:
            yield Piece(start, end - start, "fields of a kind that is not in use", depth)
            return
        yield Piece(start, at - start, _text(field, value, tag), depth)
    yield from _left_out(held, end, depth)


def _left_out(held: list[int], end: int, depth: int) -> Iterator[Piece]:
    if held:
        yield Piece(held[0], end - held[0], f"{len(held)} more like these", depth)
        held.clear()


def _wire_types(field: Any) -> tuple[int, ...]:
    """The forms in which a field may stand: numbers that repeat may also be packed."""
    if field.type in (field.TYPE_STRING, field.TYPE_BYTES, field.TYPE_MESSAGE):
        return (2,)
    if field.type in (field.TYPE_FIXED64, field.TYPE_DOUBLE):
        return (1,)
    if field.type in (field.TYPE_FIXED32, field.TYPE_FLOAT):
        return (5,)
    return (0, 2) if field.name in PACKED else (0,)


def _text(field: Any, value: int | bytes, tag: int) -> str:
    if field is None or tag & 7 not in _wire_types(field):
        return f"unknown field {tag >> 3}"
    if isinstance(value, bytes):
        if field.type == field.TYPE_STRING:
            return f"{field.name} {value.decode(errors='replace')!r}"
        if field.name in PACKED:
            numbers, at = [], 0
            while at < len(value):
                number, at = _varint(value, at)
                numbers.append(number)
            return f"{field.name} {numbers}"
        return f"{field.name}, {len(value)} bytes"
    if field.enum_type is not None:
        named = field.enum_type.values_by_number.get(value)
        return f"{field.name} {named.name if named else value}"
    if field.type in (field.TYPE_DOUBLE, field.TYPE_FLOAT):
        kind = np.float64 if field.type == field.TYPE_DOUBLE else np.float32
        return f"{field.name} {np.array([value], f'u{kind().itemsize}').view(kind)[0]!s}"
    if field.type == field.TYPE_FIXED64:
        return f"{field.name} {value:016x}"
    if field.type == field.TYPE_BOOL:
        return f"{field.name} {'yes' if value else 'no'}"
    return f"{field.name} {value}"


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
