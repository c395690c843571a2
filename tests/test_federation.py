"""The federation between its clients and its folder: who may join, what is aggregated, what is written down."""

import csv
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from fedreuse.proto import PROTOCOL_VERSION
from fedreuse.proto import federation_pb2 as pb
from fedreuse.proto.codec import Payload, encode, transfer_header
from fedreuse.proto.errors import ProtocolError
from fedreuse.proto.frames import Incoming, Receiver
from fedreuse.proto.ledger import CONNECTION_LAYERS, LAYERS, Row
from fedreuse.proto.schema import FLOAT_BUFFER, INTEGER_BUFFER, PARAMETER, Schema, TensorSpec
from fedreuse.proto.transfers import plain
from fedreuse.server import messages
from fedreuse.server.aggregate import StepSettings
from fedreuse.server.federation import (
    TABLE_HEADERS,
    Evaluator,
    Federation,
    new_state,
)
from fedreuse.server.gate import GateSettings
from fedreuse.server.memory import MemorySettings
from fedreuse.server.messages import Broadcast
from fedreuse.server.outcome import Closing
from fedreuse.server.round import AskScore, Command, Reuse, SendModel, State, Train
from fedreuse.server.settings import FederationSettings
from fedreuse.server.store import RunStore

RUN = "00c0ffee00c0ffee"
SCHEMA = Schema(
    (
        TensorSpec("w", "float32", (2, 5), PARAMETER),
        TensorSpec("b", "float32", (2,), PARAMETER),
        TensorSpec("mean", "float32", (2,), FLOAT_BUFFER),
        TensorSpec("seen", "int64", (), INTEGER_BUFFER),
    )
)
# Modelled bytes with a share of 0.2 kept, the smallest of dense, pairs and bitmap:
#   w     k = 2:  40, 16,  8 + 2 = 10
#   b     k = 1:   8,  8,  4 + 1 =  5
#   mean  k = 1:   8,  8,  4 + 1 =  5
#   seen  k = 1:   8, 12,  8 + 1
# so B_i = 10 + 5 + 5 + 8 = 28, B_0 = 40 + 8 + 8 + 8 = 64.
# What travels: w and b as above, mean whole, seen never: 10 + 5 + 8 = 23 up, 40 + 8 + 8 = 56 down.
B_I, B_0, UPDATE_PAYLOAD, MODEL_PAYLOAD = 28, 64, 23, 56

EXAMPLES = {0: 1, 1: 1, 2: 2, 3: 4, 4: 8}
SCORE = GateSettings(kind="score", tau_start=0.9, tau_min=0.9, gamma=0, quota=0)
REUSE = MemorySettings(kind="reuse", max_age=4, decay=0.5)


def plan(**changes: Any) -> FederationSettings:
    """Five clients, all of them in every round."""
    defaults: dict[str, Any] = {
        "seed": 7,
        "rounds": 20,
        "total": 5,
        "per_round": 5,
        "keep_ratio": 0.2,
        "gate": SCORE,
        "memory": REUSE,
        "pack": False,  # bytes by hand
    }
    return FederationSettings(**(defaults | changes))


def opened(
    folder: Path,
    settings: FederationSettings | None = None,
    evaluator: Evaluator | None = None,
    weights: float = 0.0,
) -> Federation:
    """The federation of a folder, where it left off or with all weights equal."""
    store = RunStore(folder)
    state = store.load()
    if state is None:
        flat = np.zeros(B_0, np.uint8)
        flat[:56].view("<f4")[:] = weights
        state = new_state(RUN, SCHEMA, flat)
        store.initialise(state, TABLE_HEADERS)
    return Federation(settings or plan(), SCHEMA, store, state, evaluator)


def joined(federation: Federation, clients: Iterable[int] = range(5)) -> Federation:
    for client in clients:
        federation.join(client, EXAMPLES[client])
    return federation


def update(
    federation: Federation,
    round: int,
    w: Mapping[int, float],
    mean: tuple[float, float] = (0, 0),
    loss: float = 1.0,
) -> tuple[pb.SparseUpdate, Payload]:
    """An update that moves coordinates of w and the whole of mean."""
    arrays = {0: np.zeros(10, "<f4"), 1: np.zeros(2, "<f4"), 2: np.array(mean, "<f4")}
    for coordinate, value in w.items():
        arrays[0][coordinate] = value
    payload = encode(SCHEMA, arrays, federation.kept)
    header = transfer_header(SCHEMA, payload)
    return pb.SparseUpdate(round=round, transfer=header, steps=3, train_loss=loss), payload


def deliver(
    federation: Federation,
    client: int,
    w: Mapping[int, float],
    mean: tuple[float, float] = (0, 0),
    loss: float = 1.0,
) -> None:
    """A client's update goes the whole way, with its row in the ledger."""
    number = federation.next_round
    message, payload = update(federation, number, w, mean, loss)
    federation.admit(client, message)
    federation.verify(message, payload)
    row = Row(number, client, "up", "update", modelled=0, payload=payload.nbytes)
    federation.books.record(row)
    federation.accept(client, message, payload, row)


def score(federation: Federation, client: int, value: float, signature: int | None = None) -> list[Command]:
    message = pb.ScoreReply(round=federation.next_round, score=value, signature_round=signature)
    return federation.score(client, message)


def start(federation: Federation, absent: Iterable[int] = ()) -> list[Command]:
    """Open a round and send the model."""
    commands = federation.open_round(absent)
    number = federation.next_round
    for command in commands:
        if isinstance(command, SendModel):
            charge = federation.books.modelled_bytes("model", command.client, number)
            size = federation.versions.current.payload.nbytes
            federation.books.record(
                Row(number, command.client, "down", "model", modelled=charge, payload=size)
            )
    return commands


def play_round(federation: Federation, discrepancy: Callable[[int, int], float]) -> list[Closing]:
    """A whole round without faults; each client moves two coordinates of its own."""
    number = federation.next_round
    commands = start(federation)
    for command in commands:  # grows while it is read
        client = command.client
        if isinstance(command, AskScore):
            held = federation.state.caches[client].round
            commands += score(federation, client, discrepancy(number, client), held)
        elif isinstance(command, Train):
            delta = {(client + number) % 10: 1.0 + client, (client + 3 * number) % 7: 0.1 * (number + 1)}
            deliver(federation, client, delta, mean=(0.5, client), loss=1 / (number + client + 1))
    return federation.commit()


