"""Packed bodies: payloads of `codec` made smaller for the wire without losing a bit.

A packed body is a list of sections. Tensors of at least 4096 coordinates have sections of their own; all smaller
ones of the same dtype and kind share one, so that a bias of ten elements pays for no streams of its own. A tensor of
more than 2^20 coordinates is cut into sections of as many whole rows as fit that number (of 2^20 coordinates if a row
does not), which bounds the memory that coding needs. Sections stand in the order of their first tensors. A section
holds, for its coordinates back to back: a varint t, how many of them are stored; their places (`masks`); their
values (`floats`).

`pack` and `unpack` carry a payload, whose modes and k stand in the transfer's header; the values may be coded
against the model the update was trained from. `pack_change` and `unpack_change` carry a whole model as what
changed since an older one. Whoever unpacks gets exactly the payload that was packed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedreuse.proto import federation_pb2 as pb
from fedreuse.proto import floats, masks
from fedreuse.proto.codec import Block, Buffer, Payload, decode_block, dense_blocks
from fedreuse.proto.entropy import Reader, Writer
from fedreuse.proto.floats import Places
from fedreuse.proto.masks import Indices, Mask
from fedreuse.proto.schema import Array, Schema

OWN_SECTION = 4096
"""Coordinates from which a tensor has sections of its own."""
LONGEST_SECTION = 1 << 20

State = NDArray[np.uint8]


@dataclass(frozen=True)
class Section:
    """What is coded as one: the coordinates from `offset` on, as many as `shape` holds, of tensors end to end.

    `starts` is where each tensor begins, and the end of the last.
    """

    tensors: tuple[int, ...]
    starts: tuple[int, ...]
    offset: int
    shape: tuple[int, int]
    dtype: np.dtype[Any]

    @property
    def size(self) -> int:
        return self.shape[0] * self.shape[1]

    def of(self, whole: NDArray[Any]) -> NDArray[Any]:
        """This section's part of the tensors end to end."""
        return whole[self.offset : self.offset + self.size]


@dataclass(frozen=True, slots=True)
class Coded:
    """How a section was coded, and its bytes on the wire, for places and for values."""

    tensors: tuple[int, ...]
    stored: int
    index_coding: int
    value_coding: int
    index_bytes: int
    value_bytes: int


@dataclass(frozen=True, slots=True)
class Packed:
    body: bytes
    sections: tuple[Coded, ...]

    @property
    def nbytes(self) -> int:
        return len(self.body)


def sections(schema: Schema, indices: Sequence[int]) -> list[Section]:
    """The sections of a body that holds these tensors, which ascend."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for index in indices:
        spec = schema.tensors[index]
        key = (index,) if spec.size >= OWN_SECTION else (spec.dtype, spec.kind)
        groups.setdefault(key, []).append(index)
    result = []
    for members in groups.values():
        specs = [schema.tensors[index] for index in members]
        starts = tuple(np.cumsum([0] + [spec.size for spec in specs]).tolist())
        own = specs[0].size >= OWN_SECTION
        offset = 0
        for shape in _cut(masks.matrix_shape(specs[0].shape) if own else (1, starts[-1])):
            result.append(Section(tuple(members), starts, offset, shape, specs[0].numpy_dtype))
            offset += shape[0] * shape[1]
    return result


def _cut(shape: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """The shapes of a matrix's sections."""
    rows, columns = shape
    if rows * columns <= LONGEST_SECTION:
        yield shape
    elif columns <= LONGEST_SECTION:
        step = LONGEST_SECTION // columns
        yield from ((min(step, rows - row), columns) for row in range(0, rows, step))
    else:
        size = rows * columns
        yield from ((1, min(LONGEST_SECTION, size - at)) for at in range(0, size, LONGEST_SECTION))


# ---------------------------------------------------------------- payloads


def pack(schema: Schema, payload: Payload, base: State | None = None) -> Packed:
    """A checked payload, packed; `base` is the model its values are changes of."""
    located = {block.index: (block, data) for block, data in payload.located()}
    old = None if base is None else schema.views(base)
    out, coded = Writer(), []
    for tensors, group in _by_tensors(sections(schema, [block.index for block in payload.blocks])):
        chosen, values = _gather(schema, tensors, located)
        base_values, done = None if old is None else _joined(tensors, old), 0
        for section in group:
            mask = section.of(chosen)
            mine = values[done : done + int(np.count_nonzero(mask))]
            done += len(mine)
            was = None if base_values is None else section.of(base_values)
            coded.append(_write(out, section, mask, mine, was, change=False))
    return Packed(out.getvalue(), tuple(coded))


