"""What the meter of TCP connections costs, as a share of a round: runs with it and without it in turns.

    python tests/bench/metering.py [--pairs P] [--rounds N] [--json] [KEY=VALUE ...]      (no root, a few minutes)

One process holds a real service and ten real clients that train on digits, or what the overrides say (for example
task=mnist task.train_limit=12000 data=DATA: the sizes of the DG paper's clients), over gRPC on loopback. A pair is two
runs with the same seed, one with and one without the meter; a round is compared with the same round of the other run,
so both did the same work. Without the meter means: no reading, no counters in messages, no wait for them before a
commit. Beside it the direct measurement: seconds spent inside the meter, and how many readings a round took.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from pathlib import Path
from typing import Any, Literal

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from rich.console import Console
from rich.table import Table

from fedreuse.client import metering as client_metering
from fedreuse.client.agent import Agent
from fedreuse.client.held import HeldStore
from fedreuse.client.host import ClientHost, be_deterministic
from fedreuse.client.ledger import ClientLedger
from fedreuse.client.shelf import Shelf
from fedreuse.client.task import Task
from fedreuse.proto.allocator import keep_large_blocks
from fedreuse.proto.meter import Address, Meter, Reading, UnobservableError
from fedreuse.server import metering as server_metering
from fedreuse.server.service import REPORT_SECONDS, Service
from fedreuse.sim.config import RunConfig, load_config
from fedreuse.sim.run import create_run, make_task, open_federation

CLIENTS = 10
SKIPPED = 2
"""Rounds at a run's beginning that are left out: connecting, and the first of everything."""

console = Console(width=None if sys.stdout.isatty() else 110)


class Counting(Meter):
    def __init__(self, client: Literal["local", "remote"], spent: Counter[str]) -> None:
        super().__init__(client)
        self._spent = spent

    def read(self, end: Address) -> Reading:
        began = time.thread_time()
        try:
            return super().read(end)
        finally:
            self._spent["reading"] += time.thread_time() - began
            self._spent["readings"] += 1

    def _scan(self) -> None:
        super()._scan()
        self._spent["scans"] += 1


class Off(Meter):
    def read(self, end: Address) -> Reading:
        raise UnobservableError("off")


def watch(spent: Counter[str]) -> None:
    """Take the time of whatever the two ends do with readings, rows and messages included."""
    places = (
        (server_metering.ConnectionMeter, ("read", "report")),
        (client_metering.ConnectionMeter, ("read", "peek")),
    )
    for owner, names in places:
        for name in names:
            setattr(owner, name, _timed(getattr(owner, name), spent))


def _timed(call: Callable[..., Any], spent: Counter[str]) -> Callable[..., Any]:
    @wraps(call)
    def timed(*arguments: Any) -> Any:
        if spent["inside"]:
            return call(*arguments)
        spent["inside"], wall, cpu = 1, time.perf_counter(), time.thread_time()
        try:
            return call(*arguments)
        finally:
            spent["inside"] = 0
            spent["metering_cpu"] += time.thread_time() - cpu
            spent["metering_wall"] += time.perf_counter() - wall

    return timed


def watch_commits(service: Service, spent: Counter[str]) -> None:
    """Take the time for which commits wait for counters."""
    tasks = service._sessions.tasks
    until = tasks.until

    async def timed(condition: Callable[[], bool], seconds: float) -> bool:
        began = time.perf_counter()
        try:
            return await until(condition, seconds)
        finally:
            if seconds == REPORT_SECONDS:
                spent["waiting"] += time.perf_counter() - began

    tasks.until = timed  # type: ignore[method-assign]


async def federate(config: RunConfig, task: Task, folder: Path, spent: Counter[str], on: bool) -> list[Any]:
    """One run; for every round but the first few its seconds, CPU seconds, and what the meter spent in it."""
    federation = open_federation(folder, config, None)
    marks = []

    def committed(_row: Any) -> None:
        marks.append({"wall": time.perf_counter(), "cpu": time.process_time(), **spent})

    service = Service(federation, config.plan().to_proto(), config.server, committed=committed)
    watch_commits(service, spent)
    service._sessions._meter = Counting("remote", spent) if on else Off("remote")
    host = ClientHost(task, torch.device("cpu"), HeldStore(None))
    ledger, shelf = ClientLedger(folder / "clients.csv"), Shelf()
    theirs: Meter = Counting("local", spent) if on else Off("local")
    address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    with ThreadPoolExecutor(1) as compute:
        serving = asyncio.create_task(service.serve(address.set_result))
        where = await address
        agents = [
            Agent(where, host.participant(client), ledger, compute, give_up=30, shelf=shelf, meter=theirs)
            for client in range(CLIENTS)
        ]
        async with asyncio.TaskGroup() as group:
            for agent in agents:
                group.create_task(agent.run())
        if not await serving:
            raise RuntimeError("the federation did not finish")
    ledger.close()
    federation.close()
    pairs = list(itertools.pairwise(marks))[SKIPPED - 1 :]
    return [{name: after.get(name, 0) - before.get(name, 0) for name in FIGURES} for before, after in pairs]


