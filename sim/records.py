"""The tables of a run folder, row by row."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedreuse.proto.ledger import CONNECTION_LAYERS, MESSAGE_LAYERS, Layer, Row
from fedreuse.server.store import RunError


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