def numbers(federation: Federation, name: str) -> list[float]:
    return np.asarray(federation.arrays()[name], np.float64).flatten().tolist()


def rows(folder: Path, name: str) -> list[dict[str, str]]:
    with (folder / name).open(newline="") as handle:
        return list(csv.DictReader(handle))


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def code_of(call: Callable[[], Any]) -> pb.Code:
    with pytest.raises(ProtocolError) as caught:
        call()
    return caught.value.code


# ---------------------------------------------------------------- joining


@pytest.mark.parametrize("client", [-1, 5, 1_000_000])
def test_only_the_clients_of_the_federation_may_join(tmp_path: Path, client: int) -> None:
    federation = opened(tmp_path)
    assert code_of(lambda: federation.join(client, 10)) == pb.UNKNOWN_CLIENT
    assert federation.state.examples == {}
    assert federation.join(0, 10) is federation.join(4, 10) is None
    assert federation.state.examples == {0: 10, 4: 10}


def test_a_client_without_examples_may_not_join(tmp_path: Path) -> None:
    federation = opened(tmp_path)
    assert code_of(lambda: federation.join(0, 0)) == pb.EXAMPLES_CHANGED
    assert federation.state.examples == {}


def test_the_first_join_fixes_the_examples(tmp_path: Path) -> None:
    federation = opened(tmp_path)
    federation.join(2, 10)
    federation.join(2, 10)
    assert code_of(lambda: federation.join(2, 11)) == pb.EXAMPLES_CHANGED
    assert federation.state.examples == {2: 10}


def with_caches(folder: Path, **changes: Any) -> Federation:
    """After three rounds: clients 0 and 1 have caches of round 2, the others of round 0."""
    federation = joined(opened(folder, plan(**changes)))
    for _ in range(3):
        play_round(federation, lambda _, client: float(client < 2))
    return federation


@pytest.mark.parametrize(
    ("run", "held", "staged", "confirmed"),
    [
        (RUN, 2, None, 2),
        (RUN, 1, 2, 2),  # it uploaded and never heard that it counted
        (RUN, None, 2, 2),
        (RUN, 2, 3, 2),  # what it staged later did not count
        (RUN, 1, None, None),
        (RUN, None, 1, None),
        (RUN, None, None, None),
        ("", None, None, None),
        ("another run", 2, None, None),
        ("another run", 2, 2, None),
    ],
)
def test_a_cache_is_valid_while_both_sides_hold_their_part(
    tmp_path: Path, run: str, held: int | None, staged: int | None, confirmed: int | None
) -> None:
    federation = with_caches(tmp_path)
    assert federation.join(1, EXAMPLES[1], run, held, staged) == confirmed
    assert (1 in federation.state.caches) == (confirmed is not None)
    # Dropped or not, that of the others stays.
    assert {c: cache.round for c, cache in federation.state.caches.items() if c != 1} == {
        0: 2,
        2: 0,
        3: 0,
        4: 0,
    }
    # Once dropped, it does not come back with the next join.
    assert federation.join(1, EXAMPLES[1], RUN, 2) == confirmed


def test_clients_hold_nothing_where_no_gate_scores_them(tmp_path: Path) -> None:
    federation = joined(opened(tmp_path, plan(gate=GateSettings(kind="age"))))
    play_round(federation, lambda *_: 0.0)
    assert federation.join(1, EXAMPLES[1]) == 0
    assert federation.join(2, EXAMPLES[2], "another run", 5, 6) == 0


def test_a_dropped_cache_is_gone_after_the_next_commit_for_good(tmp_path: Path) -> None:
    federation = with_caches(tmp_path)
    federation.join(3, EXAMPLES[3])
    federation.flush()
    federation.close()
    federation = opened(tmp_path)
    assert sorted(federation.state.caches) == [0, 1, 2, 4]
    assert [e["client"] for e in events(tmp_path) if e["type"] == "cache_dropped"] == [3]
    assert Train(3, pb.CACHELESS) in federation.open_round()


def test_a_cache_lost_in_the_middle_of_a_round_still_counts_in_it(tmp_path: Path) -> None:
    """Client 1 was told that it is reused, then came back with an empty disk. The decision stands."""
    federation = joined(opened(tmp_path, plan(total=2, per_round=2)), [0, 1])
    start(federation)
    deliver(federation, 0, {0: 8})
    deliver(federation, 1, {1: 8})
    federation.commit()
    start(federation)
    score(federation, 0, 0.0, 0)
    assert score(federation, 1, 0.0, 0)[-1] == Reuse(1, 0, 1, 0.5)
    assert federation.join(1, EXAMPLES[1]) is None
    federation.commit()
    # q = 1/2 each: 8/2 in round 1, half of it again in round 2.
    assert numbers(federation, "w")[:2] == [6.0, 6.0]
    assert sorted(federation.state.caches) == [0]
    assert Train(1, pb.CACHELESS) in federation.open_round()


def test_a_state_lost_before_the_score_makes_cacheless(tmp_path: Path) -> None:
    federation = with_caches(tmp_path)
    start(federation)
    assert federation.join(1, EXAMPLES[1]) is None
    assert score(federation, 1, 0.0, None) == [Train(1, pb.CACHELESS)]
    federation.deadline()
    federation.commit()
    assert sorted(federation.state.caches) == [0, 2, 3, 4]


# ---------------------------------------------------------------- rounds


def test_the_cohort_is_a_function_of_seed_and_round(tmp_path: Path) -> None:
    settings = plan(total=40, per_round=6, rounds=100)
    one, other = opened(tmp_path / "one", settings), opened(tmp_path / "other", settings)
    before = [one.cohort(t) for t in range(20)]
    one.join(3, 5)
    one.open_round()
    assert [one.cohort(t) for t in range(20)] == [other.cohort(t) for t in range(20)] == before
    for selected in before:
        assert list(selected) == sorted(set(selected))
        assert len(selected) == 6
        assert set(selected) <= set(range(40))
    assert len(set(before)) == 20
    reseeded = opened(tmp_path / "reseeded", plan(total=40, per_round=6, seed=8))
    assert [reseeded.cohort(t) for t in range(20)] != before


