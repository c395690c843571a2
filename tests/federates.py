"""A server and clients as processes of their own, without torch: `python federates.py serve|take JSON`.

Bytes below gRPC are read from a process's own sockets, so tests of them need real processes. Each writes a line of
JSON when there is something to know: the server its address, a client that it trains, both that they are done.
"""

from __future__ import annotations

import asyncio
import csv
import json
import sys
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

PATIENCE = 40.0


class Puppet:
    """A participant whose updates are all ones; in round `pause` it waits for a line on standard input."""

    examples = 10

    def __init__(self, client: int, pause: int | None) -> None:
        from fedreuse.client.held import Held

        self.client, self._pause = client, pause
        self._held = Held
        self.versions = Held()

    def welcome(self, run, schema, plan, confirmed, pending) -> None:
        self.versions, self._schema = self._held(run), schema

    def train(self, round, weights):
        from fedreuse.client.results import LocalUpdate
        from fedreuse.proto.codec import encode
        from fedreuse.proto.modelled import kept
        from fedreuse.proto.transfers import plain

        if round == self._pause:
            say(training=round)
            sys.stdin.readline()
        schema, ratio = self._schema, 0.2
        arrays = {i: np.ones(schema.tensors[i].size, np.float32) for i in schema.travelling}
        sizes = {i: schema.tensors[i].size for i in schema.travelling}
        payload = encode(schema, arrays, lambda i: kept(sizes[i], ratio) if i == 0 else sizes[i])
        return LocalUpdate(plain(payload), 1, 0.5)

    def closed(self, round, accepted) -> None: ...


def say(**what: Any) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


async def serve(folder: str, clients: int, rounds: int, size: int, settings: dict[str, Any]) -> None:
    import wire

    from fedreuse.proto.schema import PARAMETER, Schema, TensorSpec
    from fedreuse.server.settings import ServerSettings

    wire.SCHEMA = Schema.of([TensorSpec("weight", "float32", (size,), PARAMETER)])
    start = {"weight": np.random.default_rng(5).normal(size=size).astype(np.float32)}
    chosen = ServerSettings.model_validate(wire.QUICK.model_dump() | settings)
    async with wire.serving(
        Path(folder), clients=clients, rounds=rounds, settings=chosen, zeros=start
    ) as running:
        say(address=running.address)
        await asyncio.wait_for(running.task, PATIENCE)
    say(done=True)


async def take(
    address: str, folder: str, clients: list[int], pause: int | None, tls: dict[str, Any] | None
) -> None:
    from fedreuse.client.agent import Agent
    from fedreuse.client.ledger import ClientLedger
    from fedreuse.client.tls import ClientTls
    from fedreuse.proto.meter import Meter

    compute, meter = ThreadPoolExecutor(1), Meter("local")
    trust = None if tls is None else ClientTls.model_validate(tls)
    ledgers = [ClientLedger(Path(folder) / f"client-{client}.csv") for client in clients]
    agents = [
        Agent(address, Puppet(client, pause), ledger, compute, give_up=PATIENCE, meter=meter, tls=trust)  # type: ignore[arg-type]
        for client, ledger in zip(clients, ledgers, strict=True)
    ]
    await asyncio.wait_for(asyncio.gather(*(agent.run() for agent in agents)), PATIENCE)
    for ledger in ledgers:
        ledger.close()
    say(done=True)


class Process:
    """One of the two, from the side of the test."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def hear(self, key: str) -> Any:
        """What the next line says of `key`."""
        assert self._process.stdout is not None
        line = await asyncio.wait_for(self._process.stdout.readline(), PATIENCE)
        assert line, "the process ended early"
        return json.loads(line)[key]

    def go_on(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")

    async def end(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()


@asynccontextmanager
async def started(what: str, *, within: tuple[str, ...] = (), **arguments: Any) -> AsyncIterator[Process]:
    """A process that is killed at the end; `within` is a command that it is started by."""
    command = (*within, sys.executable, __file__, what, json.dumps(arguments, default=str))
    pipe = asyncio.subprocess.PIPE
    process = Process(await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe))
    try:
        yield process
    finally:
        await process.end()


def server(folder: Path, clients: int = 1, rounds: int = 2, size: int = 400_000, **more: Any):
    settings = more.pop("settings", {})
    return started(
        "serve", folder=folder, clients=clients, rounds=rounds, size=size, settings=settings, **more
    )


def client(address: str, folder: Path, *clients: int, **more: Any):
    rest = {"pause": None, "tls": None} | more
    return started("take", address=address, folder=folder, clients=clients or (0,), **rest)


# ---------------------------------------------------------------- what they wrote

Rows = list[dict[str, str]]


def read_rows(path: Path) -> Rows:
    with path.open(newline="") as handle:
        return list(csv.DictReader(handle))


def total(rows: Rows, direction: str, layer: str, client: int | None = None, kind: str | None = None) -> int:
    """The sum of a layer over rows of a direction that have it; at least one must."""
    values = [
        int(row[layer])
        for row in rows
        if row["direction"] == direction
        and row[layer] != ""
        and client in (None, int(row["client"]))
        and kind in (None, row["kind"])
    ]
    assert values, (direction, layer, client)
    return sum(values)


if __name__ == "__main__":
    asyncio.run({"serve": serve, "take": take}[sys.argv[1]](**json.loads(sys.argv[2])))
