"""Runs side by side: bytes by direction, kind and layer, savings, reuse, accuracy; as JSON or CSV; `tables` prints it.

Bytes are added up from bytes.csv alone. A layer counts as observed only where every message of it was;
otherwise it is None, shown as a dash, and never 0.
"""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import yaml

from fedreuse.proto import modelled
from fedreuse.proto.ledger import CONNECTION, MESSAGE_LAYERS, Direction, MessageLayer, Status, Totals
from fedreuse.proto.schema import Schema
from fedreuse.server.federation import CAUSES
from fedreuse.server.store import RunError
from fedreuse.server.weights import load_model
from fedreuse.sim.config import RunConfig
from fedreuse.sim.folder import (
    INITIAL,
    SUMMARY,
    TEST_RESULT,
    check_ending,
    damage,
    read_config,
    repair,
)
from fedreuse.sim.reuse import Ceiling, Scores, ceiling, score_histogram
from fedreuse.sim.summary import read_rounds, read_rows, summarise

Layers = Mapping[MessageLayer, int | None]
"""Bytes by layer; None where the layer was not observed."""

WAYS: tuple[Direction, ...] = ("up", "down")
STATUSES: tuple[Status, ...] = ("ok", "lost", "refused", "fault")
KINDS = (
    *("update", "score_reply", "model", "train_order", "score_request", "reuse_notice", "round_closed"),
    *("join", "welcome", "heartbeat", "abort", "reuse", "fault"),
)
"""The order of kinds in tables; unknown ones follow."""
COUNTS = ("fresh", *CAUSES, "reused", "fault", "bridged")


# ---------------------------------------------------------------- what is compared


@dataclass(frozen=True)
class Entry:
    """All rows of bytes.csv of one direction, kind and status.

    `events` counts charges of the byte model that no message carried: a reuse (16 bytes), and what is
    charged where a client failed (status "fault").
    """

    direction: Direction
    kind: str
    status: Status
    messages: int
    events: int
    bytes: Layers


@dataclass(frozen=True)
class Run:
    """One run after its `rounds` committed rounds. `selected` sums m over them, `dense_bytes` is B_0.

    `name` is unique in its comparison. `clients` says what became of the selected clients: fresh and its
    causes, reused, fault and, of these, bridged (the cached update stood in). `partial` names directions and
    layers that were observed for some messages only, and therefore count as absent.
    """

    name: str
    config: RunConfig
    schema: Schema
    finished: bool
    rounds: int
    selected: int
    dense_bytes: int
    validation: float | None
    test: float | None
    clients: Mapping[str, int]
    entries: tuple[Entry, ...]
    partial: tuple[str, ...]
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


def total(entries: Iterable[Entry]) -> dict[MessageLayer, int | None]:
    """Sums by layer; None where a message was not observed. Events, which only the modelled layer can
    show, do not count as missing from the others."""
    entries = list(entries)
    result: dict[MessageLayer, int | None] = {}
    for layer in MESSAGE_LAYERS:
        observed = [value for e in entries if (value := e.bytes[layer]) is not None]
        missing = any(e.messages and e.bytes[layer] is None for e in entries)
        result[layer] = None if missing or not observed else sum(observed)
    return result


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
    return Comparison(runs, tuple(_warnings(runs)), tuple(_notes(runs)))


def _read_run(folder: Path, name: str) -> Run:
    config = _read_config(folder)
    schema, _ = load_model(folder / INITIAL)
    committed = _count_rounds(folder)
    finished = (folder / SUMMARY).exists()
    summary = _read_summary(folder) if finished else _live_summary(folder, config)
    rounds = summary["rounds"]
    entries, partial, totals = _read_bytes(folder, None if finished else rounds)
    if finished:
        _check(folder / "rounds.csv", rounds == committed)
        _check(folder / "bytes.csv", all(summary[f"{way}link"] == totals.layers(way) for way in WAYS))
    clients = {key: summary["reuse"][key] for key in COUNTS}
    clients["always"] = clients["fresh"] - sum(clients[cause] for cause in CAUSES)
    return Run(
        name,
        config,
        schema,
        finished,
        rounds,
        selected=summary["selected"],
        dense_bytes=summary["dense_bytes"],
        validation=summary["accuracy"]["validation"],
        test=summary["accuracy"]["test"],
        clients=clients,
        entries=entries,
        partial=partial,
        ceiling=ceiling(config, schema, rounds) if rounds and config.gate.kind != "none" else None,
        scores=score_histogram(folder, rounds=rounds) if config.gate.kind == "score" else None,
    )


def _read_config(folder: Path) -> RunConfig:
    try:
        return read_config(folder)
    except (yaml.YAMLError, OSError) as error:
        raise RunError(f"{folder / 'config.yaml'} cannot be read: {error}; restore the file") from None


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
    test, metrics = folder / TEST_RESULT, None
    if test.exists():
        with damage(test, "restore the file"):
            metrics = dict(json.loads(test.read_text(encoding="utf-8")))
    with damage(folder / "bytes.csv", repair(folder)):
        return summarise(folder, config, metrics)


