"""How much the gate had to decide: the always-reuse ceiling of a schedule, and the scores it saw."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedreuse.proto import modelled
from fedreuse.proto.schema import Schema
from fedreuse.proto.streams import cohort
from fedreuse.server.round import Round, State, Train
from fedreuse.server.store import RunError
from fedreuse.sim.config import RunConfig
from fedreuse.sim.folder import damage, repair

BINS = 10


@dataclass(frozen=True)
class Ceiling:
    """What a gate that never fires would give on the same schedule without faults; two fractions."""

    reuse_fraction: float
    uplink_saving: float


@dataclass(frozen=True)
class Scores:
    """The discrepancies D that clients sent, over [0, 2].

    `edges` bound the bins of `counts`. `quartiles` are minimum, three quartiles and maximum; empty without
    scores. `below` and `reached` compare each D with the threshold of its own round.
    """

    edges: tuple[float, ...]
    counts: tuple[int, ...]
    quartiles: tuple[float, ...]
    below: int
    reached: int


def always_reuse_ceiling(config: RunConfig, rounds: int) -> float:
    """The fraction of selected clients that is reused if no score ever reaches the threshold.

    Same seed and so the same cohorts, same quota and age limit, no faults, no training: the round machine
    itself decides, with its gate "age", for which D = 0. Raises ValueError for less than one round.
    """
    if rounds < 1:
        raise ValueError(f"{rounds} rounds; a ceiling needs one or more")
    settings = config.federation()
    gate = settings.gate.model_copy(update={"kind": "age"})
    caches: dict[int, int] = {}
    reused = 0
    for number in range(rounds):
        selected = cohort(settings.seed, number, settings.total, settings.per_round)
        round = Round[None](number, selected, gate, settings.memory, caches, minimum=settings.minimum)
        for command in round.start():
            if isinstance(command, Train):
                round.update(command.client, number, None)
        fresh = [client for client, seat in round.seats.items() if seat.state is State.FRESH]
        reused += len(selected) - len(fresh)
        if settings.memory.kind != "none" and round.contributions():
            caches.update(dict.fromkeys(fresh, number))
    return reused / (rounds * settings.per_round)


def ceiling(config: RunConfig, schema: Schema, rounds: int) -> Ceiling:
    reuse = always_reuse_ceiling(config, rounds)
    tensors = [(t.size, t.width) for t in schema.tensors]
    fresh = modelled.update_bytes(tensors, config.compressor.keep_ratio)
    mean = (1 - reuse) * fresh + reuse * modelled.REUSE_EVENT_BYTES
    return Ceiling(reuse, 1 - mean / modelled.dense_bytes(tensors))


def score_histogram(folder: Path, bins: int = BINS, rounds: int | None = None) -> Scores:
    """How the scores of a run (or of its first `rounds`) are spread, and how many reached their threshold.

    Where a round was broken off and done again, its last scores count. Raises RunError.
    """
    path = folder / "events.jsonl"
    if not path.exists():
        raise RunError(f"{path} is missing; restore the file")
    thresholds: dict[int, float] = {}
    found: dict[tuple[int, int], float] = {}
    with damage(path, repair(folder)), path.open(encoding="utf-8") as handle:
        for event in map(json.loads, handle):
            round = event["round"]
            if rounds is not None and round > rounds:
                continue
            if event["type"] == "round_opened":
                thresholds[round] = event["threshold"]
            elif event["type"] == "score":
                found[round, event["client"]] = event["score"]
        reached = sum(score >= thresholds[round] for (round, _), score in found.items())
    scores = list(found.values())
    counts, edges = np.histogram(scores, bins, range=(0, 2))
    quartiles = np.quantile(scores, [0, 0.25, 0.5, 0.75, 1]).tolist() if scores else []
    below = len(scores) - reached
    return Scores(tuple(edges.tolist()), tuple(counts.tolist()), tuple(quartiles), below, reached)
