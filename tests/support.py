"""Tiny tasks and helpers that several test files share.

The tasks are plug-ins, named `support:Line` and `support:Grid`.
"""

from __future__ import annotations

import csv
import json
import multiprocessing
import os
import signal
from collections.abc import Iterable, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

from fedreuse.client.held import HeldStore
from fedreuse.client.participant import Participant
from fedreuse.client.settings import ClientPlan, ProxySettings, TrainSettings
from fedreuse.client.task import Task, TaskContext
from fedreuse.client.workbench import Workbench, initial_weights, schema_of, state_arrays
from fedreuse.proto.codec import Payload, dense_payload
from fedreuse.proto.ledger import Row
from fedreuse.proto.schema import Schema
from fedreuse.server.store import RunStore
from fedreuse.server.weights import load_model
from fedreuse.sim import simulate as simulation
from fedreuse.sim.config import RunConfig, load_config
from fedreuse.sim.evaluate import TaskEvaluator
from fedreuse.sim.folder import read_config
from fedreuse.sim.pool import PRELOADED
from fedreuse.sim.run import create_run, make_task
from fedreuse.sim.simulate import simulate
from fedreuse.sim.worker import Worker

CPU = torch.device("cpu")
VALIDATION, TEST = 1000, 2000


class LineModel(nn.Module):
    """One layer of 8 parameters, 32 bytes: `fc.weight` (2, 3) and `fc.bias` (2,)."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


class GridModel(nn.Module):
    """Convolution, batch normalisation, dropout and a head, for pictures of 4x4 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2), nn.ReLU())
        self.dropout = nn.Dropout(0.25)
        self.classifier = nn.Linear(32, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.dropout(self.features(x).flatten(1)))


class Classification:
    """Two classes from a named random stream; client i holds `smallest` + i examples.

    Task option `wild` lists clients whose numbers are so large that their training overflows.
    """

    smallest = 6

    def __init__(self, context: TaskContext) -> None:
        self._context = context

    def _examples(self, name: int, count: int) -> TensorDataset:
        rng = np.random.default_rng([self._context.seed, name])
        labels = rng.integers(0, 2, count)
        x = self._inputs(rng, 2.0 * labels - 1, name)
        if name in self._context.options.get("wild", ()):
            x = x * 1e30
        return TensorDataset(torch.from_numpy(x.astype(np.float32)), torch.from_numpy(labels))

    def _inputs(self, rng: np.random.Generator, sign: np.ndarray, name: int) -> np.ndarray:
        raise NotImplementedError

    def client_data(self, client: int) -> TensorDataset:
        return self._examples(client, self.smallest + client)

    def validation(self) -> TensorDataset:
        return self._examples(VALIDATION, 40)

    def test(self) -> TensorDataset:
        return self._examples(TEST, 40)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return functional.cross_entropy(model(x), y)

    def metrics(self, model: nn.Module, data: Dataset[Any]) -> Mapping[str, float]:
        assert isinstance(data, TensorDataset)
        x, y = data.tensors
        logits = model(x)
        return {
            "accuracy": float((logits.argmax(1) == y).float().mean()),
            "loss": float(functional.cross_entropy(logits, y)),
        }


class Line(Classification):
    """Points in three dimensions; the second direction means something else to every client."""

    def model(self) -> nn.Module:
        return LineModel()

    def _inputs(self, rng: np.random.Generator, sign: np.ndarray, name: int) -> np.ndarray:
        direction = np.array([1.0, np.sin(name), 0.3])
        return rng.normal(size=(len(sign), 3)) + sign[:, None] * direction


class Located(Line):
    """As `Line`; task option `pids` is a folder where each training leaves its process's number."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        (Path(self._context.options["pids"]) / str(os.getpid())).touch()
        return super().loss(model, batch)


class Grid(Classification):
    """Pictures of 4x4 pixels, a bright or a dark left half."""

    smallest = 9

    def model(self) -> nn.Module:
        return GridModel()

    def _inputs(self, rng: np.random.Generator, sign: np.ndarray, name: int) -> np.ndarray:
        x = rng.normal(size=(len(sign), 1, 4, 4))
        x[:, :, :, :2] += sign[:, None, None, None]
        return x


def task_of(kind: type[Classification], seed: int = 7, clients: int = 6, **options: Any) -> Task:
    return kind(TaskContext(seed, clients, Path("no-such-folder"), options))


# ---------------------------------------------------------------- one client


def plan_of(seed: int = 7, *, proxy: ProxySettings | None = None, **train: Any) -> ClientPlan:
    """A plan of one epoch in batches of 4; `train` changes its training."""
    chosen = {"local_epochs": 1, "batch_size": 4, "learning_rate": 0.1} | train
    return ClientPlan(seed=seed, train=TrainSettings(**chosen), proxy=proxy)


def ready(task: Task, plan: ClientPlan) -> tuple[Workbench, Schema, Payload]:
    """A prepared workbench, and the initial weights in the schema's terms."""
    bench, model = Workbench(task, CPU), initial_weights(task, plan.seed)
    schema = schema_of(model)
    bench.prepare(schema, plan)
    return bench, schema, dense_payload(schema, schema.flatten(state_arrays(model)))


