"""A run with everything around it that a command shows or writes: progress, scalars, the report at its end."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedreuse.sim.console import err, out

if TYPE_CHECKING:
    from fedreuse.proto.captures import CaptureTo
    from fedreuse.proto.federation_pb2 import StatusReply
    from fedreuse.sim.config import RunConfig


def run_here(
    folder: Path,
    config: RunConfig,
    *,
    wire: bool,
    device: str,
    as_json: bool,
    tensorboard: Path | None = None,
    capture: CaptureTo | None = None,
) -> None:
    """Run a folder in this process to its end, with a view on it, and report."""
    from fedreuse.sim.progress import RunProgress
    from fedreuse.sim.simulate import simulate

    with (
        _scalars(tensorboard, folder) as update,
        RunProgress(err, f"{config.method} {config.task.name}", config.rounds) as progress,
    ):

        def committed(row: dict[str, Any]) -> None:
            progress.row(row)
            update()

        summary = simulate(folder, config, wire=wire, device=device, committed=committed, capture=capture)
    report(folder, summary, as_json)


def run_processes(
    folder: Path,
    config: RunConfig,
    *,
    device: str,
    as_json: bool,
    tensorboard: Path | None = None,
    capture: CaptureTo | None = None,
) -> None:
    """Run a folder with a server and client processes to its end, with a view on it, and report."""
    from fedreuse.sim.launch import launch
    from fedreuse.sim.progress import RunProgress

    with (
        _scalars(tensorboard, folder) as update,
        RunProgress(err, f"{config.method} {config.task.name}", config.rounds) as progress,
    ):

        def status(reply: StatusReply) -> None:
            progress.status(reply)
            update()

        summary = launch(folder, config, device=device, progress=status, capture=capture)
    report(folder, summary, as_json)


def capture_to(folder: Path | None, rounds: int) -> CaptureTo | None:
    """What --capture and --capture-rounds say."""
    from fedreuse.proto.captures import CaptureTo

    return None if folder is None else CaptureTo(folder, rounds)


def check_tensorboard(logs: Path | None) -> None:
    """Complain before anything has begun."""
    if logs is not None:
        from fedreuse.sim.scalars import writer_class

        writer_class()


@contextmanager
def _scalars(logs: Path | None, folder: Path) -> Iterator[Callable[[], None]]:
    """What to call when rounds may have been committed."""
    if logs is None:
        yield lambda: None
        return
    from fedreuse.sim.scalars import TensorBoard as Scalars

    with Scalars(logs, folder) as scalars:
        yield scalars.update


def report(folder: Path, summary: dict[str, Any], as_json: bool) -> None:
    """What a run came to."""
    if as_json:
        sys.stdout.write(json.dumps(summary, indent=2) + "\n")
        return
    from fedreuse.sim.compare import compare as read
    from fedreuse.sim.tables import render

    render(read([folder]), out, brief=True)
    out.print(f"more: `fedreuse compare {folder}`", highlight=False, soft_wrap=True)
