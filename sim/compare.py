"""Runs side by side: bytes by direction, kind and layer, savings, reuse, accuracy; `tables` prints it.

Bytes are added up from bytes.csv alone, by the rules of `sums`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fedreuse.proto import modelled
from fedreuse.proto.ledger import CONNECTION_LAYERS, MESSAGE_LAYERS, Direction, Layer, MessageLayer
from fedreuse.proto.schema import Schema
from fedreuse.server.outcome import CAUSES
from fedreuse.server.store import RunError
from fedreuse.server.weights import load_model
from fedreuse.sim import remarks
from fedreuse.sim.behind import Behind, read_behind
from fedreuse.sim.config import RunConfig
from fedreuse.sim.export import to_csv, to_json
from fedreuse.sim.folder import (
    INITIAL,
    SUMMARY,
    check_ending,
    damage,
    read_body,
    read_config,
    repair,
)
from fedreuse.sim.records import read_rounds
from fedreuse.sim.remarks import Absence
from fedreuse.sim.reuse import Ceiling, Scores, ceiling, score_histogram
from fedreuse.sim.summary import summarise
from fedreuse.sim.sums import WAYS, Body, Connections, Cost, Entry, read_bodies, read_sums, total
from fedreuse.sim.testset import read_examined

__all__ = ["Comparison", "Run", "compare", "to_csv", "to_json"]

COUNTS = ("fresh", *CAUSES, "reused", "fault", "bridged")
WITH_BODY = ("update", "model")
"""Kinds whose length is that of their body; all others are control messages."""


# ---------------------------------------------------------------- what is compared


@dataclass(frozen=True)
class Run:
    """One run after its `rounds` committed rounds. `selected` sums m over them, `dense_bytes` is B_0.

    `name` is unique in its comparison. `clients` says what became of the selected clients: fresh and its
    causes, reused, fault and, of these, bridged (the cached update stood in). `partial` names directions and
    layers that were observed for some messages only, `partial_connections` for some rows of connections only,
    and which therefore count as absent. `body` is the command that ran it, if the folder says so; `bodies` is
    None in folders without tensors.csv. `behind` has the models sent by how far their clients were behind.
    `macro` is the mean over clients of their test accuracies, `fairness` how even these are; None where absent.
    """

    name: str
    config: RunConfig
    body: str | None
    schema: Schema
    finished: bool
    rounds: int
    selected: int
    dense_bytes: int
    validation: float | None
    test: float | None
    macro: float | None
    fairness: Mapping[str, float] | None
    clients: Mapping[str, int]
    entries: tuple[Entry, ...]
    connections: Mapping[Direction, Connections]
    bodies: tuple[Body, ...] | None
    behind: tuple[Behind, ...]
    partial: tuple[str, ...]
    partial_connections: tuple[str, ...]
    ceiling: Ceiling | None
    scores: Scores | None

    def bytes(self, *ways: Direction) -> dict[MessageLayer, int | None]:
        """Bytes of one direction or of several together, lost and refused messages included."""
        totals = [total(e for e in self.entries if e.direction == way) for way in ways]
        result: dict[MessageLayer, int | None] = {}
        for layer in MESSAGE_LAYERS:
            observed = [value for t in totals if (value := t[layer]) is not None]
            result[layer] = sum(observed) if len(observed) == len(ways) else None
        return result

    def measured(self, *ways: Direction) -> dict[Layer, int | None]:
        """All layers of one direction or of several together; below gRPC by the rule of connections."""
        result: dict[Layer, int | None] = {layer: count for layer, count in self.bytes(*ways).items()}
        there = [self.connections[way] for way in ways]
        for layer in CONNECTION_LAYERS:
            # Where a direction is encrypted throughout and the other is not, neither layer has a whole.
            found = [value for one in there if (value := one.layer(layer)) is not None]
            result[layer] = sum(found) if len(found) == len(ways) else None
        return result

    def applies(self, layer: Layer, *ways: Direction) -> bool:
        """False for tls where nothing was encrypted, and for http2 where everything was."""
        return any(
            name == layer and self.connections[w].applies(name) for name in CONNECTION_LAYERS for w in ways
        )

    def to_modelled(self, count: int | None, *ways: Direction) -> float | None:
        """Bytes in terms of the modelled ones."""
        charge = self.bytes(*ways)["modelled"]
        return None if count is None or not charge else count / charge

    def to_dense(self, count: int | None, *ways: Direction) -> float | None:
        """Bytes in terms of m B_0 a direction."""
        dense = len(ways) * self.selected * self.dense_bytes
        return None if count is None or not dense else count / dense

    def costs(self) -> list[Cost]:
        """What control messages come to on the wire, kind by kind."""
        result = []
        for way, kind in dict.fromkeys((e.direction, e.kind) for e in self.entries if e.messages):
            if kind not in WITH_BODY:
                mine = [e for e in self.entries if (e.direction, e.kind) == (way, kind) and e.messages]
                count, sums = sum(e.messages for e in mine), total(mine)
                message, grpc = (None if n is None else n / count for n in (sums["message"], sums["grpc"]))
                paper = modelled.REUSE_EVENT_BYTES if kind == "reuse_notice" else 0
                result.append(Cost(way, kind, count, message, grpc, paper))
        return result

    @property
    def absences(self) -> tuple[Absence, ...]:
        return remarks.absences(self, self.body)

    @property
    def reuse_fraction(self) -> float | None:
        return self.clients["reused"] / self.selected if self.selected else None

    def uplink_saving(self) -> dict[MessageLayer, float | None]:
        """Eq. 15, layer by layer; always against m B_0, the modelled dense bytes."""
        return self._saving(modelled.uplink_saving, "up")

    def symmetric_saving(self) -> dict[MessageLayer, float | None]:
        """Eq. 16, layer by layer; always against 2 m B_0."""
        return self._saving(modelled.symmetric_saving, "up", "down")

    def _saving(
        self, rule: Callable[[int, int, int], float], *ways: Direction
    ) -> dict[MessageLayer, float | None]:
        m, dense = self.selected, self.dense_bytes
        sums = self.bytes(*ways)
        return {layer: None if n is None or not m else rule(n, m, dense) for layer, n in sums.items()}


@dataclass(frozen=True)
class Comparison:
    """`warnings` say what does not compare, `notes` what else a reader should know."""

    runs: tuple[Run, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]


# ---------------------------------------------------------------- reading a run


def compare(folders: Sequence[Path]) -> Comparison:
    """Read runs, finished or not. Raises RunError naming the file that is missing or damaged."""
    if not folders:
        raise RunError("nothing to compare; name one or more run folders")
    places = [folder.resolve() for folder in folders]
    if len(set(places)) < len(places):
        raise RunError("a run folder is named twice; name each run once")
    short = Counter(place.name for place in places)
    names = [p.name if short[p.name] == 1 else str(f) for p, f in zip(places, folders, strict=True)]
    runs = tuple(_read_run(folder, name) for folder, name in zip(folders, names, strict=True))
    return Comparison(runs, tuple(remarks.warnings(runs)), tuple(remarks.notes(runs)))


def _read_run(folder: Path, name: str) -> Run:
    config = _read_config(folder)
    schema, _ = load_model(folder / INITIAL)
    committed = _count_rounds(folder)
    finished = (folder / SUMMARY).exists()
    summary = _read_summary(folder) if finished else _live_summary(folder, config)
    rounds = summary["rounds"]
    sums = read_sums(folder, None if finished else rounds)
    if finished:
        _check(folder / "rounds.csv", rounds == committed)
        # Older summaries have fewer layers.
        found = {way: sums.layers(way).items() for way in WAYS}
        _check(folder / "bytes.csv", all(summary[f"{way}link"].items() <= found[way] for way in WAYS))
    clients = {key: summary["reuse"][key] for key in COUNTS}
    clients["always"] = clients["fresh"] - sum(clients[cause] for cause in CAUSES)
    return Run(
        name,
        config,
        _read_body(folder),
        schema,
        finished,
        rounds,
        selected=summary["selected"],
        dense_bytes=summary["dense_bytes"],
        validation=summary["accuracy"]["validation"],
        test=summary["accuracy"]["test"],
        macro=summary.get("test", {}).get("macro_accuracy"),  # older summaries have neither
        fairness=None if "mean" not in (even := summary.get("fairness", {})) else even,
        clients=clients,
        entries=sums.entries,
        connections=sums.connections,
        bodies=read_bodies(folder, rounds),
        behind=read_behind(folder, rounds),
        partial=sums.partial,
        partial_connections=sums.partial_connections,
        ceiling=ceiling(config, schema, rounds) if rounds and config.gate.kind != "none" else None,
        scores=score_histogram(folder, rounds=rounds) if config.gate.kind == "score" else None,
    )


def _read_config(folder: Path) -> RunConfig:
    try:
        return read_config(folder)
    except (yaml.YAMLError, OSError) as error:
        raise RunError(f"{folder / 'config.yaml'} cannot be read: {error}; restore the file") from None


def _read_body(folder: Path) -> str | None:
    """Older folders, and those put together by hand, do not say what ran them."""
    try:
        return read_body(folder)
    except RunError:
        return None


def _count_rounds(folder: Path) -> int:
    path = folder / "rounds.csv"
    with damage(path, repair(folder)):
        rows = read_rounds(folder)
        check_ending(path)
        for n, row in enumerate(rows, 1):
            for column in ("selected", *COUNTS):
                int(row[column])
            float(row["validation_accuracy"] or 0)
            if int(row["round"]) != n:
                raise ValueError(f"round {row['round']} in place of {n}")
        return len(rows)


def _read_summary(folder: Path) -> dict[str, Any]:
    """The summary of a finished run, with everything in it that is used here."""
    with damage(folder / SUMMARY, "remove it to have everything computed anew"):
        summary: dict[str, Any] = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
        numbers = [summary[key] for key in ("rounds", "selected", "dense_bytes")]
        numbers += [summary["reuse"][key] for key in COUNTS]
        if not all(isinstance(number, int) for number in numbers):
            raise ValueError("a count is not an integer")
        _ = [summary["accuracy"][key] for key in ("validation", "test")]
        _ = [summary[f"{way}link"][layer] for way in WAYS for layer in MESSAGE_LAYERS]
        return summary


def _live_summary(folder: Path, config: RunConfig) -> dict[str, Any]:
    with damage(folder / "bytes.csv", repair(folder)):
        return summarise(folder, config, read_examined(folder))


def _check(path: Path, agrees: bool) -> None:
    if not agrees:
        raise RunError(
            f"{path} does not add up to what {SUMMARY} says; restore the one that was changed, or remove "
            f"{SUMMARY} to have everything computed anew"
        )
