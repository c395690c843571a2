"""Runs side by side: bytes by direction, kind and layer, savings, reuse, accuracy; as tables, JSON or CSV.

Bytes are added up from bytes.csv alone. A layer counts as observed only where every message of it was;
otherwise it is None, shown as a dash, and never 0.
"""

from __future__ import annotations

import csv
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedreuse.proto import modelled
from fedreuse.proto.ledger import LAYERS, Direction, Layer, Status, Totals
from fedreuse.proto.schema import Schema
from fedreuse.proto.streams import cohort
from fedreuse.server.federation import CAUSES
from fedreuse.server.round import Round, State, Train
from fedreuse.server.store import RunError
from fedreuse.server.weights import load_model
from fedreuse.sim.config import RunConfig
from fedreuse.sim.run import INITIAL, read_config
from fedreuse.sim.simulate import TEST_RESULT
from fedreuse.sim.summary import SUMMARY, read_rounds, read_rows, summarise

Layers = Mapping[Layer, int | None]
"""Bytes by layer; None where the layer was not observed."""

WAYS: tuple[Direction, ...] = ("up", "down")
STATUSES: tuple[Status, ...] = ("ok", "lost", "refused", "fault")
KINDS = (
    *("update", "score_reply", "model", "train_order", "score_request", "reuse_notice", "round_closed"),
    *("join", "welcome", "heartbeat", "abort", "reuse", "fault"),
)
"""The order of kinds in tables; unknown ones follow."""
COUNTS = ("fresh", *CAUSES, "reused", "fault", "bridged")
BINS = 10


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

    def bytes(self, *ways: Direction) -> dict[Layer, int | None]:
        """Bytes of one direction or of several together, lost and refused messages included."""
        totals = [total(e for e in self.entries if e.direction == way) for way in ways]
        result: dict[Layer, int | None] = {}
        for layer in LAYERS:
            observed = [value for t in totals if (value := t[layer]) is not None]
            result[layer] = sum(observed) if len(observed) == len(ways) else None
        return result

    @property
    def reuse_fraction(self) -> float | None:
        return self.clients["reused"] / self.selected if self.selected else None

    def uplink_saving(self) -> dict[Layer, float | None]:
        """Eq. 15, layer by layer; always against m B_0, the modelled dense bytes."""
        return self._saving(modelled.uplink_saving, "up")

    def symmetric_saving(self) -> dict[Layer, float | None]:
        """Eq. 16, layer by layer; always against 2 m B_0."""
        return self._saving(modelled.symmetric_saving, "up", "down")

    def _saving(self, rule: Callable[[int, int, int], float], *ways: Direction) -> dict[Layer, float | None]:
        m, dense = self.selected, self.dense_bytes
        sums = self.bytes(*ways)
        return {layer: None if n is None or not m else rule(n, m, dense) for layer, n in sums.items()}


@dataclass(frozen=True)
class Comparison:
    """`warnings` say what does not compare, `notes` what else a reader should know."""

    runs: tuple[Run, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]


def total(entries: Iterable[Entry]) -> dict[Layer, int | None]:
    """Sums by layer; None where a message was not observed. Events, which only the modelled layer can
    show, do not count as missing from the others."""
    entries = list(entries)
    result: dict[Layer, int | None] = {}
    for layer in LAYERS:
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
        ceiling=_ceiling(config, schema, rounds) if rounds and config.gate.kind != "none" else None,
        scores=score_histogram(folder, rounds=rounds) if config.gate.kind == "score" else None,
    )


def _read_config(folder: Path) -> RunConfig:
    try:
        return read_config(folder)
    except (yaml.YAMLError, OSError) as error:
        raise RunError(f"{folder / 'config.yaml'} cannot be read: {error}; restore the file") from None


def _count_rounds(folder: Path) -> int:
    path = folder / "rounds.csv"
    with _damage(path, _repair(folder)):
        rows = read_rounds(folder)
        _check_ending(path)
        for n, row in enumerate(rows, 1):
            for column in ("selected", *COUNTS):
                int(row[column])
            float(row["validation_accuracy"] or 0)
            if int(row["round"]) != n:
                raise ValueError(f"round {row['round']} in place of {n}")
        return len(rows)


def _read_summary(folder: Path) -> dict[str, Any]:
    """The summary of a finished run, with everything in it that is used here."""
    with _damage(folder / SUMMARY, "remove it to have everything computed anew"):
        summary: dict[str, Any] = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
        numbers = [summary[key] for key in ("rounds", "selected", "dense_bytes")]
        numbers += [summary["reuse"][key] for key in COUNTS]
        if not all(isinstance(number, int) for number in numbers):
            raise ValueError("a count is not an integer")
        _ = [summary["accuracy"][key] for key in ("validation", "test")]
        _ = [summary[f"{way}link"][layer] for way in WAYS for layer in LAYERS]
        return summary


