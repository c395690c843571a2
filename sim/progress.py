"""Live view of a run in a terminal; plain lines where there is none."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from fedreuse.proto import federation_pb2 as pb


def human(count: float | None) -> str:
    """Bytes in decimal units; an absent figure is a dash."""
    if count is None:
        return "—"
    if count < 1000:
        return f"{count:.0f} B"
    units = iter(("kB", "MB", "GB", "TB", "PB"))
    count, unit = count / 1000, next(units)
    while count >= 999.995:
        count, unit = count / 1000, next(units)
    return f"{count:.2f} {unit}"


class RunProgress:
    """A bar with rounds, rate and time left, and a line of what the last round did."""

    def __init__(self, console: Console, name: str, rounds: int, done: int = 0) -> None:
        self._console, self._rounds, self._done = console, rounds, done
        self._totals: dict[str, int] = {}
        self._accuracy = ""
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            transient=False,
            disable=not console.is_terminal,
        )
        self._bar = self._progress.add_task(name, total=rounds, completed=done)

    def __enter__(self) -> RunProgress:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def row(self, row: dict[str, Any]) -> None:
        """A new row of rounds.csv; byte totals are summed here."""
        for key in row:
            if key.startswith(("uplink_", "downlink_")) and row[key] is not None:
                self._totals[key] = self._totals.get(key, 0) + row[key]
        self._show(row)

    def status(self, reply: pb.StatusReply) -> None:
        """What a server says of itself; rounds may have been missed, totals are its own."""
        if not reply.latest:
            self._progress.update(
                self._bar,
                description=f"waiting for clients: {reply.connected} connected, {reply.joined} joined",
            )
            return
        self._totals = {f"{total.direction}link_{total.layer}": total.bytes for total in reply.bytes}
        self._show(json.loads(reply.latest))

    def _show(self, row: dict[str, Any]) -> None:
        if row["round"] == self._done:
            return
        self._done = row["round"]
        if row["validation_accuracy"] is not None:
            self._accuracy = f"  val {row['validation_accuracy']:.4f}"
        fault = f"  fault {row['fault']}" if row["fault"] else ""
        text = (
            f"fresh {row['fresh']}  reused {row['reused']}{fault}{self._accuracy}"
            f"  up {self._bytes('up')}  down {self._bytes('down')}"
        )
        self._progress.update(self._bar, completed=self._done, description=text)
        if not self._console.is_terminal and (self._done % 10 == 0 or self._done in (1, self._rounds)):
            self._console.print(f"round {self._done} of {self._rounds}  {text}", highlight=False)

    def _bytes(self, way: str) -> str:
        """Modelled and, where measured, gRPC bytes so far."""
        modelled, wire = (self._totals.get(f"{way}link_{layer}") for layer in ("modelled", "grpc"))
        return f"{human(modelled)} modelled" + ("" if wire is None else f" / {human(wire)} gRPC")
