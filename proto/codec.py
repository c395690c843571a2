"""The tensor codec: named tensors to payload bytes and back, bit for bit.

A payload is a list of blocks (one per tensor: mode, k, length) and a body of their bytes back to back.
The mode is the smallest of dense, pairs and bitmap (DG paper, Eq. 10-12; ties in that order). Decoding
trusts nothing: `check_layout` compares every declared number with the schema before a body is reserved,
`check_body` verifies checksum, coordinates and values before anything is used.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from fedreuse.proto import federation_pb2 as pb
from fedreuse.proto import modelled
from fedreuse.proto.errors import ProtocolError
from fedreuse.proto.schema import Array, Schema, TensorSpec
from fedreuse.proto.topk import is_finite, keep_largest

Buffer = bytes | bytearray | memoryview
MAX_PAIR_COORDINATE = 1 << 32


@dataclass(frozen=True, slots=True)
class Block:
    """One tensor inside a payload: `kept` coordinates in `length` bytes."""

    index: int
    mode: pb.Mode
    kept: int
    length: int


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Payload:
    """Encoded tensors. `body` holds the blocks' bytes in order."""

    blocks: tuple[Block, ...]
    body: Buffer

    @property
    def nbytes(self) -> int:
        return len(self.body)

    def prefix(self, keep: Callable[[int], bool]) -> Payload:
        """The leading blocks whose tensor index satisfies `keep`, with their own copy of the bytes."""
        count = next((n for n, b in enumerate(self.blocks) if not keep(b.index)), len(self.blocks))
        end = sum(b.length for b in self.blocks[:count])
        return Payload(self.blocks[:count], bytes(memoryview(self.body)[:end]))

    def located(self) -> Iterator[tuple[Block, memoryview]]:
        """Each block with its bytes."""
        view, at = memoryview(self.body), 0
        for block in self.blocks:
            yield block, view[at : at + block.length]
            at += block.length


def block_length(spec: TensorSpec, mode: pb.Mode, kept: int) -> int | None:
    """Bytes a block must have; None for a mode this version does not know."""
    if mode == pb.DENSE:
        return modelled.dense(spec.size, spec.width)
    if mode == pb.PAIRS:
        return modelled.pairs(kept, spec.width)
    if mode == pb.BITMAP:
        return modelled.bitmap(spec.size, kept, spec.width)
    return None


def choose_mode(spec: TensorSpec, kept: int) -> pb.Mode:
    """The mode with the fewest bytes; ties in the order dense, pairs, bitmap."""
    d, b = spec.size, spec.width
    sizes = [(modelled.dense(d, b), pb.DENSE), (modelled.bitmap(d, kept, b), pb.BITMAP)]
    if d <= MAX_PAIR_COORDINATE:
        sizes.insert(1, (modelled.pairs(kept, b), pb.PAIRS))
    return min(sizes, key=lambda size: size[0])[1]


# ---------------------------------------------------------------- encoding


def encode_tensor(
    spec: TensorSpec, values: Array, kept: int, mode: pb.Mode | None = None
) -> tuple[pb.Mode, Buffer]:
    """Bytes of one tensor with its `kept` largest coordinates, in the smallest or the given mode.

    `values` is one-dimensional with the schema's dtype. Raises ProtocolError NOT_FINITE on NaN or Inf.
    """
    if not is_finite(values):
        raise ProtocolError(pb.NOT_FINITE, f"tensor {spec.name!r} contains NaN or Inf")
    mode = choose_mode(spec, kept) if mode is None else mode
    if kept >= spec.size and mode == pb.DENSE:
        return mode, np.ascontiguousarray(values).view(np.uint8).data
    mask = keep_largest(values, kept)
    if mode == pb.DENSE:
        return mode, np.where(mask, values, np.zeros((), values.dtype)).tobytes()
    at = np.flatnonzero(mask)  # much faster than indexing with the mask itself
    places = at.astype("<u4") if mode == pb.PAIRS else np.packbits(mask, bitorder="little")
    return mode, places.tobytes() + np.take(values, at).tobytes()


