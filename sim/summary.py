"""What a run comes to: accuracy, bytes by direction and layer, savings, reuse; read from its folder."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedreuse.proto import modelled
from fedreuse.proto.ledger import CONNECTION_LAYERS, MESSAGE_LAYERS, Layer, Row, Totals
from fedreuse.server.federation import CAUSES
from fedreuse.server.store import RunError
from fedreuse.server.weights import load_model
from fedreuse.sim.config import RunConfig
from fedreuse.sim.folder import INITIAL, SUMMARY


def read_rows(folder: Path) -> Iterator[Row]:
    """The rows of bytes.csv; rounds count from 1, 0 belongs to no round. Raises RunError."""
    with _open(folder / "bytes.csv") as handle:
        for cells in csv.DictReader(handle):
            # Older folders have no columns below gRPC.
            texts: dict[Layer, str] = {layer: cells[layer] for layer in MESSAGE_LAYERS}
            texts |= {layer: cells.get(layer, "") for layer in CONNECTION_LAYERS}
            numbers = {layer: int(text) if text else None for layer, text in texts.items()}
            yield Row(
                int(cells["round"]),
                int(cells["client"]),
                cells["direction"],  # type: ignore[arg-type]
                cells["kind"],
                cells["status"],  # type: ignore[arg-type]
                how=cells.get("how", ""),
                **numbers,  # type: ignore[arg-type]
            )


def read_rounds(folder: Path) -> list[dict[str, str]]:
    """The rows of rounds.csv, as text. Raises RunError."""
    with _open(folder / "rounds.csv") as handle:
        return list(csv.DictReader(handle))


def _open(path: Path) -> Any:
    if not path.exists():
        raise RunError(f"{path} is missing; is {path.parent} a run folder?")
    return path.open(encoding="utf-8", newline="")


def summarise(folder: Path, config: RunConfig, test: dict[str, float] | None) -> dict[str, Any]:
    """The summary of a run as far as it has come; absent figures are None."""
    rounds = read_rounds(folder)
    totals = Totals()
    totals.add(read_rows(folder))
    schema, _ = load_model(folder / INITIAL)
    dense = modelled.dense_bytes((t.size, t.width) for t in schema.tensors)
    selected = _sum(rounds, "selected")
    up, down = totals.layers("up"), totals.layers("down")
    validation = [float(r["validation_accuracy"]) for r in rounds if r["validation_accuracy"]]
    counts = {name: _sum(rounds, name) for name in ("fresh", "reused", *CAUSES, "fault", "bridged")}
    return {
        "method": config.method,
        "task": config.task.name,
        "train_limit": config.task.train_limit,
        "seed": config.seed,
        "rounds": len(rounds),
        "clients": {"total": config.clients.total, "per_round": config.clients.per_round},
        "dense_bytes": dense,
        "selected": selected,
        "accuracy": {
            "validation": validation[-1] if validation else None,
            "test": (test or {}).get("accuracy"),
        },
        "uplink": up,
        "downlink": down,
        "saving": {
            "uplink_modelled": _uplink_saving(up["modelled"], selected, dense),
            "symmetric_modelled": _symmetric_saving(up["modelled"], down["modelled"], selected, dense),
            "uplink_grpc": _uplink_saving(up["grpc"], selected, dense),
            "symmetric_grpc": _symmetric_saving(up["grpc"], down["grpc"], selected, dense),
        },
        "reuse": {"fraction": counts["reused"] / selected if selected else None, **counts},
    }


def write_summary(folder: Path, summary: dict[str, Any]) -> None:
    partial = folder / (SUMMARY + ".partial")
    partial.write_text(json.dumps(summary, indent=2) + "\n")
    partial.rename(folder / SUMMARY)


def _sum(rounds: list[dict[str, str]], column: str) -> int:
    return sum(int(row[column]) for row in rounds)


def _uplink_saving(uplink: int | None, selected: int, dense: int) -> float | None:
    if uplink is None or not selected:
        return None
    return modelled.uplink_saving(uplink, selected, dense)


def _symmetric_saving(up: int | None, down: int | None, selected: int, dense: int) -> float | None:
    if up is None or down is None or not selected:
        return None
    return modelled.symmetric_saving(up + down, selected, dense)