def _live_summary(folder: Path, config: RunConfig) -> dict[str, Any]:
    test, metrics = folder / TEST_RESULT, None
    if test.exists():
        with _damage(test, "restore the file"):
            metrics = dict(json.loads(test.read_text(encoding="utf-8")))
    with _damage(folder / "bytes.csv", _repair(folder)):
        return summarise(folder, config, metrics)


def _read_bytes(folder: Path, rounds: int | None) -> tuple[tuple[Entry, ...], tuple[str, ...], Totals]:
    """The ledger's rows, up to a round if given: gathered, what was observed in part, and plain totals."""
    rows: Counter[tuple[Direction, str, Status]] = Counter()
    seen: Counter[tuple[Direction, str, Status, Layer]] = Counter()
    sums: Counter[tuple[Direction, str, Status, Layer]] = Counter()
    totals = Totals()
    path = folder / "bytes.csv"
    with _damage(path, _repair(folder)):
        for row in read_rows(folder):
            if row.direction not in WAYS or row.status not in STATUSES:
                raise ValueError(f"direction {row.direction!r}, status {row.status!r}")
            if rounds is not None and row.round > rounds:
                continue  # a round that is still open or was broken off: it belongs to no m
            totals.add([row])
            key = row.direction, row.kind, row.status
            rows[key] += 1
            for layer in LAYERS:
                value = getattr(row, layer)
                if value is not None:
                    seen[*key, layer] += 1
                    sums[*key, layer] += value
        _check_ending(path)
    entries, partial = [], []
    for key in sorted(rows, key=_place):
        layers = {layer: sums[*key, layer] if seen[*key, layer] == rows[key] else None for layer in LAYERS}
        messages, events = (0, rows[key]) if _is_event(key) else (rows[key], 0)
        entries.append(Entry(*key, messages, events, layers))
    for way in WAYS:
        sent = [key for key in rows if key[0] == way and not _is_event(key)]
        whole = sum(rows[key] for key in sent)
        found = {layer: sum(seen[*key, layer] for key in sent) for layer in LAYERS}
        partial += [f"{way}link {layer}" for layer in LAYERS if 0 < found[layer] < whole]
    return tuple(entries), tuple(partial), totals


def _is_event(key: tuple[Direction, str, Status]) -> bool:
    """The byte model charges for it, but no message carried it."""
    return key[1] == "reuse" or key[2] == "fault"


def _place(key: tuple[Direction, str, Status]) -> tuple[int, int, str, int]:
    way, kind, status = key
    known = KINDS.index(kind) if kind in KINDS else len(KINDS)
    return WAYS.index(way), known, kind, STATUSES.index(status)


# ---------------------------------------------------------------- damaged folders


@contextmanager
def _damage(path: Path, advice: str) -> Iterator[None]:
    """Turns what a damaged file's content causes into a RunError."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, csv.Error) as error:
        what = f"no {error}" if isinstance(error, KeyError) else error
        raise RunError(f"{path} is damaged: {what}; {advice}") from None


def _repair(folder: Path) -> str:
    return (
        f"if the run is going on, try again; if it was interrupted, `fedreuse resume {folder}` mends it; "
        "otherwise restore the file"
    )


def _check_ending(path: Path) -> None:
    """A number that was cut off would pass for a smaller one."""
    with path.open("rb") as handle:
        handle.seek(-min(1, path.stat().st_size), os.SEEK_END)
        if handle.read() != b"\n":
            raise ValueError("the last line is not complete")


def _check(path: Path, agrees: bool) -> None:
    if not agrees:
        raise RunError(
            f"{path} does not add up to what {SUMMARY} says; restore the one that was changed, or remove "
            f"{SUMMARY} to have everything computed anew"
        )


# ---------------------------------------------------------------- the gate


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


def _ceiling(config: RunConfig, schema: Schema, rounds: int) -> Ceiling:
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
    with _damage(path, _repair(folder)), path.open(encoding="utf-8") as handle:
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


# ---------------------------------------------------------------- tables

Lines = list[tuple[str, list[str]]]
"""Lines of a table: a label and its cells; no cells make a heading."""

EXPLANATIONS = {
    "modelled": "the numbers alone, as papers count them: per tensor the smallest of dense, value + index and "
    "bitmap form; 16 B for a reuse",
    "payload": "the encoded tensors that were really produced",
    "message": "the serialized protobuf messages",
    "grpc": "the messages with gRPC's 5-byte prefix on every frame",
    "ratio": "bytes of a layer / modelled bytes",
    "—": "not observed in this run; that is not zero",
    "(n)": "events that the byte model charges for although no message carried them",
    "*": "downlink by the symmetric convention: one dense model per selected client and round",
    "saving": "1 - bytes / modelled dense bytes: m B0 (uplink, Eq. 15) or 2 m B0 (symmetric, Eq. 16)",
    "ceiling": "a gate that never fires (D = 0) on the same cohorts, quota and age limit, without faults",
    "D": "a client's discrepancy score; it trains afresh where D reaches the threshold of its round",
    "units": "1 kB = 1000 B; lost and refused messages are included; exact figures: --json, --csv",
}


def render(comparison: Comparison, console: Console) -> None:
    """Print everything as tables that fit the console's width."""
    page, runs = _Page(console), comparison.runs
    marks = [f"{n}" for n in range(1, len(runs) + 1)] if len(runs) > 1 else ["Run:"]
    page.list((mark, _title(run, page)) for mark, run in zip(marks, runs, strict=True))
    page.list(("Warning:", text) for text in comparison.warnings)
    page.list(("Note:", text) for text in comparison.notes)
    heads = [run.config.method for run in runs]
    if len(runs) > 1:
        heads = [f"{mark}\n{head}" for mark, head in zip(marks, heads, strict=True)]
    page.table(heads, _side_by_side(runs, page))
    for mark, run in zip(marks, runs, strict=True):
        page.heading(f"{mark} {run.name}, by kind of message")
        page.table(["count", *LAYERS, "payload\nratio", "grpc\nratio"], list(_kinds(run, page)))
    page.list((page.absent if mark == "—" else mark, text) for mark, text in EXPLANATIONS.items())


