"""A comparison as JSON or CSV, exact to the byte."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TextIO

from fedreuse.proto.ledger import CONNECTION, CONNECTION_LAYERS, Direction
from fedreuse.sim.sums import COUNTED, WAYS

if TYPE_CHECKING:
    from fedreuse.sim.compare import Comparison, Run
    from fedreuse.sim.reuse import Scores


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
        "accuracy": {"validation": run.validation, "test": run.test, "test_macro": run.macro},
        "fairness": run.fairness,
        "bytes": {"up": run.bytes("up"), "down": run.bytes("down"), "both": run.bytes(*WAYS)},
        "connections": {way: _connections_json(run, way) for way in WAYS},
        "ratios": {
            name: {
                layer: {"to_modelled": run.to_modelled(count, *ways), "to_dense": run.to_dense(count, *ways)}
                for layer, count in run.measured(*ways).items()
                if layer not in COUNTED
            }
            for name, ways in DIRECTIONS.items()
        },
        "absent": [{"layers": list(absence.layers), "reason": absence.reason} for absence in run.absences],
        "saving": {"uplink": run.uplink_saving(), "symmetric": run.symmetric_saving()},
        "reuse": {"fraction": run.reuse_fraction, **run.clients},
        "ceiling": asdict(run.ceiling) if run.ceiling else None,
        "scores": _scores_json(run.scores) if run.scores else None,
        "kinds": [asdict(entry) for entry in run.entries],
        "cost_per_message": [asdict(cost) for cost in run.costs()],
        "bodies": None if run.bodies is None else [asdict(body) for body in run.bodies],
        "models_by_rounds_behind": [asdict(group) for group in run.behind],
        "partial": list(run.partial),
        "partial_connections": list(run.partial_connections),
    }


DIRECTIONS: dict[str, tuple[Direction, ...]] = {"up": ("up",), "down": ("down",), "both": WAYS}


def _connections_json(run: Run, way: Direction) -> dict[str, Any]:
    there = run.connections[way]
    layers: dict[str, int | None] = {layer: there.layer(layer) for layer in CONNECTION_LAYERS}
    return {"rows": there.rows, **layers, "http2_or_tls": there.socket, "how": dict(there.how)}


def _scores_json(scores: Scores) -> dict[str, Any]:
    return {key: list(v) if isinstance(v, tuple) else v for key, v in asdict(scores).items()}


def _identity(run: Run) -> dict[str, Any]:
    config = run.config
    return {"run": run.name, "method": config.method, "task": config.task.name, "seed": config.seed}


def to_csv(comparison: Comparison, handle: TextIO) -> None:
    """A line per run, direction, kind, status and layer; an absent layer is an empty cell, `absent` says why.

    `messages` is 0 for events that the byte model charges for although no message carried them, and for what
    belongs to connections. `count` is filled in place of `bytes` where a layer is a number of segments. Kind
    "body" is what bodies were made of, by index and value coding, and "behind" the models by how many rounds their
    clients were behind: both are shares of the payload, so not to be added to the layers of messages.
    """
    about = ("direction", "kind", "status", "messages", "layer", "bytes", "count", "absent")
    writer = csv.DictWriter(handle, ("run", "method", "task", "seed", *about), lineterminator="\n")
    writer.writeheader()
    for run in comparison.runs:
        for line in (*_messages(run), *_connections(run), *_bodies(run), *_behind(run)):
            writer.writerow(_identity(run) | line)


def _messages(run: Run) -> Iterator[dict[str, Any]]:
    reasons = _reasons(run)
    for entry in run.entries:
        line = {key: getattr(entry, key) for key in ("direction", "kind", "status", "messages")}
        for layer, n in entry.bytes.items():
            why = (
                "no message carried it"
                if not entry.messages
                else reasons.get(f"{entry.direction}link {layer}")
            )
            yield line | {"layer": layer, "bytes": n, "absent": why if n is None else None}


def _connections(run: Run) -> Iterator[dict[str, Any]]:
    reasons = _reasons(run)
    for way in WAYS:
        there = run.connections[way]
        line = {"direction": way, "kind": CONNECTION, "status": "ok", "messages": 0}
        for layer in CONNECTION_LAYERS if there.rows else ():
            count, column = there.layer(layer), "count" if layer in COUNTED else "bytes"
            why = reasons.get(f"{way}link {layer}", "no connection has it")
            yield line | {"layer": layer, column: count, "absent": why if count is None else None}


def _bodies(run: Run) -> Iterator[dict[str, Any]]:
    for body in run.bodies or ():
        line = {"direction": body.direction, "kind": "body", "status": "ok", "messages": 0}
        coding = f"{body.index_coding}/{body.value_coding}"
        parts = {"modelled": body.modelled, "index": body.index_bytes, "value": body.value_bytes}
        for part, count in parts.items():
            yield line | {"layer": f"body {coding} {part}", "bytes": count}
        yield line | {"layer": f"body {coding} stored values", "count": body.stored}


def _behind(run: Run) -> Iterator[dict[str, Any]]:
    for group in run.behind:
        yield {
            "direction": "down",
            "kind": "behind",
            "status": "ok",
            "messages": group.models,
            "layer": f"payload behind {group.label}",
            "bytes": group.payload,
        }


def _reasons(run: Run) -> dict[str, str]:
    return {layer: absence.reason for absence in run.absences for layer in absence.layers}
