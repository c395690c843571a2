"""What to beware of when runs are compared: what does not compare, and why a layer is absent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from fedreuse.proto.ledger import CONNECTION_LAYERS, MESSAGE_LAYERS, Direction
from fedreuse.sim.config import RunConfig
from fedreuse.sim.sums import WAYS, Connections, Entry, total

if TYPE_CHECKING:
    from fedreuse.sim.compare import Run

SHARED = ("seed", "task", "clients", "partition", "train", "step", "evaluation", "faults")
PARTS = ("objective", "compressor", "proxy", "gate", "memory")
MOST_REASONS = 5
"""Sentences given for one absent layer; bytes.csv has them all."""


def warnings(runs: Sequence[Run]) -> Iterator[str]:
    """What does not compare at all, and what must not be taken for evidence."""
    for run in runs:
        if run.config.evaluation.archival:
            yield (
                f"{run.name}: archival, its test set was looked at after every evaluation: no evidence for anything"
            )
    tasks = {run.config.task.name for run in runs}
    if len(tasks) > 1 or len({run.schema.hash for run in runs}) > 1:
        yield (
            "different tasks or models: accuracies and bytes do not compare, and each saving is against its "
            "own run's dense model"
        )


def notes(runs: Sequence[Run]) -> Iterator[str]:
    """What else a reader should know."""
    done = _distinct(run.rounds for run in runs)
    if len(done) > 1:
        yield f"different numbers of rounds: {', '.join(done)}"
    differ = _differences([run.config for run in runs])
    if differ:
        yield f"different settings: {'; '.join(differ)}"
    for run in runs:
        if not run.config.evaluation.test:
            yield f"{run.name}: its test set was left closed (evaluation.test=false), as in a search over validation"
        if run.clients["fault"]:
            yield (
                f"{run.name}: {run.clients['fault']} of {run.selected} selected clients failed; no uplink is "
                "charged for them, which raises the savings"
            )
        if run.partial:
            yield f"{run.name}: {', '.join(run.partial)} observed for some messages only, so not added up"
        if run.partial_connections:
            yield (
                f"{run.name}: {', '.join(run.partial_connections)} observed for some rows of connections only, "
                "so not added up"
            )


def _differences(configs: Sequence[RunConfig]) -> list[str]:
    """Settings that are not the same in all runs; a method's parts only where the name is the same."""
    sections = SHARED if len({config.method for config in configs}) > 1 else SHARED + PARTS
    dumps = [config.model_dump(mode="json", exclude={"clients": {"processes"}}) for config in configs]
    result = []
    for section in sections:
        inner = [d[section] if isinstance(d[section], dict) else {"": d[section]} for d in dumps]
        for key in dict.fromkeys(key for values in inner for key in values):
            found = _distinct(values.get(key) for values in inner)
            if len(found) > 1:
                shown = f" ({', '.join(found)})" if sum(map(len, found)) <= 40 else ""
                result.append(f"{section}.{key}".rstrip(".") + shown)
    return result


def _distinct(values: Iterable[Any]) -> list[str]:
    return list(dict.fromkeys("none" if value is None else str(value) for value in values))


# ---------------------------------------------------------------- absent layers


@dataclass(frozen=True)
class Absence:
    """`layers`, each with its direction, are absent for one `reason`."""

    layers: tuple[str, ...]
    reason: str


class Observed(Protocol):
    """What a ledger came to; see `Sums`."""

    @property
    def entries(self) -> tuple[Entry, ...]: ...
    @property
    def connections(self) -> Mapping[Direction, Connections]: ...
    @property
    def partial(self) -> tuple[str, ...]: ...


def absences(ledger: Observed, body: str | None) -> tuple[Absence, ...]:
    """Why layers are absent, each reason once. `body` is the command that ran the run, if known."""
    found: dict[str, list[str]] = {}
    for way in WAYS:
        there = [entry for entry in ledger.entries if entry.direction == way]
        sums = total(there)
        for layer in MESSAGE_LAYERS:
            if there and sums[layer] is None:
                partly = f"{way}link {layer}" in ledger.partial
                reason = "only a part of the messages has it" if partly else _unserialized(body)
                found.setdefault(reason, []).append(f"{way}link {layer}")
        connections = ledger.connections[way]
        for below in CONNECTION_LAYERS:
            if connections.applies(below) and connections.layer(below) is None:
                reason = _reasons(connections.lacking[below]) if connections.rows else _unmetered(body)
                found.setdefault(reason, []).append(f"{way}link {below}")
    return tuple(Absence(tuple(layers), reason) for reason, layers in found.items())


def _unserialized(body: str | None) -> str:
    if body == "sim":
        return "in process without serialized messages (`fedreuse sim --wire` serializes them)"
    return "no message's row has it"


def _unmetered(body: str | None) -> str:
    if body is not None and body.startswith("sim"):
        return "in process: there are no connections (`fedreuse launch` has them)"
    return "bytes.csv has no rows of connections"


def _reasons(how: Sequence[str]) -> str:
    said = [text for text in how if text] or ["bytes.csv does not say why"]
    more = len(said) - MOST_REASONS
    return " / ".join(said[:MOST_REASONS]) + (f" / and {more} more in bytes.csv" if more > 0 else "")


def both_ways(layers: Sequence[str]) -> str:
    """Layers with their directions, in few words."""
    ways = [[layer.split()[1] for layer in layers if layer.startswith(f"{way}link")] for way in WAYS]
    if ways[0] == ways[1]:
        return f"{', '.join(ways[0])} (both ways)"
    return "; ".join(
        f"{', '.join(names)} ({way}link)" for way, names in zip(WAYS, ways, strict=True) if names
    )
