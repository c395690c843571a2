"""One run of a contender of the simulation benchmark, in this process; its figures as a line of JSON.

    python tests/bench/engine_side.py loop PEERS [--channels-last]   the hand-written loop, as it is
    python tests/bench/engine_side.py ours [--wire] KEY=VALUE...     an in-process run of fedreuse

CPU seconds are those of this process and of all it started (Linux only).
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import io
import json
import os
import runpy
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch


class Stopwatch:
    """Reads the clocks when told that the first round begins and that rounds ended."""

    def __init__(self) -> None:
        self._begin = time.perf_counter(), _cpu_seconds()
        self._marks: list[tuple[float, float]] = []

    def mark(self) -> None:
        self._marks.append((time.perf_counter(), _cpu_seconds()))

    def results(self) -> dict[str, Any]:
        """Start-up and first round apart, then the mean of the rounds after it."""
        first, second, last = self._marks[0], self._marks[1], self._marks[-1]
        count = len(self._marks) - 2
        return {
            "rounds": count + 1,
            "startup_wall": first[0] - self._begin[0],
            "startup_cpu": first[1] - self._begin[1],
            "first_cpu": second[1] - first[1],
            "wall": (last[0] - second[0]) / count,
            "cpu": (last[1] - second[1]) / count,
            **_memory(),
        }


def loop(peers: Path, channels_last: bool) -> dict[str, Any]:
    """The peers' floor.py unchanged; its marks come here. Its rounds are marked when they begin."""
    watch = Stopwatch()
    meter = ModuleType("meter")
    meter.mark = lambda _event, **_facts: watch.mark()  # type: ignore[attr-defined]
    sys.modules["meter"] = meter
    sys.path.insert(0, str(peers))
    if channels_last:
        _put_into_channels_last()
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        runpy.run_path(str(peers / "w2" / "floor.py"), run_name="__main__")
    return {**watch.results(), "accuracy": float(said.getvalue().split("accuracy ")[1])}


def _put_into_channels_last() -> None:
    """Training in the other memory format. Between trainings weights lie as floor.py's flat vectors want it."""
    from w2 import task  # type: ignore[import-not-found]

    plain: Callable[..., None] = task.train

    def train(net: torch.nn.Module, x: torch.Tensor, y: torch.Tensor, optimiser: Any) -> None:
        net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        plain(net, x.to(memory_format=torch.channels_last), y, optimiser)
        net.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]

    task.train = train


def ours(overrides: list[str], wire: bool) -> dict[str, Any]:
    watch = Stopwatch()
    from fedreuse.sim import simulate as simulation
    from fedreuse.sim.config import load_config
    from fedreuse.sim.run import create_run, make_task

    class Engine(simulation.Engine):
        def run(self, *arguments: Any) -> None:
            watch.mark()
            super().run(*arguments)

    simulation.Engine = Engine  # type: ignore[misc]
    with tempfile.TemporaryDirectory(prefix="fedreuse-bench-") as folder:
        config = load_config(None, [*overrides, f"output={folder}/run"])
        task = make_task(config)
        run = create_run(config, task)
        figures: dict[str, Any] = {}

        def committed(row: dict[str, Any]) -> None:
            watch.mark()
            if row["round"] == config.rounds:
                figures.update(watch.results())  # while worker processes still live

        summary = simulation.simulate(run, config, wire=wire, task=task, committed=committed)
    return {**figures, "accuracy": summary["accuracy"]["test"]}


# ---------------------------------------------------------------- this process and its descendants


def _family() -> list[int]:
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found = [os.getpid()]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def _cpu_seconds() -> float:
    return sum(map(_clock, _family()))


def _clock(pid: int) -> float:
    clock = ctypes.c_int()
    if ctypes.CDLL(None).clock_getcpuclockid(pid, ctypes.byref(clock)):
        return 0.0  # it ended a moment ago
    return time.clock_gettime(clock.value)


def _memory() -> dict[str, int]:
    """Bytes: the sums of the processes' peaks, and of what they hold now with shared pages divided among them."""
    rss = pss = 0
    for pid in _family():
        with contextlib.suppress(OSError):
            rss += _kilobytes(Path(f"/proc/{pid}/status"), "VmHWM:")
            pss += _kilobytes(Path(f"/proc/{pid}/smaps_rollup"), "Pss:")
    return {"rss": rss * 1024, "pss": pss * 1024}


def _kilobytes(path: Path, name: str) -> int:
    return next(int(line.split()[1]) for line in path.read_text().splitlines() if line.startswith(name))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    roles = parser.add_subparsers(dest="role", required=True)
    floor = roles.add_parser("loop")
    floor.add_argument("peers", type=Path)
    floor.add_argument("--channels-last", action="store_true")
    run = roles.add_parser("ours")
    run.add_argument("--wire", action="store_true")
    run.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    figures = (
        loop(options.peers, options.channels_last)
        if options.role == "loop"
        else ours(options.overrides, options.wire)
    )
    sys.stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
