"""From payloads to the bodies that travel, and back: which coding a transfer uses, and its header."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fedreuse.proto import codec, packing
from fedreuse.proto import federation_pb2 as pb
from fedreuse.proto.codec import Block, Buffer, Payload, check_body, checksum
from fedreuse.proto.errors import ProtocolError
from fedreuse.proto.packing import Coded, State
from fedreuse.proto.schema import Schema

BaseOf = Callable[[int], State | None]
"""The model of a round, as far as this side still has it."""


@dataclass(frozen=True, slots=True)
class Sealed:
    """A payload ready to travel: its blocks, the body, and how the body came about.

    `content` is the payload's checksum; `sections` say how a packed body is made up.
    """

    blocks: tuple[Block, ...]
    body: Buffer
    coding: pb.Coding
    base: int | None
    content: int
    sections: tuple[Coded, ...] = ()

    @property
    def nbytes(self) -> int:
        return len(self.body)


def form(coding: pb.Coding, base: int | None) -> str:
    """How a body was coded, for the ledger; its rounds count from 1."""
    if coding == pb.CHANGE:
        return f"change since the model of round {base + 1}" if base is not None else "change"
    name = {pb.PLAIN: "plain", pb.PACKED: "packed"}.get(coding, f"coding {int(coding)}")
    return name if base is None else f"{name} against the model of round {base + 1}"


def plain(payload: Payload) -> Sealed:
    """The payload as it is."""
    return Sealed(payload.blocks, payload.body, pb.PLAIN, None, checksum(payload.body))


def seal(schema: Schema, payload: Payload, base: tuple[int, State] | None = None) -> Sealed:
    """The payload packed, if that is shorter; `base` is the model its values are changes of, and its round."""
    packed = packing.pack(schema, payload, None if base is None else base[1])
    if packed.nbytes >= payload.nbytes:
        return plain(payload)
    number = None if base is None else base[0]
    return Sealed(payload.blocks, packed.body, pb.PACKED, number, checksum(payload.body), packed.sections)


def seal_change(schema: Schema, payload: Payload, new: State, base: tuple[int, State]) -> Sealed | None:
    """A dense model as what changed since `base`; None if that is not shorter than the model itself."""
    packed = packing.pack_change(schema, new, base[1])
    if packed.nbytes >= payload.nbytes:
        return None
    return Sealed(payload.blocks, packed.body, pb.CHANGE, base[0], checksum(payload.body), packed.sections)


def transfer_header(schema: Schema, sealed: Sealed) -> pb.Transfer:
    """The announcement that precedes a body's chunks."""
    if sealed.coding == pb.PLAIN:
        return codec.transfer_header(schema, Payload(sealed.blocks, sealed.body))
    return pb.Transfer(
        schema_hash=schema.hash,
        tensors=[
            pb.TensorHeader(index=b.index, mode=b.mode, kept=b.kept, format=pb.RAW) for b in sealed.blocks
        ],
        length=sealed.nbytes,
        checksum=checksum(sealed.body),
        coding=sealed.coding,
        base=sealed.base,
        content=sealed.content,
    )


def open_body(
    schema: Schema,
    header: pb.Transfer,
    received: Payload,
    base_of: BaseOf,
    coded: list[Coded] | None = None,
) -> Payload:
    """The verified payload of a received body (`received` has its checked blocks). Raises ProtocolError.

    `coded`, if given, gets how each section of a body that is not plain was coded.
    """
    if header.coding == pb.PLAIN:
        check_body(schema, received, header.checksum)
        return received
    actual = checksum(received.body)
    if actual != header.checksum:
        raise ProtocolError(
            pb.CHECKSUM, f"body hashes to {actual:016x}, the header says {header.checksum:016x}"
        )
    base = _base(header, base_of)
    if header.coding == pb.CHANGE:
        assert base is not None
        payload = packing.unpack_change(schema, received.blocks, received.body, base, coded)
    else:
        payload = packing.unpack(schema, received.blocks, received.body, base, coded)
    check_body(schema, payload, header.content)
    return payload


def _base(header: pb.Transfer, base_of: BaseOf) -> State | None:
    if not header.HasField("base"):
        if header.coding == pb.CHANGE:
            raise ProtocolError(pb.MALFORMED, "a body of changes names no base")
        return None
    base = base_of(header.base)
    if base is None:
        raise ProtocolError(pb.UNKNOWN_BASE, f"the model of round {header.base} is not known here any more")
    return base


@dataclass(frozen=True, slots=True)
class Part:
    """A section of a body, or a tensor of a plain one.

    `modes` are those of the byte model, whose bytes are `modelled`, beside the codings that were used; `stored`
    counts the values in the body. Of a tensor that is cut into several sections only the `first` is charged.
    """

    tensors: str
    modes: str
    index_coding: str
    value_coding: str
    stored: int
    modelled: int
    index_bytes: int
    value_bytes: int
    first: bool = True


def composition(schema: Schema, blocks: Sequence[Block], sections: Sequence[Coded]) -> list[Part]:
    """What a body is made of; a plain one has no `sections`."""
    if not sections:
        return [_plain_part(schema, block) for block in blocks]
    by_index = {block.index: block for block in blocks}
    parts, seen = [], set()
    for coded in sections:
        members = [by_index[index] for index in coded.tensors]
        first = coded.tensors not in seen
        seen.add(coded.tensors)
        parts.append(
            Part(
                _title(schema, coded.tensors),
                "/".join(sorted({pb.Mode.Name(block.mode).lower() for block in members})),
                *packing.names(coded),
                coded.stored,
                sum(block.length for block in members) if first else 0,
                coded.index_bytes,
                coded.value_bytes,
                first,
            )
        )
    return parts


def _plain_part(schema: Schema, block: Block) -> Part:
    spec, mode = schema.tensors[block.index], pb.Mode.Name(block.mode).lower()
    stored = spec.size if block.mode == pb.DENSE else block.kept
    values = stored * spec.width
    coding = {"dense": "all"}.get(mode, mode)
    return Part(spec.name, mode, coding, "raw", stored, block.length, block.length - values, values)


def _title(schema: Schema, indices: Sequence[int]) -> str:
    first = schema.tensors[indices[0]].name
    return first if len(indices) == 1 else f"{first} (+{len(indices) - 1})"
