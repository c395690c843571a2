"""A whole run in process: open the folder, drive the engine, finish."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedreuse.client.held import HeldStore
from fedreuse.client.host import be_deterministic
from fedreuse.client.task import Task
from fedreuse.proto.allocator import keep_large_blocks
from fedreuse.proto.captures import CaptureTo
from fedreuse.server.federation import Federation
from fedreuse.server.weights import save_model
from fedreuse.sim.chronology import work
from fedreuse.sim.config import RunConfig
from fedreuse.sim.costs import count_flops, peak_memory
from fedreuse.sim.engine import Engine
from fedreuse.sim.evaluate import TaskEvaluator
from fedreuse.sim.folder import FINAL, SUMMARY, TEST_RESULT
from fedreuse.sim.links import DirectLink, WireLink
from fedreuse.sim.pool import InlinePool, Pool, ProcessPool, TogetherPool
from fedreuse.sim.run import make_task, open_federation
from fedreuse.sim.summary import summarise, write_summary
from fedreuse.sim.testset import Examined, open_once, read_examined
from fedreuse.sim.worker import Worker


def simulate(
    folder: Path,
    config: RunConfig,
    *,
    wire: bool = False,
    device: str = "cpu",
    task: Task | None = None,
    committed: Callable[[dict[str, Any]], None] = lambda _row: None,
    capture: CaptureTo | None = None,
) -> dict[str, Any]:
    """Run (or go on with) a run folder to its end; its summary. Only with `wire` there is something to capture."""
    be_deterministic()
    keep_large_blocks()
    task = task or make_task(config, folder)
    evaluator = TaskEvaluator(task, archival=config.evaluation.archival)
    federation = open_federation(folder, config, evaluator)
    held = HeldStore(folder / "state" / "clients")
    state = federation.state
    mode, pool = _pool(
        folder,
        config,
        device,
        lambda: Worker(folder, config, device, task, held, lambda: (state.committed, state.flat)),
    )
    federation.event("simulation", mode=mode, device=device)
    tap = None if capture is None else capture.tap(federation.schema, federation.next_round)
    link = WireLink(federation, config.plan(), tap) if wire else DirectLink(federation)
    try:
        Engine(federation, pool, held, link, config.faults).run(committed)
        return finish(folder, config, federation, evaluator, mode)
    finally:
        pool.close()
        held.close()
        federation.close()


def _pool(folder: Path, config: RunConfig, device: str, here: Callable[[], Worker]) -> tuple[str, Pool]:
    """The mode that `sim.mode` comes to, and where clients then compute; `here` makes what this process needs."""
    workers = config.sim.workers or os.cpu_count() or 1
    mode = config.sim.mode
    if mode == "auto":
        mode = "serial" if workers == 1 or device.startswith("cuda") else "processes"
    if mode == "processes":
        return mode, ProcessPool(folder, device, workers)
    return mode, TogetherPool(here(), config.sim.together) if mode == "vectorised" else InlinePool(here())


def finish(
    folder: Path,
    config: RunConfig,
    federation: Federation,
    evaluator: TaskEvaluator | None,
    mode: str | None = None,
) -> dict[str, Any]:
    """After the last round: the final model, the one look at the test set if it may be opened, the summary."""
    closed = evaluator is None or not config.evaluation.test
    tested = closed or (folder / TEST_RESULT).exists()
    if tested and (folder / SUMMARY).exists():  # nothing is looked at or measured again
        return dict(json.loads((folder / SUMMARY).read_text(encoding="utf-8")))
    federation.flush()
    stamp = "archival, " if config.evaluation.archival else ""
    note = f"{stamp}after {federation.next_round} rounds"
    save_model(folder / FINAL, federation.schema, federation.arrays(), note=note)
    examined = test_once(folder, config, federation, evaluator)
    summary = summarise(
        folder, config, examined, _costs(folder, config, federation, evaluator) | {"mode": mode}
    )
    write_summary(folder, summary)
    return summary


def test_once(
    folder: Path, config: RunConfig, federation: Federation, evaluator: TaskEvaluator | None
) -> Examined | None:
    """What the test set says about the last round's model; the set is opened once per run.

    With `evaluation.test` false it is not opened, and the task is not even asked for it.
    """
    if not config.evaluation.test:
        return None
    flat = federation.state.flat
    known = read_examined(folder, flat)
    if known is not None or evaluator is None:
        return known
    return open_once(
        folder,
        federation.next_round,
        flat,
        lambda: evaluator.test(federation.arrays(), config.clients.total),
        archival=config.evaluation.archival,
    )


def _costs(
    folder: Path, config: RunConfig, federation: Federation, evaluator: TaskEvaluator | None
) -> dict[str, Any]:
    memory = asdict(peak_memory())
    if evaluator is None:
        return {"flops": {"absent": "no task beside the server"}, "memory": memory}
    flops = count_flops(evaluator.task, config.plan(), work(folder), federation.state.examples)
    counted = asdict(flops) if flops else {"absent": "the counter saw no matrix product or convolution"}
    return {"flops": counted, "memory": memory}
