"""Whole runs in one process: the same brain whatever carries the messages, and faults as planned.

Most tests use `support:Line`: 8 parameters in two tensors. B_0 = 6 * 4 + 2 * 4 = 32 bytes. Top-K with r = 0.2
keeps one coordinate of each; for d = 6 a bitmap takes 1 * 4 + 1 = 5 bytes (dense 24, pairs 8), for d = 2 also
4 + 1 = 5 (dense 8, pairs 8): B_i = 10 bytes.
"""

from __future__ import annotations

import json
import math
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import (
    Grid,
    Line,
    child,
    completed,
    decisions,
    events,
    final_state,
    go_on,
    small_config,
    table,
    task_of,
)
from torch.nn import functional

from fedreuse.client.held import HeldStore
from fedreuse.client.participant import Participant
from fedreuse.client.workbench import Workbench
from fedreuse.proto.codec import Payload, decode, dense_payload
from fedreuse.proto.ledger import LAYERS, MESSAGE_LAYERS
from fedreuse.proto.schema import FLOAT_BUFFER, PARAMETER
from fedreuse.proto.streams import Purpose, stream
from fedreuse.server.store import RunError
from fedreuse.server.weights import load_model
from fedreuse.sim.config import RunConfig
from fedreuse.sim.engine import Engine
from fedreuse.sim.evaluate import TaskEvaluator
from fedreuse.sim.folder import read_config
from fedreuse.sim.links import DirectLink
from fedreuse.sim.pool import InlinePool
from fedreuse.sim.run import create_run, make_task, open_federation
from fedreuse.sim.simulate import finish, simulate
from fedreuse.sim.worker import Worker

B0, B = 32, 10
FAULTS = (
    "faults=[{round: 2, client: 4, phase: train, kind: crash},"
    " {round: 3, client: 2, phase: upload, kind: garbage},"
    " {round: 4, client: 4, phase: score, kind: wipe, back: 6},"
    " {round: 5, client: 3, phase: train, kind: stall},"
    " {round: 6, client: 2, phase: upload, kind: crash, back: 8},"
    " {round: 8, client: 3, phase: upload, kind: stall},"
    " {round: 9, client: 0, phase: train, kind: error},"
    " {round: 10, client: 5, phase: score, kind: wipe}]"
)
# Thresholds at which every clause of the gate decides something within twelve rounds.
LINE = ("rounds=12", "clients.per_round=4", "gate.tau_start=0.2", "gate.tau_min=0.1")
GRID = ("rounds=8", "clients.per_round=4", "gate.tau_start=0.5", "gate.tau_min=0.3")
CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "line": ("support:Line", LINE),
    "grid with batch normalisation": ("support:Grid", GRID),
    "line with faults": ("support:Line", (*LINE, FAULTS)),
}


def case(name: str, folder: Path, *more: str) -> RunConfig:
    task, overrides = CASES[name]
    return small_config(folder, *overrides, *more, task=task)


