"""A captured message on the terminal: sender, fields, tensors, annotated bytes."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from fedreuse.proto import federation_pb2 as pb
from fedreuse.proto.anatomy import Found, Piece, envelope
from fedreuse.proto.captures import Label
from fedreuse.proto.frames import CHUNK_BYTES
from fedreuse.proto.schema import Schema
from fedreuse.sim.inspection import Body, Inspection
from fedreuse.sim.page import Page

MOST_FIELDS = 40
MOST_SECTIONS = 60
"""Lines of a table, unless everything is shown."""
MOST_PIECES = 400


def show(inspection: Inspection, console: Console, *, everything: bool = False) -> None:
    """Print a capture; `everything` leaves no bytes out."""
    page, label = Page(console), inspection.label
    sizes, frames = inspection.incoming.sizes, inspection.captured.frames
    page.list(_about(inspection, page))
    page.heading(
        f"Fields of {type(inspection.incoming.message).DESCRIPTOR.name} (rounds in messages count from 0)"
    )
    fields = list(_flat(inspection.incoming.message, ""))
    shown = fields if everything else fields[:MOST_FIELDS]
    received = inspection.incoming.received
    page.list([*shown, ("received", "absent" if received is None else str(received))])
    if len(shown) < len(fields):
        page.note(f"{len(fields) - len(shown)} more fields; --hex shows all")
    if inspection.body is not None:
        _tensors(inspection.captured.schema, inspection.body, page, everything)
    page.heading(
        f"Header message, {len(frames[0])} bytes" if len(frames) > 1 else f"Message, {len(frames[0])} bytes"
    )
    outer = pb.ClientMessage if label.direction == "up" else pb.ServerMessage
    _hex(frames[0], envelope(frames[0], outer, everything=everything), page, everything)
    if inspection.body is not None:
        data = inspection.body.data
        chunks = len(frames) - 1
        page.heading(
            f"Body, {len(data)} bytes, in {chunks} chunk{'s' * (chunks != 1)} of at most {CHUNK_BYTES} bytes "
            f"({sizes.message - len(frames[0]) - len(data)} bytes of envelopes)"
        )
        _hex(data, inspection.body.anatomy.pieces, page, everything)


def _about(inspection: Inspection, page: Page) -> Iterator[tuple[str, str]]:
    label, sizes, body = inspection.label, inspection.incoming.sizes, inspection.body
    yield "File:", str(inspection.path)
    yield (
        "Message:",
        f"{label.kind}, {_sender(label)}, {f'round {label.round}' if label.round else 'outside any round'}",
    )
    yield (
        "Bytes:",
        f"payload {page.size(sizes.payload)}, message {page.size(sizes.message)}, grpc {page.size(sizes.grpc)}; "
        f"{len(inspection.captured.frames)} gRPC message{'s' * (len(inspection.captured.frames) != 1)}",
    )
    if body is None:
        return
    coding = pb.Coding.Name(body.header.coding)
    if body.base is None:
        yield "Body:", f"{coding}, no base"
    else:
        where = f" (from {body.base_from})" if body.base_from else ""
        yield "Body:", f"{coding} against the model of round {body.base + 1}{where}"
    if body.problem is not None:
        yield "Problem:", f"the body {body.problem}"
    else:
        yield "Checked:", "body and payload match their checksums, all values are finite"
    if body.anatomy.stop is not None:
        yield "Read:", f"not to its end: {body.anatomy.stop}"


def _sender(label: Label) -> str:
    client = f"client {label.client}"
    return f"{client} to the server" if label.direction == "up" else f"the server to {client}"


def _flat(message: Any, prefix: str) -> Iterator[tuple[str, str]]:
    """Every field that is not absent, by its full name; a 0 that travels as nothing is shown."""
    for field in message.DESCRIPTOR.fields:
        if field.has_presence and not message.HasField(field.name):
            continue
        name, value = f"{prefix}{field.name}", getattr(message, field.name)
        if field.message_type is not None and not hasattr(value, "ListFields"):
            yield name, f"{len(value)} entries"
        elif field.message_type is not None:
            yield from _flat(value, f"{name}.")
        elif field.enum_type is not None:
            known = field.enum_type.values_by_number.get(value)
            yield name, known.name if known else str(value)
        elif field.type == field.TYPE_FIXED64:
            yield name, f"{value:016x}"
        else:
            yield name, str(list(value)) if hasattr(value, "append") else str(value)


# ---------------------------------------------------------------- tensors


def _tensors(schema: Schema, body: Body, page: Page, everything: bool) -> None:
    by_index = {block.index: block for block in body.blocks}
    whole, lines = len(body.data), []
    for found in body.anatomy.found:
        members = [by_index[index] for index in found.tensors]
        modes = "/".join(sorted({pb.Mode.Name(block.mode).lower() for block in members}))
        # A tensor that was cut into sections is charged once.
        charge = sum(block.length for block in members) if found.part == 1 else None
        wire = None if found.value_bytes is None else found.index_bytes + found.value_bytes
        lines.append(
            (
                f"  {_title(schema, found)}",
                [
                    _shape(schema, found),
                    modes,
                    f"{found.index_coding} / {found.value_coding}",
                    f"{found.stored}",
                    "" if charge is None else page.size(charge),
                    page.size(wire),
                    page.absent if wire is None or not whole else page.percent(wire / whole),
                    _range(body, found) if found.part == 1 else "",
                ],
            )
        )
    unread = len({b.index for b in body.blocks} - {i for found in body.anatomy.found for i in found.tensors})
    shown = lines if everything else lines[:MOST_SECTIONS]
    page.heading("Sections and their tensors" if body.header.coding else "Tensors")
    heads = ["shape", "paper\nmode", "index / value\ncoding", "k", "modelled", "wire", "share\n(%)", "values"]
    if shown:
        page.table(heads, [("", []), *shown])
    if len(shown) < len(lines):
        page.note(f"{len(lines) - len(shown)} more; --hex shows all")
    if unread:
        page.note(f"{unread} tensors stand behind what could be read.")


def _title(schema: Schema, found: Found) -> str:
    first = schema.tensors[found.tensors[0]].name
    first = first if len(first) <= 26 else f"..{first[-24:]}"
    more = f" (+{len(found.tensors) - 1})" if len(found.tensors) > 1 else ""
    return first + more + (f" {found.part}/{found.parts}" if found.parts > 1 else "")


def _shape(schema: Schema, found: Found) -> str:
    shape = schema.tensors[found.tensors[0]].shape
    if len(found.tensors) > 1:
        return f"{sum(schema.tensors[index].size for index in found.tensors)} in all"
    return "x".join(map(str, shape)) or "scalar"


def _range(body: Body, found: Found) -> str:
    """Smallest and largest value of the section's tensors."""
    if body.values is None:
        return ""
    ends = [
        end(body.values[i].astype(np.float64))
        for i in found.tensors
        if body.values[i].size
        for end in (np.min, np.max)
    ]
    return f"{min(ends):.3g} to {max(ends):.3g}" if ends else ""


