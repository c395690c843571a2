"""Runs the cells of a study that are not complete, and says what came of it."""

from __future__ import annotations

import signal
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from fedreuse.server.store import RunError
from fedreuse.sim.records import read_rounds
from fedreuse.sim.study.attempt import CRASH, Committed, Crew, Ended, Job
from fedreuse.sim.study.folder import Failure, State, Study
from fedreuse.sim.study.pairing import unpaired
from fedreuse.sim.study.plan import Cell

WAIT_SECONDS = 0.5


class View(Protocol):
    """Who watches a study being run."""

    def started(self, cell: Cell) -> None: ...

    def committed(self, cell: Cell, rounds: int) -> None: ...

    def ended(self, cell: Cell, outcome: str, failure: Failure | None) -> None: ...

    def stopping(self) -> None: ...


class Pace:
    """What a round of each group of cells takes, in seconds: from the rounds there are, then from those watched."""

    def __init__(self, study: Study, states: dict[str, State]) -> None:
        self._seconds: dict[tuple[str, ...], float] = defaultdict(float)
        self._rounds: dict[tuple[str, ...], int] = defaultdict(int)
        self._last: dict[str, float] = {}
        for name, state in states.items():
            cell = study.cells[name]
            if state.rounds:
                for row in read_rounds(study.path(cell)):
                    self.add(cell, float(row["seconds"] or 0))

    def add(self, cell: Cell, seconds: float) -> None:
        """A round of a cell took so long."""
        self._seconds[cell.group] += seconds
        self._rounds[cell.group] += 1

    def round(self, cell: Cell) -> float | None:
        """Seconds; None while nothing is known of the cell's group."""
        rounds = self._rounds.get(cell.group)
        return self._seconds[cell.group] / rounds if rounds else None

    def left(self, cells: list[tuple[Cell, int]], slots: int) -> float | None:
        """Seconds for cells with so many rounds left, on `slots` processes; None while nothing at all is known.

        A group of which nothing is known is taken for an average one.
        """
        rounds = sum(self._rounds.values())
        if not rounds:
            return None
        mean = sum(self._seconds.values()) / rounds
        each = [n * (self.round(cell) or mean) for cell, n in cells]
        return max(sum(each) / max(1, slots), *each) if each else 0.0


@dataclass
class Outcome:
    """`states` after the run, by cell; `unpaired` says which cells break the pairing."""

    states: dict[str, State]
    unpaired: list[str] = field(default_factory=list)
    interrupted: bool = False

    @property
    def counts(self) -> Counter[str]:
        return Counter(state.kind for state in self.states.values())

    @property
    def complete(self) -> bool:
        return self.counts["complete"] == len(self.states) and not self.unpaired


def in_order(study: Study, states: dict[str, State], pace: Pace) -> list[Cell]:
    """What is still to be run: seed by seed, so that seeds become complete early; longest first within a seed."""
    seeds = {seed: n for n, seed in enumerate(study.plan.seeds)}
    waiting = [study.cells[name] for name, state in states.items() if state.kind != "complete"]

    def key(cell: Cell) -> tuple[int, float]:
        left = cell.config.rounds - states[cell.id].rounds
        return seeds[cell.seed], -left * (pace.round(cell) or 0.0)

    return sorted(waiting, key=key)


def job_of(study: Study, cell: Cell, device: str, data: Path | None) -> Job:
    """How a cell is run: in its folder, in one process unless the study says otherwise."""
    sim = cell.config.sim
    update: dict[str, Any] = {"output": study.path(cell)}
    if sim.workers is None:
        update["sim"] = sim.model_copy(update={"workers": 1})
    if data is not None:
        update["data"] = data
    return Job(cell.id, cell.config.model_copy(update=update), study.plan.wire, device, data)


def run_study(
    study: Study, crew: Crew, view: View, pace: Pace, *, device: str = "cpu", data: Path | None = None
) -> Outcome:
    """Run everything that is not complete; failed cells are tried once more. The folder must be held exclusively.

    SIGINT or SIGTERM once: running cells end after their round; twice: at once.
    Raises RunError for folders that cannot be used.
    """
    waiting = in_order(study, study.states(), pace)
    running: dict[str, Cell] = {}
    interrupted = False
    try:
        with _interrupts() as pressed:
            while waiting or running:
                if pressed and not interrupted:
                    interrupted = True
                    waiting.clear()
                    crew.stop()
                    view.stopping()
                if len(pressed) > 1:
                    break
                while waiting and len(running) < crew.slots:
                    cell = waiting.pop(0)
                    running[cell.id] = cell
                    crew.start(job_of(study, cell, device, data))
                    view.started(cell)
                for event in crew.wait(WAIT_SECONDS):
                    cell = study.cells[event.cell]
                    if isinstance(event, Committed):
                        view.committed(cell, event.rounds)
                    else:
                        del running[cell.id]
                        if interrupted and event.type == CRASH:  # Ctrl-C may reach a process that only begins
                            event = Ended(cell.id, "stopped")
                        _end(study, cell, event, view)
    finally:
        crew.close()
    states = study.states()
    complete = [name for name, state in states.items() if state.kind == "complete"]
    return Outcome(states, unpaired(study, complete), interrupted)


def _end(study: Study, cell: Cell, event: Ended, view: View) -> None:
    failure = None
    if event.outcome == "failed":
        failure = study.record_failure(cell, event.type, event.sentence)
    view.ended(cell, event.outcome, failure)


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


def check_folders(study: Study) -> list[str]:
    """A sentence for every cell whose folder cannot be used."""
    conflicts = []
    failures = {failure.cell: failure for failure in study.failures()}
    for cell in study.cells.values():
        try:
            study.state(cell, failures)
        except RunError as error:
            conflicts.append(str(error))
    return conflicts


def to_json(study: Study, outcome: Outcome) -> dict[str, Any]:
    """What a run of a study came to."""
    return {
        "study": study.plan.name,
        "folder": str(study.folder),
        "sha256": study.sha256,
        "frozen": study.frozen,
        "complete": outcome.complete,
        "interrupted": outcome.interrupted,
        "counts": dict(outcome.counts),
        "unpaired": outcome.unpaired,
        "cells": [
            {
                "cell": name,
                **study.cells[name].factors,
                "seed": study.cells[name].seed,
                "state": state.kind,
                "rounds": state.rounds,
                "of": study.cells[name].config.rounds,
                "failure": vars(state.failure) if state.failure else None,
            }
            for name, state in outcome.states.items()
        ],
    }
