"""What the report needs of a run beyond its sums: the same things round by round and client by client."""

from __future__ import annotations

import csv
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, Literal, get_args

from fedreuse.proto.ledger import CONNECTION, Direction
from fedreuse.sim.compare import Run
from fedreuse.sim.folder import check_ending, damage, repair
from fedreuse.sim.records import read_rounds, read_rows
from fedreuse.sim.sums import TENSORS, WAYS

Stage = Literal["modelled", "payload", "message", "grpc", "socket", "tcp_payload", "ip"]
"""A layer in bytes; `socket` is http2 or tls, whichever a connection had."""
STAGES: tuple[Stage, ...] = get_args(Stage)
MEASURED = STAGES[1:]
CLAUSES = ("cacheless", "age", "threshold", "quota", "always", "reused", "fault")
"""Why a selected client trained, and what became of those that did not; together they are the cohort."""
FATES = ("fresh", "reused", "fault", "bridged")
"""What became of a selected client; `bridged`: it failed, and its cached update stood in."""


@dataclass(frozen=True)
class Score:
    """A discrepancy D that a client sent, and the threshold of its round."""

    round: int
    client: int
    score: float
    threshold: float


@dataclass(frozen=True)
class TensorShare:
    """A tensor (or several coded together) over all bodies of one direction that were coded alike.

    `stored` counts values, the rest bytes.
    """

    direction: Direction
    tensors: str
    modes: str
    index_coding: str
    value_coding: str
    bodies: int
    stored: int
    modelled: int
    index_bytes: int
    value_bytes: int


@dataclass(frozen=True)
class Chronicle:
    """A run by rounds (from 1; every list has `run.rounds` entries).

    `series` has the bytes of each complete stage in each round; `outside` what belongs to no round (joins,
    heartbeats before the first). `fates` maps round and client to an index of FATES. `shares` is None in
    folders without tensors.csv.
    """

    run: Run
    validation: tuple[float | None, ...]
    seconds: tuple[float | None, ...]
    clauses: Mapping[str, tuple[int, ...]]
    series: Mapping[tuple[Direction, Stage], tuple[int, ...]]
    outside: Mapping[tuple[Direction, Stage], int]
    fates: Mapping[tuple[int, int], int]
    scores: tuple[Score, ...]
    shares: tuple[TensorShare, ...] | None

    def total(self, stage: Stage, *ways: Direction) -> int | None:
        """Bytes of a stage over the run; None where it is not complete in each of `ways`."""
        if any((way, stage) not in self.series for way in ways):
            return None
        return sum(self.outside[way, stage] + sum(self.series[way, stage]) for way in ways)

    def per_round(self, stage: Stage, *ways: Direction) -> list[int] | None:
        if any((way, stage) not in self.series for way in ways):
            return None
        return [sum(parts) for parts in zip(*(self.series[way, stage] for way in ways), strict=True)]

    def cumulative(self, stage: Stage, *ways: Direction) -> list[int] | None:
        """Bytes up to the end of each round, with what belongs to no round from the start."""
        per_round = self.per_round(stage, *ways)
        if per_round is None:
            return None
        sums, so_far = [], sum(self.outside[way, stage] for way in ways)
        for count in per_round:
            so_far += count
            sums.append(so_far)
        return sums


def read_chronicle(folder: Path, run: Run) -> Chronicle:
    """Read a run that `compare` has read before. Raises RunError naming the file that is damaged."""
    with damage(folder / "rounds.csv", repair(folder)):
        rows = read_rounds(folder)[: run.rounds]
        clauses = {name: tuple(int(row.get(name) or 0) for row in rows) for name in CLAUSES}
        validation = tuple(_number(row["validation_accuracy"]) for row in rows)
        seconds = tuple(_number(row.get("seconds", "")) for row in rows)
    series, outside = _series(folder, run)
    fates, scores = _events(folder, run.rounds)
    return Chronicle(
        run, validation, seconds, clauses, series, outside, fates, scores, _shares(folder, run.rounds)
    )