def test_selected_clients_that_never_joined_are_faults(tmp_path: Path) -> None:
    federation = joined(opened(tmp_path), [0, 3])
    commands = federation.open_round()
    assert {command.client for command in commands} == {0, 3}
    assert federation.round is not None
    assert {c: seat.fault for c, seat in federation.round.seats.items() if seat.state is State.FAULT} == {
        1: pb.ABSENT,
        2: pb.ABSENT,
        4: pb.ABSENT,
    }


def test_only_selected_clients_are_absent(tmp_path: Path) -> None:
    federation = opened(tmp_path, plan(total=40, per_round=6))
    selected = federation.cohort(0)
    for client in range(40):
        federation.join(client, 1)
    federation.open_round(absent=range(40))
    assert federation.round is not None
    assert federation.round.absent == frozenset(selected)
    assert federation.round.complete


def test_between_rounds_nobody_is_heard(tmp_path: Path) -> None:
    federation = joined(opened(tmp_path))
    message, payload = update(federation, 0, {})
    assert code_of(lambda: federation.admit(0, message)) == pb.UNEXPECTED
    play_round(federation, lambda *_: 1.0)
    assert code_of(lambda: federation.admit(0, message)) == pb.LATE
    assert code_of(lambda: federation.accept(0, message, payload, Row(0, 0, "up", "update"))) == pb.LATE
    assert code_of(lambda: federation.score(0, pb.ScoreReply(round=0, score=0.5))) == pb.LATE
    assert code_of(lambda: federation.score(0, pb.ScoreReply(round=1, score=0.5))) == pb.UNEXPECTED
    assert federation.fail(0, pb.ABSENT, "gone") == []
    assert federation.deadline() == []
    federation.flush()
    assert {e["type"] for e in events(tmp_path)} == {"round_opened", "train", "update", "committed"}


def test_the_model_is_everything_that_travels(tmp_path: Path) -> None:
    federation = opened(tmp_path, weights=0.5)
    payload = federation.versions.current.payload
    assert payload.nbytes == MODEL_PAYLOAD
    assert bytes(payload.body) == np.full(14, 0.5, "<f4").tobytes()
    assert [(b.index, b.mode, b.kept) for b in payload.blocks] == [
        (0, pb.DENSE, 10),
        (1, pb.DENSE, 2),
        (2, pb.DENSE, 2),
    ]


def headers(federation: Federation) -> list[pb.TensorHeader]:
    return list(update(federation, 0, {1: 1.0})[0].transfer.tensors)


def without_mean(tensors: list[pb.TensorHeader]) -> list[pb.TensorHeader]:
    return tensors[:2]


def without_b(tensors: list[pb.TensorHeader]) -> list[pb.TensorHeader]:
    return [tensors[0], tensors[2]]


def with_the_counter(tensors: list[pb.TensorHeader]) -> list[pb.TensorHeader]:
    return [*tensors, pb.TensorHeader(index=3, mode=pb.DENSE, kept=1, format=pb.RAW, length=8)]


def kept(index: int, count: int) -> Callable[[list[pb.TensorHeader]], list[pb.TensorHeader]]:
    def change(tensors: list[pb.TensorHeader]) -> list[pb.TensorHeader]:
        tensors[index].kept = count
        return tensors

    return change


@pytest.mark.parametrize(
    "change",
    [
        without_mean,
        without_b,
        with_the_counter,
        kept(0, 1),
        kept(0, 3),
        kept(0, 10),
        kept(1, 2),
        kept(2, 1),  # float buffers travel whole
        lambda _: [],
    ],
)
def test_an_update_of_another_layout_is_not_admitted(
    tmp_path: Path, change: Callable[[list[pb.TensorHeader]], list[pb.TensorHeader]]
) -> None:
    federation = joined(opened(tmp_path))
    federation.open_round()
    message = update(federation, 0, {1: 1.0})[0]
    federation.admit(0, message)
    tensors = change(headers(federation))
    del message.transfer.tensors[:]
    message.transfer.tensors.extend(tensors)
    assert code_of(lambda: federation.admit(0, message)) == pb.WRONG_CONTENT
    assert federation.round is not None
    assert federation.round.seats[0].state is State.TRAINING


def test_an_update_is_admitted_only_when_due(tmp_path: Path) -> None:
    federation = joined(opened(tmp_path, plan(total=40, per_round=2)), [])
    selected = federation.cohort(0)
    for client in range(40):
        federation.join(client, 1)
    federation.open_round(absent=[selected[1]])
    message = update(federation, 0, {})[0]
    outsider = next(c for c in range(40) if c not in selected)
    assert code_of(lambda: federation.admit(outsider, message)) == pb.UNEXPECTED
    assert code_of(lambda: federation.admit(selected[1], message)) == pb.LATE
    later = update(federation, 1, {})[0]
    assert code_of(lambda: federation.admit(selected[0], later)) == pb.WRONG_ROUND
    deliver(federation, selected[0], {})
    assert code_of(lambda: federation.admit(selected[0], message)) == pb.DUPLICATE


def test_a_body_is_verified(tmp_path: Path) -> None:
    federation = opened(tmp_path)
    message, payload = update(federation, 0, {1: 1.0})
    federation.verify(message, payload)
    broken = bytearray(payload.body)
    broken[-1] ^= 1
    assert code_of(lambda: federation.verify(message, Payload(payload.blocks, broken))) == pb.CHECKSUM


# ---------------------------------------------------------------- two rounds by hand


