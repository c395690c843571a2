"""Live view of a run in a terminal; plain lines where there is none."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from fedreuse.proto import federation_pb2 as pb
from fedreuse.proto.ledger import MESSAGE_LAYERS


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


class _RateColumn(TextColumn):
    """Rounds per minute so far."""

    def __init__(self) -> None:
        super().__init__("")

    def render(self, task: Task) -> Text:
        return Text(f"{60 * task.speed:.1f} rounds/min" if task.speed else "")


class RunProgress:
    """A bar with rounds, rate and time left; below it the last round and the bytes so far, by layer."""

    def __init__(self, console: Console, name: str, rounds: int) -> None:
        self._console, self._rounds, self._done = console, rounds, 0
        self._totals: dict[str, int] = {}
        self._accuracy = "—"
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            _RateColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            expand=True,
        )
        self._bar = self._progress.add_task(name, total=rounds)
        self._details = Text("starting", style="dim")
        self._live = Live(console=console, refresh_per_second=4)
        self._live.update(Group(self._progress, self._details))

    def __enter__(self) -> RunProgress:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def row(self, row: dict[str, Any]) -> None:
        """A new row of rounds.csv; byte totals are summed here."""
        for key in row:
            if key.startswith(("uplink_", "downlink_")) and row[key] is not None:
                self._totals[key] = self._totals.get(key, 0) + row[key]
        self._show(row)

    def status(self, reply: pb.StatusReply) -> None:
        """What a server says of itself; rounds may have been missed, totals are its own."""
        if not reply.latest:
            self._details.plain = f"waiting for clients: {reply.connected} connected, {reply.joined} joined"
            return
        self._totals = {f"{total.direction}link_{total.layer}": total.bytes for total in reply.bytes}
        self._show(json.loads(reply.latest))

    def _show(self, row: dict[str, Any]) -> None:
        if row["round"] == self._done:
            return
        self._done = row["round"]
        if row["validation_accuracy"] is not None:
            self._accuracy = f"{100 * row['validation_accuracy']:.2f} %"
        last = (
            f"fresh {row['fresh']}  reused {row['reused']}  fault {row['fault']}  validation {self._accuracy}"
        )
        self._progress.update(self._bar, completed=self._done)
        lines = (
            f"round {self._done}: {last}",
            f"uplink    {self._bytes('up')}",
            f"downlink  {self._bytes('down')}",
        )
        self._details.plain = "\n".join(lines)
        if not self._console.is_terminal and (self._done % 10 == 0 or self._done in (1, self._rounds)):
            sums = f"up {self._bytes('up')}; down {self._bytes('down')}"
            self._console.print(
                f"round {self._done} of {self._rounds}: {last}; {sums}", highlight=False, soft_wrap=True
            )

    def _bytes(self, way: str) -> str:
        """The observed layers so far."""
        sums = ((layer, self._totals.get(f"{way}link_{layer}")) for layer in MESSAGE_LAYERS)
        return "  ".join(f"{layer} {human(value)}" for layer, value in sums if value is not None)
