"""The client's own byte ledger: the same rows as the server's, seen from this end."""

from __future__ import annotations

import csv
from pathlib import Path

from fedreuse.proto.ledger import COLUMNS, Row, Totals


class ClientLedger:
    """Sums in memory and, with a path, one CSV row per message; rounds in the file count from 1."""

    def __init__(self, path: Path | None = None) -> None:
        self.totals = Totals()
        self._handle = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            fresh = not path.exists() or path.stat().st_size == 0
            self._handle = path.open("a", encoding="utf-8", newline="", buffering=1)
            self._writer = csv.writer(self._handle, lineterminator="\n")
            if fresh:
                self._writer.writerow(COLUMNS)

    def count(self, row: Row) -> None:
        self.totals.add([row])

    def write(self, row: Row) -> None:
        if self._handle is not None:
            self._writer.writerow([row.round + 1, *row.cells()[1:]])

    def close(self) -> None:
        if self._handle is not None:
            self._handle.close()
