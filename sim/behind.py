"""What models cost a client by how many rounds it was behind: the gain of sending changes, from bytes.csv alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fedreuse.sim.folder import damage, repair
from fedreuse.sim.records import read_rows

GROUPS = ((1, 1), (2, 2), (3, 4), (5, 5), (6, 8), (9, 16), (17, None))
"""Rounds behind that are shown together, both ends included."""


@dataclass(frozen=True)
class Behind:
    """Models sent to clients that were `label` rounds behind.

    Rounds behind is the number of rounds since the client last received a model whole; "first" had none.
    `payload` is in bytes; `worst` is the dearest of the messages.
    """

    label: str
    models: int
    payload: int
    worst: int

    def ratio(self, dense_bytes: int) -> float:
        """Payload in terms of the dense model."""
        return self.payload / (self.models * dense_bytes)


def read_behind(folder: Path, rounds: int) -> tuple[Behind, ...]:
    """By groups, for the first `rounds` rounds; empty where payloads were not observed. Raises RunError."""
    last: dict[int, int] = {}
    found: dict[str, list[int]] = {}
    with damage(folder / "bytes.csv", repair(folder)):
        for row in read_rows(folder):
            if row.kind != "model" or row.payload is None or not 0 < row.round <= rounds:
                continue
            found.setdefault(_group(row.round, last.get(row.client)), []).append(row.payload)
            if row.status == "ok":
                last[row.client] = row.round
    return tuple(
        Behind(label, len(sizes), sum(sizes), max(sizes)) for label in LABELS if (sizes := found.get(label))
    )


def _name(first: int, last: int | None) -> str:
    return f"{first}" if first == last else f"{first} and more" if last is None else f"{first} to {last}"


LABELS = ("first", "same", *(_name(*group) for group in GROUPS))


def _group(round: int, last: int | None) -> str:
    if last is None:
        return "first"
    gap = round - last
    if gap <= 0:
        return "same"  # sent again in the same round, after a reconnect
    return next(_name(low, high) for low, high in GROUPS if low <= gap and (high is None or gap <= high))
