"""What a simulator process does for one client at a time."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing import parent_process
from pathlib import Path
from threading import Thread

import numpy as np
import yaml
from numpy.typing import NDArray

from fedreuse.client.held import Held, HeldStore
from fedreuse.client.host import ClientHost, be_deterministic
from fedreuse.client.participant import Participant
from fedreuse.client.results import Learned, LocalUpdate, Score
from fedreuse.client.settings import ClientPlan
from fedreuse.client.task import Task
from fedreuse.client.workbench import resolve_device
from fedreuse.proto.codec import Payload, dense_payload
from fedreuse.proto.errors import ProtocolError
from fedreuse.proto.schema import Schema
from fedreuse.server.store import read_weights
from fedreuse.server.weights import load_model
from fedreuse.sim.config import RunConfig
from fedreuse.sim.folder import INITIAL
from fedreuse.sim.run import make_task

Read = Callable[[], tuple[int, NDArray[np.uint8]]]


class Worker:
    """Virtual clients of a run, in this process.

    `read` gives the rounds committed so far and the flat global state after them.
    """

    def __init__(
        self, folder: Path, config: RunConfig, device: str, task: Task, held: HeldStore, read: Read
    ) -> None:
        be_deterministic()
        self._read = read
        self._plan: ClientPlan = config.plan()
        self._schema: Schema = load_model(folder / INITIAL)[0]
        # A round's clients and as many again: memory does not grow with those who were here before.
        keep = 2 * config.clients.per_round
        self._host = ClientHost(task, resolve_device(device), held, keep)
        self._weights: tuple[int, Payload] | None = None

    def look(self, client: int) -> tuple[int, Held]:
        """n_i and the versions the client holds."""
        participant = self._host.participant(client)
        return participant.examples, participant.versions

    def score(self, run: str, client: int, round: int) -> Score:
        return self._ready(run, client).score(round, self.weights(round))

    def train(self, run: str, client: int, round: int) -> LocalUpdate:
        return self._ready(run, client).train(round, self.weights(round))

    def learn(self, run: str, client: int, round: int) -> Learned:
        return self._ready(run, client).learn(round, self.weights(round))

    def together(
        self, method: str, run: str, clients: Sequence[int], round: int
    ) -> list[Learned | LocalUpdate | ProtocolError]:
        """What `learn` or `train` (method) would return or raise for each client; they train at once."""
        weights = self.weights(round)
        participants = [self._ready(run, client) for client in clients]
        learned = Participant.learn_together(participants, round, weights)
        if method == "learn":
            return [*learned]
        return [
            found if isinstance(found, ProtocolError) else each.coded(found, round, weights)
            for each, found in zip(participants, learned, strict=True)
        ]

    def weights(self, round: int) -> Payload:
        """The global weights of a round, read from the state its predecessor committed."""
        if self._weights is None or self._weights[0] != round:
            committed, flat = self._read()
            if committed != round:
                raise RuntimeError(f"round {round} wanted, {committed} rounds are committed")
            self._weights = round, dense_payload(self._schema, flat)
        return self._weights[1]

    def _ready(self, run: str, client: int) -> Participant:
        participant = self._host.participant(client)
        participant.enter(run, self._schema, self._plan)
        return participant


_worker: Worker | None = None


def start(folder: Path, device: str) -> None:
    """Initialise a worker process."""
    global _worker
    Thread(target=leave_with_parent, daemon=True).start()
    logging.disable(logging.INFO)
    config = RunConfig.model_validate(yaml.safe_load((folder / "config.yaml").read_text()))
    held = HeldStore(folder / "state" / "clients")
    _worker = Worker(folder, config, device, make_task(config, folder), held, partial(read_weights, folder))


def leave_with_parent() -> None:
    """End this process once the simulation is gone: a killed one cannot say goodbye."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def call(method: str, *arguments: object) -> object:
    """Run a worker method in this process."""
    assert _worker is not None
    return getattr(_worker, method)(*arguments)
