"""Scalars of a run for TensorBoard, written beside the run as rows of rounds.csv appear.

Needs the extra `fedreuse[tensorboard]`. Steps are rounds, from 1. What is absent in rounds.csv is not written.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from fedreuse.proto.ledger import LAYERS
from fedreuse.sim.folder import LaunchError

MARKER = "run.txt"
"""Names the run whose rounds a folder holds."""
LAST = "clients/fault"
"""The tag that is written last in every round: where it is, the round is complete."""
SINGLE = {
    "validation_accuracy": "validation/accuracy",
    "validation_loss": "validation/loss",
    "train_loss": "train/loss",
    "fresh": "clients/fresh",
    "reused": "clients/reused",
}
"""Columns of rounds.csv and their tags."""
BYTES = tuple((f"{way}link_{layer}", f"{way}link/{layer}") for way in ("up", "down") for layer in LAYERS)


class TensorBoard:
    """Follows a run folder's rounds.csv; `update` writes what is new, a context manager that ends with it.

    Goes on after the last complete round that `logs` already holds. Raises LaunchError if tensorboard is not
    installed, or if `logs` holds another run.
    """

    def __init__(self, logs: Path, run: Path) -> None:
        writer = writer_class()
        logs.mkdir(parents=True, exist_ok=True)
        _claim(logs, run)
        self._rounds = run / "rounds.csv"
        self._at = 0
        self._columns: list[str] = []
        self._sums: Counter[str] = Counter()
        self._partly: set[str] = set()
        """Columns that were absent in some round: their sums would be too small."""
        self._written = last_step(logs)
        # TensorBoard drops what a killed process wrote of a later round.
        purge = self._written + 1 if self._written else None
        self._writer = writer(str(logs), purge_step=purge)

    def __enter__(self) -> TensorBoard:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.update()
        self._writer.close()

    def update(self) -> None:
        """Write the rounds that were committed since."""
        new = list(self._new_rows())
        for row in new:
            self._row(row)
        if new:
            self._writer.flush()

    def _new_rows(self) -> Iterator[dict[str, str]]:
        """Complete lines of rounds.csv that were not read before."""
        if not self._rounds.exists():
            return
        with self._rounds.open("rb") as handle:
            handle.seek(self._at)
            new = handle.read()
        new = new[: new.rfind(b"\n") + 1]
        self._at += len(new)
        lines = new.decode().splitlines()
        if lines and not self._columns:
            self._columns = lines.pop(0).split(",")
        yield from csv.DictReader(lines, fieldnames=self._columns)

    def _row(self, row: dict[str, str]) -> None:
        step, scalars = int(row["round"]), {}
        for column, tag in SINGLE.items():
            if row.get(column):
                scalars[tag] = float(row[column])
        for column, tag in BYTES:
            if not row.get(column):
                self._partly.add(column)
                continue
            scalars[f"{tag} per round"] = float(row[column])
            self._sums[column] += int(row[column])
            if column not in self._partly:
                scalars[f"{tag} so far"] = float(self._sums[column])
        scalars[LAST] = float(row["fault"])
        if step > self._written:
            for tag, value in scalars.items():
                self._writer.add_scalar(tag.replace(" ", "_"), value, step)
            self._written = step


def writer_class() -> Any:
    """torch's SummaryWriter. Raises LaunchError if tensorboard is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter  # type: ignore[attr-defined, unused-ignore]
    except ImportError as error:
        raise LaunchError(
            f"--tensorboard needs the extra `tensorboard` ({error}); install it with "
            "`pip install 'fedreuse[tensorboard]'`"
        ) from None
    return SummaryWriter


def _claim(logs: Path, run: Path) -> None:
    """Two runs in one folder would look like one run with two values a round."""
    marker, name = logs / MARKER, str(run.resolve())
    if marker.exists():
        if (owner := marker.read_text(encoding="utf-8").strip()) != name:
            raise LaunchError(f"{logs} holds the scalars of {owner}; choose another folder for {run}")
    elif any(logs.glob("events.out.tfevents.*")):
        raise LaunchError(f"{logs} holds scalars of something else; choose another folder")
    else:
        marker.write_text(name + "\n", encoding="utf-8")


def last_step(logs: Path) -> int:
    """The last round that is complete in a folder of scalars; 0 if there is none."""
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

    if not any(logs.glob("events.out.tfevents.*")):
        return 0
    events = EventAccumulator(str(logs), size_guidance={SCALARS: 0})
    events.Reload()
    if LAST not in events.Tags()[SCALARS]:
        return 0
    return max(int(event.step) for event in events.Scalars(LAST))
