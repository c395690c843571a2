"""The paired design: runs that differ in their method alone share the division of examples and who is selected when."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fedreuse.server.store import RunError
from fedreuse.sim.folder import ENVIRONMENT, damage, repair
from fedreuse.sim.study.folder import Study
from fedreuse.sim.study.plan import Cell

_SHARED = {"seed", "task", "clients", "partition"}


def unpaired(study: Study, complete: Iterable[str]) -> list[str]:
    """A sentence for every complete cell that does not share partition or cohorts with the first of its kind.

    Compared are cells of one seed whose configurations agree in task, clients and partition. A partition is known by
    its hash in environment.json (tasks that do not divide examples have none), cohorts by the event log.
    Raises RunError for a damaged folder.
    """
    kinds: dict[str, list[Cell]] = defaultdict(list)
    for name in complete:
        cell = study.cells[name]
        kinds[cell.config.model_dump_json(include=_SHARED)].append(cell)
    sentences = []
    for first, *others in kinds.values():
        partition, cohorts = _partition(study.path(first)), _cohorts(study.path(first))
        for other in others:
            if _partition(study.path(other)) != partition:
                sentences.append(f"{other.id} divides the examples otherwise than {first.id}")
            theirs = _cohorts(study.path(other))
            differing = [n for n in sorted(cohorts.keys() & theirs.keys()) if cohorts[n] != theirs[n]]
            if differing:
                sentences.append(
                    f"{other.id} selects other clients than {first.id} from round {differing[0]} on"
                )
    return sentences


def _partition(folder: Path) -> Any:
    path = folder / ENVIRONMENT
    with damage(path, "restore the file"):
        return json.loads(path.read_text(encoding="utf-8")).get("partition_sha256")


def _cohorts(folder: Path) -> dict[int, list[int]]:
    """The selected clients by round."""
    path = folder / "events.jsonl"
    if not path.exists():
        raise RunError(f"{path} is missing; {repair(folder)}")
    with damage(path, repair(folder)), path.open(encoding="utf-8") as handle:
        return {
            event["round"]: sorted(event["cohort"])
            for event in (json.loads(line) for line in handle if '"round_opened"' in line)
        }
