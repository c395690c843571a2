"""The test set of a run: opened once, here, on the last round's model.

A line in `test-opened.jsonl` says before the look when it came and on which model; `test.json` then appears in one
step with what was seen. A process that dies between the two leaves the first without the second: the same look at
the same model is then repeated, which can show nothing new, and both files say that there were two. A look at any
other model is refused, and so is one at a set whose result is there.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedreuse.server.store import RunError
from fedreuse.sim.folder import TEST_OPENED, TEST_RESULT, damage


@dataclass(frozen=True)
class ClientTest:
    """Accuracy and mean loss over the `examples` test examples that stand for one client's data."""

    client: int
    examples: int
    accuracy: float
    loss: float


@dataclass(frozen=True)
class Examined:
    """The task's metrics over the whole test set, and client by client; `absent` says why `clients` is None.

    `openings` counts the looks: 1, or more where a crash came between a look and its record.
    """

    metrics: Mapping[str, float]
    clients: tuple[ClientTest, ...] | None
    absent: str | None
    openings: int = 1


def open_once(
    folder: Path, rounds: int, flat: NDArray[np.uint8], look: Callable[[], Examined], *, archival: bool
) -> Examined:
    """Look at the test set with the model `flat` of `rounds` rounds, and record it. Raises RunError if refused."""
    if (folder / TEST_RESULT).exists():
        raise RunError(
            f"the test set of {folder} has been opened and is not opened again; {TEST_RESULT} there has the result"
        )
    model = hashlib.sha256(flat.data).hexdigest()
    earlier = _openings(folder)
    if any(opening["model"] != model for opening in earlier):
        raise RunError(
            f"the test set of {folder} was opened at {earlier[0]['time']} on another model (after "
            f"{earlier[0]['rounds']} rounds); a second look is refused, start another run"
        )
    stamp = {"archival": True} if archival else {}
    time = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    opening = {"time": time, "rounds": rounds, "model": model, **stamp}
    _write(folder / TEST_OPENED, "".join(json.dumps(line) + "\n" for line in (*earlier, opening)))
    found = look()
    openings = len(earlier) + 1
    clients = None if found.clients is None else [list(asdict(c).values()) for c in found.clients]
    record = {
        **stamp,
        "model": model,
        "rounds": rounds,
        "openings": openings,
        "metrics": dict(found.metrics),
        "clients": clients,
        "absent": found.absent,
    }
    _write(folder / TEST_RESULT, json.dumps(record) + "\n")
    return Examined(found.metrics, found.clients, found.absent, openings)


def read_examined(folder: Path, flat: NDArray[np.uint8] | None = None) -> Examined | None:
    """What the look at the test set showed; None if there was none.

    With `flat` the look must have been at that model. Raises RunError.
    """
    path = folder / TEST_RESULT
    if not path.exists():
        return None
    with damage(path, "restore the file"):
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        metrics = record.get("metrics")
        if metrics is None:  # an older folder: nothing but metrics
            return Examined(record, None, "the run was made before tests were kept by client")
        if flat is not None and record["model"] != hashlib.sha256(flat.data).hexdigest():
            raise RunError(f"{path} is about another model than the one of {folder}; restore the run's files")
        clients = record["clients"]
        by_client = None if clients is None else tuple(ClientTest(*row) for row in clients)
        return Examined(metrics, by_client, record["absent"], record["openings"])


def _openings(folder: Path) -> list[dict[str, Any]]:
    """Earlier looks at the test set."""
    path = folder / TEST_OPENED
    if not path.exists():
        return []
    with damage(path, "restore the file"):
        lines = path.read_text(encoding="utf-8").splitlines()
        found = [json.loads(line) for line in lines]
        _ = [(opening["time"], opening["rounds"], opening["model"]) for opening in found]
        return found


def _write(path: Path, text: str) -> None:
    """In one step, and on the disk when this returns."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as handle:
        handle.write(text)
        handle.flush()
        os.fsync(handle.fileno())
    partial.rename(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