def two_rounds(folder: Path) -> tuple[Federation, list[list[Closing]]]:
    """Round 1: client 4 never joined, the others are cacheless and train.

    Round 2: client 0 reaches the threshold, 1 and 2 are reused, 3 breaks down, 4 is still missing.
    """
    federation = joined(opened(folder), [0, 1, 2, 3])
    assert start(federation) == [
        command for c in range(4) for command in (SendModel(c), Train(c, pb.CACHELESS))
    ]
    for client, loss in [(2, 2.0), (0, 0.5), (3, 0.25), (1, 1.5)]:
        deliver(federation, client, {client: 8}, mean=(8, client), loss=loss)
    closings = [federation.commit()]
    assert start(federation) == [command for c in range(4) for command in (SendModel(c), AskScore(c))]
    score(federation, 1, 0.125, 0)
    score(federation, 0, 1.0, 0)
    federation.fail(3, pb.CLIENT_FAILED, "out of memory")
    assert score(federation, 2, 0.25, 0) == [Reuse(1, 0, 1, 0.5), Reuse(2, 0, 1, 0.5)]
    deliver(federation, 0, {9: 8}, mean=(-4, 2), loss=0.75)
    closings.append(federation.commit())
    return federation, closings


def test_the_weights_after_two_rounds(tmp_path: Path) -> None:
    # n = 1, 1, 2, 4, so q = 1/8, 1/8, 1/4, 1/2 in both rounds (client 3 is bridged in the second).
    # Round 1: client i moves w_i by 8:          (1, 1, 2, 4)
    #          mean: 8 from everybody is 8;       0/8 + 1/8 + 2/4 + 3/2 = 17/8
    # Round 2: w_9 by 8/8 = 1, the old ones by half of what they did: (0, 1/2, 1, 2)
    #          mean: client 0 is the only fresh one and counts alone: (-4, 2)
    federation, _ = two_rounds(tmp_path)
    assert numbers(federation, "w") == [1, 1.5, 3, 6, 0, 0, 0, 0, 0, 1]
    assert numbers(federation, "mean") == [4, 4.125]
    assert numbers(federation, "b") == [0, 0]
    assert numbers(federation, "seen") == [0]
    assert federation.arrays()["w"].shape == (2, 5)
    assert federation.arrays()["seen"].shape == ()


def test_the_caches_after_two_rounds(tmp_path: Path) -> None:
    federation, _ = two_rounds(tmp_path)
    assert {c: cache.round for c, cache in federation.state.caches.items()} == {0: 1, 1: 0, 2: 0, 3: 0}
    for cache in federation.state.caches.values():
        # Parameters alone, 10 + 5 bytes: float buffers are never reused.
        assert [b.index for b in cache.payload.blocks] == [0, 1]
        assert cache.payload.nbytes == 15


def test_how_two_rounds_ended_for_each_client(tmp_path: Path) -> None:
    _, (first, second) = two_rounds(tmp_path)
    absent = "not connected when the round began"
    assert first == [
        *(Closing(c, 0, accepted=True) for c in range(4)),
        Closing(4, 0, False, pb.ABSENT, absent),
    ]
    assert second == [
        Closing(0, 1, accepted=True),
        Closing(1, 1, accepted=False, detail="the cached update was used"),
        Closing(2, 1, accepted=False, detail="the cached update was used"),
        Closing(3, 1, False, pb.CLIENT_FAILED, "out of memory"),
        Closing(4, 1, False, pb.ABSENT, absent),
    ]


def test_the_table_of_rounds(tmp_path: Path) -> None:
    federation, _ = two_rounds(tmp_path)
    first, second = rows(tmp_path, "rounds.csv")
    assert float(first.pop("seconds")) >= 0
    assert float(second.pop("seconds")) >= 0
    unobserved = {f"{way}link_{layer}": "" for way in ("up", "down") for layer in LAYERS}
    unobserved |= {"void": "", "validation_accuracy": "", "validation_loss": ""}
    assert first == unobserved | {
        "round": "1",
        "selected": "5",
        "fresh": "4",
        "reused": "0",
        "fault": "1",
        "bridged": "0",
        "cacheless": "4",
        "age": "0",
        "threshold": "0",
        "quota": "0",
        "always": "0",
        "tau": "0.9",
        "train_loss": "0.875",  # (1/2 + 3/2 + 2 * 2 + 4/4) / 8
        "uplink_modelled": str(4 * B_I),
        "uplink_payload": str(4 * UPDATE_PAYLOAD),
        "downlink_modelled": str(5 * B_0),  # the absent client is charged, too
        "downlink_payload": str(4 * MODEL_PAYLOAD),
    }
    assert second == unobserved | {
        "round": "2",
        "selected": "5",
        "fresh": "1",
        "reused": "2",
        "fault": "2",
        "bridged": "1",
        "cacheless": "0",
        "age": "0",
        "threshold": "1",
        "quota": "0",
        "always": "0",
        "tau": "0.9",
        "train_loss": "0.75",
        "uplink_modelled": str(B_I + 2 * 16),
        "uplink_payload": str(UPDATE_PAYLOAD),
        "downlink_modelled": str(5 * B_0),
        "downlink_payload": str(4 * MODEL_PAYLOAD),
    }
    assert federation.latest["round"] == 2
    assert federation.latest["uplink_modelled"] == B_I + 32


def test_the_table_of_bytes(tmp_path: Path) -> None:
    two_rounds(tmp_path)
    lines = [line.removesuffix(8 * ",") for line in (tmp_path / "bytes.csv").read_text().splitlines()]
    assert lines[0] == "round,client,direction,kind,status,modelled,payload,message,grpc" + "".join(
        f",{layer}" for layer in (*CONNECTION_LAYERS, "how")
    )
    assert sorted(lines[1:]) == sorted(
        [
            *(f"1,{c},down,model,ok,64,56,," for c in range(4)),
            *(f"1,{c},up,update,ok,28,23,," for c in range(4)),
            "1,4,up,fault,fault,0,,,",
            "1,4,down,model,fault,64,,,",
            *(f"2,{c},down,model,ok,64,56,," for c in range(4)),
            "2,0,up,update,ok,28,23,,",
            "2,1,up,reuse,ok,16,,,",
            "2,2,up,reuse,ok,16,,,",
            "2,3,up,fault,fault,0,,,",
            "2,4,up,fault,fault,0,,,",
            "2,4,down,model,fault,64,,,",
        ]
    )


