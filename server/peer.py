"""One connected client as the gRPC service sees it: a channel, an outbox, and when it was last heard."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from fedreuse.proto import federation_pb2 as pb
from fedreuse.proto.channel import NO_ROUND, Channel
from fedreuse.server.messages import Broadcast
from fedreuse.server.metering import ConnectionMeter

MAX_WAITING = 64
"""Messages a peer may leave unread; the protocol never needs more than a handful."""
MAX_UNCONFIRMED = 1000
"""Messages a peer may leave unconfirmed; each of its own messages confirms all before."""

WriteFrame = Callable[[bytes], Awaitable[Any]]


@dataclass(slots=True)
class Letter:
    """A message on its way out, or one that will be ready by its turn."""

    kind: str
    message: Any = None
    broadcast: asyncio.Task[Broadcast] | None = None


@dataclass(eq=False)
class Peer:
    """`session` and `instance` are the random numbers by which server and client name themselves."""

    client: int
    instance: int
    session: int
    channel: Channel
    meter: ConnectionMeter
    outbox: asyncio.Queue[Letter | None] = field(default_factory=asyncio.Queue)
    heard: float = field(default_factory=time.monotonic)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when somebody decided that this session is over."""
    busy: bool = False
    """While an update of this peer is verified, nothing else of it is read: that is not its silence."""
    closed: int = NO_ROUND
    """The round that was closed last, until the client has said what it took."""
    holds: int | None = None
    """Round of the newest model the client has, or will have when it has read everything posted."""

    def post(self, kind: str, message: Any) -> None:
        """Queue a message; a peer that reads nothing is cut off."""
        self._queue(Letter(kind, message))

    def post_model(self, round: int, broadcast: asyncio.Task[Broadcast]) -> None:
        """Queue the model of a round; it may still be in the making."""
        self._queue(Letter("model", broadcast=broadcast))
        self.holds = round

    def _queue(self, letter: Letter) -> None:
        if self.outbox.qsize() >= MAX_WAITING:
            self.ended.set()
        else:
            self.outbox.put_nowait(letter)

    def end(self, code: pb.Code, detail: str = "") -> None:
        """Say goodbye and close once everything queued is written."""
        self.outbox.put_nowait(Letter("abort", pb.Abort(code=code, detail=detail[:500])))
        self.outbox.put_nowait(None)

    async def write(self, write: WriteFrame) -> None:
        """Put the outbox on the wire until `end`; counted as it is written."""
        while (letter := await self.outbox.get()) is not None:
            if letter.broadcast is not None:
                model = await asyncio.shield(letter.broadcast)  # others wait for it, too
                out = self.channel.send(letter.kind, model.message, chunks=model.chunks, body=model.body)
            else:
                out = self.channel.send(letter.kind, letter.message)
            for frame in out.frames:
                await write(frame)
            if self.channel.unconfirmed > MAX_UNCONFIRMED:
                self.ended.set()

    async def beat(self, seconds: float) -> None:
        """Send heartbeats for ever."""
        while True:
            await asyncio.sleep(seconds)
            if self.outbox.empty():  # whatever waits there is a sign of life, too
                self.post("heartbeat", pb.Heartbeat())
