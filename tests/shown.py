"""Study folders written by hand, quickly: small run folders with chosen accuracies, bytes and fates."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedreuse.proto.schema import PARAMETER, Schema, TensorSpec
from fedreuse.proto.streams import cohort
from fedreuse.server.outcome import CAUSES
from fedreuse.server.weights import save_model
from fedreuse.sim.config import RunConfig
from fedreuse.sim.study.folder import Study
from fedreuse.sim.study.plan import Cell, StudyPlan, parse_plan
from fedreuse.sim.summary import summarise, write_summary
from fedreuse.sim.testset import ClientTest, Examined

SCHEMA = Schema((TensorSpec("fc.weight", "float32", (250,), PARAMETER),))
DENSE = 1000
"""Bytes of the model."""
UPDATE = {"topk-fedavg": 300, "dg-fedreuse": 300}
FLOPS = {"training": 5_000_000_000, "proxy_gate": 0, "proxy_refresh": 0}
MEMORY = {"process": 700_000_000, "workers": None}

PLAN: dict[str, Any] = {
    "name": "byhand",
    "base": {"rounds": 6, "clients": {"total": 4, "per_round": 2}, "evaluation.every": 1},
    "methods": ["topk-fedavg", "age-only"],
    "tasks": [{"label": "a", "task": "support:Line"}, {"label": "b", "task": "support:Grid"}],
    "seeds": [1, 2, 3, 4, 5],
    "wire": True,
    "compare": {"control": "topk-fedavg", "margin": 1.0},
    "target": {"of": "topk-fedavg", "share": 0.9},
}


def by_hand(**changes: Any) -> StudyPlan:
    """`PLAN` with other keys; None takes one out."""
    return parse_plan({key: value for key, value in (PLAN | changes).items() if value is not None}, "test")


Curve = Callable[[Cell], Sequence[float]]
"""Validation accuracies of all rounds; the last is also the test accuracy."""


def write_study(
    folder: Path,
    plan: StudyPlan,
    curve: Curve,
    *,
    without: Sequence[str] = (),
) -> Study:
    """A study whose cells are complete but for those named in `without`."""
    study = Study.freeze(plan, folder)
    for cell in study.cells.values():
        if cell.id not in without:
            write_cell(study.path(cell), cell, curve(cell))
    return study


def write_cell(folder: Path, cell: Cell, validation: Sequence[float], *, finished: bool = True) -> None:
    """Half of the selected clients are reused from round 2 on where there is a gate; each update is 300 bytes."""
    config: RunConfig = cell.config.model_copy(update={"output": folder})
    folder.mkdir(parents=True)
    save_model(folder / "initial.safetensors", SCHEMA, {"fc.weight": np.zeros(250, np.float32)})
    (folder / "config.yaml").write_text(config.to_yaml())
    environment = {
        "body": "sim --wire",
        "config_sha256": hashlib.sha256(config.to_yaml().encode()).hexdigest(),
        "partition_sha256": f"partition {cell.seed}",
    }
    (folder / "environment.json").write_text(json.dumps(environment))
    columns = ("round", "selected", "fresh", "reused", "fault", "bridged", *CAUSES, "always", "void")
    rounds = [",".join((*columns, "validation_accuracy", "seconds"))]
    ledger = ["round,client,direction,kind,status,modelled,payload,message,grpc,how"]
    events: list[dict[str, Any]] = []
    for client in range(config.clients.total):
        ledger.append(f"0,{client},up,join,ok,0,0,10,15,")
        ledger.append(f"0,{client},down,welcome,ok,0,0,20,25,")
    for number, accuracy in enumerate(validation, 1):
        chosen = cohort(config.seed, number - 1, config.clients.total, config.clients.per_round)
        gate = config.gate.kind != "none"
        reused = chosen[: len(chosen) // 2] if gate and number > 1 else ()
        events.append({"round": number, "type": "round_opened", "cohort": list(chosen), "threshold": 0.5})
        for client in chosen:
            ledger.append(f"{number},{client},down,model,ok,{DENSE},800,810,815,")
            if client in reused:
                ledger.append(f"{number},{client},up,reuse,ok,16,,,,")
                events.append(
                    {"round": number, "type": "reuse", "client": client, "age": 1, "source_round": 1}
                )
            else:
                ledger.append(f"{number},{client},up,update,ok,300,200,210,215,")
                events.append({"round": number, "type": "update", "client": client})
        events.append({"round": number, "type": "committed"})
        fresh = len(chosen) - len(reused)
        cells = [number, len(chosen), fresh, len(reused), 0, 0, fresh if gate else 0, 0, 0, 0]
        rounds.append(",".join(map(str, [*cells, 0 if gate else fresh, "", accuracy, 2.0])))
    (folder / "rounds.csv").write_text("\n".join([*rounds, ""]))
    (folder / "bytes.csv").write_text("\n".join([*ledger, ""]))
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    if finished:
        end = validation[-1]
        spread = np.linspace(-0.1, 0.1, config.clients.total)
        clients = tuple(ClientTest(n, 12, min(1.0, end + d), 0.5) for n, d in enumerate(spread))
        examined = Examined({"accuracy": end, "loss": 1 - end}, clients, None)
        write_summary(folder, summarise(folder, config, examined, {"flops": FLOPS, "memory": MEMORY}))
