"""Runs the cells of a study that are not complete, and says what came of it."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from fedreuse.server.store import RunError
from fedreuse.sim.records import read_rounds
from fedreuse.sim.study.attempt import Committed, Crew, Ended, Job, job_of
from fedreuse.sim.study.drive import drive
from fedreuse.sim.study.failures import Failure
from fedreuse.sim.study.folder import State, Study
from fedreuse.sim.study.pairing import unpaired
from fedreuse.sim.study.plan import Cell


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


def run_study(
    study: Study, crew: Crew, view: View, pace: Pace, *, device: str = "cpu", data: Path | None = None
) -> Outcome:
    """Run everything that is not complete; failed cells are tried once more. The folder must be held exclusively.

    SIGINT or SIGTERM once: running cells end after their round; twice: at once.
    Raises RunError for folders that cannot be used.
    """
    interrupted = drive(_Cells(study, view, in_order(study, study.states(), pace), device, data), crew)
    states = study.states()
    complete = [name for name, state in states.items() if state.kind == "complete"]
    return Outcome(states, unpaired(study, complete), interrupted)


@dataclass
class _Cells:
    """The work of a study: the cells that wait, in their order."""

    study: Study
    view: View
    waiting: list[Cell]
    device: str
    data: Path | None

    def next(self) -> Job | None:
        if not self.waiting:
            return None
        cell = self.waiting.pop(0)
        self.view.started(cell)
        place = self.study.path(cell)
        return job_of(cell.id, cell.config, place, self.study.plan.wire, self.device, self.data)

    def committed(self, event: Committed) -> None:
        self.view.committed(self.study.cells[event.cell], event.rounds)

    def ended(self, event: Ended) -> None:
        cell, failure = self.study.cells[event.cell], None
        if event.outcome == "failed":
            failure = self.study.record_failure(cell, event.type, event.sentence)
        self.view.ended(cell, event.outcome, failure)

    def stopping(self) -> None:
        self.view.stopping()


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
