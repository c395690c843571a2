"""What a cached client costs the server, in memory and on disk."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

CACHE_COST = """
import ctypes, gc, json, sys
from pathlib import Path
import numpy as np
from fedreuse.proto import federation_pb2 as pb
from fedreuse.proto.codec import encode
from fedreuse.proto.frames import Receiver, chunk_frames, outgoing
from fedreuse.proto.codec import transfer_header
from fedreuse.proto.ledger import Row
from fedreuse.proto.schema import PARAMETER, Schema, TensorSpec
from fedreuse.server.federation import TABLE_HEADERS, Federation, new_state
from fedreuse.server.gate import GateSettings
from fedreuse.server.memory import MemorySettings
from fedreuse.server.settings import FederationSettings
from fedreuse.server.store import RunStore

CLIENTS, ROUNDS = 300, 60
SCHEMA = Schema.of([TensorSpec("fc.weight", "float32", (500, 800), PARAMETER)])
settings = FederationSettings(
    rounds=ROUNDS, total=CLIENTS, per_round=10, keep_ratio=0.2,
    gate=GateSettings(kind="age"), memory=MemorySettings(kind="reuse"),
    history=0,  # past models are a cost of their own, and the same for any number of clients
)
store = RunStore(Path(sys.argv[1]), budget=8 << 20)
state = new_state("0" * 16, SCHEMA, SCHEMA.flatten({"fc.weight": np.zeros((500, 800), np.float32)}))
store.initialise(state, TABLE_HEADERS)
federation = Federation(settings, SCHEMA, store, state)
for client in range(CLIENTS):
    federation.join(client, 10)

def rss():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed does not count
    with open("/proc/self/status") as status:
        fields = dict(line.split(":", 1) for line in status)
    return int(fields["RssAnon"].split()[0]) * 1024, int(fields["RssFile"].split()[0]) * 1024

def disk():
    return (Path(sys.argv[1]) / "state" / "server" / "data.mdb").stat().st_blocks * 512

def update(seed):
    values = np.random.default_rng(seed).standard_normal(400_000).astype(np.float32)
    payload = encode(SCHEMA, {0: values}, lambda _: 80_000)
    header = pb.SparseUpdate(round=federation.next_round, transfer=transfer_header(SCHEMA, payload))
    receiver = Receiver("client", SCHEMA)
    for frame in outgoing("client", "update", header, chunks=chunk_frames("client", payload.body)).frames:
        whole = receiver.feed(frame)
    return whole.message, whole.payload

def play():
    federation.open_round()
    for client in federation.cohort(federation.next_round):
        if federation.round.seats[client].state.value == "training":
            federation.accept(client, *update(client), Row(federation.next_round, client, "up", "update"))
    federation.commit()

play()
play()
(before, _), on_disk, cached = rss(), disk(), len(state.caches)
mapped = []
while len(state.caches) < CLIENTS * 3 // 4:
    play()
    mapped.append(rss()[1])
added = len(state.caches) - cached
print(json.dumps({
    "memory": (rss()[0] - before) / added, "disk": (disk() - on_disk) / added, "added": added,
    "mapped": max(mapped) - min(mapped),
}))
"""


def test_a_cached_client_costs_the_disk_its_payload_and_no_memory(tmp_path: Path) -> None:
    """80,000 of 400,000 float32 values and one bit per coordinate: 370,000 bytes a client, dense 1,600,000."""
    command = [sys.executable, "-c", CACHE_COST, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)
    assert measured["added"] >= 150
    payload = 80_000 * 4 + 400_000 // 8
    assert 0.95 * payload < measured["disk"] < 1.2 * payload, measured
    assert measured["memory"] < payload / 10, measured
    # Mapped of the file are the budget and some rounds of ten clients, not all 206 clients.
    assert measured["mapped"] < (8 << 20) + 40 * payload, measured