def encode(schema: Schema, arrays: dict[int, Array], kept: Callable[[int], int]) -> Payload:
    """Payload of one-dimensional arrays by tensor index; `kept(index)` coordinates of each survive."""
    blocks, parts = [], []
    for index in sorted(arrays):
        spec, k = schema.tensors[index], kept(index)
        mode, data = encode_tensor(spec, arrays[index], k)
        blocks.append(Block(index, mode, k, len(data)))
        parts.append(data)
    return Payload(tuple(blocks), b"".join(parts))


def dense_blocks(schema: Schema) -> tuple[Block, ...]:
    """The blocks of a whole model: everything that travels, dense."""
    return tuple(
        Block(i, pb.DENSE, schema.tensors[i].size, schema.tensors[i].nbytes) for i in schema.travelling
    )


def dense_payload(schema: Schema, flat: NDArray[np.uint8]) -> Payload:
    """Everything that travels of a flat state, dense; the body is a view, not a copy."""
    blocks = dense_blocks(schema)
    end = sum(block.length for block in blocks)
    return Payload(blocks, memoryview(flat.data)[:end])


def checksum(body: Buffer) -> int:
    """XXH3-64 of a whole body."""
    return xxhash.xxh3_64_intdigest(body)


def transfer_header(schema: Schema, payload: Payload) -> pb.Transfer:
    """The announcement that precedes the chunks of a plain body."""
    return pb.Transfer(
        schema_hash=schema.hash,
        tensors=[
            pb.TensorHeader(index=b.index, mode=b.mode, kept=b.kept, format=pb.RAW, length=b.length)
            for b in payload.blocks
        ],
        length=payload.nbytes,
        checksum=checksum(payload.body),
    )


# ---------------------------------------------------------------- decoding


def check_layout(schema: Schema, header: pb.Transfer) -> tuple[Block, ...]:
    """The blocks a header declares, every number compared with the schema. Raises ProtocolError.

    After this body and payload are known to be no longer than the schema allows, so room may be reserved.
    """
    if header.coding not in (pb.PLAIN, pb.PACKED, pb.CHANGE):
        raise ProtocolError(pb.MALFORMED, f"coding {header.coding}, known: 0, 1, 2")
    plain = header.coding == pb.PLAIN
    if header.schema_hash != schema.hash:
        raise ProtocolError(
            pb.SCHEMA_MISMATCH,
            f"payload for schema {header.schema_hash:016x}, this run has {schema.hash:016x}",
        )
    blocks, previous, total = [], -1, 0
    for n, tensor in enumerate(header.tensors):
        where = f"tensor header {n}"
        if not previous < tensor.index < len(schema):
            raise ProtocolError(
                pb.MALFORMED,
                f"{where} names tensor {tensor.index}; indices must ascend and stay below {len(schema)}",
            )
        previous = tensor.index
        spec = schema.tensors[tensor.index]
        if tensor.format != pb.RAW:
            raise ProtocolError(
                pb.MALFORMED, f"{where} ({spec.name!r}) has value format {tensor.format}, known: 1"
            )
        if tensor.kept > spec.size:
            raise ProtocolError(
                pb.MALFORMED, f"{where} ({spec.name!r}) keeps {tensor.kept} of {spec.size} coordinates"
            )
        expected = block_length(spec, tensor.mode, tensor.kept)
        if expected is None:
            raise ProtocolError(
                pb.MALFORMED, f"{where} ({spec.name!r}) has mode {tensor.mode}, known: 1, 2, 3"
            )
        if tensor.mode == pb.PAIRS and spec.size > MAX_PAIR_COORDINATE:
            raise ProtocolError(pb.MALFORMED, f"{where} ({spec.name!r}) is too large for mode PAIRS")
        if tensor.length != (expected if plain else 0):
            raise ProtocolError(
                pb.MALFORMED,
                f"{where} ({spec.name!r}) declares {tensor.length} bytes, "
                + (f"its mode and k need {expected}" if plain else "which only a plain body has"),
            )
        total += expected
        blocks.append(Block(tensor.index, tensor.mode, tensor.kept, expected))
    if header.length > total or (plain and header.length != total):
        raise ProtocolError(pb.MALFORMED, f"body of {header.length} bytes declared, its tensors need {total}")
    return tuple(blocks)


