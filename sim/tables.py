"""A comparison as tables that fit the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedreuse.proto.ledger import MESSAGE_LAYERS, Direction, MessageLayer
from fedreuse.server.federation import CAUSES
from fedreuse.sim.compare import WAYS, Comparison, Entry, Layers, Run, total
from fedreuse.sim.reuse import BINS, Scores

Lines = list[tuple[str, list[str]]]
"""Lines of a table: a label and its cells; no cells make a heading."""

EXPLANATIONS = {
    "modelled": "the numbers alone, as papers count them: per tensor the smallest of dense, value + index and "
    "bitmap form; 16 B for a reuse",
    "payload": "the encoded tensors that were really produced",
    "message": "the serialized protobuf messages",
    "grpc": "the messages with gRPC's 5-byte prefix on every frame",
    "ratio": "bytes of a layer / modelled bytes",
    "—": "not observed in this run; that is not zero",
    "(n)": "events that the byte model charges for although no message carried them",
    "*": "downlink by the symmetric convention: one dense model per selected client and round",
    "saving": "1 - bytes / modelled dense bytes: m B0 (uplink, Eq. 15) or 2 m B0 (symmetric, Eq. 16)",
    "ceiling": "a gate that never fires (D = 0) on the same cohorts, quota and age limit, without faults",
    "D": "a client's discrepancy score; it trains afresh where D reaches the threshold of its round",
    "units": "1 kB = 1000 B; lost and refused messages are included; exact figures: --json, --csv",
}


def render(comparison: Comparison, console: Console, *, brief: bool = False) -> None:
    """Print everything as tables that fit the console's width; `brief` leaves out kinds and explanations."""
    page, runs = _Page(console), comparison.runs
    marks = [f"{n}" for n in range(1, len(runs) + 1)] if len(runs) > 1 else ["Run:"]
    page.list((mark, _title(run, page)) for mark, run in zip(marks, runs, strict=True))
    page.list(("Warning:", text) for text in comparison.warnings)
    page.list(("Note:", text) for text in comparison.notes)
    heads = [run.config.method for run in runs]
    if len(runs) > 1:
        heads = [f"{mark}\n{head}" for mark, head in zip(marks, heads, strict=True)]
    page.table(heads, _side_by_side(runs, page))
    if brief:
        return
    for mark, run in zip(marks, runs, strict=True):
        page.heading(f"{mark} {run.name}, by kind of message")
        page.table(["count", *MESSAGE_LAYERS, "payload\nratio", "grpc\nratio"], list(_kinds(run, page)))
    page.list((page.absent if mark == "—" else mark, text) for mark, text in EXPLANATIONS.items())


def _title(run: Run, page: _Page) -> str:
    config, clients = run.config, run.config.clients
    rounds = f"{run.rounds} rounds" if run.finished else f"round {run.rounds} of {config.rounds} (unfinished)"
    if run.finished and run.rounds < config.rounds:
        rounds += f" of {config.rounds} (stopped early)"
    return (
        f"{run.name}: {config.method} on {config.task.name}, seed {config.seed}, {clients.per_round} of "
        f"{clients.total} clients a round, {rounds}, dense model {page.size(run.dense_bytes)}"
    )


def _side_by_side(runs: Sequence[Run], page: _Page) -> Lines:
    bins = sorted({n for run in runs if run.scores for n, count in enumerate(run.scores.counts) if count})
    columns = [list(_figures(run, page, bins)) for run in runs]
    return [
        (row[0][0], [] if row[0][1] is None else [cell or "" for _, cell in row])
        for row in zip(*columns, strict=True)
    ]


def _figures(run: Run, page: _Page, bins: Sequence[int]) -> Iterator[tuple[str, str | None]]:
    """A run's column, with the same labels for every run; a heading has no cell."""
    gated, top, clients = run.config.gate.kind != "none", run.ceiling, run.clients
    yield "Accuracy (%)", None
    yield "  validation", page.percent(run.validation)
    yield "  test", page.percent(run.test)
    yield "Rounds", f"{run.rounds} of {run.config.rounds}"
    ways: dict[str, tuple[Direction, ...]] = {"Uplink": ("up",), "Downlink": ("down",), "Both": WAYS}
    for title, directions in ways.items():
        sums, star = run.bytes(*directions), "*" if "down" in directions else ""
        yield f"{title} (bytes)", None
        for layer, count in sums.items():
            yield f"  {layer}{star if layer == 'modelled' else ''}", page.size(count)
        yield "  payload ratio", page.ratio(sums, "payload")
        yield "  grpc ratio", page.ratio(sums, "grpc")
    yield "Uplink saving (%)", None
    for layer, saving in run.uplink_saving().items():
        yield f"  {layer}", page.percent(saving)
    yield (
        "  modelled, ceiling",
        page.percent(top.uplink_saving if top else None) if gated else "no gate",
    )
    yield "Symmetric saving (%)", None
    for layer, saving in run.symmetric_saving().items():
        yield f"  {layer}{'*' if layer == 'modelled' else ''}", page.percent(saving)
    yield "Reuse (% of selected)", None
    yield "  reused", page.percent(run.reuse_fraction)
    yield "  ceiling", page.percent(top.reuse_fraction if top else None) if gated else "no gate"
    yield "Selected clients", f"{run.selected}"
    yield "  fresh", f"{clients['fresh']}"
    yield from ((f"    {cause}", f"{clients[cause]}") for cause in CAUSES)
    yield "    no gate", f"{clients['always']}"
    yield from ((f"  {what}", f"{clients[what]}") for what in ("reused", "fault"))
    yield "    bridged", f"{clients['bridged']}"
    if bins:
        yield from _score_figures(run.scores, bins)


