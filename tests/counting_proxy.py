"""A TCP proxy that counts what passes, and takes HTTP/2 frames or TLS records apart as it does.

It is the tests' own meter: it shares no code with the product's. Its connection to the server leaves from the port
of the client's connection to it, so that the server sees the client's true address.
"""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass, field
from itertools import accumulate

FRAMES = {0: "DATA", 1: "HEADERS", 3: "RST_STREAM", 4: "SETTINGS", 6: "PING", 7: "GOAWAY"}
FRAMES |= {8: "WINDOW_UPDATE", 9: "CONTINUATION"}
RECORDS = {20: "change cipher spec", 21: "alert", 22: "handshake", 23: "application data"}
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


@dataclass
class Unit:
    """One frame or record: `size` with its header, `length` without."""

    name: str
    size: int
    length: int


@dataclass
class Way:
    """One direction of one connection."""

    tls: bool = False
    total: int = 0
    """Bytes, counted as they pass, whatever they are."""
    units: list[Unit] = field(default_factory=list)
    _rest: bytes = b""
    _skip: int = 0

    def feed(self, data: bytes) -> None:
        self.total += len(data)
        if self._skip >= len(data):
            self._skip -= len(data)
            return
        rest, self._skip = self._rest + data[self._skip :], 0
        while rest:
            unit = self._first(rest)
            if unit is None:
                break
            self.units.append(unit)
            self._skip = max(0, unit.size - len(rest))
            rest = rest[unit.size :]
        self._rest = rest

    def _first(self, data: bytes) -> Unit | None:
        if not self.units and data[:1] == b"\x16":
            self.tls = True
        if self.tls:
            if len(data) < 5:
                return None
            length = int.from_bytes(data[3:5], "big")
            return Unit(RECORDS[data[0]], 5 + length, length)
        if not self.units and PREFACE.startswith(data[: len(PREFACE)]):
            return Unit("preface", len(PREFACE), 0) if len(data) >= len(PREFACE) else None
        if len(data) < 9:
            return None
        length = int.from_bytes(data[:3], "big")
        return Unit(FRAMES[data[3]], 9 + length, length)

    @property
    def whole(self) -> bool:
        """True if the last unit has passed to its end."""
        return not self._skip and not self._rest

    @property
    def data(self) -> int:
        """What DATA frames carried."""
        return sum(unit.length for unit in self.units if unit.name == "DATA")

    def tail(self, counted: int) -> list[Unit]:
        """The units after the first `counted` bytes, which must end where one ends."""
        ends = [0, *accumulate(unit.size for unit in self.units)]
        assert counted in ends, (counted, ends[-8:])
        return self.units[ends.index(counted) :]


@dataclass
class Connection:
    client: int
    """The client's port."""
    up: Way = field(default_factory=Way)
    down: Way = field(default_factory=Way)


class CountingProxy:
    """With `disguise` off it connects from a port of its own, as any other proxy does."""

    def __init__(self, target: str, *, disguise: bool = True) -> None:
        self._disguise = disguise
        host, _, port = target.rpartition(":")
        self._target = host.strip("[]"), int(port)
        self.connections: list[Connection] = []
        self._writers: list[asyncio.StreamWriter] = []
        self._pumps: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> CountingProxy:
        host = self._target[0]
        self._server = await asyncio.start_server(self._connect, host, 0)
        port = self._server.sockets[0].getsockname()[1]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cut()
        self._server.close()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def connected(self, number: int) -> None:
        """Wait until this many connections have carried something."""
        async with asyncio.timeout(20):
            while sum(1 for connection in self.connections if connection.up.total) < number:
                await asyncio.sleep(0.01)

    async def quiet(self, seconds: float = 0.2) -> None:
        """Wait until nothing has passed for a while."""
        async with asyncio.timeout(20):
            seen = -1
            while (now := sum(c.up.total + c.down.total for c in self.connections)) != seen:
                seen = now
                await asyncio.sleep(seconds)

    def cut(self) -> None:
        """Reset all connections there are."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        whence = writer.get_extra_info("peername")
        onward = socket.socket(socket.AF_INET6 if ":" in whence[0] else socket.AF_INET)
        onward.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        onward.setblocking(False)
        if self._disguise:
            onward.bind(whence[:2])
        try:
            await asyncio.get_running_loop().sock_connect(onward, self._target)
        except OSError:
            onward.close()
            writer.transport.abort()
            return
        back_reader, back_writer = await asyncio.open_connection(sock=onward)
        self._writers += [writer, back_writer]
        connection = Connection(whence[1])
        self.connections.append(connection)
        for source, sink, way in (
            (reader, back_writer, connection.up),
            (back_reader, writer, connection.down),
        ):
            pump = asyncio.create_task(_pump(source, sink, way))
            self._pumps.add(pump)
            pump.add_done_callback(self._pumps.discard)


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter, way: Way) -> None:
    try:
        while data := await source.read(1 << 18):
            way.feed(data)
            sink.write(data)
            await sink.drain()
    except ConnectionError:
        pass
    finally:
        sink.close()