@pytest.fixture(scope="module", params=CASES)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A run in one process without messages: what every other body must reproduce."""
    folder = tmp_path_factory.mktemp("reference")
    return request.param, completed(case(request.param, folder / "run"))


def modelled_rows(folder: Path) -> list[tuple[str, ...]]:
    """Who was charged what in which round, order aside; without control messages, which are charged nothing."""
    rows = table(folder, "bytes.csv")
    return sorted(
        (row["round"], row["client"], row["direction"], row["kind"], row["modelled"])
        for row in rows
        if row["modelled"] != "0" or row["kind"] == "fault"
    )


def rounds_without_wire(folder: Path) -> list[dict[str, str]]:
    measured = [f"{way}link_{layer}" for way in ("up", "down") for layer in MESSAGE_LAYERS]
    return table(folder, without=("seconds", *measured))


def assert_twins(one: Path, other: Path) -> None:
    assert final_state(one) == final_state(other)
    assert decisions(one) == decisions(other)
    assert rounds_without_wire(one) == rounds_without_wire(other)
    assert modelled_rows(one) == modelled_rows(other)


# The twin


def test_the_reference_exercises_every_clause(reference: tuple[str, Path]) -> None:
    name, folder = reference
    counts = Counter[str]()
    for row in table(folder):
        for clause in ("reused", "cacheless", "age", "threshold", "quota", "fault", "bridged"):
            counts[clause] += int(row[clause])
    assert min(counts[c] for c in ("reused", "cacheless", "age", "threshold", "quota")) > 0
    assert (counts["fault"] > counts["bridged"] > 0) == ("faults" in name)
    if "faults" in name:
        codes = {event["code"] for event in events(folder) if event["type"] == "fault"}
        assert codes == {"ABSENT", "CHECKSUM", "TIMEOUT", "CLIENT_FAILED"}


def test_two_processes_are_the_same_run(reference: tuple[str, Path], tmp_path: Path) -> None:
    name, folder = reference
    assert_twins(folder, completed(case(name, tmp_path / "run", "sim.workers=2")))


def test_real_messages_are_the_same_run(reference: tuple[str, Path], tmp_path: Path) -> None:
    name, folder = reference
    assert_twins(folder, completed(case(name, tmp_path / "run"), wire=True))


def test_a_budget_of_nothing_is_the_same_run(reference: tuple[str, Path], tmp_path: Path) -> None:
    name, folder = reference
    tight = completed(case(name, tmp_path / "run", "memory.budget=0"))
    assert_twins(folder, tight)
    assert (tight / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_the_same_run_twice_is_the_same_run(reference: tuple[str, Path], tmp_path: Path) -> None:
    name, folder = reference
    again = completed(case(name, tmp_path / "run"))
    assert_twins(folder, again)
    assert (again / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    assert (again / "bytes.csv").read_bytes() == (folder / "bytes.csv").read_bytes()
    assert events(again) == events(folder)


def test_another_seed_is_another_run(tmp_path: Path) -> None:
    one = completed(small_config(tmp_path / "one", "rounds=2"))
    other = completed(small_config(tmp_path / "other", "rounds=2", "seed=8"))
    assert final_state(one) != final_state(other)


Order = Callable[[list[Future[Any]]], list[Future[Any]]]


def run_with_order(config: RunConfig, order: Order) -> Path:
    """As `simulate` does it, but finished work is taken up in another order."""
    task = make_task(config)
    folder = create_run(config, task)
    evaluator = TaskEvaluator(task)
    federation = open_federation(folder, config, evaluator)
    held = HeldStore(folder / "state" / "clients")
    state = federation.state
    pool = InlinePool(Worker(folder, config, "cpu", task, held, lambda: (state.committed, state.flat)))
    Engine(federation, pool, held, DirectLink(federation), config.faults, order=order).run()
    finish(folder, config, federation, evaluator)
    federation.close()
    held.close()
    return folder


@pytest.mark.parametrize("name", ["reversed", "shuffled"])
def test_completion_order_does_not_matter(reference: tuple[str, Path], tmp_path: Path, name: str) -> None:
    rng, moved = random.Random(5), []

    def order(ready: list[Future[Any]]) -> list[Future[Any]]:
        result = ready[::-1] if name == "reversed" else rng.sample(ready, len(ready))
        moved.append(result != ready)
        return result

    other = run_with_order(case(reference[0], tmp_path / "run"), order)
    assert sum(moved) > 5
    assert_twins(reference[1], other)


# Modelled bytes and the summary


def test_modelled_bytes_of_every_round(reference: tuple[str, Path]) -> None:
    name, folder = reference
    # Grid: 90 floats of parameters and 4 of buffers, and the int64 counter: 360 + 16 + 8 bytes; its B_i is
    # worked out in `test_paper_buffers_are_sparse_and_dense_ones_are_not`.
    dense, update = (384, 109) if "grid" in name else (B0, B)
    for row in table(folder):
        # Eq. 13; a fault, be it a refused update, costs nothing. Downwards one dense model per selected client.
        fresh, reused = int(row["fresh"]), int(row["reused"])
        assert int(row["uplink_modelled"]) == update * fresh + 16 * reused
        assert int(row["downlink_modelled"]) == 4 * dense


def test_the_summary_by_hand(tmp_path: Path) -> None:
    # Everybody trains in round 1 (no cache) and is reused in round 2 (no score reaches 2, no quota).
    folder = completed(
        small_config(
            tmp_path / "run",
            "rounds=2",
            "clients.total=2",
            "clients.per_round=2",
            "gate.tau_start=2",
            "gate.tau_min=2",
            "gate.quota=0",
        )
    )
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["method"] == "dg-fedreuse"
    assert summary["task"] == "support:Line"
    assert (summary["seed"], summary["rounds"], summary["train_limit"]) == (7, 2, None)
    assert summary["clients"] == {"total": 2, "per_round": 2}
    assert (summary["dense_bytes"], summary["selected"]) == (32, 4)
    # Up: 2 * 10 + 2 * 16 = 52 modelled; down: 4 * 32. Nothing was coded, so nothing is measured.
    assert summary["uplink"] == dict.fromkeys(LAYERS) | {"modelled": 52}
    assert summary["downlink"] == dict.fromkeys(LAYERS) | {"modelled": 128}
    # 1 - 52/128 = 76/128; 1 - (128 + 52)/256 = 76/256.
    assert summary["saving"] == {
        "uplink_modelled": 0.59375,
        "symmetric_modelled": 0.296875,
        "uplink_grpc": None,
        "symmetric_grpc": None,
    }
    assert summary["reuse"] == {
        "fraction": 0.5,
        "active": 0.5,
        "fresh": 2,
        "reused": 2,
        "cacheless": 2,
        "age": 0,
        "threshold": 0,
        "quota": 0,
        "fault": 0,
        "bridged": 0,
    }
    rows = table(folder)
    assert summary["accuracy"]["validation"] == float(rows[-1]["validation_accuracy"])
    # The test set's accuracy, from the final model and the data, without the package's evaluator.
    _, flat = load_model(folder / "model.safetensors")
    values = flat.view(np.float32)
    x, y = task_of(Line, clients=2).test().tensors
    predicted = (x.numpy() @ values[:6].reshape(2, 3).T + values[6:]).argmax(1)
    assert summary["accuracy"]["test"] == pytest.approx((predicted == y.numpy()).mean())


def test_measured_savings_are_in_the_summary_where_messages_were_real(tmp_path: Path) -> None:
    folder = completed(small_config(tmp_path / "run", "rounds=2", method="fedavg"), wire=True)
    summary = json.loads((folder / "summary.json").read_text())
    rows = table(folder, "bytes.csv")
    up, down = (sum(int(r["grpc"]) for r in rows if r["direction"] == way) for way in ("up", "down"))
    assert (summary["uplink"]["grpc"], summary["downlink"]["grpc"]) == (up, down)
    # 2 rounds of 3 clients of 32 bytes; so tiny a model pays more for headers than for numbers.
    assert summary["saving"]["uplink_grpc"] == 1 - up / (6 * 32)
    assert summary["saving"]["symmetric_grpc"] == 1 - (up + down) / (2 * 6 * 32)
    assert summary["saving"]["uplink_grpc"] < 0
    assert summary["saving"]["uplink_modelled"] == 0.0


# What crosses the wire


def test_layers_of_every_message(tmp_path: Path) -> None:
    folder = completed(case("line with faults", tmp_path / "run", "wire.pack=false"), wire=True)
    rows = table(folder, "bytes.csv")
    kinds = Counter(row["kind"] for row in rows)
    assert kinds.keys() >= {"join", "welcome", "model", "score_request", "score_reply", "train_order"}
    assert kinds.keys() >= {"update", "reuse_notice", "round_closed", "heartbeat", "abort"}
    for row in rows:
        if row["kind"] in ("reuse", "fault") or row["status"] == "fault":
            assert (row["payload"], row["message"], row["grpc"]) == ("", "", "")  # no message at all
            continue
        payload, message, grpc = (int(row[layer]) for layer in ("payload", "message", "grpc"))
        # A body of up to 1 MiB is one chunk after the header; gRPC prefixes each frame with 5 bytes.
        frames = 2 if row["kind"] in ("model", "update") else 1
        assert message > payload
        assert grpc - message == 5 * frames
        # float32 values: a model is B_0 bytes, an update without float buffers B_i.
        assert payload == {"model": B0, "update": B}.get(row["kind"], 0)


def test_rounds_csv_adds_up_bytes_csv(tmp_path: Path) -> None:
    folder = completed(case("line with faults", tmp_path / "run"), wire=True)
    sums = Counter[tuple[str, str]]()
    for row in table(folder, "bytes.csv"):
        # The notice that a round is durable goes out after the round's row was written.
        if row["kind"] != "round_closed":
            for layer in ("modelled", "payload", "message", "grpc"):
                sums[row["round"], f"{row['direction']}link_{layer}"] += int(row[layer] or 0)
    for row in table(folder):
        for column in row:
            if column.partition("_")[2] in MESSAGE_LAYERS:
                assert int(row[column]) == sums[row["round"], column], (row["round"], column)


def test_without_messages_their_layers_are_absent(reference: tuple[str, Path]) -> None:
    _, folder = reference
    assert {row["message"] + row["grpc"] for row in table(folder, "bytes.csv")} == {""}
    for row in table(folder):
        assert (
            row["uplink_message"]
            == row["uplink_grpc"]
            == row["downlink_message"]
            == row["downlink_grpc"]
            == ""
        )


# Methods


@pytest.mark.parametrize(
    "method", ["reuse-only", "age-only", "fedavg", "fedprox", "topk-fedavg", "topk-fedprox"]
)
def test_every_method_runs(method: str, tmp_path: Path) -> None:
    folder = completed(small_config(tmp_path / "run", "rounds=4", method=method))
    rows = table(folder)
    assert [row["selected"] for row in rows] == ["3"] * 4
    types = Counter(event["type"] for event in events(folder))
    assert (types["score"] > 0) == (method == "reuse-only")
    assert (types["reuse"] > 0) == (method in ("reuse-only", "age-only"))
    dense = method in ("fedavg", "fedprox", "reuse-only")
    for row in rows:
        expected = (B0 if dense else B) * int(row["fresh"]) + 16 * int(row["reused"])
        assert int(row["uplink_modelled"]) == expected
        assert (row["tau"] != "") == (method == "reuse-only")
        if method not in ("reuse-only", "age-only"):
            assert row["always"] == row["fresh"] == "3"


def test_the_proximal_term_and_the_mask_change_the_model(tmp_path: Path) -> None:
    finals = {
        method: final_state(
            completed(small_config(tmp_path / method, "rounds=2", "train.local_epochs=2", method=method))
        )
        for method in ("fedavg", "fedprox", "topk-fedavg", "topk-fedprox")
    }
    assert len(set(finals.values())) == 4


def test_one_client_with_full_participation_is_plain_sgd(tmp_path: Path) -> None:
    # FedAvg over the only client: w + 1 (w_1 - w) is its own model. A fresh optimiser every round.
    folder = completed(
        small_config(
            tmp_path / "run",
            "rounds=5",
            "clients.total=1",
            "clients.per_round=1",
            "train.local_epochs=2",
            "train.momentum=0.9",
            "train.weight_decay=0.01",
            method="fedavg",
        )
    )
    x, y = task_of(Line, clients=1).client_data(0).tensors
    assert len(y) == 6
    _, flat = load_model(folder / "initial.safetensors")
    start = torch.from_numpy(flat.view(np.float32).copy())
    weight, bias = start[:6].reshape(2, 3).requires_grad_(), start[6:].requires_grad_()
    for round in range(5):
        optimiser = torch.optim.SGD([weight, bias], lr=0.1, momentum=0.9, weight_decay=0.01)
        for epoch in range(2):
            order = stream(7, Purpose.BATCH_ORDER, client=0, round=round, draw=epoch).permutation(6)
            for batch in (order[:4], order[4:]):
                optimiser.zero_grad()
                functional.cross_entropy(x[batch] @ weight.T + bias, y[batch]).backward()
                optimiser.step()
    _, final = load_model(folder / "model.safetensors")
    expected = torch.cat([weight.reshape(-1), bias]).detach().numpy()
    np.testing.assert_allclose(final.view(np.float32), expected, rtol=1e-5, atol=1e-6)


# Batch normalisation


def buffers(path: Path) -> dict[str, np.ndarray]:
    schema, flat = load_model(path)
    views = zip(schema.tensors, schema.views(flat), strict=True)
    return {t.name.rsplit(".", 1)[1]: v for t, v in views if t.name.startswith("features.1.")}


@pytest.mark.parametrize(("option", "kind"), [("dense", FLOAT_BUFFER), ("paper", PARAMETER)])
def test_running_statistics_move_and_counters_do_not(tmp_path: Path, option: str, kind: int) -> None:
    folder = completed(small_config(tmp_path / "run", *GRID, f"task.buffers={option}", task="support:Grid"))
    schema, _ = load_model(folder / "model.safetensors")
    assert schema.tensors[schema.indices["features.1.running_mean"]].kind == kind
    before, after = buffers(folder / "initial.safetensors"), buffers(folder / "model.safetensors")
    assert before["running_mean"].tolist() == [0.0, 0.0]
    assert before["running_var"].tolist() == [1.0, 1.0]
    assert np.all(after["running_mean"] != 0)
    assert np.all(after["running_var"] != 1)
    assert before["num_batches_tracked"].tolist() == after["num_batches_tracked"].tolist() == [0]
    assert sum(int(row["reused"]) for row in table(folder)) > 0


def test_paper_buffers_are_sparse_and_dense_ones_are_not(tmp_path: Path) -> None:
    # Payload of an update, r = 0.2. Floats: 18 + 2 + 2 + 2 + 64 + 2 parameters: k = 3, 1, 1, 1, 12, 1;
    # bitmaps 3*4+3, 4+1, 4+1, 4+1, 12*4+8, 4+1 = 15 + 5 + 5 + 5 + 56 + 5 = 91.
    # Two buffers of 2: dense 8 + 8; as parameters 5 + 5.
    for option, expected in (("dense", 91 + 16), ("paper", 91 + 10)):
        config = small_config(
            tmp_path / option,
            "rounds=1",
            f"task.buffers={option}",
            "wire.pack=false",
            task="support:Grid",
            method="topk-fedavg",
        )
        rows = table(completed(config, wire=True), "bytes.csv")
        assert {row["payload"] for row in rows if row["kind"] == "update"} == {str(expected)}
        # The paper's model counts the whole state dict alike, the int64 counter with its 8 bytes.
        assert {row["modelled"] for row in rows if row["kind"] == "update"} == {str(91 + 10 + 8)}


def test_paper_buffers_have_a_twin_too(tmp_path: Path) -> None:
    config = small_config(tmp_path / "one", *GRID, "task.buffers=paper", task="support:Grid")
    other = config.model_copy(update={"output": tmp_path / "other"})
    assert_twins(completed(config), completed(other, wire=True))


# Faults, one at a time

# Three clients, all of them selected in every round. With threshold 0 everybody trains after a score, so that
# caches are one round old; a cache of age 3 is too old.
ALL = (
    "rounds=5",
    "clients.total=3",
    "clients.per_round=3",
    "gate.tau_start=0",
    "gate.tau_min=0",
    "memory.max_age=3",
)


def with_fault(folder: Path, fault: str, *more: str, method: str = "dg-fedreuse") -> RunConfig:
    return small_config(folder, *ALL, f"faults=[{{{fault}}}]", *more, method=method)


@pytest.fixture(params=["direct", "wire"])
def wire(request: pytest.FixtureRequest) -> bool:
    return request.param == "wire"


def faults(folder: Path) -> list[tuple[int, int, str, bool]]:
    return [
        (event["round"], event["client"], event["code"], event["bridged"])
        for event in events(folder)
        if event["type"] == "fault"
    ]


def causes(folder: Path, client: int) -> dict[int, str]:
    return {e["round"]: e["cause"] for e in events(folder) if e["type"] == "train" and e["client"] == client}


def signatures(folder: Path, client: int) -> dict[int, int | None]:
    """The round of the signature that was compared, by the round of the comparison; both from 1."""
    scores = (e for e in events(folder) if e["type"] == "score" and e["client"] == client)
    return {e["round"]: e["signature_round"] for e in scores}


def kinds(folder: Path, client: int, round: int) -> list[str]:
    rows = table(folder, "bytes.csv")
    return sorted(row["kind"] for row in rows if (row["client"], row["round"]) == (str(client), str(round)))


def test_a_crash_is_bridged_while_the_cache_is_young_and_leaves_the_disk(tmp_path: Path, wire: bool) -> None:
    config = with_fault(tmp_path / "run", "round: 2, client: 1, phase: train, kind: crash, back: 5")
    folder = completed(config, wire=wire)
    # Its cache is of round 1: ages 1, 2, and in round 4 the limit of 3.
    assert faults(folder) == [(2, 1, "ABSENT", True), (3, 1, "ABSENT", True), (4, 1, "ABSENT", False)]
    # In round 5 it is back with its signature of round 1, which is what the server's cache is of.
    assert causes(folder, 1) == {1: "cacheless", 2: "threshold", 5: "age"}
    assert not [event for event in events(folder) if event["type"] == "cache_dropped"]
    rows = table(folder)
    assert [(row["fresh"], row["fault"], row["bridged"]) for row in rows] == [
        ("3", "0", "0"),
        ("2", "1", "1"),
        ("2", "1", "1"),
        ("2", "1", "0"),
        ("3", "0", "0"),
    ]
    # Nothing is sent to a dead client; the byte model still charges its dense model.
    assert kinds(folder, 1, 3) == ["fault", "model"]
    assert {row["downlink_modelled"] for row in rows} == {str(3 * B0)}
    assert [row["uplink_modelled"] for row in rows] == [str(n * B) for n in (3, 2, 2, 2, 3)]


def test_a_wiped_client_comes_back_without_a_cache(tmp_path: Path, wire: bool) -> None:
    config = with_fault(tmp_path / "run", "round: 2, client: 1, phase: score, kind: wipe, back: 4")
    folder = completed(config, wire=wire)
    # While it is away its cached update still stands in.
    assert faults(folder) == [(2, 1, "ABSENT", True), (3, 1, "ABSENT", True)]
    assert [e["client"] for e in events(folder) if e["type"] == "cache_dropped"] == [1]
    assert causes(folder, 1) == {1: "cacheless", 4: "cacheless", 5: "threshold"}


@pytest.mark.parametrize("phase", ["score", "train", "upload"])
def test_a_stall_costs_the_round_and_nothing_else(tmp_path: Path, wire: bool, phase: str) -> None:
    config = with_fault(tmp_path / "run", f"round: 2, client: 1, phase: {phase}, kind: stall")
    folder = completed(config, wire=wire)
    assert faults(folder) == [(2, 1, "TIMEOUT", True)]
    # What it staged in round 2 never became current: it is compared with round 1 and is not cacheless.
    assert signatures(folder, 1)[3] == 1
    assert causes(folder, 1)[3] == "threshold"
    assert signatures(folder, 1)[4] == 3


def test_garbage_is_refused_and_bridged(tmp_path: Path, wire: bool) -> None:
    config = with_fault(tmp_path / "run", "round: 2, client: 1, phase: upload, kind: garbage")
    folder = completed(config, wire=wire)
    assert faults(folder) == [(2, 1, "CHECKSUM", True)]
    refused = [row for row in table(folder, "bytes.csv") if row["status"] == "refused"]
    # It was sent, and its bytes are in the other layers; the model charges a fault nothing.
    assert [(r["round"], r["client"], r["kind"], r["modelled"]) for r in refused] == [
        ("2", "1", "update", "0")
    ]
    assert signatures(folder, 1)[3] == 1


@pytest.mark.parametrize("phase", ["score", "train", "upload"])
def test_a_reported_error_is_bridged(tmp_path: Path, wire: bool, phase: str) -> None:
    config = with_fault(tmp_path / "run", f"round: 2, client: 1, phase: {phase}, kind: error")
    folder = completed(config, wire=wire)
    assert faults(folder) == [(2, 1, "CLIENT_FAILED", True)]
    if wire:
        assert "abort" in kinds(folder, 1, 2)


def test_a_crash_after_the_upload_was_prepared_drops_what_was_staged(tmp_path: Path, wire: bool) -> None:
    config = with_fault(tmp_path / "run", "round: 2, client: 1, phase: upload, kind: crash")
    folder = completed(config, wire=wire)
    assert faults(folder) == [(2, 1, "ABSENT", True)]
    assert signatures(folder, 1) == {2: 1, 3: 1, 4: 3, 5: 4}


def test_without_a_cache_nobody_stands_in(tmp_path: Path, wire: bool) -> None:
    config = with_fault(tmp_path / "run", "round: 1, client: 1, phase: train, kind: crash")
    assert faults(completed(config, wire=wire)) == [(1, 1, "ABSENT", False)]


def test_a_method_without_memory_goes_on_without_the_client(tmp_path: Path, wire: bool) -> None:
    config = with_fault(tmp_path / "run", "round: 2, client: 1, kind: crash, back: 4", method="fedavg")
    folder = completed(config, wire=wire)
    assert faults(folder) == [(2, 1, "ABSENT", False), (3, 1, "ABSENT", False)]


def test_below_the_minimum_a_round_has_no_effect(tmp_path: Path, wire: bool) -> None:
    config = with_fault(
        tmp_path / "run", "round: 2, client: 1, kind: crash", "server.minimum=3", "rounds=2", method="fedavg"
    )
    folder = completed(config, wire=wire)
    one = completed(small_config(tmp_path / "one", *ALL, "rounds=1", method="fedavg"))
    assert final_state(folder) == final_state(one)
    assert table(folder)[1]["void"] == "fewer than 3 contributions"


def test_a_death_that_was_planned_for_a_phase_that_never_came(tmp_path: Path, wire: bool) -> None:
    # Nobody is scored in round 1. The plan alone says who is away, so that every body agrees on it.
    config = with_fault(tmp_path / "run", "round: 1, client: 1, phase: score, kind: crash, back: 4")
    folder = completed(config, wire=wire)
    assert faults(folder) == [(2, 1, "ABSENT", True), (3, 1, "ABSENT", True)]
    assert causes(folder, 1) == {1: "cacheless", 4: "age", 5: "threshold"}


@pytest.mark.parametrize("kind", ["crash", "stall", "error"])
def test_a_client_given_up_while_scored_for_study_does_not_train(
    tmp_path: Path, wire: bool, kind: str
) -> None:
    # Nobody reaches threshold 2 before the age limit of 3: round 4 is age-forced, and scored all the same.
    config = with_fault(
        tmp_path / "run",
        f"round: 4, client: 1, phase: score, kind: {kind}",
        "gate.score_all=true",
        "gate.tau_start=2",
        "gate.tau_min=2",
        "gate.quota=0",
    )
    folder = completed(config, wire=wire)
    code = {"crash": "ABSENT", "stall": "TIMEOUT", "error": "CLIENT_FAILED"}[kind]
    assert faults(folder) == [(4, 1, code, False)]
    assert "update" not in kinds(folder, 1, 4)
    assert signatures(folder, 0)[4] == 1
    assert int(table(folder)[3]["uplink_modelled"]) == 2 * B


@pytest.mark.parametrize("workers", [1, 2])
def test_a_client_whose_training_diverges_is_a_fault(tmp_path: Path, workers: int) -> None:
    config = small_config(
        tmp_path / "run", *ALL, "task.options.wild=[1]", "rounds=2", f"sim.workers={workers}", method="fedavg"
    )
    folder = completed(config)
    assert faults(folder) == [(1, 1, "NOT_FINITE", False), (2, 1, "NOT_FINITE", False)]
    assert [row["fresh"] for row in table(folder)] == ["2", "2"]
    assert math.isfinite(float(np.abs(load_model(folder / "model.safetensors")[1].view(np.float32)).max()))


def local_deltas(
    config: RunConfig, weights: np.ndarray, round: int, clients: tuple[int, ...]
) -> list[np.ndarray]:
    """What clients would upload for a flat state, decoded; outside of any run."""
    task = make_task(config)
    schema, _ = load_model(config.folder / "initial.safetensors")
    bench, result = Workbench(task, torch.device("cpu")), []
    for client in clients:
        participant = Participant(client, task, bench, HeldStore())
        plan = config.plan().model_copy(update={"pack": False})
        participant.welcome("elsewhere", schema, plan, None)
        sealed = participant.train(round, dense_payload(schema, weights)).sealed
        payload = Payload(sealed.blocks, sealed.body)
        result.append(np.concatenate(list(decode(schema, payload).values())))
    return result


@pytest.mark.parametrize("method", ["dg-fedreuse", "fedavg"])
def test_the_model_after_a_fault_is_the_weighted_sum_of_what_counted(tmp_path: Path, method: str) -> None:
    # Clients 0, 1, 2 hold 6, 7, 8 examples. Client 1 crashes in round 2.
    config = with_fault(tmp_path / "run", "round: 2, client: 1, kind: crash", "rounds=2", method=method)
    _, w0 = load_model(create_run(config, make_task(config)) / "initial.safetensors")
    simulate(config.folder, config)
    first = local_deltas(config, w0, 0, (0, 1, 2))
    w1 = w0.view(np.float32) + sum(n / 21 * delta for n, delta in zip((6, 7, 8), first, strict=True))
    second = local_deltas(config, w1.astype(np.float32).view(np.uint8), 1, (0, 2))
    if method == "dg-fedreuse":
        # Eq. 7 and 8: its cached update of age 1 stands in, scaled by rho, with its own weight.
        w2 = w1 + 6 / 21 * second[0] + 7 / 21 * 0.7279635 * first[1] + 8 / 21 * second[1]
    else:
        # The weights of those who answered add up to 1.
        w2 = w1 + 6 / 14 * second[0] + 8 / 14 * second[1]
    _, final = load_model(config.folder / "model.safetensors")
    np.testing.assert_allclose(final.view(np.float32), w2, rtol=1e-5, atol=1e-6)


# Killed and resumed

DEATHS = [
    ("commit", "before", 1),  # while the folder is made
    ("commit", "after", 1),
    ("train", "after", 2),  # in the middle of round 1
    ("commit", "before", 1),  # round 1 aggregated, but not durable
    ("commit", "after", 1),  # round 1 durable, but no client knows
    ("stage", "before", 1),
    ("stage", "after", 1),
    ("settle", "after", 5),
    ("forget", "before", 1),  # a wiped disk, not wiped yet
    ("forget", "after", 1),
    ("score", "after", 2),
    ("commit", "after", 2),
    ("settle", "before", 6),
    ("final model", "before", 1),
    ("test", "before", 1),
    ("test", "after", 1),
    ("summary", "before", 1),
]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """The run with faults, without and with messages, to its end in one go."""
    folder = tmp_path_factory.mktemp("undisturbed")
    name = "line with faults"
    return {wire: completed(case(name, folder / f"wire {wire}"), wire=wire) for wire in (False, True)}


def assert_like(folder: Path, undisturbed: Path, wire: bool) -> None:
    assert_twins(folder, undisturbed)
    assert table(folder) == table(undisturbed)
    for name in ("model.safetensors", "test.json"):
        assert (folder / name).read_bytes() == (undisturbed / name).read_bytes()
    if not wire:
        assert (folder / "bytes.csv").read_bytes() == (undisturbed / "bytes.csv").read_bytes()
        found, due = (json.loads((f / "summary.json").read_text()) for f in (folder, undisturbed))
        assert found.pop("machine") != due.pop("machine")  # time and memory
        assert found == due


def test_killed_at_every_kind_of_moment_and_resumed(
    tmp_path: Path, undisturbed: dict[bool, Path], wire: bool
) -> None:
    config = case("line with faults", tmp_path / "run")
    folder = create_run(config, make_task(config))
    for death in DEATHS:
        process = child(folder, wire, death)
        process.join()
        assert process.exitcode == -signal.SIGKILL, death
    go_on(folder, wire)
    assert_like(folder, undisturbed[wire], wire)


def test_a_kill_loses_no_bytes(tmp_path: Path) -> None:
    # Without scores, a reused client says nothing for rounds: whether its model arrived stays open so long.
    config = small_config(tmp_path / "run", *LINE, method="age-only")
    folder = create_run(config, make_task(config))
    process = child(folder, wire=True, death=("commit", "after", 4))
    process.join()
    assert process.exitcode == -signal.SIGKILL
    go_on(folder, wire=True)
    rows = [row for row in table(folder, "bytes.csv") if row["direction"] == "down"]
    for row in table(folder):
        sent = sum(int(r["modelled"]) for r in rows if r["round"] == row["round"])
        assert sent == int(row["downlink_modelled"]) == B0 * 4


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.parametrize("budget", ["1GB", "0"])
def test_killed_at_random_moments_and_resumed(
    tmp_path: Path, undisturbed: dict[bool, Path], budget: str
) -> None:
    config = case("line with faults", tmp_path / "run", f"memory.budget={budget}")
    folder, rng, kills = create_run(config, make_task(config)), random.Random(1), 0
    while True:
        process, before = child(folder), lines(folder / "rounds.csv")
        while process.is_alive() and lines(folder / "rounds.csv") <= before + 1:
            time.sleep(0.001)
        time.sleep(0.02 * rng.random())
        process.kill()
        process.join()
        if process.exitcode == 0:
            break
        kills += 1
    assert kills >= 2
    assert_like(folder, undisturbed[False], wire=False)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks processes up in /proc")
def test_workers_do_not_outlive_a_killed_simulation(tmp_path: Path) -> None:
    (pids := tmp_path / "pids").mkdir()
    config = small_config(
        tmp_path / "run",
        *LINE,
        "rounds=500",
        "sim.workers=2",
        f"task.options.pids={pids}",
        task="support:Located",
    )
    folder = create_run(config, make_task(config))
    process = child(folder)
    deadline = time.monotonic() + 60
    while (lines(folder / "rounds.csv") < 4 or len(list(pids.iterdir())) < 2) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.kill()
    process.join()
    workers = [int(path.name) for path in pids.iterdir()]
    assert len(workers) == 2
    assert process.pid not in workers
    while any(map(alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(alive, workers))
    # The folder is free again, and the rounds that were committed are there.
    federation = open_federation(folder, config, None)
    assert federation.next_round == lines(folder / "rounds.csv") - 1 >= 2
    federation.close()


# The end of a run


class Counting(Grid):
    """Counts how often the test set was opened."""

    opened = 0

    def test(self) -> Any:
        type(self).opened += 1
        return super().test()


def test_the_test_set_is_opened_once(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run", "rounds=2", task="support:Grid")
    task = task_of(Counting)
    folder = create_run(config, task)
    Counting.opened = 0
    first = simulate(folder, config, task=task)
    assert Counting.opened == 1
    assert json.loads((folder / "test.json").read_text())["metrics"].keys() == {"accuracy", "loss"}
    kept = {name: (folder / name).read_bytes() for name in ("test.json", "summary.json", "model.safetensors")}
    assert simulate(folder, config, task=task) == first
    assert Counting.opened == 1
    assert kept == {name: (folder / name).read_bytes() for name in kept}


@pytest.mark.parametrize("wired", [False, True])
def test_a_finished_run_stays_as_it_is(tmp_path: Path, wired: bool) -> None:
    config = small_config(tmp_path / "run", "rounds=2")
    folder = completed(config, wire=wired)
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    simulate(folder, config, wire=wired)
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before


def test_early_stopping_ends_the_run(tmp_path: Path) -> None:
    # A learning rate of almost nothing: the second evaluation is not better than the first.
    config = small_config(
        tmp_path / "run", "evaluation.every=1", "evaluation.patience=2", "train.learning_rate=1e-12"
    )
    rows = table(completed(config))
    assert [row["round"] for row in rows] == ["1", "2", "3"]
    assert len({row["validation_accuracy"] for row in rows}) == 1


def test_validation_happens_in_round_1_every_so_many_and_the_last(tmp_path: Path) -> None:
    rows = table(completed(small_config(tmp_path / "run", "rounds=7", "evaluation.every=3")))
    assert [row["round"] for row in rows if row["validation_accuracy"]] == ["1", "3", "6", "7"]


# Run folders


def test_a_folder_holds_one_run(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run", "rounds=1")
    create_run(config, make_task(config))
    with pytest.raises(RunError, match="already holds a run; continue it with `fedreuse resume"):
        create_run(config, make_task(config))


def test_the_configuration_of_a_run_is_its_own(tmp_path: Path) -> None:
    config = small_config(tmp_path / "run", "rounds=1", FAULTS.replace("}]", ", back: null}]"), "rounds=12")
    assert read_config(create_run(config, make_task(config))) == config


@pytest.mark.parametrize("text", [None, "rounds: [1, 2\n", "rounds: 0\n", "colour: red\n", "- 1\n"])
def test_a_folder_without_a_usable_configuration_is_named(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(RunError, match=str(tmp_path)):
        read_config(tmp_path)
