"""A hand-driven client and a small real server, for tests that speak the protocol message by message."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from fedreuse.client.settings import ClientPlan, CompressorSettings
from fedreuse.proto import PROTOCOL_VERSION, transport
from fedreuse.proto import federation_pb2 as pb
from fedreuse.proto.codec import encode, transfer_header
from fedreuse.proto.frames import Incoming, Receiver, chunk_frames, outgoing
from fedreuse.proto.modelled import kept
from fedreuse.proto.schema import FLOAT_BUFFER, INTEGER_BUFFER, PARAMETER, Schema, TensorSpec
from fedreuse.server.federation import TABLE_HEADERS, Federation, new_state
from fedreuse.server.gate import GateSettings
from fedreuse.server.memory import MemorySettings
from fedreuse.server.service import Service
from fedreuse.server.settings import FederationSettings, ServerSettings
from fedreuse.server.store import RunStore

SCHEMA = Schema.of(
    [
        TensorSpec("weight", "float32", (4, 5), PARAMETER),
        TensorSpec("mean", "float32", (5,), FLOAT_BUFFER),
        TensorSpec("steps", "int64", (), INTEGER_BUFFER),
    ]
)
RATIO = 0.2
PLAN = ClientPlan(seed=1, compressor=CompressorSettings(kind="topk", ratio=RATIO))
QUICK = ServerSettings(join_deadline=20, round_deadline=20, rejoin_grace=0.2, heartbeat=5)


class NotebookLedger:
    """Keeps nothing."""

    def count(self, row: object) -> None: ...

    def write(self, row: object) -> None: ...


class RawClient:
    """Says exactly what it is told to say."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=transport.CLIENT_OPTIONS)
        self.call = self._channel.stream_stream(transport.SESSION)()
        self._receiver = Receiver("server", SCHEMA)

    async def __aenter__(self) -> RawClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Vanish."""
        self.call.cancel()
        await self._channel.close()

    async def raw(self, frame: bytes) -> None:
        await self.call.write(frame)

    async def say(self, kind: str, message: Any, body: bytes = b"") -> None:
        out = outgoing(
            "client", kind, message, received=self._receiver.received, chunks=chunk_frames("client", body)
        )
        for frame in out.frames:
            await self.raw(frame)

    async def join(self, client: int, examples: int = 10, **fields: Any) -> pb.Welcome | pb.Abort:
        version = fields.pop("protocol_version", PROTOCOL_VERSION)
        instance = fields.pop("instance", client + 1)
        join = pb.Join(
            protocol_version=version, client=client, examples=examples, instance=instance, **fields
        )
        await self.say("join", join)
        return (await self.hear()).message

    async def hear(self, *kinds: str, seconds: float = 10) -> Incoming:
        """The next whole message; with `kinds`, the next of these, heartbeats and others skipped."""
        async with asyncio.timeout(seconds):
            while True:
                frame = await self.call.read()
                if frame is grpc.aio.EOF:
                    raise EOFError("the server closed the stream")
                whole = self._receiver.feed(frame)
                if whole is not None and whole.kind != "heartbeat" and (not kinds or whole.kind in kinds):
                    return whole

    async def update(self, round: int, value: float = 1.0, **changes: Any) -> None:
        """A valid update of `value` everywhere; `changes` spoil its header, `body` its body."""
        message, body = make_update(round, value)
        body = changes.pop("body", body)
        for name, change in changes.items():
            setattr(message.transfer, name, change)
        await self.say("update", message, body)

    async def work(self, until: int | None = None, score: float = 0.5) -> list[str]:
        """Do what an honest client does until the server is done (or `until` rounds closed); kinds heard."""
        heard, signature, closed = [], None, 0
        while True:
            incoming = await self.hear()
            heard.append(incoming.kind)
            match incoming.kind:
                case "score_request":
                    reply = pb.ScoreReply(
                        round=incoming.message.round, score=score, signature_round=signature
                    )
                    await self.say("score_reply", reply)
                case "train_order":
                    await self.update(incoming.message.round)
                case "round_closed":
                    closed += 1
                    signature = incoming.message.round if incoming.message.accepted else signature
                    if closed == until:
                        return heard
                case "abort" if incoming.message.code >= 100:
                    await self.say("heartbeat", pb.Heartbeat())
                    await self.call.done_writing()
                    return heard


def make_update(round: int, value: float = 1.0) -> tuple[pb.SparseUpdate, bytes]:
    arrays = {i: np.full(SCHEMA.tensors[i].size, value, np.float32) for i in SCHEMA.travelling}
    payload = encode(SCHEMA, arrays, lambda i: kept(20, RATIO) if i == 0 else SCHEMA.tensors[i].size)
    message = pb.SparseUpdate(round=round, transfer=transfer_header(SCHEMA, payload), steps=1, train_loss=0.5)
    return message, bytes(payload.body)


class Running:
    """A real service on a loopback port, serving in the background."""

    def __init__(
        self, federation: Federation, service: Service, address: str, task: asyncio.Task[bool]
    ) -> None:
        self.federation, self.service, self.address, self.task = federation, service, address, task

    def client(self) -> RawClient:
        return RawClient(self.address)

    def events(self, folder: Path, type: str) -> list[dict[str, Any]]:
        import json

        lines = (folder / "events.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["type"] == type]


@contextlib.asynccontextmanager
async def serving(
    folder: Path,
    *,
    clients: int = 3,
    rounds: int = 2,
    gate: str = "none",
    settings: ServerSettings = QUICK,
    faults: tuple[Any, ...] = (),
    zeros: dict[str, Any] | None = None,
    **extra: Any,
) -> AsyncIterator[Running]:
    """A federation of `clients`, all selected each round."""
    start = {"weight": np.zeros((4, 5), np.float32), "mean": np.zeros(5, np.float32), "steps": np.array(7)}
    flat = SCHEMA.flatten(zeros or start)
    store = RunStore(folder)
    state = store.load()
    if state is None:
        state = new_state("0123456789abcdef", SCHEMA, flat)
        store.initialise(state, TABLE_HEADERS)
    memory = MemorySettings(kind="none" if gate == "none" else "reuse")
    federation = Federation(
        FederationSettings(
            rounds=rounds,
            total=clients,
            per_round=clients,
            keep_ratio=RATIO,
            gate=GateSettings(kind=gate),
            memory=memory,
            **extra,
        ),
        SCHEMA,
        store,
        state,
    )
    service = Service(federation, PLAN.to_proto(), settings, faults)
    address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(service.serve(address.set_result))
    await asyncio.wait({task, address}, return_when=asyncio.FIRST_COMPLETED)
    try:
        if task.done():
            await task
        yield Running(federation, service, await address, task)
    finally:
        service.stop()
        await asyncio.wait_for(asyncio.gather(task, return_exceptions=True), 20)
        federation.close()