def unpack(
    schema: Schema,
    blocks: tuple[Block, ...],
    body: Buffer,
    base: State | None = None,
    coded: list[Coded] | None = None,
) -> Payload:
    """The payload in a packed body; `coded`, if given, gets how each section was coded. Raises ProtocolError.

    `blocks` come from a checked header, so the sizes of everything are known and bounded by the schema. The
    payload's values are not checked here: `codec.check_body` does that.
    """
    source = Reader(body, "packed body")
    old = None if base is None else schema.views(base)
    by_index = {block.index: block for block in blocks}
    flat = np.empty(sum(block.length for block in blocks), np.uint8)
    room, at = {}, 0
    for block in blocks:
        room[block.index] = flat[at : at + block.length]
        at += block.length
    for tensors, group in _by_tensors(sections(schema, list(by_index))):
        base_values = None if old is None else _joined(tensors, old)
        parts = []
        for section in group:
            was = None if base_values is None else section.of(base_values)
            parts.append(_read(source, section, was, coded, change=False)[1:])  # coordinates take most room
        chosen, values = _end_to_end([part[0] for part in parts]), _end_to_end([part[1] for part in parts])
        _scatter(schema, group[0], by_index, room, chosen, values, source)
    source.end()
    return Payload(blocks, flat.data)


