"""The client's gRPC body: it comes back by itself, does nothing twice, and says why it cannot go on."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest
from wire import QUICK, RATIO, SCHEMA, NotebookLedger, serving

from fedreuse.client import agent as agents
from fedreuse.client.agent import Agent
from fedreuse.client.errors import AgentError
from fedreuse.client.held import Held
from fedreuse.client.results import LocalUpdate, Score
from fedreuse.proto import federation_pb2 as pb
from fedreuse.proto import transport
from fedreuse.proto.codec import encode
from fedreuse.proto.errors import ProtocolError
from fedreuse.proto.ledger import Row
from fedreuse.proto.modelled import kept
from fedreuse.proto.transfers import plain
from fedreuse.server import sessions


@pytest.fixture(autouse=True)
def short_goodbyes(monkeypatch):
    monkeypatch.setattr(sessions, "FAREWELL_SECONDS", 1.0)


class Stub:
    """A participant that trains when it is allowed to, and counts."""

    examples = 10
    versions = Held()

    def __init__(self, client: int = 0) -> None:
        self.client = client
        self.may_train = threading.Event()
        self.may_train.set()
        self.trainings: list[int] = []
        self.accepted: list[int] = []
        self.pending: list[int | None] = []
        self.errors: dict[int, Exception] = {}

    def welcome(self, run, schema, plan, confirmed, pending) -> None:
        assert schema == SCHEMA
        self.versions = Held(run)
        self.pending.append(pending)

    def score(self, round, weights) -> Score:
        return Score(0.1, max(self.accepted, default=None))

    def train(self, round, weights) -> LocalUpdate:
        self.trainings.append(round)
        assert self.may_train.wait(20)
        if round in self.errors:
            raise self.errors[round]
        arrays = {i: np.ones(SCHEMA.tensors[i].size, np.float32) for i in SCHEMA.travelling}
        payload = encode(SCHEMA, arrays, lambda i: kept(20, RATIO) if i == 0 else 5)
        return LocalUpdate(plain(payload), 1, 0.5)

    def closed(self, round, accepted) -> None:
        if accepted:
            self.accepted.append(round)


class Proxy:
    """A TCP proxy whose connections can be cut, as a router does with idle ones."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = host, int(port)
        self._writers: list[asyncio.StreamWriter] = []
        self.connections = 0

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _connect(self, reader, writer) -> None:
        self.connections += 1
        back_reader, back_writer = await asyncio.open_connection(*self._target)
        self._writers += [writer, back_writer]
        await asyncio.gather(self._pump(reader, back_writer), self._pump(back_reader, writer))

    async def _pump(self, reader, writer) -> None:
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    def close(self) -> None:
        self.cut()
        self._server.close()


class Rows(NotebookLedger):
    def __init__(self) -> None:
        self.rows: list[Row] = []

    def write(self, row: Row) -> None:
        self.rows.append(row)


def agent(address: str, stub: Stub, ledger=None, **kwargs) -> Agent:
    return Agent(address, stub, ledger or NotebookLedger(), ThreadPoolExecutor(1), **kwargs)  # type: ignore[arg-type]


async def until(condition) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


async def test_it_takes_part_until_the_end(tmp_path):
    async with serving(tmp_path, clients=1, rounds=4) as running:
        stub = Stub()
        await asyncio.wait_for(agent(running.address, stub).run(), 20)
        assert (stub.trainings, stub.accepted) == ([0, 1, 2, 3], [0, 1, 2, 3])
        assert await running.task is True


async def test_goodbyes_take_no_longer_than_they_need(tmp_path, monkeypatch):
    monkeypatch.setattr(sessions, "FAREWELL_SECONDS", 60.0)
    monkeypatch.setattr(agents, "FAREWELL_SECONDS", 60.0)
    async with serving(tmp_path, clients=2, rounds=1) as running:
        both = [agent(running.address, Stub(client)).run() for client in range(2)]
        await asyncio.wait_for(asyncio.gather(*both), 20)
        assert await asyncio.wait_for(running.task, 20) is True