def _title(run: Run, page: _Page) -> str:
    config, clients = run.config, run.config.clients
    rounds = f"{run.rounds} rounds" if run.finished else f"round {run.rounds} of {config.rounds} (unfinished)"
    if run.finished and run.rounds < config.rounds:
        rounds += f" of {config.rounds} (stopped early)"
    return (
        f"{run.name}: {config.method} on {config.task.name}, seed {config.seed}, {clients.per_round} of "
        f"{clients.total} clients a round, {rounds}, dense model {page.size(run.dense_bytes)}"
    )


def _side_by_side(runs: Sequence[Run], page: _Page) -> Lines:
    bins = sorted({n for run in runs if run.scores for n, count in enumerate(run.scores.counts) if count})
    columns = [list(_figures(run, page, bins)) for run in runs]
    return [
        (row[0][0], [] if row[0][1] is None else [cell or "" for _, cell in row])
        for row in zip(*columns, strict=True)
    ]


def _figures(run: Run, page: _Page, bins: Sequence[int]) -> Iterator[tuple[str, str | None]]:
    """A run's column, with the same labels for every run; a heading has no cell."""
    gated, top, clients = run.config.gate.kind != "none", run.ceiling, run.clients
    yield "Accuracy (%)", None
    yield "  validation", page.percent(run.validation)
    yield "  test", page.percent(run.test)
    yield "Rounds", f"{run.rounds} of {run.config.rounds}"
    ways: dict[str, tuple[Direction, ...]] = {"Uplink": ("up",), "Downlink": ("down",), "Both": WAYS}
    for title, directions in ways.items():
        sums, star = run.bytes(*directions), "*" if "down" in directions else ""
        yield f"{title} (bytes)", None
        for layer, count in sums.items():
            yield f"  {layer}{star if layer == 'modelled' else ''}", page.size(count)
        yield "  payload ratio", page.ratio(sums, "payload")
        yield "  grpc ratio", page.ratio(sums, "grpc")
    yield "Uplink saving (%)", None
    for layer, saving in run.uplink_saving().items():
        yield f"  {layer}", page.percent(saving)
    yield (
        "  modelled, ceiling",
        page.percent(top.uplink_saving if top else None) if gated else "no gate",
    )
    yield "Symmetric saving (%)", None
    for layer, saving in run.symmetric_saving().items():
        yield f"  {layer}{'*' if layer == 'modelled' else ''}", page.percent(saving)
    yield "Reuse (% of selected)", None
    yield "  reused", page.percent(run.reuse_fraction)
    yield "  ceiling", page.percent(top.reuse_fraction if top else None) if gated else "no gate"
    yield "Selected clients", f"{run.selected}"
    yield "  fresh", f"{clients['fresh']}"
    yield from ((f"    {cause}", f"{clients[cause]}") for cause in CAUSES)
    yield "    no gate", f"{clients['always']}"
    yield from ((f"  {what}", f"{clients[what]}") for what in ("reused", "fault"))
    yield "    bridged", f"{clients['bridged']}"
    if bins:
        yield from _score_figures(run.scores, bins)