def _gather(
    schema: Schema, tensors: tuple[int, ...], located: dict[int, tuple[Block, memoryview]]
) -> tuple[Mask, Array]:
    """Places and values of tensors, end to end."""
    chosen, parts = [], []
    for index in tensors:
        spec, (block, data) = schema.tensors[index], located[index]
        if block.mode == pb.BITMAP:
            bits = np.frombuffer(data, np.uint8, (spec.size + 7) // 8)
            mask = np.unpackbits(bits, count=spec.size, bitorder="little").view(bool)
            values = np.frombuffer(data, spec.numpy_dtype, block.kept, bits.size)
        else:
            at, values = decode_block(spec, block, data)
            if at is not None:
                mask = np.zeros(spec.size, bool)
                mask[at] = True
            elif block.kept == spec.size:
                mask = np.ones(spec.size, bool)
            else:
                mask = floats.unsigned(values) != 0
                values = values[mask]
        chosen.append(mask)
        parts.append(values)
    return _end_to_end(chosen), _end_to_end(parts)


def _scatter(
    schema: Schema,
    section: Section,
    blocks: dict[int, Block],
    room: dict[int, State],
    chosen: Mask,
    values: Array,
    source: Reader,
) -> None:
    """Put the tensors of a section where the payload has them."""
    done = 0
    for index, start, end in _members(section):
        spec, block, data = schema.tensors[index], blocks[index], room[index]
        mask = chosen[start:end]
        count = int(np.count_nonzero(mask))
        mine = values[done : done + count]
        done += count
        partly = block.mode == pb.DENSE and block.kept < spec.size
        if count != block.kept and not (partly and count < block.kept):
            raise source.fail(f"{count} coordinates of tensor {spec.name!r}, its header keeps {block.kept}")
        head = block.length - count * spec.width
        if block.mode == pb.BITMAP:
            data[:head] = np.packbits(mask, bitorder="little")
        elif block.mode == pb.PAIRS:
            data[:head] = np.flatnonzero(mask).astype("<u4").view(np.uint8)
        elif partly:
            data[:] = 0
            data.view(spec.numpy_dtype)[mask] = mine
            continue
        data[head:] = mine.view(np.uint8)


# ---------------------------------------------------------------- changes of a model


def pack_change(schema: Schema, new: State, old: State) -> Packed:
    """Everything of `new` that travels, as what changed since `old`."""
    before, after = schema.views(old), schema.views(new)
    out, coded = Writer(), []
    for tensors, group in _by_tensors(sections(schema, schema.travelling)):
        all_was, all_now = _joined(tensors, before), _joined(tensors, after)
        for section in group:
            was, now = section.of(all_was), section.of(all_now)
            chosen = floats.unsigned(was) != floats.unsigned(now)
            values = np.take(now, np.flatnonzero(chosen))
            coded.append(_write(out, section, chosen, values, was, change=True))
    return Packed(out.getvalue(), tuple(coded))


def unpack_change(
    schema: Schema, blocks: tuple[Block, ...], body: Buffer, old: State, coded: list[Coded] | None = None
) -> Payload:
    """The model that changed from `old`, whose `blocks` must be those of a dense one. Raises ProtocolError."""
    source, before = Reader(body, "changes"), schema.views(old)
    if blocks != dense_blocks(schema):
        raise source.fail("changes of something else than a dense model")
    flat = np.empty(sum(block.length for block in blocks), np.uint8)
    after = schema.views(flat)
    for tensors, group in _by_tensors(sections(schema, schema.travelling)):
        all_was = _joined(tensors, before)
        now = after[tensors[0]] if len(tensors) == 1 else np.empty_like(all_was)
        now[:] = all_was
        for section in group:
            at, _, values = _read(source, section, section.of(all_was), coded, change=True)
            section.of(now)[at] = values
        if len(tensors) > 1:
            for index, start, end in _members(group[0]):
                after[index][:] = now[start:end]
    source.end()
    return Payload(blocks, flat.data)


# ---------------------------------------------------------------- sections


def _write(
    out: Writer, section: Section, chosen: Mask, values: Array, base: Array | None, *, change: bool
) -> Coded:
    """`base` are the old values of the whole section."""
    start = out.nbytes
    out.varint(len(values))
    index_coding, grid = masks.write_mask(out, chosen, section.shape)
    middle = out.nbytes
    at = np.flatnonzero(chosen)
    places = None if grid is None else Places(at, grid)
    old = None if base is None else np.take(base, at)
    if change and old is not None:
        value_coding = floats.write_steps(out, values, old, places)
    else:
        value_coding = floats.write_values(out, values, old, places)
    return Coded(
        section.tensors, len(values), index_coding, value_coding, middle - start, out.nbytes - middle
    )


def _read(
    source: Reader, section: Section, base: Array | None, coded: list[Coded] | None, *, change: bool
) -> tuple[Indices, Mask, Array]:
    """Where values stand, the same as a mask, and the values."""
    source.where = f"section of tensors {', '.join(map(str, section.tensors[:5]))}"
    start = source.position
    stored = source.varint(section.size)
    chosen, index_coding, grid = masks.read_mask(source, stored, section.shape)
    middle = source.position
    at = np.flatnonzero(chosen)
    places = None if grid is None else Places(at, grid)
    old = None if base is None else np.take(base, at)
    if change and old is not None:
        values, value_coding = floats.read_steps(source, old, places)
    else:
        values, value_coding = floats.read_values(source, stored, section.dtype, old, places)
    if coded is not None:
        sizes = middle - start, source.position - middle
        coded.append(Coded(section.tensors, stored, index_coding, value_coding, *sizes))
    return at, chosen, values


def _by_tensors(every: list[Section]) -> Iterator[tuple[tuple[int, ...], list[Section]]]:
    """Sections of the same tensors together."""
    return ((tensors, list(group)) for tensors, group in groupby(every, lambda section: section.tensors))


def _joined(tensors: tuple[int, ...], arrays: Sequence[Array]) -> Array:
    """Tensors end to end; a view if it is only one."""
    return _end_to_end([arrays[index] for index in tensors])


def _end_to_end(parts: list[Array]) -> Array:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _members(section: Section) -> Iterator[tuple[int, int, int]]:
    """Each tensor of a section with its first and its end coordinate."""
    return zip(section.tensors, section.starts, section.starts[1:], strict=False)


def as_state(body: Buffer) -> State:
    """A dense payload's body as a flat state, a view; integer buffers, which never travel, are missing."""
    return np.frombuffer(body, np.uint8)


def names(coded: Coded) -> tuple[str, str]:
    """Names of the index and the value coding."""
    return masks.NAMES[coded.index_coding], floats.NAMES[coded.value_coding]