# ---------------------------------------------------------------- bytes


def _hex(data: bytes, pieces: Sequence[Piece], page: Page, everything: bool) -> None:
    """Bytes beside what they mean; long runs are cut unless `everything` is shown."""
    width = page.console.width
    a_line = 16 if width >= 110 else 12 if width >= 80 else 8
    digits = max(4, len(f"{max(len(data) - 1, 0):x}"))
    column = digits + 2 + 3 * a_line
    shown = pieces if everything else pieces[:MOST_PIECES]
    out = Text()
    for piece in shown:
        part = data[piece.at : piece.at + piece.length]
        if not part:
            out.append(textwrap.fill(piece.text, width) + "\n", "bold")
            continue
        cut = len(part) if everything else a_line
        texts = textwrap.wrap(piece.text, max(12, width - column - 2 * piece.depth)) or [""]
        rows = [part[at : at + a_line] for at in range(0, min(cut, len(part)), a_line)]
        for n in range(max(len(rows), len(texts))):
            row = rows[n] if n < len(rows) else b""
            offset = f"{piece.at + n * a_line:0{digits}x}" if row else ""
            more = ".." if n == len(rows) - 1 and cut < len(part) else ""
            text = f"{'  ' * piece.depth}{texts[n]}" if n < len(texts) else ""
            cells = f"{row[: a_line - 1].hex(' ')} {more}" if more else row.hex(" ")
            out.append(f"{offset:{digits}}  {cells:{3 * a_line}}{text}".rstrip() + "\n")
    if len(shown) < len(pieces):
        out.append(f"{len(pieces) - len(shown)} more pieces; --hex shows all\n", "dim")
    page.console.print(out, soft_wrap=False, no_wrap=True, overflow="crop", crop=False)