async def test_a_connection_cut_in_the_middle_of_a_training_loses_nothing(tmp_path):
    settings = QUICK.model_copy(update={"rejoin_grace": 15.0})
    async with serving(tmp_path, clients=1, rounds=2, settings=settings) as running:
        proxy, stub, ledger = Proxy(running.address), Stub(), Rows()
        stub.may_train.clear()
        work = asyncio.create_task(agent(await proxy.start(), stub, ledger).run())
        await until(lambda: stub.trainings == [0])
        proxy.cut()
        await until(lambda: proxy.connections >= 2)
        await asyncio.sleep(0.3)
        stub.may_train.set()
        await asyncio.wait_for(work, 20)
        assert await running.task is True
        proxy.close()
    assert stub.trainings == [0, 1]  # not trained again
    assert stub.pending == [None, 0]  # what it staged in round 0 is to be kept
    assert stub.accepted == [0, 1]
    # The model of round 1 went over the wire once, and nothing was lost: the second Join settled it.
    assert [row.round for row in ledger.rows if row.kind == "model"] == [0, 1]
    assert {row.status for row in ledger.rows if row.kind != "heartbeat"} == {"ok"}


async def test_it_waits_for_a_server_that_starts_later_and_again_after_a_stop(tmp_path):
    stub = Stub()
    async with serving(tmp_path, clients=1, rounds=300) as running:
        port = int(running.address.rpartition(":")[2])
        work = asyncio.create_task(agent(running.address, stub).run())
        await until(lambda: len(stub.accepted) >= 2)
    done = len(stub.accepted)
    await asyncio.sleep(0.5)
    assert not work.done()
    settings = QUICK.model_copy(update={"port": port})
    async with serving(tmp_path, clients=1, rounds=300, settings=settings):
        await until(lambda: len(stub.accepted) >= done + 2)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
    assert stub.accepted == sorted(set(stub.accepted))


async def test_its_own_failure_is_reported_and_it_goes_on(tmp_path):
    async with serving(tmp_path, clients=1, rounds=3) as running:
        stub = Stub()
        stub.errors = {0: RuntimeError("out of memory"), 1: RuntimeError("out of memory")}
        await asyncio.wait_for(agent(running.address, stub).run(), 20)
    faults = running.events(tmp_path, "fault")
    assert {(f["code"], f["detail"]) for f in faults} == {("CLIENT_FAILED", "RuntimeError: out of memory")}
    assert [f["round"] for f in faults] == [1, 2]
    assert stub.accepted == [2]


async def test_a_diverged_update_never_leaves_the_client(tmp_path):
    async with serving(tmp_path, clients=1, rounds=1) as running:
        stub = Stub()
        stub.errors = {0: ProtocolError(pb.NOT_FINITE, "tensor 'weight' contains NaN or Inf")}
        await asyncio.wait_for(agent(running.address, stub).run(), 20)
    assert "'weight' contains NaN" in running.events(tmp_path, "fault")[0]["detail"]


async def test_a_refused_identity_ends_it_with_the_reason(tmp_path):
    async with serving(tmp_path, clients=1, rounds=1) as running:
        with pytest.raises(AgentError, match=r"UNKNOWN_CLIENT.*client 5.*0 to 0"):
            await asyncio.wait_for(agent(running.address, Stub(client=5)).run(), 20)


async def test_no_server_at_all():
    with pytest.raises(AgentError, match=r"no federation at 127.0.0.1:9 for \d+ s .*is the server running"):
        await asyncio.wait_for(agent("127.0.0.1:9", Stub(), give_up=0.5).run(), 20)


async def test_a_server_that_talks_nonsense():
    """Anything but the protocol ends the agent with a sentence, not with a hang."""

    async def nonsense(_frames, context):
        await context.write(b"\xff\xff\xff")
        await asyncio.sleep(5)

    server = grpc.aio.server()
    handler = grpc.stream_stream_rpc_method_handler(nonsense)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(transport.SERVICE, {"Session": handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        with pytest.raises(AgentError, match="broke the protocol"):
            await asyncio.wait_for(agent(f"127.0.0.1:{port}", Stub()).run(), 20)
    finally:
        await server.stop(0)
