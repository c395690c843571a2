"""What one control message really costs, layer by layer, beside the 16 bytes papers charge for a reuse.

    python tests/bench/control.py [--repeats R] [--messages N] [--tls-too] [--json]     (no data, no root, a minute)

Messages are made by the package's own code and counted by its ledger (message, grpc). N of each kind then cross one
open gRPC stream between two processes, with the package's channel options, one by one with a pause of 60 ms so that
nothing shares a segment; the kernel's counters of both ends before and after (TCP_INFO, read by the package's meter)
give bytes and segments there and back. Window updates, pings and pure ACKs that a message causes are therefore in
its cost. IP is payload and 52 bytes a segment (IPv4 with time stamps); loopback only saves larger packets that.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import grpc
import numpy as np
from rich.console import Console
from rich.table import Table
from workload import shapes

from fedreuse.client.held import Held
from fedreuse.client.results import Score
from fedreuse.client.session import ClientSession
from fedreuse.client.settings import ClientPlan, CompressorSettings
from fedreuse.client.tls import ClientTls, client_credentials
from fedreuse.proto import federation_pb2 as pb
from fedreuse.proto import modelled, transport
from fedreuse.proto.channel import Channel
from fedreuse.proto.ledger import Row
from fedreuse.proto.meter import Meter, Reading, parse_peer
from fedreuse.proto.schema import PARAMETER, Schema, TensorSpec
from fedreuse.server.messages import closed, order, welcome
from fedreuse.server.outcome import Closing
from fedreuse.server.round import AskScore, Reuse, Train
from fedreuse.server.settings import TlsSettings
from fedreuse.server.tls import server_credentials

PAUSE_SECONDS = 0.06
"""Longer than a kernel puts off an acknowledgement (40 ms)."""
HEADERS, SYN_EXTRA = 52, 8
Way = Literal["up", "down"]

console = Console(width=None if sys.stdout.isatty() else 110)


# ---------------------------------------------------------------- messages


class Notebook:
    """A ledger that keeps the rows."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def count(self, row: Row) -> None:
        self.rows.append(row)

    def write(self, row: Row) -> None: ...


@dataclass(frozen=True)
class Kind:
    """How the n-th message of a kind is made: its frames and the ledger's row."""

    name: str
    way: Way
    make: Callable[[int], tuple[list[bytes], Row]]


SCHEMA = Schema.of(TensorSpec(name, "float32", shape, PARAMETER) for name, shape in shapes("small").items())
PLAN = ClientPlan(seed=101, compressor=CompressorSettings(kind="topk", ratio=0.2))
REUSE_KINDS = ("score_request", "score_reply", "reuse_notice", "round_closed", "heartbeat (up)")


def kinds() -> list[Kind]:
    ours, theirs = Notebook(), Notebook()
    session = ClientSession(7, ours)
    session.channel.learn_schema(SCHEMA)
    server = Channel("server", 7, theirs, lambda _kind, _round: 0)
    rng = np.random.default_rng(2026)

    def up(make: Callable[[int], Any]) -> Callable[[int], tuple[list[bytes], Row]]:
        return lambda n: (list(make(n).frames), ours.rows[-1])

    def down(make: Callable[[int], tuple[str, Any]]) -> Callable[[int], tuple[list[bytes], Row]]:
        return lambda n: (list(server.send(*make(n)).frames), theirs.rows[-1])

    def counters(n: int) -> pb.Counters:
        return Reading(400_000 + 4_000 * n, 0, 900 + 9 * n, 300 + 3 * n, HEADERS, 1448).to_proto()

    def greeting(_n: int) -> tuple[str, Any]:
        federation: Any = SimpleNamespace(
            state=SimpleNamespace(run="5f0c1a2b3c4d5e6f"),
            schema=SCHEMA,
            settings=SimpleNamespace(rounds=90, total=50),
        )
        return "welcome", welcome(
            federation, PLAN.to_proto(), 1 << 62, None, heartbeat=10.0, address="10.99.0.2:50123"
        )

    return [
        Kind("join", "up", up(lambda n: session.join(1_200 + n, Held(), (1 << 63) + n))),
        Kind("welcome", "down", down(greeting)),
        Kind("score_request", "down", down(lambda n: order(n, AskScore(7)))),
        Kind("score_reply", "up", up(lambda n: session.score_reply(n, Score(float(rng.random()), n - 1)))),
        Kind("train_order", "down", down(lambda n: order(n, Train(7, pb.AGE)))),
        Kind("reuse_notice", "down", down(lambda n: order(n, Reuse(7, max(0, n - 2), 2, 0.81)))),
        Kind("round_closed", "down", down(lambda n: ("round_closed", closed(Closing(7, n, True))))),
        Kind("heartbeat (up)", "up", up(lambda n: session.heartbeat(counters(n)))),
        Kind("heartbeat (down)", "down", down(lambda _n: ("heartbeat", pb.Heartbeat()))),
        Kind("abort", "down", down(lambda _n: ("abort", pb.Abort(code=pb.FINISHED)))),
    ]