def _score_figures(scores: Scores | None, bins: Sequence[int]) -> Iterator[tuple[str, str | None]]:
    yield "Scores D", None
    yield "  below threshold", f"{scores.below}" if scores else ""
    yield "  threshold reached", f"{scores.reached}" if scores else ""
    names = ("minimum", "lower quartile", "median", "upper quartile", "maximum")
    for name, value in zip_longest(names, scores.quartiles if scores else ()):
        yield f"  {name}", "" if value is None else f"{value:.4f}"
    for n in bins:
        end = "]" if n == BINS - 1 else ")"
        yield (
            f"  in [{2 * n / BINS:.1f}, {2 * (n + 1) / BINS:.1f}{end}",
            f"{scores.counts[n]}" if scores else "",
        )


def _kinds(run: Run, page: _Page) -> Iterator[tuple[str, list[str]]]:
    """The byte table of a run."""

    def cells(entries: Sequence[Entry]) -> list[str]:
        messages, events = sum(e.messages for e in entries), sum(e.events for e in entries)
        sums = total(entries)
        count = f"({events})" if events and not messages else f"{messages}"
        return [count, *map(page.size, sums.values()), page.ratio(sums, "payload"), page.ratio(sums, "grpc")]

    for way in WAYS:
        there = [entry for entry in run.entries if entry.direction == way]
        yield f"{way.title()}link", []
        for kind, group in groupby(there, key=lambda entry: entry.kind):
            entries = list(group)
            yield f"  {kind}", cells(entries)
            for entry in entries:
                if entry.status != "ok" and entry.status != kind:
                    yield f"    {'not sent' if entry.status == 'fault' else entry.status}", cells([entry])
        yield "  total", cells(there)
    yield "Both", cells(run.entries)


@dataclass(frozen=True)
class _Page:
    """Formats figures and lays tables out for one console."""

    console: Console

    @property
    def absent(self) -> str:
        return "-" if self.console.options.ascii_only else "—"

    @property
    def gap(self) -> int:
        return 2 if self.console.width >= 80 else 1

    def size(self, count: int | None) -> str:
        """Four digits in decimal units; exact below 1 kB."""
        if count is None or count < 1000:
            return self.absent if count is None else f"{count} B"
        value, units = count / 1000, ["kB", "MB", "GB", "TB", "PB"]
        while value >= 999.95 and len(units) > 1:
            value, units = value / 1000, units[1:]
        digits = 3 if value < 9.9995 else 2 if value < 99.995 else 1
        return f"{value:.{digits}f} {units[0]}"

    def percent(self, fraction: float | None) -> str:
        return self.absent if fraction is None else f"{100 * fraction:.2f}"

    def ratio(self, sums: Layers, layer: MessageLayer) -> str:
        """A layer in terms of the modelled one; empty where the model charges nothing."""
        count, charge = sums[layer], sums["modelled"]
        if count is None or charge is None:
            return self.absent
        return f"{count / charge:.4f}" if charge else ""

    def heading(self, text: str) -> None:
        self.console.print(Text(text, "bold"))

    def list(self, items: Iterable[tuple[str, str]]) -> None:
        """Sentences that hang on their marks."""
        grid = Table.grid(padding=(0, 1, 0, 0))
        for mark, text in items:
            grid.add_row(Text(mark, "bold"), Text(text, overflow="fold"))
        if grid.row_count:
            self.console.print(grid)
            self.console.print()

    def table(self, heads: Sequence[str], lines: Lines) -> None:
        """One table, or several below each other where the width asks for it; all have the labels."""
        labels = max(len(label) for label, _ in lines)
        widths = [
            max(map(len, [*head.split("\n"), *(cells[n] for _, cells in lines if cells)]))
            for n, head in enumerate(heads)
        ]
        start = 0
        while start < len(heads):
            end = start + 1
            while end < len(heads) and self._width(labels, widths[start : end + 1]) <= self.console.width:
                end += 1
            self._block(heads[start:end], [(label, cells[start:end]) for label, cells in lines])
            start = end

    def _width(self, labels: int, columns: Sequence[int]) -> int:
        return labels + sum(self.gap + width for width in columns)

    def _block(self, heads: Sequence[str], lines: Lines) -> None:
        table = Table(box=None, padding=(0, self.gap, 0, 0), pad_edge=False, header_style="bold")
        table.add_column("", overflow="fold")
        for head in heads:
            table.add_column(Text(head), justify="right", overflow="fold")
        heading = ""
        for label, cells in lines:
            if not cells:
                heading = label
            elif any(cells):
                if heading or not label.startswith(" "):
                    if table.row_count:
                        table.add_row()
                    if heading:
                        table.add_row(Text(heading, "bold"))
                    heading = ""
                style = "" if label.startswith(" ") else "bold"
                table.add_row(Text(label, style), *map(Text, cells))
        self.console.print(table)
        self.console.print()
