"""A captured message taken apart: its envelope, its body, and whether its checksums hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedreuse.proto import codec, packing, transfers
from fedreuse.proto import federation_pb2 as pb
from fedreuse.proto.anatomy import Anatomy, dissect
from fedreuse.proto.captures import SUFFIX, Captured, Label, label_of, read_capture
from fedreuse.proto.codec import Block, Payload
from fedreuse.proto.errors import ProtocolError
from fedreuse.proto.frames import Incoming, Receiver
from fedreuse.proto.packing import State
from fedreuse.proto.schema import Array, Schema
from fedreuse.server.store import RunError, read_weights
from fedreuse.server.weights import load_model
from fedreuse.sim.folder import INITIAL

MAX_STATE_BYTES = 4 << 30
"""A schema may promise any size, and a few bytes of a body may stand for very many zeros."""
MOST_TRIES = 10
"""Captured models of one round that are tried as a base."""


@dataclass(frozen=True)
class Body:
    """`values` has each tensor's kept values, if the payload could be made from the body.

    `base` counts from 0 like all rounds in messages; `base_from` says where that model was found, `problem` what
    is wrong with the body, or missing.
    """

    header: pb.Transfer
    blocks: tuple[Block, ...]
    data: bytes
    base: int | None
    base_from: str | None
    anatomy: Anatomy
    problem: str | None
    values: dict[int, Array] | None


@dataclass(frozen=True)
class Inspection:
    path: Path
    captured: Captured
    incoming: Incoming
    body: Body | None

    @property
    def label(self) -> Label:
        return self.captured.label


def inspect(path: Path, run: Path | None = None) -> Inspection:
    """Take a capture apart; bases come from captures in the same folder and from the run folder `run`.

    Raises ProtocolError or RunError where the file is none, OSError where it cannot be read.
    """
    captured, incoming = _message(path)
    if incoming.payload is None:
        return Inspection(path, captured, incoming, None)
    bases = _Bases(path.parent, captured.schema, run)
    try:
        body = _open(captured.schema, incoming, bases)
    except MemoryError:
        raise ProtocolError(
            pb.TOO_LARGE, f"{path}: this machine has not enough memory for the body"
        ) from None
    return Inspection(path, captured, incoming, body)


def _message(path: Path) -> tuple[Captured, Incoming]:
    captured = read_capture(path)
    if captured.schema.offsets[-1] > MAX_STATE_BYTES:
        raise ProtocolError(
            pb.TOO_LARGE,
            f"{path}: a model of {captured.schema.offsets[-1]} bytes; {MAX_STATE_BYTES} are the limit",
        )
    there = sum(map(len, captured.frames))

    def admit(_kind: str, header: Any) -> None:
        if header.transfer.length > there:
            raise ProtocolError(
                pb.MALFORMED, f"a body of {header.transfer.length} bytes is announced, the file has {there}"
            )

    receiver, incoming = Receiver(captured.label.side, captured.schema, admit), None
    for n, frame in enumerate(captured.frames):
        if incoming is not None:
            raise ProtocolError(
                pb.MALFORMED, f"{path}: {len(captured.frames) - n} entries after a whole message"
            )
        try:
            incoming = receiver.feed(frame)
        except ProtocolError as error:
            raise ProtocolError(error.code, f"{path}, entry {n + 1}: {error.detail}") from None
    if incoming is None:
        raise ProtocolError(pb.MALFORMED, f"{path} ends before its message does")
    if incoming.refusal is not None:
        raise ProtocolError(incoming.refusal.code, f"{path}: {incoming.refusal.detail}")
    if incoming.kind != captured.label.kind:
        raise ProtocolError(
            pb.MALFORMED,
            f"{path} is named {captured.label.direction}-{captured.label.kind} and would then hold a message of "
            f"kind {incoming.kind}; was it renamed?",
        )
    return captured, incoming


def _open(schema: Schema, incoming: Incoming, bases: _Bases) -> Body:
    header, received = incoming.message.transfer, incoming.payload
    assert received is not None
    number = header.base if header.HasField("base") else None
    base = None if number is None else bases.find(number)
    payload, problem = None, None
    if number is not None and base is None:
        problem = (
            f"needs the model of round {number + 1}, which is neither captured in this folder nor found by --run; "
            "what follows is its structure, its values cannot be read"
        )
        if codec.checksum(received.body) != header.checksum:
            problem = f"does not match its checksum; it also {problem}"
    else:
        try:
            payload = transfers.open_body(schema, header, received, lambda _number: base)
        except ProtocolError as error:
            problem = f"would be refused: {error}"
    anatomy = dissect(schema, header.coding, received.blocks, received.body, base)
    values = None if payload is None else _values(schema, payload)
    source = None if number is None else bases.sources.get(number)
    return Body(header, received.blocks, bytes(received.body), number, source, anatomy, problem, values)


def _values(schema: Schema, payload: Payload) -> dict[int, Array]:
    return {
        block.index: codec.decode_block(schema.tensors[block.index], block, data)[1]
        for block, data in payload.located()
    }


@dataclass
class _Bases:
    """Looks for models of earlier rounds; rounds count from 0."""

    folder: Path
    schema: Schema
    run: Path | None
    sources: dict[int, str] = field(default_factory=dict)
    """Where each model that was found came from."""
    _known: dict[int, State | None] = field(default_factory=dict)

    def find(self, round: int) -> State | None:
        """The model of a round, if it is there and what it claims to be."""
        wanted, need = [], round
        # Down to a model that needs no other; not by recursion, for a chain may be long.
        while need not in self._known:
            self._known[need] = self._from_run(need)
            if self._known[need] is not None:
                break
            wanted.append(need)
            bases = self._captures(need)
            older = [number for _, _, number in bases if number is not None and number < need]
            if not older or any(number is None for _, _, number in bases):
                break
            need = max(older)
        for number in reversed(wanted):
            self._known[number] = self._from_captures(number)
        return self._known[round]

    def _from_run(self, round: int) -> State | None:
        if self.run is None:
            return None
        read: list[tuple[str, Callable[[], State | None]]] = [
            (f"the state of {self.run}", self._committed(round))
        ]
        if round == 0:
            read.insert(0, (str(self.run / INITIAL), self._initial))
        for source, get in read:
            state = get()
            if state is not None:
                self.sources[round] = source
                return state
        return None

    def _initial(self) -> State | None:
        assert self.run is not None
        schema, flat = load_model(self.run / INITIAL)
        if schema.hash != self.schema.hash:
            raise RunError(f"{self.run} has another model than the capture")
        return flat

    def _committed(self, round: int) -> Callable[[], State | None]:
        def get() -> State | None:
            assert self.run is not None
            if not (self.run / "state" / "server").exists():
                return None
            committed, flat = read_weights(self.run)
            return flat if committed == round and flat.size == self.schema.offsets[-1] else None

        return get

    def _captures(self, round: int) -> list[tuple[Path, Incoming, int | None]]:
        """Captured models of a round, each with the round of its own base."""
        found = []
        for path in sorted(self.folder.glob(f"r{round + 1:04d}-*-down-model*{SUFFIX}"))[:MOST_TRIES]:
            label = label_of(path)
            if label is None or label.kind != "model":
                continue
            try:
                captured, incoming = _message(path)
            except (ProtocolError, OSError):
                continue  # somebody else's problem: another capture may do
            transfer = incoming.message.transfer
            if captured.schema.hash == self.schema.hash and incoming.message.round == round:
                found.append((path, incoming, transfer.base if transfer.HasField("base") else None))
        return found

    def _from_captures(self, round: int) -> State | None:
        for path, incoming, base in self._captures(round):
            try:
                assert incoming.payload is not None
                codec.require(
                    incoming.payload.blocks,
                    self.schema,
                    lambda i: self.schema.tensors[i].size,
                    self.schema.travelling,
                )
                if any(block.mode != pb.DENSE for block in incoming.payload.blocks):
                    continue
                old = None if base is None or base >= round else self._known.get(base)
                header = incoming.message.transfer
                payload = transfers.open_body(self.schema, header, incoming.payload, lambda _n, old=old: old)  # type: ignore[misc]
            except ProtocolError:
                continue
            self.sources[round] = path.name
            return packing.as_state(payload.body)
        return None