FIGURES = ("wall", "cpu", "readings", "scans", "reading", "metering_cpu", "metering_wall", "waiting")


def session(pairs: int, rounds: int, overrides: Sequence[str]) -> dict[str, list[Any]]:
    """Rounds with and without the meter, in the same order."""
    result: dict[str, list[Any]] = {"on": [], "off": []}
    spent: Counter[str] = Counter()
    watch(spent)
    for pair in range(pairs):
        # Turn the order round each time: what comes second runs on a warmer machine.
        for side in ("on", "off") if pair % 2 else ("off", "on"):
            with tempfile.TemporaryDirectory(prefix="fedreuse-bench-") as place:
                keys = {"rounds": rounds, "clients.total": CLIENTS, "clients.per_round": CLIENTS}
                keys |= {"output": f"{place}/run", "seed": 101 + pair}
                config = load_config(None, [*overrides, *(f"{key}={value}" for key, value in keys.items())])
                task = make_task(config)
                folder = create_run(config, task, body="launch")
                result[side] += asyncio.run(federate(config, task, folder, spent, side == "on"))
    return result


# ---------------------------------------------------------------- showing it


def evaluate(rounds: dict[str, list[Any]]) -> dict[str, Any]:
    """Medians a round, and what the meter adds: differences of like rounds over the median round without it."""
    facts: dict[str, Any] = {"rounds": len(rounds["on"])}
    for clock in ("wall", "cpu"):
        off = statistics.median(r[clock] for r in rounds["off"])
        like = [(a[clock] - b[clock]) / off for a, b in zip(rounds["on"], rounds["off"], strict=True)]
        facts[clock] = {
            "on": statistics.median(r[clock] for r in rounds["on"]),
            "off": off,
            "added": interval(like),
        }
    mean = {name: statistics.fmean(r[name] for r in rounds["on"]) for name in FIGURES}
    facts["direct"] = {
        "mean": mean,
        "seconds_a_reading": mean["reading"] / mean["readings"],
        "cpu_share": mean["metering_cpu"] / mean["cpu"],
        "wall_share": (mean["metering_wall"] + mean["waiting"]) / mean["wall"],
    }
    return facts


def interval(values: Sequence[float]) -> dict[str, float]:
    """Median, and the order statistics that enclose the true one with 95 % confidence."""
    ordered, n = sorted(values), len(values)
    low = max(0, math.floor(n / 2 - 0.98 * math.sqrt(n)))
    return {"median": statistics.median(ordered), "low": ordered[low], "high": ordered[n - 1 - low]}


def show(facts: dict[str, Any], what: str) -> None:
    title = f"A round of {CLIENTS} clients on {what}, {facts['rounds']} rounds each way"
    table = Table(title=title, title_justify="left")
    for head in ("", "with, ms", "without, ms", "added, %", "95 % interval"):
        table.add_column(head, justify="right" if head else "left")
    for clock, name in (("wall", "wall"), ("cpu", "CPU")):
        row, added = facts[clock], facts[clock]["added"]
        table.add_row(
            name,
            f"{1e3 * row['on']:.1f}",
            f"{1e3 * row['off']:.1f}",
            f"{100 * added['median']:+.2f}",
            f"{100 * added['low']:+.2f} to {100 * added['high']:+.2f}",
        )
    console.print(table)
    direct = facts["direct"]
    mean = direct["mean"]
    console.print(
        f"directly, means over rounds: {mean['readings']:.1f} readings of {1e6 * direct['seconds_a_reading']:.0f} µs "
        f"CPU (scans of descriptors, {mean['scans']:.2f} a round, included); with rows of the ledger "
        f"{1e3 * mean['metering_cpu']:.2f} ms CPU, {100 * direct['cpu_share']:.2f} % of a round's; "
        f"{1e3 * mean['metering_wall']:.2f} ms on the clock and {1e3 * mean['waiting']:.2f} ms in which a commit "
        f"waited for counters, {100 * direct['wall_share']:.2f} % of a round's time",
        highlight=False,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", action="store_true", help="machine-readable result, all rounds included")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of the configuration")
    options = parser.parse_args()
    if options.pairs < 1 or options.rounds <= SKIPPED:
        parser.error(f"at least 1 pair and {SKIPPED + 1} rounds")
    keep_large_blocks()
    be_deterministic()
    rounds = session(options.pairs, options.rounds, options.overrides)
    facts = evaluate(rounds)
    if options.json:
        sys.stdout.write(json.dumps({**facts, "load": os.getloadavg(), "raw": rounds}, indent=1) + "\n")
    else:
        show(facts, " ".join(options.overrides) or "digits")


if __name__ == "__main__":
    main()
