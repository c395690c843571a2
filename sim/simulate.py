"""A whole run in process: open the folder, drive the engine, finish."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedreuse.client.held import HeldStore
from fedreuse.client.host import be_deterministic
from fedreuse.client.task import Task
from fedreuse.proto.allocator import keep_large_blocks
from fedreuse.proto.captures import CaptureTo
from fedreuse.server.federation import Federation
from fedreuse.server.weights import save_model
from fedreuse.sim.config import RunConfig
from fedreuse.sim.engine import Engine
from fedreuse.sim.evaluate import TaskEvaluator
from fedreuse.sim.folder import FINAL, TEST_RESULT
from fedreuse.sim.links import DirectLink, WireLink
from fedreuse.sim.pool import InlinePool, Pool, ProcessPool
from fedreuse.sim.run import make_task, open_federation
from fedreuse.sim.summary import summarise, write_summary
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
    task = task or make_task(config)
    evaluator = TaskEvaluator(task)
    federation = open_federation(folder, config, evaluator)
    held = HeldStore(folder / "state" / "clients")
    workers = config.sim.workers or os.cpu_count() or 1
    pool: Pool
    if workers == 1 or device.startswith("cuda"):
        state = federation.state
        pool = InlinePool(Worker(folder, config, device, task, held, lambda: (state.committed, state.flat)))
    else:
        pool = ProcessPool(folder, device, workers)
    tap = None if capture is None else capture.tap(federation.schema, federation.next_round)
    link = WireLink(federation, config.plan(), tap) if wire else DirectLink(federation)
    try:
        Engine(federation, pool, held, link, config.faults, join_all=wire).run(committed)
        return finish(folder, config, federation, evaluator)
    finally:
        pool.close()
        held.close()
        federation.close()


def finish(
    folder: Path, config: RunConfig, federation: Federation, evaluator: TaskEvaluator | None
) -> dict[str, Any]:
    """After the last round: the final model, the one look at the test set, the summary."""
    federation.flush()
    save_model(
        folder / FINAL, federation.schema, federation.arrays(), note=f"after {federation.next_round} rounds"
    )
    summary = summarise(folder, config, test_once(folder, federation, evaluator))
    write_summary(folder, summary)
    return summary


def test_once(
    folder: Path, federation: Federation, evaluator: TaskEvaluator | None
) -> dict[str, float] | None:
    """The test metrics of the last round's model; the test set is opened once per run."""
    path = folder / TEST_RESULT
    if path.exists():
        return dict(json.loads(path.read_text()))
    if evaluator is None:
        return None
    metrics = dict(evaluator.test(federation.arrays()))
    partial = folder / (TEST_RESULT + ".partial")
    partial.write_text(json.dumps(metrics) + "\n")
    partial.rename(path)
    return metrics