def test_the_running_totals(tmp_path: Path) -> None:
    federation, _ = two_rounds(tmp_path)
    assert federation.books.totals.total("up", "modelled") == 4 * B_I + B_I + 2 * 16
    assert federation.books.totals.total("down", "modelled") == 2 * 5 * B_0
    assert federation.books.totals.total("up", "payload") == 5 * UPDATE_PAYLOAD


def test_the_log_of_two_rounds(tmp_path: Path) -> None:
    two_rounds(tmp_path)
    log = events(tmp_path)
    assert all(event.pop("time") > 1_600_000_000 for event in log)
    told = [event for event in log if event["type"] in ("train", "reuse", "fault", "committed")]
    absent = {"code": "ABSENT", "detail": "not connected when the round began", "bridged": False}
    assert told == [
        *({"round": 1, "type": "train", "client": c, "cause": "cacheless"} for c in range(4)),
        {"round": 1, "type": "fault", "client": 4} | absent,
        {"round": 1, "type": "committed"},
        {"round": 2, "type": "train", "client": 0, "cause": "threshold"},
        {"round": 2, "type": "reuse", "client": 1, "source_round": 1, "age": 1},
        {"round": 2, "type": "reuse", "client": 2, "source_round": 1, "age": 1},
        {"round": 2, "type": "fault", "client": 3, "code": "CLIENT_FAILED", "detail": "out of memory"}
        | {"bridged": True},
        {"round": 2, "type": "fault", "client": 4} | absent,
        {"round": 2, "type": "committed"},
    ]
    assert [e for e in log if e["type"] == "round_opened"] == [
        {"round": n, "type": "round_opened", "cohort": [0, 1, 2, 3, 4], "threshold": 0.9} for n in (1, 2)
    ]
    assert [e for e in log if e["type"] == "score"] == [
        {"round": 2, "type": "score", "client": c, "score": s, "signature_round": 1}
        for c, s in [(1, 0.125), (0, 1.0), (2, 0.25)]
    ]
    assert {"round": 1, "type": "update", "client": 2, "steps": 3, "train_loss": 2.0} in log


def test_a_model_is_charged_once_per_client_and_round(tmp_path: Path) -> None:
    federation = joined(opened(tmp_path))
    for number in range(2):
        federation.open_round()
        assert federation.books.modelled_bytes("model", 3, number) == B_0
        assert federation.books.modelled_bytes("model", 3, number) == 0  # sent again after a lost connection
        assert federation.books.modelled_bytes("model", 2, number) == B_0
        federation.deadline()
        federation.commit()
        assert (
            federation.books.modelled_bytes("model", 1, number) == 0
        )  # too late: charged when the round closed
    assert federation.books.modelled_bytes("update", 3, 2) == 0  # charged when it is accepted
    assert federation.books.modelled_bytes("score_reply", 3, 2) == 0


def test_an_update_is_charged_when_it_is_accepted(tmp_path: Path) -> None:
    federation = joined(opened(tmp_path))
    start(federation)
    deliver(federation, 0, {0: 1.0})
    deliver(federation, 1, {0: 1.0})
    number = federation.next_round
    federation.books.record(Row(number, 2, "up", "update", "refused", modelled=0, payload=7))
    federation.deadline()
    federation.commit()
    assert federation.books.totals.total("up", "modelled") == 2 * B_I
    assert federation.latest["uplink_modelled"] == 2 * B_I


def test_rows_after_a_commit_are_written_but_not_summed_into_the_next_round(tmp_path: Path) -> None:
    federation = joined(opened(tmp_path))
    play_round(federation, lambda *_: 1.0)
    federation.books.record(Row(0, 2, "down", "round_closed", modelled=0, payload=0, message=12, grpc=17))
    federation.books.record(Row(-1, 2, "down", "heartbeat", modelled=0, payload=0, message=3, grpc=8))
    play_round(federation, lambda *_: 1.0)
    assert rows(tmp_path, "rounds.csv")[1]["downlink_message"] == ""
    lines = [line.removesuffix(8 * ",") for line in (tmp_path / "bytes.csv").read_text().splitlines()]
    assert "1,2,down,round_closed,ok,0,0,12,17" in lines
    assert "0,2,down,heartbeat,ok,0,0,3,8" in lines
    federation.books.record(Row(1, 2, "down", "round_closed", modelled=0, payload=0, message=12, grpc=17))
    federation.flush()
    last = (tmp_path / "bytes.csv").read_text().splitlines()[-1]
    assert last == "2,2,down,round_closed,ok,0,0,12,17" + 8 * ","
    assert len(rows(tmp_path, "rounds.csv")) == 2


def test_a_layer_that_was_observed_is_summed_even_if_it_is_nothing(tmp_path: Path) -> None:
    federation = joined(opened(tmp_path))
    start(federation)
    federation.books.record(Row(0, 1, "down", "train_order", modelled=0, payload=0, message=0, grpc=5))
    federation.deadline()
    federation.commit()
    (row,) = rows(tmp_path, "rounds.csv")
    assert (row["downlink_message"], row["downlink_grpc"], row["uplink_grpc"]) == ("0", "5", "")


def test_the_sum_does_not_depend_on_who_answers_first(tmp_path: Path) -> None:
    # In float32, 1 + 2^-24 + 2^-24 depends on the order. Equal weights of 1/4 are exact.
    moves = {0: 4.0, 1: 4 * 2.0**-24, 2: 4 * 2.0**-24, 3: -4.0}
    states = set()
    for n, order in enumerate([(0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2)]):
        federation = opened(tmp_path / str(n), plan(total=4, per_round=4))
        for client in order:
            federation.join(client, 10)
        start(federation)
        for client in order:
            deliver(federation, client, {0: moves[client]})
        federation.commit()
        # ((1 + 2^-24) + 2^-24) - 1 = 0, as 1 + 2^-24 rounds to 1.
        assert numbers(federation, "w")[0] == 0.0
        states.add(federation.state.flat.tobytes())
    assert len(states) == 1


def test_the_server_learning_rate_is_the_settings(tmp_path: Path) -> None:
    federation = joined(opened(tmp_path, plan(step=StepSettings(learning_rate=0.5))))
    start(federation, absent=[1, 2, 3, 4])
    deliver(federation, 0, {4: 8})
    federation.commit()
    assert numbers(federation, "w")[4] == 4.0