def check_body(schema: Schema, payload: Payload, expected_checksum: int) -> None:
    """Verify checksum, coordinates and values of a received payload. Raises ProtocolError."""
    actual = checksum(payload.body)
    if actual != expected_checksum:
        raise ProtocolError(
            pb.CHECKSUM, f"body hashes to {actual:016x}, the header says {expected_checksum:016x}"
        )
    for block, data in payload.located():
        spec = schema.tensors[block.index]
        _check_coordinates(spec, block, data)
        if not is_finite(_values(spec, block, data)):
            raise ProtocolError(pb.NOT_FINITE, f"tensor {spec.name!r} contains NaN or Inf")


def _check_coordinates(spec: TensorSpec, block: Block, data: memoryview) -> None:
    if block.mode == pb.BITMAP:
        bits = np.frombuffer(data, np.uint8, (spec.size + 7) // 8)
        if spec.size % 8 and int(bits[-1]) >> (spec.size % 8):
            raise ProtocolError(
                pb.MALFORMED, f"bitmap of tensor {spec.name!r} sets bits past its last coordinate"
            )
        count = int(np.bitwise_count(bits).sum(dtype=np.int64))
        if count != block.kept:
            raise ProtocolError(
                pb.MALFORMED, f"bitmap of tensor {spec.name!r} sets {count} bits, k is {block.kept}"
            )
    elif block.mode == pb.PAIRS and block.kept:
        at = np.frombuffer(data, "<u4", block.kept)
        if int(at[-1]) >= spec.size or not bool(np.all(at[1:] > at[:-1])):
            raise ProtocolError(
                pb.MALFORMED,
                f"coordinates of tensor {spec.name!r} must ascend strictly and stay below {spec.size}",
            )
    elif block.mode == pb.DENSE and block.kept < spec.size:
        count = int(np.count_nonzero(_values(spec, block, data)))
        if count > block.kept:
            raise ProtocolError(pb.MALFORMED, f"tensor {spec.name!r} has {count} values, k is {block.kept}")


def _values(spec: TensorSpec, block: Block, data: memoryview) -> Array:
    """The value part of a block, a view: `kept` values, or all of them in mode DENSE."""
    count = spec.size if block.mode == pb.DENSE else block.kept
    values: Array = np.frombuffer(data, spec.numpy_dtype, count, block.length - count * spec.width)
    return values


def decode_block(spec: TensorSpec, block: Block, data: memoryview) -> tuple[NDArray[np.intp] | None, Array]:
    """Coordinates (None: all of them) and values of a checked block. The values are a view."""
    values = _values(spec, block, data)
    if block.mode == pb.DENSE:
        return None, values
    if block.mode == pb.PAIRS:
        return np.frombuffer(data, "<u4", block.kept).astype(np.intp), values
    bits = np.frombuffer(data, np.uint8, (spec.size + 7) // 8)
    return np.flatnonzero(np.unpackbits(bits, count=spec.size, bitorder="little")), values


def decode(schema: Schema, payload: Payload) -> dict[int, Array]:
    """Full one-dimensional arrays by tensor index, zeros where nothing was kept; writable copies."""
    arrays: dict[int, Array] = {}
    for block, data in payload.located():
        spec = schema.tensors[block.index]
        at, values = decode_block(spec, block, data)
        if at is None:
            arrays[block.index] = values.copy()
        else:
            arrays[block.index] = np.zeros(spec.size, spec.numpy_dtype)
            arrays[block.index][at] = values
    return arrays


def require(
    blocks: Collection[Block | pb.TensorHeader],
    schema: Schema,
    kept: Callable[[int], int],
    indices: Sequence[int],
) -> None:
    """Demand exactly these tensors with exactly these k. Raises ProtocolError WRONG_CONTENT."""
    for block, index in zip(blocks, indices, strict=False):
        name = schema.tensors[index].name
        if block.index != index:
            raise ProtocolError(
                pb.WRONG_CONTENT, f"tensor {schema.tensors[block.index].name!r} where {name!r} was due"
            )
        if block.kept != kept(index):
            raise ProtocolError(
                pb.WRONG_CONTENT,
                f"tensor {name!r} keeps {block.kept} coordinates, the plan says {kept(index)}",
            )
    if len(blocks) != len(indices):
        raise ProtocolError(pb.WRONG_CONTENT, f"{len(blocks)} tensors, the plan says {len(indices)}")