# ---------------------------------------------------------------- the client's process


async def be_client(address: str, ca: Path | None) -> None:
    """Carries out what it reads, a line of JSON each: open, send, read, close."""
    reader = asyncio.StreamReader(limit=1 << 24)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    credentials = client_credentials(None if ca is None else ClientTls(ca=ca))
    meter, stack, call, local = Meter("local"), AsyncExitStack(), None, None

    while line := await reader.readline():
        command = json.loads(line)
        match command["do"]:
            case "open":
                if credentials is None:
                    channel = grpc.aio.insecure_channel(address, options=transport.CLIENT_OPTIONS)
                else:
                    channel = grpc.aio.secure_channel(address, credentials, options=transport.CLIENT_OPTIONS)
                await stack.enter_async_context(channel)
                call = channel.stream_stream(transport.SESSION)()
                stack.callback(asyncio.create_task(_drain(call)).cancel)
                result: Any = None
            case "send":
                assert call is not None
                for frame in command["frames"]:
                    await call.write(bytes.fromhex(frame))
                result = None
            case "met":
                local = parse_peer(command["peer"])
                result = None
            case "read":
                assert local is not None
                now = meter.read(local)
                result = [now.once, now.segments, now.segments - now.data_segments]
            case _:
                await stack.aclose()
                result = None
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()
    await stack.aclose()


