"""A study's folder: the frozen plan, the cells as ordinary run folders, and what failed.

    study.yaml       the definition as resolved, the SHA-256 of its content, when it was frozen, what was added since
    cells/<id>/      run folders, as `fedreuse sim` makes them
    failures.jsonl   a line for every failed attempt: cell, time, attempt, type, sentence
    lock             held while a command runs the study

The definition is frozen at the first run. Later runs may add cells by new levels of a factor; that is recorded with
its date. Seeds, comparison, margin, target and the cells there are cannot be changed: they are what makes the
outcome evidence. A study with more seeds is another study.
"""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import yaml

from fedreuse.server.store import RunError
from fedreuse.sim.config import ConfigError
from fedreuse.sim.folder import CONFIG, SUMMARY, read_config
from fedreuse.sim.study.failures import Failure, read_failures, record_failure
from fedreuse.sim.study.frozen import check_run, digest, exclusively, replace
from fedreuse.sim.study.plan import Cell, StudyPlan, differences, identity, parse_plan

STUDY = "study.yaml"
CELLS = "cells"

_FROZEN = ("seeds", "wire", "compare", "target")


@dataclass(frozen=True)
class State:
    """How far a cell is: `rounds` are in its tables; `failure` is its last one, if it is not complete."""

    kind: Literal["complete", "part", "failed", "missing"]
    rounds: int = 0
    failure: Failure | None = None


@dataclass(frozen=True)
class Addition:
    """Cells that were added after the study was frozen, by name."""

    at: str
    cells: tuple[str, ...]


@dataclass(frozen=True)
class Study:
    """A study folder. `frozen` is when the definition was fixed; times are UTC, ISO 8601."""

    folder: Path
    plan: StudyPlan
    cells: dict[str, Cell]
    sha256: str
    frozen: str
    additions: tuple[Addition, ...] = ()

    @classmethod
    def open(cls, folder: Path) -> Study:
        """An existing study. Raises RunError if there is none, or its definition was changed by hand."""
        path = folder / STUDY
        if not path.exists():
            raise RunError(f"{folder} is not a study folder: it has no {STUDY}")
        try:
            content = yaml.safe_load(path.read_text(encoding="utf-8"))
            definition, record = content["definition"], content["frozen"]
            if record["sha256"] != digest(definition):
                raise RunError(f"{path}: the definition was changed after it was frozen; restore it")
            additions = tuple(Addition(a["at"], tuple(a["cells"])) for a in content["added"])
            plan = parse_plan(definition, str(path))
            return cls(folder, plan, plan.cells(), record["sha256"], record["at"], additions)
        except (yaml.YAMLError, UnicodeDecodeError, KeyError, TypeError, ConfigError) as error:
            raise RunError(f"{path} cannot be used: {error!r}; restore the file") from None

    @classmethod
    def of(cls, plan: StudyPlan, folder: Path) -> Study:
        """The study of a plan in `folder`, nothing written.

        Raises RunError if the folder holds a definition of which the plan changes more than adding cells.
        """
        now = datetime.now(UTC).isoformat(timespec="seconds")
        cells, sha256 = plan.cells(), digest(plan.model_dump(mode="json"))
        if not (folder / STUDY).exists():
            return cls(folder, plan, cells, sha256, now)
        old = cls.open(folder)
        if old.plan == plan:
            return old
        added = _added(old, plan, cells)
        additions = (*old.additions, Addition(now, added)) if added else old.additions
        return cls(folder, plan, cells, sha256, old.frozen, additions)

    @classmethod
    def freeze(cls, plan: StudyPlan, folder: Path) -> Study:
        """As `of`, and the definition is written down unless it is there already."""
        study = cls.of(plan, folder)
        if not (folder / STUDY).exists() or cls.open(folder) != study:
            study._write()
        return study

    def _write(self) -> None:
        content = {
            "frozen": {"sha256": self.sha256, "at": self.frozen},
            "added": [{"at": a.at, "cells": list(a.cells)} for a in self.additions],
            "definition": self.plan.model_dump(mode="json"),
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        replace(self.folder / STUDY, yaml.safe_dump(content, sort_keys=False, width=110))

    def path(self, cell: Cell) -> Path:
        """The cell's run folder."""
        return self.folder / CELLS / cell.id

    def state(self, cell: Cell, failures: dict[str, Failure]) -> State:
        """How far a cell is. Raises RunError if its folder holds another run."""
        path, failure = self.path(cell), failures.get(cell.id)
        if not (path / CONFIG).exists():
            return State("failed", failure=failure) if failure else State("missing")
        body = "sim --wire" if self.plan.wire else "sim"
        check_run(path, read_config(path), cell.config, body, "study")
        rounds = count_rounds(path)
        if (path / SUMMARY).exists():
            return State("complete", rounds)
        return State("failed", rounds, failure) if failure else State("part", rounds)

    def states(self) -> dict[str, State]:
        """How far every cell is. Raises RunError if a cell's folder holds another run."""
        failures = {failure.cell: failure for failure in self.failures()}
        return {name: self.state(cell, failures) for name, cell in self.cells.items()}

    def failures(self) -> list[Failure]:
        """All failed attempts, oldest first. Raises RunError for a damaged file."""
        return read_failures(self.folder)

    def record_failure(self, cell: Cell, type: str, sentence: str) -> Failure:
        """Write down that an attempt at a cell failed."""
        return record_failure(self.folder, cell.id, type, sentence)

    def strangers(self) -> list[str]:
        """Folders among the cells that belong to no cell of the study."""
        cells = self.folder / CELLS
        return sorted(p.name for p in cells.iterdir() if p.name not in self.cells) if cells.is_dir() else []

    def exclusively(self) -> AbstractContextManager[None]:
        """One command at a time runs a study. Raises RunError if another one does."""
        return exclusively(self.folder)


def _added(old: Study, plan: StudyPlan, cells: dict[str, Cell]) -> tuple[str, ...]:
    """The cells that a plan adds to a frozen study. Raises RunError if it changes anything else."""
    changes = []
    for key in _FROZEN:
        before, after = (getattr(one, key) for one in (old.plan, plan))
        if key == "seeds":
            before, after = set(before), set(after)
        if before != after:
            changes.append(f"{key} was {_shown(before)}, is now {_shown(after)}")
    if not changes:
        for name, cell in old.cells.items():
            if name not in cells:
                changes.append(f"cell {name} is gone")
            else:
                found = differences(identity(cell.config), identity(cells[name].config))
                changes += [f"{key} of cell {name} was {a!r}, is now {b!r}" for key, a, b in found]
    if changes:
        raise RunError(
            f"{old.folder} was frozen on {old.frozen} and only cells can be added to it: "
            + "; ".join(changes[:3])
            + (f"; and {len(changes) - 3} more" if len(changes) > 3 else "")
            + ". Restore the file, or give the study another name"
        )
    return tuple(name for name in cells if name not in old.cells)


def _shown(value: Any) -> str:
    dumped = value.model_dump(exclude_none=True) if hasattr(value, "model_dump") else value
    return json.dumps(sorted(dumped) if isinstance(dumped, set) else dumped)


def count_rounds(path: Path) -> int:
    """Complete lines of rounds.csv but the header; a round that was not committed may be among them."""
    table = path / "rounds.csv"
    return max(0, table.read_bytes().count(b"\n") - 1) if table.exists() else 0
