"""Time, CPU seconds and memory of a server and its clients, read from inside the server (Linux only)."""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class Meter:
    """`mark` is called at the end of every round, the last time while the clients still run."""

    def __init__(self, clients: Sequence[int]) -> None:
        self._clients = clients
        self._clocks = [_cpu_clock(pid) for pid in clients]
        self._marks: list[tuple[float, float, float]] = []
        self._peaks: dict[str, int] = {}

    def mark(self, *, last: bool) -> None:
        clients = sum(map(time.clock_gettime, self._clocks))
        self._marks.append((time.monotonic(), time.process_time(), clients))
        if last:
            self._peaks = {"server_rss": _peak(os.getpid()), "client_rss": sum(map(_peak, self._clients))}

    def results(self) -> dict[str, Any]:
        """Seconds from mark to mark (the first round, which connects and imports, is not among them), and
        peak resident bytes of the server and of all clients together."""
        pairs = list(zip(self._marks, self._marks[1:], strict=False))
        columns = enumerate(("wall", "server_cpu", "client_cpu"))
        rounds = {name: [after[i] - before[i] for before, after in pairs] for i, name in columns}
        return {**rounds, **self._peaks}


def meet(address: str) -> Meter:
    """Tell the benchmark where this server listens, and learn its clients' process numbers."""
    tell({"address": address})
    return Meter(json.loads(sys.stdin.readline()))


def tell(facts: dict[str, Any]) -> None:
    """One line to the benchmark."""
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def _cpu_clock(pid: int) -> int:
    """The clock of another process's CPU time: all its threads, in nanoseconds."""
    clock = ctypes.c_int()
    if error := ctypes.CDLL(None).clock_getcpuclockid(pid, ctypes.byref(clock)):
        raise OSError(error, f"no CPU clock of process {pid}")
    return clock.value


def _peak(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")) * 1024
