"""A federation of processes that are interrupted and killed: nothing stays behind, nothing is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from fedreuse.sim.config import load_config
from fedreuse.sim.launch import split_clients
from fedreuse.sim.run import create_run, make_task
from fedreuse.sim.simulate import simulate

SETTINGS = [
    "method=dg-fedreuse",
    "task=twin_task:ShuffledGrid",
    "rounds=40",
    "clients.total=6",
    "clients.per_round=4",
    "clients.processes=2",
    "train.batch_size=16",
    "train.local_epochs=1",
    "server.heartbeat=1",
    "server.rejoin_grace=8",
    "sim.workers=1",
]


def fedreuse(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "fedreuse.sim.cli", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def committed(folder: Path) -> int:
    path = folder / "rounds.csv"
    return max(0, len(path.read_text().splitlines()) - 1) if path.exists() else 0


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str] | None = None) -> None:
    end = time.monotonic() + 90
    while not condition():
        if process is not None and process.poll() is not None:
            raise AssertionError(process.communicate()[0])
        assert time.monotonic() < end, "waited for too long"
        time.sleep(0.02)


def processes_of(folder: Path) -> list[int]:
    """Processes that work on a run folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes()
        except OSError:
            continue
        if str(folder).encode() in line and int(path.parent.name) != os.getpid():
            found.append(int(path.parent.name))
    return found


def test_interrupted_and_killed_at_every_level_it_ends_with_the_same_bits(tmp_path: Path) -> None:
    folder = tmp_path / "launched"

    run = fedreuse("launch", *SETTINGS, f"output={folder}")
    wait_for(lambda: committed(folder) >= 3, run)
    run.send_signal(signal.SIGINT)  # Ctrl-C
    output = run.communicate(timeout=60)[0]
    assert (run.returncode, "Traceback" in output, "fedreuse resume" in output) == (130, False, True), output
    assert processes_of(folder) == []
    assert committed(folder) < 40

    run = fedreuse("resume", folder)
    before = committed(folder)
    wait_for(lambda: committed(folder) >= before + 3, run)
    run.kill()  # the launcher alone: its children must notice
    run.communicate()
    wait_for(lambda: processes_of(folder) == [])

    run = fedreuse("resume", folder)
    before = committed(folder)
    wait_for(lambda: (folder / "server.json").exists() and committed(folder) >= before + 3, run)
    os.kill(json.loads((folder / "server.json").read_text())["pid"], signal.SIGKILL)
    output = run.communicate(timeout=60)[0]
    assert run.returncode == 1, output
    assert "the server failed" in output
    assert "Traceback" not in output
    assert processes_of(folder) == []

    run = fedreuse("resume", folder)
    before = committed(folder)
    wait_for(lambda: committed(folder) >= before + 2, run)
    client = next(
        pid for pid in processes_of(folder) if b"--clients" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )
    os.kill(client, signal.SIGKILL)
    output = run.communicate(timeout=60)[0]
    assert (run.returncode, "client-0" in output) == (1, True), output
    assert processes_of(folder) == []

    run = fedreuse("resume", folder, "--json")
    output = run.communicate(timeout=120)[0]
    assert run.returncode == 0, output
    assert committed(folder) == 40

    # The launches ended before any grace did, so no round knew of a fault: it is an undisturbed run.
    rounds = (folder / "rounds.csv").read_text().splitlines()
    fault = rounds[0].split(",").index("fault")
    assert {row.split(",")[fault] for row in rounds[1:]} == {"0"}
    config = load_config(None, [*SETTINGS, f"output={tmp_path / 'simulated'}"])
    simulated = create_run(config, make_task(config))
    simulate(simulated, config)
    assert (folder / "model.safetensors").read_bytes() == (simulated / "model.safetensors").read_bytes()


def test_clients_are_shared_out_evenly() -> None:
    assert [list(share) for share in split_clients(7, 3)] == [[0, 1], [2, 3, 4], [5, 6]]
    assert [len(share) for share in split_clients(50, 4)] == [12, 13, 13, 12]
    assert [list(share) for share in split_clients(2, 5)] == [[0], [1]]