def test_without_memory_nothing_is_kept(tmp_path: Path) -> None:
    federation = joined(opened(tmp_path, plan(gate=GateSettings(), memory=MemorySettings())))
    for _ in range(2):
        closings = play_round(federation, lambda *_: 0.0)
        assert all(closing.accepted for closing in closings)
    assert federation.state.caches == {}
    assert [(r["fresh"], r["always"], r["tau"]) for r in rows(tmp_path, "rounds.csv")] == [("5", "5", "")] * 2


# ---------------------------------------------------------------- void rounds


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_an_aggregate_that_overflows_has_no_effect(tmp_path: Path) -> None:
    federation = joined(opened(tmp_path, weights=3e38))
    start(federation)
    for client in range(5):
        deliver(federation, client, {client: 3e38})
    before = federation.state.flat.tobytes()
    closings = federation.commit()
    assert federation.state.flat.tobytes() == before
    assert federation.state.caches == {}
    assert not any(closing.accepted for closing in closings)
    assert {closing.detail for closing in closings} == {"the aggregate overflowed to NaN or Inf"}
    (row,) = rows(tmp_path, "rounds.csv")
    assert row["void"] == "the aggregate overflowed to NaN or Inf"
    assert (row["fresh"], row["uplink_modelled"]) == ("5", str(5 * B_I))
    # The round counts as one, and the next one is well again.
    assert federation.next_round == 1
    start(federation, absent=[1, 2, 3, 4])
    deliver(federation, 0, {0: -3e38})
    assert federation.commit()[0].accepted
    assert numbers(federation, "w")[0] == 0.0


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_an_overflowing_round_bridges_nobody(tmp_path: Path) -> None:
    federation = joined(opened(tmp_path, plan(total=2, per_round=2), weights=3e38), [0, 1])
    start(federation)
    deliver(federation, 0, {})
    deliver(federation, 1, {})
    federation.commit()
    start(federation, absent=[1])
    score(federation, 0, 1.0, 0)
    deliver(federation, 0, {0: 3e38})  # half of it is 1.5e38, and the largest float32 3.4e38
    federation.commit()
    first, second = rows(tmp_path, "rounds.csv")
    assert (first["fresh"], first["void"]) == ("2", "")
    assert (second["fault"], second["void"]) == ("1", "the aggregate overflowed to NaN or Inf")
    assert second["bridged"] == "0"


def test_a_round_below_the_minimum_has_no_effect(tmp_path: Path) -> None:
    federation = joined(opened(tmp_path, plan(minimum=3)))
    start(federation, absent=[2, 3, 4])
    deliver(federation, 0, {0: 8})
    deliver(federation, 1, {1: 8})
    closings = federation.commit()
    assert [closing.code for closing in closings] == [pb.TOO_FEW_CONTRIBUTIONS] * 2 + [pb.ABSENT] * 3
    assert numbers(federation, "w") == [0.0] * 10
    assert federation.state.caches == {}
    assert rows(tmp_path, "rounds.csv")[0]["void"] == "fewer than 3 contributions"
    # Nobody's state moved on, so everybody is cacheless still.
    assert [c.cause for c in federation.open_round() if isinstance(c, Train)] == [pb.CACHELESS] * 5


def test_in_a_void_round_nobody_is_bridged_and_caches_stay(tmp_path: Path) -> None:
    federation = with_caches(tmp_path, minimum=5)
    assert federation.join(4, EXAMPLES[4]) is None
    before = federation.state.flat.tobytes()
    start(federation, absent=[2, 4])
    for client in (0, 1, 3):
        score(federation, client, 0.0, federation.state.caches[client].round)
    # 0, 1 and 3 would be reused and 2 bridged, if it had not been for 4.
    federation.commit()
    assert federation.state.flat.tobytes() == before
    assert {c: cache.round for c, cache in federation.state.caches.items()} == {0: 2, 1: 2, 2: 0, 3: 0}
    row = rows(tmp_path, "rounds.csv")[-1]
    assert (row["void"], row["bridged"]) == ("fewer than 5 contributions", "0")
    assert [(e["client"], e["bridged"]) for e in events(tmp_path) if e["type"] == "fault"] == [
        (2, False),
        (4, False),
    ]


def test_everybody_missing_is_a_void_round_too(tmp_path: Path) -> None:
    federation = opened(tmp_path)
    federation.open_round()
    federation.commit()
    (row,) = rows(tmp_path, "rounds.csv")
    assert (row["fault"], row["void"], row["train_loss"]) == ("5", "fewer than 1 contributions", "")
    assert row["downlink_modelled"] == str(5 * B_0)


def test_a_loss_that_is_no_number_is_left_out(tmp_path: Path) -> None:
    federation = joined(opened(tmp_path))
    start(federation, absent=[2, 3, 4])
    deliver(federation, 0, {}, loss=float("nan"))
    deliver(federation, 1, {}, loss=1.0)
    federation.commit()
    assert rows(tmp_path, "rounds.csv")[0]["train_loss"] == ""
    assert [e["train_loss"] for e in events(tmp_path) if e["type"] == "update"] == [None, 1.0]


def test_causes_are_counted_for_the_fresh_alone(tmp_path: Path) -> None:
    federation = joined(opened(tmp_path))
    start(federation)
    deliver(federation, 0, {})
    deliver(federation, 1, {})
    federation.fail(2, pb.CLIENT_FAILED, "told to train, and failed")
    federation.deadline()
    federation.commit()
    (row,) = rows(tmp_path, "rounds.csv")
    assert (row["fresh"], row["cacheless"], row["fault"]) == ("2", "2", "3")


def test_a_foreign_signature_costs_the_cache(tmp_path: Path) -> None:
    federation = with_caches(tmp_path)
    start(federation)
    assert score(federation, 3, 0.0, 1) == [Train(3, pb.CACHELESS)]
    federation.fail(3, pb.CLIENT_FAILED, "and then it died")
    federation.deadline()
    federation.commit()
    federation.close()
    assert sorted(opened(tmp_path).state.caches) == [0, 1, 2, 4]
    assert [(e["client"], e["round"]) for e in events(tmp_path) if e["type"] == "cache_dropped"] == [(3, 4)]