async def _drain(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


# ---------------------------------------------------------------- measuring


class Line:
    """A server in this process, a client in another, and the one stream between them."""

    def __init__(self, tls: Path | None) -> None:
        self._tls = tls
        self._meter = Meter("remote")
        self._contexts: asyncio.Queue[Any] = asyncio.Queue()
        self._over = asyncio.Event()
        self.heard = 0

    async def __aenter__(self) -> Line:
        self._server = grpc.aio.server(options=transport.SERVER_OPTIONS)
        handler = grpc.stream_stream_rpc_method_handler(self._session)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(transport.SERVICE, {"Session": handler}),)
        )
        if self._tls is None:
            port = self._server.add_insecure_port("127.0.0.1:0")
        else:
            tls = TlsSettings(certificate=self._tls / "certificate.pem", key=self._tls / "key.pem")
            port = self._server.add_secure_port("127.0.0.1:0", server_credentials(tls))
        await self._server.start()
        ca = [] if self._tls is None else [str(self._tls / "ca.pem")]
        self._client = await asyncio.create_subprocess_exec(
            *(sys.executable, __file__, "--client", f"127.0.0.1:{port}", *ca),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        self._over.set()
        if self._client.stdin is not None:
            self._client.stdin.close()
        try:
            await asyncio.wait_for(self._client.wait(), 10)
        except TimeoutError:
            self._client.kill()
        await self._server.stop(1)

    async def _session(self, frames: AsyncIterator[bytes], context: Any) -> None:
        await self._contexts.put(context)
        async for _ in frames:
            self.heard += 1

    async def ask(self, do: str, **fields: Any) -> Any:
        assert self._client.stdin is not None
        assert self._client.stdout is not None
        self._client.stdin.write(json.dumps({"do": do, **fields}).encode() + b"\n")
        line = await asyncio.wait_for(self._client.stdout.readline(), 30)
        return json.loads(line)

    async def open(self) -> None:
        await self.ask("open")
        self._context = await asyncio.wait_for(self._contexts.get(), 30)
        await self.ask("met", peer=self._context.peer())

    async def send(self, way: Way, frames: Sequence[bytes]) -> None:
        if way == "up":
            await self.ask("send", frames=[frame.hex() for frame in frames])
        else:
            for frame in frames:
                await self._context.write(frame)

    async def read(self) -> dict[Way, list[int]]:
        """What each direction's sender has counted: bytes once, segments, pure ACKs."""
        up = await self.ask("read")
        end = parse_peer(self._context.peer())
        assert end is not None
        now = self._meter.read(end)
        return {"up": up, "down": [now.once, now.segments, now.segments - now.data_segments]}


async def measure(tls: Path | None, repeats: int, count: int) -> dict[str, Any]:
    """By kind and figure, one value a repeat: the mean over its messages."""
    values: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    made = kinds()
    greet = {kind.name: kind for kind in made[:2]}
    async with Line(tls) as line:
        for repeat in range(repeats):
            await _open(line, greet, values["connect and join"])
            for kind in made:
                first = 1 + repeat * count  # the numbers in messages are those of rounds
                found = [kind.make(first + n) for n in range(count)]
                await asyncio.sleep(PAUSE_SECONDS)
                before = await line.read()
                for frames, _ in found:
                    await line.send(kind.way, frames)
                    await asyncio.sleep(PAUSE_SECONDS)
                after = await line.read()
                _enter(values[kind.name], kind.way, [row for _, row in found], before, after)
            await line.ask("close")
    return {name: dict(figures) for name, figures in values.items()}


async def _open(line: Line, greet: dict[str, Kind], values: dict[str, list[float]]) -> None:
    """From SYN to the last ACK of the Welcome."""
    await line.open()
    rows = []
    for name in ("join", "welcome"):
        frames, row = greet[name].make(1)
        await line.send(greet[name].way, frames)
        rows.append(row)
        await asyncio.sleep(PAUSE_SECONDS)
    await asyncio.sleep(PAUSE_SECONDS)
    # The SYN-ACK is not among the server's segments.
    nothing: dict[Way, list[int]] = {"up": [0, 0, 0], "down": [0, -1, -1]}
    _enter(values, "up", rows, nothing, await line.read(), messages=1, extra=2 * SYN_EXTRA)


def _enter(
    values: dict[str, list[float]],
    way: Way,
    rows: Sequence[Row],
    before: dict[Way, list[int]],
    after: dict[Way, list[int]],
    messages: int | None = None,
    extra: int = 0,
) -> None:
    n = messages or len(rows)
    back: Way = "down" if way == "up" else "up"
    there, other = ([b - a for a, b in zip(before[w], after[w], strict=True)] for w in (way, back))
    figures = {
        "message": sum(row.message or 0 for row in rows),
        "grpc": sum(row.grpc or 0 for row in rows),
        "socket": there[0],
        "socket_back": other[0],
        "segments": there[1],
        "segments_back": other[1],
        "pure_acks": there[2] + other[2],
        "ip": there[0] + other[0] + HEADERS * (there[1] + other[1]) + extra,
    }
    for name, value in figures.items():
        values[name].append(value / n)


def together(values: dict[str, dict[str, list[float]]]) -> dict[str, list[float]]:
    """All that goes over the wire because a selected client's cached update is used again, the model left out."""
    parts = [values[name] for name in REUSE_KINDS]
    return {
        figure: [sum(x) for x in zip(*(part[figure] for part in parts), strict=True)] for figure in parts[0]
    }


# ---------------------------------------------------------------- showing it


def show(socket: str, values: dict[str, dict[str, list[float]]]) -> None:
    title = f"One message in bytes, medians over repeats; {socket} and segments: the message's way + back"
    table = Table(title=title, title_justify="left")
    heads = ("", "message", "grpc", socket, "segments", "ACKs", "ip", "range", "paper")
    for head in heads:
        table.add_column(head, justify="right" if head else "left", no_wrap=True)
    ways = {kind.name: kind.way for kind in kinds()}
    for name, figures in values.items():
        label = name if name not in ways or "(" in name else f"{name} ({ways[name]})"
        middle = {figure: statistics.median(found) for figure, found in figures.items()}
        ip = figures["ip"]
        table.add_row(
            label,
            f"{middle['message']:.0f}",
            f"{middle['grpc']:.0f}",
            f"{middle['socket']:.0f} + {middle['socket_back']:.0f}",
            f"{middle['segments']:.2f} + {middle['segments_back']:.2f}",
            f"{middle['pure_acks']:.2f}",
            f"{middle['ip']:.0f}",
            f"{min(ip):.0f}-{max(ip):.0f}",
            str(modelled.REUSE_EVENT_BYTES) if name in ("reuse_notice", ALL) else "0",
        )
    console.print(table)


ALL = "a reuse in all"


def certificates(folder: Path) -> None:
    import trustme

    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    (folder / "certificate.pem").write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    issued.private_key_pem.write_to_path(folder / "key.pem")
    authority.cert_pem.write_to_path(folder / "ca.pem")


def main() -> None:
    if sys.argv[1:2] == ["--client"]:
        asyncio.run(be_client(sys.argv[2], Path(sys.argv[3]) if sys.argv[3:] else None))
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--messages", type=int, default=18, help="of each kind in a repeat (default: 18)")
    parser.add_argument("--tls-too", action="store_true", help="a second table, with TLS")
    parser.add_argument("--json", action="store_true", help="machine-readable result")
    options = parser.parse_args()
    if options.repeats < 1 or options.messages < 1:
        parser.error("at least 1 repeat and 1 message")
    results = {"http2": asyncio.run(measure(None, options.repeats, options.messages))}
    if options.tls_too:
        with tempfile.TemporaryDirectory(prefix="fedreuse-bench-") as folder:
            certificates(Path(folder))
            results["tls"] = asyncio.run(measure(Path(folder), options.repeats, options.messages))
    for values in results.values():
        values[ALL] = together(values)
    if options.json:
        about = {"paper": modelled.REUSE_EVENT_BYTES, "load": os.getloadavg()}
        sys.stdout.write(json.dumps({**about, **results}, indent=1) + "\n")
        return
    for socket, values in results.items():
        show(socket, values)
    console.print(
        f"{ALL}: {', '.join(REUSE_KINDS)}; the model that a score is made with is left out.\n"
        "ip: both ways, with what comes back (window updates, pings, pure ACKs), 52 B of headers a segment.",
        highlight=False,
    )


if __name__ == "__main__":
    main()
