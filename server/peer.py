"""One connected client as the gRPC service sees it: a channel, an outbox, and when it was last heard."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from fedreuse.proto import federation_pb2 as pb
from fedreuse.proto.channel import Channel

MAX_WAITING = 64
"""Messages a peer may leave unread; the protocol never needs more than a handful."""
MAX_UNCONFIRMED = 1000
"""Messages a peer may leave unconfirmed; each of its own messages confirms all before."""

WriteFrame = Callable[[bytes], Awaitable[Any]]


@dataclass(slots=True)
class Letter:
    """A message on its way out."""

    kind: str
    message: Any
    chunks: tuple[bytes, ...] = ()
    body: int = 0


@dataclass(eq=False)
class Peer:
    """`session` and `instance` are the random numbers by which server and client name themselves."""

    client: int
    instance: int
    session: int
    channel: Channel
    outbox: asyncio.Queue[Letter | None] = field(default_factory=asyncio.Queue)
    heard: float = field(default_factory=time.monotonic)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when somebody decided that this session is over."""

    def post(self, kind: str, message: Any, chunks: tuple[bytes, ...] = (), body: int = 0) -> None:
        """Queue a message; a peer that reads nothing is cut off."""
        if self.outbox.qsize() >= MAX_WAITING:
            self.ended.set()
        else:
            self.outbox.put_nowait(Letter(kind, message, chunks, body))

    def end(self, code: pb.Code, detail: str = "") -> None:
        """Say goodbye and close once everything queued is written."""
        self.outbox.put_nowait(Letter("abort", pb.Abort(code=code, detail=detail[:500])))
        self.outbox.put_nowait(None)

    async def write(self, write: WriteFrame) -> None:
        """Put the outbox on the wire until `end`; counted as it is written."""
        while (letter := await self.outbox.get()) is not None:
            out = self.channel.send(letter.kind, letter.message, chunks=letter.chunks, body=letter.body)
            for frame in out.frames:
                await write(frame)
            if self.channel.unconfirmed > MAX_UNCONFIRMED:
                self.ended.set()

    async def beat(self, seconds: float) -> None:
        """Send heartbeats for ever."""
        while True:
            await asyncio.sleep(seconds)
            self.post("heartbeat", pb.Heartbeat())