def _number(text: str) -> float | None:
    return _finite(text) if text else None


def _finite(value: str | float) -> float:
    number = float(value)
    if not isfinite(number):
        raise ValueError(f"{value} where a number is due")
    return number


def _series(
    folder: Path, run: Run
) -> tuple[dict[tuple[Direction, Stage], tuple[int, ...]], dict[tuple[Direction, Stage], int]]:
    """Stages that the comparison calls complete, added up by round."""
    complete = {(way, stage) for way in WAYS for stage in STAGES if _complete(run, way, stage)}
    sums: dict[tuple[Direction, Stage], list[int]] = {key: [0] * (run.rounds + 1) for key in complete}
    with damage(folder / "bytes.csv", repair(folder)):
        for row in read_rows(folder):
            if row.round > run.rounds and not run.finished:
                continue
            at = min(row.round, run.rounds)  # closing notices belong to the last round's bytes
            for stage in STAGES:
                if (row.direction, stage) not in complete:
                    continue
                if stage == "socket":
                    value = None if row.kind != CONNECTION else (row.http2 or 0) + (row.tls or 0)
                else:
                    value = getattr(row, stage)
                if value is not None:
                    sums[row.direction, stage][at] += value
    return {key: tuple(s[1:]) for key, s in sums.items()}, {key: s[0] for key, s in sums.items()}


def _complete(run: Run, way: Direction, stage: Stage) -> bool:
    if stage == "socket":
        return run.connections[way].socket is not None
    return run.measured(way)[stage] is not None


def _events(folder: Path, rounds: int) -> tuple[dict[tuple[int, int], int], tuple[Score, ...]]:
    """What became of each selected client, and the scores. What a broken-off round saw is forgotten."""
    fates: dict[tuple[int, int], int] = {}
    scores: dict[tuple[int, int], Score] = {}
    threshold: dict[int, float] = {}
    opened: dict[int, list[int]] = defaultdict(list)
    path = folder / "events.jsonl"
    with damage(path, repair(folder)):
        for event in _lines(path):
            round, kind = int(event["round"]), event["type"]
            if round > rounds:
                continue
            if kind == "round_opened":
                for client in opened[round]:
                    fates.pop((round, client), None)
                    scores.pop((round, client), None)
                opened[round] = [int(client) for client in event["cohort"]]
                threshold[round] = _finite(event["threshold"])
            elif kind == "score":
                client = int(event["client"])
                scores[round, client] = Score(round, client, _finite(event["score"]), threshold[round])
            elif kind in ("update", "reuse", "fault"):
                name = {"update": "fresh", "reuse": "reused", "fault": "fault"}[kind]
                if kind == "fault" and event["bridged"]:
                    name = "bridged"
                fates[round, int(event["client"])] = FATES.index(name)
    return fates, tuple(scores.values())


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if path.exists():
        with path.open(encoding="utf-8") as handle:
            yield from map(json.loads, handle)


def _shares(folder: Path, rounds: int) -> tuple[TensorShare, ...] | None:
    path = folder / TENSORS
    if not path.exists():
        return None
    figures = ("bodies", "stored", "modelled", "index_bytes", "value_bytes")
    sums: dict[tuple[str, ...], Counter[str]] = {}
    with damage(path, repair(folder)), path.open(encoding="utf-8", newline="") as handle:
        for cells in csv.DictReader(handle):
            if int(cells["round"]) > rounds:
                continue
            key = tuple(
                cells[name] for name in ("direction", "tensors", "modes", "index_coding", "value_coding")
            )
            sums.setdefault(key, Counter()).update({name: int(cells[name]) for name in figures})
        check_ending(path)
    return tuple(TensorShare(*key, *(found[n] for n in figures)) for key, found in sums.items())  # type: ignore[arg-type]