# ---------------------------------------------------------------- validation and early stopping


class Judge:
    """An evaluator with given accuracies; remembers what it saw."""

    def __init__(self, accuracies: Iterable[float] = ()) -> None:
        self.accuracies = iter(accuracies)
        self.seen: list[Mapping[str, np.ndarray]] = []

    def validate(self, arrays: Mapping[str, np.ndarray]) -> Mapping[str, float]:
        self.seen.append({name: array.copy() for name, array in arrays.items()})
        return {"accuracy": next(self.accuracies, 0.5), "loss": 0.25}


def run_out(federation: Federation) -> list[int]:
    """Play until the federation is finished; the rounds that were evaluated."""
    evaluated = []
    while not federation.finished:
        play_round(federation, lambda *_: 1.0)
        if federation.latest["validation_accuracy"] is not None:
            evaluated.append(federation.latest["round"])
    return evaluated


@pytest.mark.parametrize(
    ("last", "every", "evaluated"),
    [
        (12, 5, [1, 5, 10, 12]),
        (10, 5, [1, 5, 10]),
        (8, 4, [1, 4, 8]),
        (3, 1, [1, 2, 3]),
        (3, 100, [1, 3]),
        (1, 5, [1]),
    ],
)
def test_the_schedule_of_validation(tmp_path: Path, last: int, every: int, evaluated: list[int]) -> None:
    judge = Judge()
    federation = joined(opened(tmp_path, plan(rounds=last, evaluate_every=every), judge))
    assert run_out(federation) == evaluated
    assert len(judge.seen) == len(evaluated)
    found = rows(tmp_path, "rounds.csv")
    assert [int(r["round"]) for r in found if r["validation_accuracy"] == "0.5"] == evaluated
    assert [int(r["round"]) for r in found if r["validation_loss"] == "0.25"] == evaluated
    assert federation.next_round == last


def test_what_is_validated_is_the_new_model(tmp_path: Path) -> None:
    judge = Judge()
    federation = joined(opened(tmp_path, evaluator=judge))
    start(federation, absent=[1, 2, 3, 4])
    deliver(federation, 0, {3: 8})
    federation.commit()
    (seen,) = judge.seen
    assert {name: array.shape for name, array in seen.items()} == {
        "w": (2, 5),
        "b": (2,),
        "mean": (2,),
        "seen": (),
    }
    assert seen["w"].tolist() == [[0, 0, 0, 8, 0], [0, 0, 0, 0, 0]]


@pytest.mark.parametrize(
    ("accuracies", "patience", "rounds", "best_round"),
    [
        ([0.5, 0.6, 0.6, 0.55], 2, 4, 2),  # equal is not better
        ([0.5, 0.4, 0.6, 0.1, 0.2], 2, 5, 3),  # a better one starts the count again
        ([0.0, 0.0], 1, 2, 1),
        ([0.5, float("nan"), 0.5], 2, 3, 1),
    ],
)
def test_early_stopping(
    tmp_path: Path, accuracies: list[float], patience: int, rounds: int, best_round: int
) -> None:
    settings = plan(evaluate_every=1, patience=patience)
    federation = joined(opened(tmp_path, settings, Judge(accuracies)))
    run_out(federation)
    assert federation.next_round == rounds
    assert federation.state.notes["best_round"] == best_round
    assert federation.state.notes["best"] == accuracies[best_round - 1]
    federation.close()
    assert opened(tmp_path, settings).finished


def test_patience_counts_evaluations_not_rounds(tmp_path: Path) -> None:
    # Rounds 1, 5, 10, 15: the second evaluation without a better one is that of round 10.
    settings = plan(evaluate_every=5, patience=2)
    federation = joined(opened(tmp_path, settings, Judge([0.5, 0.4, 0.3, 0.9])))
    run_out(federation)
    assert federation.next_round == 10


def test_patience_outlives_a_restart(tmp_path: Path) -> None:
    settings = plan(evaluate_every=1, patience=3)
    federation = joined(opened(tmp_path, settings, Judge([0.5, 0.4, 0.3])))
    for _ in range(3):
        play_round(federation, lambda *_: 1.0)
    assert not federation.finished
    federation.close()
    federation = opened(tmp_path, settings, Judge([0.5, 0.9]))
    play_round(federation, lambda *_: 1.0)
    assert federation.finished


def test_without_patience_or_evaluator_a_run_goes_to_its_end(tmp_path: Path) -> None:
    judge = Judge([0.5] + [0.1] * 20)
    federation = joined(opened(tmp_path / "judged", plan(rounds=15, evaluate_every=1), judge))
    run_out(federation)
    assert federation.next_round == 15
    blind = joined(opened(tmp_path / "blind", plan(rounds=15, evaluate_every=1, patience=1)))
    assert run_out(blind) == []
    assert blind.next_round == 15


# ---------------------------------------------------------------- restart


def discrepancy(number: int, client: int) -> float:
    """Some of each: about a third of the clients reach the threshold of 0.9."""
    return (number * 7 + client * 5) % 11 / 8


def history(folder: Path) -> dict[str, Any]:
    """Everything a run has written, without its clocks."""
    table = [{k: v for k, v in row.items() if k != "seconds"} for row in rows(folder, "rounds.csv")]
    log = [{k: v for k, v in event.items() if k != "time"} for event in events(folder)]
    return {"rounds": table, "bytes": rows(folder, "bytes.csv"), "events": log}