def _score_figures(scores: Scores | None, bins: Sequence[int]) -> Iterator[tuple[str, str | None]]:
    yield "Scores D", None
    yield "  below threshold", f"{scores.below}" if scores else ""
    yield "  threshold reached", f"{scores.reached}" if scores else ""
    names = ("minimum", "lower quartile", "median", "upper quartile", "maximum")
    for name, value in zip_longest(names, scores.quartiles if scores else ()):
        yield f"  {name}", "" if value is None else f"{value:.4f}"
    for n in bins:
        end = "]" if n == BINS - 1 else ")"
        yield (
            f"  in [{2 * n / BINS:.1f}, {2 * (n + 1) / BINS:.1f}{end}",
            f"{scores.counts[n]}" if scores else "",
        )


def _kinds(run: Run, page: _Page) -> Iterator[tuple[str, list[str]]]:
    """The byte table of a run."""

    def cells(entries: Sequence[Entry]) -> list[str]:
        messages, events = sum(e.messages for e in entries), sum(e.events for e in entries)
        sums = total(entries)
        count = f"({events})" if events and not messages else f"{messages}"
        return [count, *map(page.size, sums.values()), page.ratio(sums, "payload"), page.ratio(sums, "grpc")]

    for way in WAYS:
        there = [entry for entry in run.entries if entry.direction == way]
        yield f"{way.title()}link", []
        for kind, group in groupby(there, key=lambda entry: entry.kind):
            entries = list(group)
            yield f"  {kind}", cells(entries)
            for entry in entries:
                if entry.status != "ok" and entry.status != kind:
                    yield f"    {'not sent' if entry.status == 'fault' else entry.status}", cells([entry])
        yield "  total", cells(there)
    yield "Both", cells(run.entries)


@dataclass(frozen=True)
class _Page:
    """Formats figures and lays tables out for one console."""

    console: Console

    @property
    def absent(self) -> str:
        return "-" if self.console.options.ascii_only else "—"

    @property
    def gap(self) -> int:
        return 2 if self.console.width >= 80 else 1

    def size(self, count: int | None) -> str:
        """Four digits in decimal units; exact below 1 kB."""
        if count is None or count < 1000:
            return self.absent if count is None else f"{count} B"
        value, units = count / 1000, ["kB", "MB", "GB", "TB", "PB"]
        while value >= 999.95 and len(units) > 1:
            value, units = value / 1000, units[1:]
        digits = 3 if value < 9.9995 else 2 if value < 99.995 else 1
        return f"{value:.{digits}f} {units[0]}"

    def percent(self, fraction: float | None) -> str:
        return self.absent if fraction is None else f"{100 * fraction:.2f}"

    def ratio(self, sums: Layers, layer: Layer) -> str:
        """A layer in terms of the modelled one; empty where the model charges nothing."""
        count, charge = sums[layer], sums["modelled"]
        if count is None or charge is None:
            return self.absent
        return f"{count / charge:.4f}" if charge else ""

    def heading(self, text: str) -> None:
        self.console.print(Text(text, "bold"))

    def list(self, items: Iterable[tuple[str, str]]) -> None:
        """Sentences that hang on their marks."""
        grid = Table.grid(padding=(0, 1, 0, 0))
        for mark, text in items:
            grid.add_row(Text(mark, "bold"), Text(text, overflow="fold"))
        if grid.row_count:
            self.console.print(grid)
            self.console.print()

    def table(self, heads: Sequence[str], lines: Lines) -> None:
        """One table, or several below each other where the width asks for it; all have the labels."""
        labels = max(len(label) for label, _ in lines)
        widths = [
            max(map(len, [*head.split("\n"), *(cells[n] for _, cells in lines if cells)]))
            for n, head in enumerate(heads)
        ]
        start = 0
        while start < len(heads):
            end = start + 1
            while end < len(heads) and self._width(labels, widths[start : end + 1]) <= self.console.width:
                end += 1
            self._block(heads[start:end], [(label, cells[start:end]) for label, cells in lines])
            start = end

    def _width(self, labels: int, columns: Sequence[int]) -> int:
        return labels + sum(self.gap + width for width in columns)

    def _block(self, heads: Sequence[str], lines: Lines) -> None:
        table = Table(box=None, padding=(0, self.gap, 0, 0), pad_edge=False, header_style="bold")
        table.add_column("", overflow="fold")
        for head in heads:
            table.add_column(Text(head), justify="right", overflow="fold")
        heading = ""
        for label, cells in lines:
            if not cells:
                heading = label
            elif any(cells):
                if heading or not label.startswith(" "):
                    if table.row_count:
                        table.add_row()
                    if heading:
                        table.add_row(Text(heading, "bold"))
                    heading = ""
                style = "" if label.startswith(" ") else "bold"
                table.add_row(Text(label, style), *map(Text, cells))
        self.console.print(table)
        self.console.print()
