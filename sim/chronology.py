"""What events.jsonl says of committed rounds: the work that clients did, and how old what was aggregated was."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedreuse.server.store import RunError
from fedreuse.sim.folder import damage, repair
from fedreuse.sim.records import read_rounds


@dataclass(frozen=True)
class Work:
    """By client: trainings whose updates arrived, and scores that cost a proxy gradient."""

    trained: Mapping[int, int]
    scored: Mapping[int, int]


@dataclass(frozen=True)
class Staleness:
    """Age in rounds of the updates that were aggregated: 0 for a fresh one, for a cached one the rounds since.

    Every contribution counts alike, also a cached update that stood in for a client that failed.
    """

    contributions: int
    mean: float
    max: int


def committed_rounds(folder: Path) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Rounds (from 1) with their events, the last attempt of each only. Raises RunError."""
    path = folder / "events.jsonl"
    if not path.exists():
        raise RunError(f"{path} is missing; restore the file")
    open_: list[dict[str, Any]] = []
    with damage(path, repair(folder)), path.open(encoding="utf-8") as handle:
        for event in map(json.loads, handle):
            if event["type"] == "round_opened":
                open_ = []  # what a round saw that was broken off and done again is forgotten
            open_.append(event)
            if event["type"] == "committed":
                yield int(event["round"]), open_
                open_ = []


def work(folder: Path) -> Work:
    """What the clients of a run computed in its committed rounds. Raises RunError."""
    trained: Counter[int] = Counter()
    scored: Counter[int] = Counter()
    with damage(folder / "events.jsonl", repair(folder)):
        for _, events in committed_rounds(folder):
            for event in events:
                if event["type"] == "update":
                    trained[int(event["client"])] += 1
                elif event["type"] == "score" and event["signature_round"] is not None:
                    scored[int(event["client"])] += 1
    return Work(trained, scored)


def staleness(folder: Path) -> Staleness | None:
    """Of everything aggregated so far; None if nothing was. Raises RunError."""
    void = {int(row["round"]) for row in read_rounds(folder) if row.get("void")}
    ages: Counter[int] = Counter()
    cached: dict[int, int] = {}
    with damage(folder / "events.jsonl", repair(folder)):
        for round, events in committed_rounds(folder):
            if round in void:
                continue  # nothing was aggregated, and nothing cached
            fresh = [int(event["client"]) for event in events if event["type"] == "update"]
            ages[0] += len(fresh)
            for event in events:
                if event["type"] == "reuse":
                    ages[int(event["age"])] += 1
                elif event["type"] == "fault" and event["bridged"]:
                    ages[round - cached[int(event["client"])]] += 1
            cached.update(dict.fromkeys(fresh, round))
    count = ages.total()
    if not count:
        return None
    return Staleness(count, sum(age * n for age, n in ages.items()) / count, max(+ages))
