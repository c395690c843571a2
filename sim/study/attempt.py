"""One attempt at a cell: begin it or go on with it, wherever that happens."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from fedreuse.sim.config import RunConfig
from fedreuse.sim.folder import CONFIG, read_config

CRASH = "Crash"
"""The type of a failure where a process ended without a word."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """A cell to run: `config.output` is its folder; `data`, if given, stands for what an older folder says."""

    cell: str
    config: RunConfig
    wire: bool
    device: str = "cpu"
    data: Path | None = None

    @property
    def folder(self) -> Path:
        return self.config.folder


def job_of(cell: str, config: RunConfig, folder: Path, wire: bool, device: str, data: Path | None) -> Job:
    """How a cell is run: in its folder, in one process unless its configuration says otherwise."""
    update: dict[str, Any] = {"output": folder}
    if config.sim.workers is None:
        update["sim"] = config.sim.model_copy(update={"workers": 1})
    if data is not None:
        update["data"] = data
    return Job(cell, config.model_copy(update=update), wire, device, data)


@dataclass(frozen=True)
class Committed:
    """A running cell has committed so many rounds."""

    cell: str
    rounds: int


@dataclass(frozen=True)
class Ended:
    """An attempt is over. Stopped: it was asked to, and can go on; failed: `type` and `sentence` say why."""

    cell: str
    outcome: Literal["complete", "stopped", "failed"]
    type: str = ""
    sentence: str = ""


class Crew(Protocol):
    """Who runs the cells of a study: processes of this machine, or a cluster."""

    @property
    def slots(self) -> int:
        """How many cells may run at a time, now."""
        ...

    def start(self, job: Job) -> None: ...

    def wait(self, seconds: float) -> list[Committed | Ended]:
        """What has happened; returns early once something has."""
        ...

    def stop(self) -> None:
        """Ask all running cells to end after their current round."""
        ...

    def close(self) -> None:
        """End whatever still runs, at once; a cell goes on from its last committed round."""
        ...


class Stopped(Exception):
    """The cell was asked to stop."""


def attempt(job: Job, committed: Callable[[int], None]) -> Ended:
    """Run a cell to its end in this process. `committed` gets the number of rounds; it may raise Stopped.

    Nothing is raised: what went wrong is in the result.
    """
    try:
        _run(job, committed)
    except Stopped:
        return Ended(job.cell, "stopped")
    except Exception as error:
        log.warning("cell %s failed", job.cell, exc_info=error)
        return Ended(job.cell, "failed", type(error).__name__, str(error) or repr(error))
    return Ended(job.cell, "complete")


def _run(job: Job, committed: Callable[[int], None]) -> None:
    from fedreuse.sim.run import create_run, make_task
    from fedreuse.sim.simulate import simulate

    folder, config = job.folder, job.config
    if (folder / CONFIG).exists():
        config = read_config(folder)
        if job.data is not None:
            config = config.model_copy(update={"data": job.data})
        task = make_task(config)
    else:
        task = make_task(config)
        create_run(config, task, body="sim --wire" if job.wire else "sim")

    def row(columns: dict[str, Any]) -> None:
        committed(columns["round"])

    simulate(folder, config, wire=job.wire, device=job.device, task=task, committed=row)


def death(code: int) -> str:
    """What the exit status of a process that said nothing means."""
    if code >= 0:
        return f"its process ended with status {code}"
    name = signal.Signals(-code).name
    hint = "; out of memory, perhaps: try fewer --workers" if name == "SIGKILL" else ""
    return f"its process was ended by {name}{hint}"