def test_a_run_restarted_after_every_round_is_the_undisturbed_run(tmp_path: Path) -> None:
    settings = plan(
        total=12, per_round=5, rounds=12, patience=30, gate=SCORE.model_copy(update={"quota": 0.3})
    )
    undisturbed = opened(tmp_path / "one", settings, Judge())
    for client in range(12):
        undisturbed.join(client, 10 + client)
    for _ in range(12):
        play_round(undisturbed, discrepancy)
    for number in range(12):
        federation = opened(tmp_path / "many", settings, Judge())
        assert federation.next_round == number
        for client in range(12):
            cached = federation.state.caches.get(client)
            confirmed = federation.join(client, 10 + client, RUN, cached and cached.round)
            assert confirmed == (cached and cached.round)
        start(federation)  # and killed in the middle of the round
        federation.close()
        federation = opened(tmp_path / "many", settings, Judge())
        for client in range(12):
            cached = federation.state.caches.get(client)
            federation.join(client, 10 + client, RUN, cached and cached.round)
        play_round(federation, discrepancy)
        federation.close()
    undisturbed.close()
    one, many = RunStore(tmp_path / "one").load(), RunStore(tmp_path / "many").load()
    assert one is not None
    assert many is not None
    assert one.flat.tobytes() == many.flat.tobytes() != bytes(B_0)
    assert (one.committed, one.examples, one.caches, one.notes) == (
        many.committed,
        many.examples,
        many.caches,
        many.notes,
    )
    assert one.caches
    assert history(tmp_path / "one") == history(tmp_path / "many")
    assert {row["reused"] for row in rows(tmp_path / "one", "rounds.csv")} > {"0"}


def test_a_run_does_not_go_on_with_another_model(tmp_path: Path) -> None:
    federation = opened(tmp_path)
    other = Schema((*SCHEMA.tensors[:3], TensorSpec("seen", "int64", (1,), INTEGER_BUFFER)))
    federation.close()
    with RunStore(tmp_path) as store:
        state = store.load()
        assert state is not None
        with pytest.raises(ProtocolError, match="another model") as caught:
            Federation(plan(), other, store, state)
    assert caught.value.code == pb.SCHEMA_MISMATCH


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"per_round": 6}, "6 clients per round of 5 in total"),
        ({"gate": SCORE, "memory": MemorySettings()}, "gate 'score' decides on reuse"),
        ({"gate": GateSettings(kind="age"), "memory": MemorySettings()}, "gate 'age' decides on reuse"),
        ({"keep_ratio": 0}, "keep_ratio"),
        ({"keep_ratio": 1.5}, "keep_ratio"),
        ({"rounds": 0}, "rounds"),
        ({"minimum": 0}, "minimum"),
        ({"patience": 0}, "patience"),
        ({"evaluate_every": 0}, "evaluate_every"),
        ({"seed": -1}, "seed"),
        ({"cohort": 5}, "cohort"),
    ],
)
def test_impossible_settings_are_refused_by_name(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        plan(**changes)


# ---------------------------------------------------------------- what the server says


def test_orders_in_words() -> None:
    assert messages.order(7, AskScore(3)) == ("score_request", pb.ScoreRequest(round=7))
    assert messages.order(7, Train(3, pb.QUOTA)) == ("train_order", pb.TrainOrder(round=7, cause=pb.QUOTA))
    assert messages.order(7, Reuse(3, 5, 2, 0.25)) == (
        "reuse_notice",
        pb.ReuseNotice(round=7, source_round=5, age=2, factor=0.25),
    )


def test_endings_in_words() -> None:
    accepted = messages.closed(Closing(3, 7, accepted=True))
    assert accepted == pb.RoundClosed(round=7, accepted=True)
    failed = messages.closed(Closing(3, 7, False, pb.TIMEOUT, "x" * 900))
    assert failed == pb.RoundClosed(round=7, code=pb.TIMEOUT, detail="x" * 500)


def test_a_welcome_tells_the_run_and_what_is_confirmed(tmp_path: Path) -> None:
    federation = opened(tmp_path)
    client_plan = pb.ClientPlan(seed=7)
    first = messages.welcome(federation, client_plan, 99, None, heartbeat=2.5)
    assert not first.HasField("confirmed_round")
    assert not first.HasField("previous_received")
    assert (first.protocol_version, first.run, first.session) == (PROTOCOL_VERSION, RUN, 99)
    assert (first.rounds, first.heartbeat_seconds, first.plan) == (20, 2.5, client_plan)
    assert Schema.from_proto(first.schema) == SCHEMA
    # Round 0 and no message at all are not the same as nothing known.
    again = messages.welcome(federation, client_plan, 99, 0, heartbeat=2.5, previous_received=0)
    assert again.HasField("confirmed_round")
    assert again.confirmed_round == 0
    assert again.HasField("previous_received")


def test_a_join_names_versions_or_not() -> None:
    assert messages.held_versions(pb.Join()) == (None, None)
    assert messages.held_versions(pb.Join(held_round=0)) == (0, None)
    assert messages.held_versions(pb.Join(held_round=4, staged_round=5)) == (4, 5)


def test_a_broadcast_brings_the_model(tmp_path: Path) -> None:
    federation = opened(tmp_path, weights=0.5)
    broadcast = Broadcast.of(SCHEMA, 4, plain(federation.versions.current.payload))
    assert broadcast.body == MODEL_PAYLOAD
    receiver = Receiver("server", SCHEMA)
    receiver.feed(pb.ServerMessage(model=broadcast.message).SerializeToString())
    arrived: Incoming | None = None
    for frame in broadcast.chunks:
        arrived = receiver.feed(frame)
    assert arrived is not None
    assert arrived.message.round == 4
    assert arrived.payload is not None
    assert bytes(arrived.payload.body) == np.full(14, 0.5, "<f4").tobytes()


# ---------------------------------------------------------------- small dependencies

IMPORTS = """
import importlib
import pkgutil
import sys

import fedreuse.proto
import fedreuse.server

for package in (fedreuse.proto, fedreuse.server):
    modules = [module.name for module in pkgutil.iter_modules(package.__path__)]
    assert len(modules) > 5, modules
    for module in modules:
        importlib.import_module(f"{package.__name__}.{module}")
        print(package.__name__, module)
loaded = {name.split(".")[0] for name in sys.modules}
print("heavy:", sorted(loaded & {"torch", "torchvision", "medmnist", "sklearn", "pandas"}))
print("above:", sorted(name for name in sys.modules if name.startswith(("fedreuse.client", "fedreuse.sim"))))
"""


def test_server_and_contract_load_no_torch_and_nothing_above_them() -> None:
    found = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    lines = found.stdout.splitlines()
    assert "fedreuse.server federation" in lines
    assert lines[-2:] == ["heavy: []", "above: []"]
