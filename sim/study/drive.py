"""Keeps a crew busy until there is no more work, and ends it cleanly on Ctrl-C."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from fedreuse.sim.study.attempt import CRASH, Committed, Crew, Ended, Job

WAIT_SECONDS = 0.5


class Work(Protocol):
    """Where jobs come from, and who is told what became of them."""

    def next(self) -> Job | None:
        """A job to start now; None if there is none now. What has ended may bring new ones."""
        ...

    def committed(self, event: Committed) -> None: ...

    def ended(self, event: Ended) -> None: ...

    def stopping(self) -> None:
        """No job will be asked for any more; running ones end after their round."""
        ...


def drive(work: Work, crew: Crew) -> bool:
    """Start jobs while there are slots and work; True if interrupted before the end. The crew is closed then.

    SIGINT or SIGTERM once: running jobs end after their round; twice: at once.
    """
    running: set[str] = set()
    interrupted = False
    try:
        with _interrupts() as pressed:
            while True:
                if pressed and not interrupted:
                    interrupted = True
                    crew.stop()
                    work.stopping()
                if len(pressed) > 1:
                    break
                while not interrupted and len(running) < crew.slots and (job := work.next()) is not None:
                    crew.start(job)
                    running.add(job.cell)
                if not running:
                    break
                for event in crew.wait(WAIT_SECONDS):
                    if isinstance(event, Committed):
                        work.committed(event)
                    else:
                        running.discard(event.cell)
                        if interrupted and event.type == CRASH:  # Ctrl-C may reach a process that only begins
                            event = Ended(event.cell, "stopped")
                        work.ended(event)
    finally:
        crew.close()
    return interrupted


@contextmanager
def _interrupts() -> Iterator[list[float]]:
    """A list that gets the time of every SIGINT or SIGTERM, in place of what these do."""
    pressed: list[float] = []
    before = {
        number: signal.signal(number, lambda *_: pressed.append(time.monotonic()))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield pressed
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
