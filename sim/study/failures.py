"""What failed, in a file of its own: a line for every failed attempt, oldest first."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from fedreuse.server.store import RunError
from fedreuse.sim.study.frozen import replace

FAILURES = "failures.jsonl"


@dataclass(frozen=True)
class Failure:
    """One failed attempt at a cell: the exception's type and its sentence."""

    cell: str
    time: str
    attempt: int
    type: str
    sentence: str


def read_failures(folder: Path) -> list[Failure]:
    """All failed attempts, oldest first. Raises RunError for a damaged file."""
    path = folder / FAILURES
    if not path.exists():
        return []
    try:
        return [Failure(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
    except (ValueError, TypeError) as error:
        raise RunError(f"{path} is damaged: {error}; mend or remove it") from None


def record_failure(folder: Path, cell: str, type: str, sentence: str) -> Failure:
    """Write down that an attempt at a cell failed."""
    before = read_failures(folder)
    attempt = 1 + sum(failure.cell == cell for failure in before)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    failure = Failure(cell, now, attempt, type, sentence)
    lines = [json.dumps(vars(one)) + "\n" for one in (*before, failure)]
    replace(folder / FAILURES, "".join(lines))  # whole, so that a full disk leaves no half line
    return failure
