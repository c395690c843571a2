"""The twin test: one configuration over gRPC with real processes and in process gives the same bits.

Weights, decisions and modelled bytes agree exactly, and so do the bytes of every message kind up to gRPC
(heartbeats and reconnects apart). Client processes sleep at random before they answer, so messages arrive
in another order each time.
"""

from __future__ import annotations

import csv
import json
from collections import Counter
from pathlib import Path

import pytest

from fedreuse.proto.ledger import MESSAGE_LAYERS
from fedreuse.sim.config import load_config
from fedreuse.sim.launch import launch
from fedreuse.sim.run import create_run, make_task
from fedreuse.sim.simulate import simulate

QUICK = ["server.heartbeat=1", "server.rejoin_grace=0.5", "server.round_deadline=60", "sim.workers=1"]
RUNS = {
    "dg-fedreuse on digits": ["method=dg-fedreuse", "rounds=6", "clients.total=12", "clients.per_round=6"],
    "batch norm, shuffled answers": [
        "method=dg-fedreuse",
        "task=twin_task:ShuffledGrid",
        "rounds=6",
        "clients.total=9",
        "clients.per_round=5",
        "train.batch_size=16",
        "train.local_epochs=1",
    ],
    "augmentation, shuffled answers": [
        "method=dg-fedreuse",
        "task=twin_task:AugmentedGrid",
        "rounds=4",
        "clients.total=6",
        "clients.per_round=4",
        "train.batch_size=8",
        "train.local_epochs=2",
    ],
    "faults": [
        "method=dg-fedreuse",
        "task=twin_task:ShuffledGrid",
        "rounds=7",
        "clients.total=8",
        "clients.per_round=6",
        "train.batch_size=16",
        "train.local_epochs=1",
        "faults=["
        "{round: 2, client: 3, phase: train, kind: crash, back: 4},"
        "{round: 3, client: 1, phase: score, kind: wipe},"
        "{round: 4, client: 5, phase: upload, kind: garbage},"
        "{round: 5, client: 2, phase: train, kind: error},"
        "{round: 6, client: 0, phase: upload, kind: crash}]",
    ],
}
RECONNECTS = {"heartbeat", "join", "welcome", "abort"}


def decisions(folder: Path) -> Counter[tuple[object, ...]]:
    """Everything the server decided, without times and without the order inside a round."""
    kinds = {"round_opened", "train", "reuse", "score", "cache_dropped", "update", "fault", "committed"}
    found: Counter[tuple[object, ...]] = Counter()
    for line in (folder / "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["type"] in kinds:
            # How a failure looked differs between a socket and a function call; that it happened does not.
            for key in ("time", "detail", "code", "why"):
                event.pop(key, None)
            found[tuple(sorted((key, str(value)) for key, value in event.items()))] += 1
    return found


def byte_sums(folder: Path) -> Counter[tuple[str, str, str, str]]:
    """Bytes per round, direction, kind and layer."""
    sums: Counter[tuple[str, str, str, str]] = Counter()
    with (folder / "bytes.csv").open() as handle:
        for row in csv.DictReader(handle):
            if row["kind"] not in RECONNECTS:
                for layer in MESSAGE_LAYERS:
                    sums[row["round"], row["direction"], row["kind"], layer] += int(row[layer] or 0)
    return sums


@pytest.mark.parametrize("name", RUNS)
def test_the_twin(tmp_path, name):
    over_grpc = load_config(None, [*RUNS[name], *QUICK, f"output={tmp_path / 'grpc'}"])
    launched = create_run(over_grpc, make_task(over_grpc), body="launch")
    launch(launched, over_grpc, progress=lambda _status: None)

    in_process = load_config(None, [*RUNS[name], *QUICK, f"output={tmp_path / 'sim'}"])
    simulated = create_run(in_process, make_task(in_process))
    summary = simulate(simulated, in_process, wire=True)

    assert (launched / "model.safetensors").read_bytes() == (simulated / "model.safetensors").read_bytes()
    assert (launched / "model.safetensors").read_bytes()[-400:] != (
        launched / "initial.safetensors"
    ).read_bytes()[-400:]
    assert decisions(launched) == decisions(simulated)
    assert byte_sums(launched) == byte_sums(simulated)
    grpc_summary = json.loads((launched / "summary.json").read_text())
    for way in ("uplink", "downlink"):
        assert grpc_summary[way]["modelled"] == summary[way]["modelled"]
    assert grpc_summary["reuse"] == summary["reuse"]
    assert grpc_summary["accuracy"] == summary["accuracy"]
    if "faults" in name:
        assert summary["reuse"]["fault"] >= 3
    else:
        # Without faults nothing is lost, and both ends agree on every single message.
        assert_ends_agree(launched)


def assert_ends_agree(folder: Path) -> None:
    server = Counter(message_rows(folder / "bytes.csv"))
    clients: Counter[tuple[str, ...]] = Counter()
    for path in sorted(folder.glob("clients/*/bytes.csv")):
        clients.update(message_rows(path))
    assert server == clients
    assert not [row for row in server if row[4] == "lost"]


def message_rows(path: Path) -> list[tuple[str, ...]]:
    """Rows of real messages; the reuse event's charge is no message, heartbeats end as the timing has it."""
    with path.open() as handle:
        rows = [tuple(row.values()) for row in csv.DictReader(handle)]
    return [row for row in rows if row[3] not in ("reuse", "heartbeat", "connection")]
