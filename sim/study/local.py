"""Cells as processes of this machine, one process each, so that a crash is one cell's alone."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Thread

from fedreuse.sim.pool import PRELOADED
from fedreuse.sim.study.attempt import CRASH, Committed, Ended, Job, Stopped, attempt, death
from fedreuse.sim.worker import leave_with_parent

STOP = "stop"


@dataclass
class _Running:
    process: BaseProcess
    pipe: Connection


class LocalCrew:
    """`slots` processes, forked from a server that has torch loaded already.

    logs: a folder for what the processes print, by cell.
    """

    def __init__(self, slots: int, logs: Path) -> None:
        self.slots = slots
        self._logs = logs
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)
        self._running: dict[str, _Running] = {}

    def start(self, job: Job) -> None:
        self._logs.mkdir(parents=True, exist_ok=True)
        pipe, theirs = self._context.Pipe()
        log = self._logs / f"{job.cell}.log"
        process = self._context.Process(target=_work, args=(job, theirs, log), name=job.cell)
        process.start()
        theirs.close()
        self._running[job.cell] = _Running(process, pipe)

    def wait(self, seconds: float) -> list[Committed | Ended]:
        wait([one for r in self._running.values() for one in (r.pipe, r.process.sentinel)], seconds)
        events: list[Committed | Ended] = []
        for cell, running in list(self._running.items()):
            gone = not running.process.is_alive()  # before its last words are read, not after
            said = _said(running.pipe)
            events += said
            if gone:
                running.process.join()
                code = running.process.exitcode
                if not any(isinstance(event, Ended) for event in said):
                    events.append(Ended(cell, "failed", CRASH, death(code or 0)))
                self._forget(cell)
            elif any(isinstance(event, Ended) for event in said):
                running.process.join()
                self._forget(cell)
        return events

    def _forget(self, cell: str) -> None:
        self._running.pop(cell).pipe.close()
        log = self._logs / f"{cell}.log"
        if log.exists() and not log.stat().st_size:
            log.unlink()

    def stop(self) -> None:
        for running in self._running.values():
            try:
                running.pipe.send(STOP)
            except OSError:
                continue  # it has ended

    def close(self) -> None:
        for running in self._running.values():
            running.process.kill()
        for cell, running in list(self._running.items()):
            running.process.join()
            self._forget(cell)


def _said(pipe: Connection) -> list[Committed | Ended]:
    """All that a process has sent so far."""
    events: list[Committed | Ended] = []
    try:
        while pipe.poll():
            events.append(pipe.recv())
    except (EOFError, OSError):
        pass  # it has gone; its exit status says how
    return events


def _work(job: Job, pipe: Connection, log: Path) -> None:
    """A cell's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches everybody; the runner decides
    Thread(target=leave_with_parent, daemon=True).start()
    with log.open("ab", buffering=0) as handle:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(handle.fileno(), stream.fileno())
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)-7s %(name)s: %(message)s")

    def committed(rounds: int) -> None:
        pipe.send(Committed(job.cell, rounds))
        if pipe.poll():
            raise Stopped

    ended = attempt(job, committed)
    pipe.send(ended)