def _read_bytes(folder: Path, rounds: int | None) -> tuple[tuple[Entry, ...], tuple[str, ...], Totals]:
    """The ledger's rows, up to a round if given: gathered, what was observed in part, and plain totals."""
    rows: Counter[tuple[Direction, str, Status]] = Counter()
    seen: Counter[tuple[Direction, str, Status, MessageLayer]] = Counter()
    sums: Counter[tuple[Direction, str, Status, MessageLayer]] = Counter()
    totals = Totals()
    path = folder / "bytes.csv"
    with damage(path, repair(folder)):
        for row in read_rows(folder):
            if row.direction not in WAYS or row.status not in STATUSES:
                raise ValueError(f"direction {row.direction!r}, status {row.status!r}")
            if rounds is not None and row.round > rounds:
                continue  # a round that is still open or was broken off: it belongs to no m
            totals.add([row])
            if row.kind == CONNECTION:
                continue
            key = row.direction, row.kind, row.status
            rows[key] += 1
            for layer in MESSAGE_LAYERS:
                value = getattr(row, layer)
                if value is not None:
                    seen[*key, layer] += 1
                    sums[*key, layer] += value
        check_ending(path)
    entries, partial = [], []
    for key in sorted(rows, key=_place):
        layers = {
            layer: sums[*key, layer] if seen[*key, layer] == rows[key] else None for layer in MESSAGE_LAYERS
        }
        messages, events = (0, rows[key]) if _is_event(key) else (rows[key], 0)
        entries.append(Entry(*key, messages, events, layers))
    for way in WAYS:
        sent = [key for key in rows if key[0] == way and not _is_event(key)]
        whole = sum(rows[key] for key in sent)
        found = {layer: sum(seen[*key, layer] for key in sent) for layer in MESSAGE_LAYERS}
        partial += [f"{way}link {layer}" for layer in MESSAGE_LAYERS if 0 < found[layer] < whole]
    return tuple(entries), tuple(partial), totals


def _is_event(key: tuple[Direction, str, Status]) -> bool:
    """The byte model charges for it, but no message carried it."""
    return key[1] == "reuse" or key[2] == "fault"


def _place(key: tuple[Direction, str, Status]) -> tuple[int, int, str, int]:
    way, kind, status = key
    known = KINDS.index(kind) if kind in KINDS else len(KINDS)
    return WAYS.index(way), known, kind, STATUSES.index(status)


def _check(path: Path, agrees: bool) -> None:
    if not agrees:
        raise RunError(
            f"{path} does not add up to what {SUMMARY} says; restore the one that was changed, or remove "
            f"{SUMMARY} to have everything computed anew"
        )


# ---------------------------------------------------------------- what to beware of

SHARED = ("seed", "task", "clients", "partition", "train", "step", "evaluation", "faults")
PARTS = ("objective", "compressor", "proxy", "gate", "memory")


def _warnings(runs: Sequence[Run]) -> Iterator[str]:
    tasks = {run.config.task.name for run in runs}
    if len(tasks) > 1 or len({run.schema.hash for run in runs}) > 1:
        yield (
            "different tasks or models: accuracies and bytes do not compare, and each saving is against its "
            "own run's dense model"
        )


def _notes(runs: Sequence[Run]) -> Iterator[str]:
    done = _distinct(run.rounds for run in runs)
    if len(done) > 1:
        yield f"different numbers of rounds: {', '.join(done)}"
    differ = _differences([run.config for run in runs])
    if differ:
        yield f"different settings: {'; '.join(differ)}"
    for run in runs:
        if run.clients["fault"]:
            yield (
                f"{run.name}: {run.clients['fault']} of {run.selected} selected clients failed; no uplink is "
                "charged for them, which raises the savings"
            )
        if run.partial:
            yield f"{run.name}: {', '.join(run.partial)} observed for some messages only, so not added up"


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


# ---------------------------------------------------------------- JSON and CSV


def to_json(comparison: Comparison) -> dict[str, Any]:
    """Exact figures: bytes and counts are integers, savings and reuse fractions, null is absent."""
    return {
        "runs": [_run_json(run) for run in comparison.runs],
        "warnings": list(comparison.warnings),
        "notes": list(comparison.notes),
    }


def _run_json(run: Run) -> dict[str, Any]:
    clients = run.config.clients
    return {
        **_identity(run),
        "clients": {"total": clients.total, "per_round": clients.per_round},
        "finished": run.finished,
        "rounds": {"done": run.rounds, "planned": run.config.rounds},
        "selected": run.selected,
        "dense_bytes": run.dense_bytes,
        "accuracy": {"validation": run.validation, "test": run.test},
        "bytes": {"up": run.bytes("up"), "down": run.bytes("down"), "both": run.bytes(*WAYS)},
        "saving": {"uplink": run.uplink_saving(), "symmetric": run.symmetric_saving()},
        "reuse": {"fraction": run.reuse_fraction, **run.clients},
        "ceiling": asdict(run.ceiling) if run.ceiling else None,
        "scores": _scores_json(run.scores) if run.scores else None,
        "kinds": [asdict(entry) for entry in run.entries],
        "partial": list(run.partial),
    }


def _scores_json(scores: Scores) -> dict[str, Any]:
    return {key: list(v) if isinstance(v, tuple) else v for key, v in asdict(scores).items()}


def _identity(run: Run) -> dict[str, Any]:
    config = run.config
    return {"run": run.name, "method": config.method, "task": config.task.name, "seed": config.seed}


def to_csv(comparison: Comparison, handle: TextIO) -> None:
    """Exact bytes, a line per run, direction, kind, status and layer; an absent layer is an empty cell.

    `messages` is 0 for events that the byte model charges for although no message carried them.
    """
    about = ("direction", "kind", "status", "messages")
    writer = csv.DictWriter(
        handle, ("run", "method", "task", "seed", *about, "layer", "bytes"), lineterminator="\n"
    )
    writer.writeheader()
    for run in comparison.runs:
        for entry in run.entries:
            row = _identity(run) | {key: getattr(entry, key) for key in about}
            writer.writerows(row | {"layer": layer, "bytes": n} for layer, n in entry.bytes.items())
