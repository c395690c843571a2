"""What a server process and a client process of a real federation do, from configuration to exit."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fedreuse.client.agent import Agent
from fedreuse.client.held import HeldStore
from fedreuse.client.host import ClientHost, be_deterministic
from fedreuse.client.ledger import ClientLedger
from fedreuse.client.shelf import Shelf
from fedreuse.client.task import Task
from fedreuse.client.tls import ClientTls
from fedreuse.client.workbench import resolve_device
from fedreuse.proto.allocator import keep_large_blocks
from fedreuse.proto.captures import CaptureTo
from fedreuse.proto.meter import Meter
from fedreuse.server.federation import Federation
from fedreuse.server.service import Service
from fedreuse.sim.config import RunConfig
from fedreuse.sim.evaluate import TaskEvaluator
from fedreuse.sim.folder import ADDRESS
from fedreuse.sim.run import open_federation
from fedreuse.sim.simulate import finish

log = logging.getLogger("fedreuse")


def serve(
    folder: Path,
    config: RunConfig,
    task: Task | None,
    *,
    listening: Callable[[str], None] = lambda _address: None,
    committed: Callable[[dict[str, Any]], None] = lambda _row: None,
    capture: CaptureTo | None = None,
) -> dict[str, Any] | None:
    """Run the server of a run folder; its summary, or None if it was stopped before the end.

    With a task, metrics are computed beside the server; without one they stay absent.
    """
    keep_large_blocks()
    evaluator = None
    if task is not None:
        be_deterministic()
        evaluator = TaskEvaluator(task, archival=config.evaluation.archival)
    federation = open_federation(folder, config, evaluator)
    try:
        if not federation.finished and not asyncio.run(
            _serve(folder, config, federation, listening, committed, capture)
        ):
            return None
        return finish(folder, config, federation, evaluator)
    finally:
        (folder / ADDRESS).unlink(missing_ok=True)
        federation.close()


async def _serve(
    folder: Path,
    config: RunConfig,
    federation: Federation,
    listening: Callable[[str], None],
    committed: Callable[[dict[str, Any]], None],
    capture: CaptureTo | None,
) -> bool:
    tap = None if capture is None else capture.tap(federation.schema, federation.next_round)
    service = Service(federation, config.plan().to_proto(), config.server, config.faults, committed, tap)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, service.stop)

    def announce(address: str) -> None:
        partial = folder / (ADDRESS + ".partial")
        partial.write_text(json.dumps({"address": address, "pid": os.getpid()}) + "\n")
        partial.rename(folder / ADDRESS)
        listening(address)

    return await service.serve(announce)


def take_part(
    address: str,
    clients: Sequence[int],
    config: RunConfig,
    task: Task,
    *,
    state: Path | None,
    device: str,
    give_up: float,
    tls: ClientTls | None = None,
) -> bool:
    """Run the agents of some clients in this process; True if the federation finished, False if stopped."""
    keep_large_blocks()
    be_deterministic()
    held = HeldStore(None if state is None else state / "held")
    ledger = ClientLedger(None if state is None else state / "bytes.csv")
    host = ClientHost(task, resolve_device(device), held)
    compute = ThreadPoolExecutor(1, thread_name_prefix="compute")
    expected = config.seed, config.clients.total
    shelf, meter = Shelf(), Meter("local")
    agents = [
        Agent(
            address,
            host.participant(client),
            ledger,
            compute,
            config.faults,
            give_up,
            expected,
            shelf,
            meter,
            tls,
        )
        for client in clients
    ]
    try:
        return asyncio.run(_take_part(agents))
    finally:
        compute.shutdown(wait=False, cancel_futures=True)
        ledger.close()


async def _take_part(agents: Sequence[Agent]) -> bool:
    loop = asyncio.get_running_loop()
    work = asyncio.ensure_future(_all(agents))
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, work.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await work
        return True
    return False


async def _all(agents: Sequence[Agent]) -> None:
    """All agents to their end; the first failure ends them all."""
    async with asyncio.TaskGroup() as group:
        for agent in agents:
            group.create_task(agent.run())


def exit_with_parent(parent: int) -> None:
    """Stop this process when process `parent` is gone, so that a killed launcher leaves nobody behind."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        log.warning("the launcher is gone; stopping")
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
