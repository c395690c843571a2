"""What came of a round: updates, endings, and its row of rounds.csv."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedreuse.proto import federation_pb2 as pb
from fedreuse.proto.codec import Payload
from fedreuse.proto.ledger import LAYERS
from fedreuse.server.round import Round, State

CAUSE_VALUES = {"cacheless": pb.CACHELESS, "age": pb.AGE, "threshold": pb.THRESHOLD, "quota": pb.QUOTA}
CAUSES = tuple(CAUSE_VALUES)
ROUND_COLUMNS = (
    "round",
    "selected",
    "fresh",
    "reused",
    "fault",
    "bridged",
    *CAUSES,
    "always",
    "void",
    "tau",
    "train_loss",
    *(f"{way}link_{layer}" for way in ("up", "down") for layer in LAYERS),
    "validation_accuracy",
    "validation_loss",
    "seconds",
)
ARCHIVAL_COLUMNS = ("test_accuracy", "evaluation")
"""Only in runs that look at the test set again and again."""


@dataclass(frozen=True, slots=True)
class Update:
    """A verified update and the client's own report on it."""

    payload: Payload
    steps: int
    train_loss: float


@dataclass(frozen=True, slots=True)
class Closing:
    """How a round ended for one selected client."""

    client: int
    round: int
    accepted: bool
    code: pb.Code = pb.CODE_UNSPECIFIED
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Void:
    """Why a round closed without effect."""

    code: pb.Code
    why: str


def round_row(
    columns: Sequence[str],
    round: Round[Update],
    examples: Mapping[int, int],
    void: Void | None,
    stood_in: frozenset[int],
    metrics: Mapping[str, float],
    sums: Mapping[str, int | None],
    seconds: float,
) -> dict[str, Any]:
    """The row of a closed round, by `columns`; rounds from 1.

    `examples` gives n_i, `stood_in` whose cached update counted, `sums` the bytes of the round.
    """
    seats = round.seats.values()
    states = Counter(seat.state for seat in seats)
    causes = Counter(seat.cause for seat in seats if seat.state is State.FRESH)
    row: dict[str, Any] = {
        "round": round.number + 1,
        "selected": len(round.seats),
        "fresh": states[State.FRESH],
        "reused": states[State.REUSED],
        "fault": states[State.FAULT],
        "bridged": sum(s.state is State.FAULT and c in stood_in for c, s in round.seats.items()),
        **{cause: causes[CAUSE_VALUES[cause]] for cause in CAUSES},
        "always": causes[pb.ALWAYS],
        "void": void.why if void else None,
        "tau": round.threshold if round.gate.kind == "score" else None,
        "train_loss": finite(_mean_loss(round, examples)),
        "validation_accuracy": metrics.get("accuracy"),
        "validation_loss": finite(metrics.get("loss")),
        "seconds": f"{seconds:.3f}",
        "test_accuracy": metrics.get("test_accuracy"),
        "evaluation": "archival",
        **sums,
    }
    return {column: row[column] for column in columns}


def _mean_loss(round: Round[Update], examples: Mapping[int, int]) -> float | None:
    """Over the fresh updates, weighted by examples."""
    fresh = [(examples[c], s.update.train_loss) for c, s in round.seats.items() if s.update is not None]
    return sum(n * loss for n, loss in fresh) / sum(n for n, _ in fresh) if fresh else None


def finite(value: float | None) -> float | None:
    """None where there is no number to show."""
    return value if value is not None and np.isfinite(value) else None
