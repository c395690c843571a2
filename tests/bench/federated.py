"""fedreuse's side of the benchmark: a real service with a real run folder, real agents, no training."""

from __future__ import annotations

import argparse
import asyncio
import csv
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from meter import Meter, meet, tell
from workload import CLIENTS, MODELS, arrays, change, is_buffer, shapes

from fedreuse.client.agent import Agent
from fedreuse.client.held import Held
from fedreuse.client.ledger import ClientLedger
from fedreuse.client.results import LocalUpdate
from fedreuse.client.settings import ClientPlan
from fedreuse.proto.allocator import keep_large_blocks
from fedreuse.proto.codec import Payload, encode
from fedreuse.proto.schema import FLOAT_BUFFER, PARAMETER, Schema, TensorSpec
from fedreuse.proto.transfers import plain
from fedreuse.server.federation import TABLE_HEADERS, Federation, new_state
from fedreuse.server.service import Service
from fedreuse.server.settings import FederationSettings, ServerSettings
from fedreuse.server.store import RunStore


class Standin:
    """Takes a participant's place in the agent: its training adds the same small number everywhere."""

    examples = 1
    versions = Held()

    def __init__(self, client: int) -> None:
        self.client = client

    def welcome(self, _run: str, schema: Schema, *_: object) -> None:
        self._schema = schema

    def train(self, _round: int, weights: Payload) -> LocalUpdate:
        tensors = self._schema.tensors
        update = {b.index: np.full(tensors[b.index].size, change(self.client)) for b in weights.blocks}
        return LocalUpdate(plain(encode(self._schema, update, lambda index: tensors[index].size)), 1, 0.0)

    def closed(self, round: int, accepted: bool) -> None:
        if not accepted:
            raise RuntimeError(f"the update of client {self.client} did not count in round {round + 1}")


async def serve(model: str, rounds: int, folder: Path) -> None:
    schema = _schema(model)
    start = schema.flatten(arrays(model))
    store = RunStore(folder)
    state = new_state("0" * 16, schema, start)
    store.initialise(state, TABLE_HEADERS)
    federation = Federation(
        FederationSettings(rounds=rounds, total=CLIENTS, per_round=CLIENTS, minimum=CLIENTS, pack=False),
        schema,
        store,
        state,
    )
    meters: list[Meter] = []

    def committed(row: dict[str, Any]) -> None:
        meters[0].mark(last=row["round"] == rounds)

    service = Service(
        federation, ClientPlan(seed=0, pack=False).to_proto(), ServerSettings(), committed=committed
    )
    await service.serve(lambda address: meters.append(meet(address)))
    federation.close()
    moved = float(np.mean(state.flat.view(np.float32) - start.view(np.float32), dtype=np.float64))
    tell({**meters[0].results(), "moved": moved, **_bytes(folder)})


def _schema(model: str) -> Schema:
    return Schema.of(
        TensorSpec(name, "float32", shape, FLOAT_BUFFER if is_buffer(name) else PARAMETER)
        for name, shape in shapes(model).items()
    )


def _bytes(folder: Path) -> dict[str, list[int]]:
    """What the run's own ledger says about every round after the first, gRPC's prefixes included."""
    with (folder / "rounds.csv").open(newline="") as handle:
        rows = list(csv.DictReader(handle))[1:]
    return {way: [int(row[f"{way}link_grpc"]) for row in rows] for way in ("up", "down")}


def take_part(address: str, client: int, folder: Path) -> None:
    ledger = ClientLedger(folder / f"client{client}.csv")
    with ThreadPoolExecutor(1) as compute:
        agent = Agent(address, Standin(client), ledger, compute, give_up=30)  # type: ignore[arg-type]
        asyncio.run(agent.run())
    ledger.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=("server", "client"))
    parser.add_argument("--model", choices=MODELS)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--address")
    parser.add_argument("--client", type=int)
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    keep_large_blocks()
    if arguments.role == "server":
        asyncio.run(serve(arguments.model, arguments.rounds, arguments.folder / "run"))
    else:
        take_part(arguments.address, arguments.client, arguments.folder)


if __name__ == "__main__":
    main()