# ---------------------------------------------------------------- whole runs

SMALL = (
    "seed=7",
    "rounds=8",
    "clients.total=6",
    "clients.per_round=3",
    "train.local_epochs=1",
    "train.batch_size=4",
    "train.learning_rate=0.1",
    "proxy.batches=2",
    "proxy.batch_size=3",
    "evaluation.every=3",
    "sim.workers=1",
)


def small_config(
    output: Path, *overrides: str, method: str = "dg-fedreuse", task: str = "support:Line"
) -> RunConfig:
    """Eight rounds of three of six clients; `overrides` as on the command line."""
    return load_config(None, [f"method={method}", f"task={task}", f"output={output}", *SMALL, *overrides])


def completed(config: RunConfig, **how: Any) -> Path:
    """The folder of a run made and simulated to its end."""
    folder = create_run(config, make_task(config))
    simulate(folder, config, **how)
    return folder


def final_state(folder: Path) -> bytes:
    """Every bit of the final model."""
    return load_model(folder / "model.safetensors")[1].tobytes()


def table(
    folder: Path, name: str = "rounds.csv", without: Iterable[str] = ("seconds",)
) -> list[dict[str, str]]:
    """The rows of a CSV file; by default without the one column that no two runs share."""
    with (folder / name).open(newline="") as handle:
        rows = list(csv.DictReader(handle))
    return [{key: value for key, value in row.items() if key not in without} for row in rows]


def events(folder: Path) -> list[dict[str, Any]]:
    """All events, without their times."""
    lines = (folder / "events.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key != "time"} for line in lines]


def decisions(folder: Path) -> list[list[tuple[str, str]]]:
    """What was decided and why, round by round, in an order of its own: arrival orders may differ."""
    kept = [
        {key: value for key, value in event.items() if key != "detail"}
        for event in events(folder)
        if event["type"] != "simulation"  # how it was computed is no decision
    ]
    order = sorted(kept, key=lambda event: (event["round"], event["type"], event.get("client", -1)))
    return [sorted((key, str(value)) for key, value in event.items()) for event in order]


class Ledger:
    """A ledger that keeps its rows: `counted` as they come, `written` once their fate is known."""

    def __init__(self) -> None:
        self.counted: list[Row] = []
        self.written: list[Row] = []

    def count(self, row: Row) -> None:
        self.counted.append(row)

    def write(self, row: Row) -> None:
        self.written.append(row)


# ---------------------------------------------------------------- killed runs

STEPS: dict[str, tuple[Any, str]] = {
    "commit": (RunStore, "commit"),
    "score": (Worker, "score"),
    "train": (Participant, "learn"),
    "stage": (HeldStore, "stage"),
    "settle": (HeldStore, "settle"),
    "forget": (HeldStore, "forget"),
    "final model": (simulation, "save_model"),
    "test": (simulation, "test_once"),
    "look": (TaskEvaluator, "test"),
    "summary": (simulation, "write_summary"),
}


def go_on(folder: Path, wire: bool = False, death: tuple[str, str, int] | None = None) -> None:
    """Run a folder to its end; with a death (step, "before" or "after", n) only to the n-th call of that step."""
    if death is not None:
        step, moment, last = death
        owner, name = STEPS[step]
        real, calls = getattr(owner, name), 0

        def deadly(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if (moment, calls) == ("before", last):
                os.kill(os.getpid(), signal.SIGKILL)
            result = real(*args, **kwargs)
            if (moment, calls) == ("after", last):
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        setattr(owner, name, deadly)
    simulate(folder, read_config(folder), wire=wire)


def child(folder: Path, wire: bool = False, death: tuple[str, str, int] | None = None) -> BaseProcess:
    """`go_on` in a process of its own, started from a server that has torch loaded already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=go_on, args=(folder, wire, death))
    process.start()
    return process
