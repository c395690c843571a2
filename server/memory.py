"""Old updates the server keeps: encoded as they came, decoded when used, scaled by their age."""

from __future__ import annotations

import struct
from dataclasses import astuple, dataclass
from typing import Literal

from pydantic import BaseModel, ByteSize, ConfigDict, Field, FiniteFloat

from fedreuse.proto.codec import Block, Payload
from fedreuse.server.table import Table


class MemorySettings(BaseModel):
    """kind: "none" keeps nothing; "reuse" keeps each client's last accepted update (DG paper, Eq. 7)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["none", "reuse"] = "none"
    max_age: int = Field(
        4, ge=1, description="S, age in rounds at which a cached update is not used any more"
    )
    decay: FiniteFloat = Field(0.7279635, gt=0, le=1, description="ρ, factor per round of age")
    budget: ByteSize | None = Field(
        ByteSize(1 << 30),
        ge=0,
        description="of cached updates in the server's memory, bytes or 256MB; the others lie in the run's folder",
    )

    def factor(self, age: int) -> float:
        """ρ^a, Eq. 7."""
        return self.decay**age

    def usable(self, age: int) -> bool:
        """A cached update counts only while a < S (Eq. 4 and 17)."""
        return age < self.max_age


@dataclass(frozen=True, slots=True)
class CachedUpdate:
    """The parameter part of a client's update of `round`."""

    round: int
    payload: Payload


class Caches(Table[CachedUpdate]):
    """The cached update of each client. Payloads stay on the disk until they are used."""

    def __init__(self) -> None:
        super().__init__(b"caches", _pack, _unpack)

    def round_of(self, client: int) -> int | None:
        """The round of a client's cached update, without its payload."""
        if client in self._changed:
            cached = self._changed[client]
            return None if cached is None else cached.round
        return self._look(client, _round)


_HEAD = struct.Struct(">QQ")
_BLOCK = struct.Struct(">4Q")


def _pack(cached: CachedUpdate) -> bytes:
    """Round, number of blocks, the blocks' numbers, body."""
    blocks = cached.payload.blocks
    head = _HEAD.pack(cached.round, len(blocks))
    return b"".join((head, *(_BLOCK.pack(*astuple(block)) for block in blocks), cached.payload.body))


def _round(raw: memoryview) -> int:
    return int(_HEAD.unpack_from(raw)[0])


def _unpack(raw: memoryview) -> CachedUpdate:
    round, count = _HEAD.unpack_from(raw)
    body = _HEAD.size + count * _BLOCK.size
    blocks = tuple(Block(*numbers) for numbers in _BLOCK.iter_unpack(raw[_HEAD.size : body]))
    return CachedUpdate(round, Payload(blocks, bytes(raw[body:])))
