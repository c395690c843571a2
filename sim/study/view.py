"""What a person sees of a study: the grid of its cells, the live view of a run, what it came to."""

from __future__ import annotations

import time
from datetime import timedelta

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from fedreuse.sim.study.failures import Failure
from fedreuse.sim.study.folder import State, Study
from fedreuse.sim.study.plan import Cell
from fedreuse.sim.study.runner import Outcome, Pace

SHOWN = 12
"""Running cells that have a line of their own."""

_STYLES = {"complete": "green", "part": "yellow", "failed": "red", "missing": "dim"}


def duration(seconds: float | None) -> str:
    """1:02:03; a dash for what is not known."""
    return "—" if seconds is None else str(timedelta(seconds=round(seconds)))


def grid(study: Study, states: dict[str, State]) -> Table:
    """A row for each combination of levels, a column for each seed."""
    factors = list(study.plan.factors)
    table = Table(*factors, box=None, pad_edge=False, header_style="bold")
    for seed in study.plan.seeds:
        table.add_column(str(seed), justify="right", no_wrap=True)
    rows: dict[tuple[str, ...], dict[int, Text]] = {}
    for name, state in states.items():
        cell = study.cells[name]
        rows.setdefault(cell.group, {})[cell.seed] = Text(_mark(cell, state), style=_STYLES[state.kind])
    for group, marks in rows.items():
        table.add_row(*map(escape, group), *(marks[seed] for seed in study.plan.seeds))
    return table


def _mark(cell: Cell, state: State) -> str:
    """✓ complete, 47/90 rounds, ✗ failed, · not begun."""
    part = f"{state.rounds}/{cell.config.rounds}"
    return {"complete": "✓", "failed": "✗", "missing": "·", "part": part}[state.kind]


def show_outcome(console: Console, study: Study, outcome: Outcome) -> None:
    """The grid, and every cell that failed with its reason."""
    console.print(grid(study, outcome.states))
    counts = outcome.counts
    parts = [f"{counts[kind]} {kind}" for kind in ("complete", "part", "failed", "missing") if counts[kind]]
    console.print(f"{len(outcome.states)} cells: {', '.join(parts)}", highlight=False)
    for name, state in outcome.states.items():
        if state.kind == "failed" and state.failure is not None:
            _failed(console, name, state.failure)
    for sentence in outcome.unpaired:
        console.print(f"[bold red]not paired:[/bold red] {escape(sentence)}", highlight=False, soft_wrap=True)
    for name in study.strangers():
        text = f"{study.folder}/cells/{name} belongs to no cell of this study and is left alone"
        console.print(escape(text), style="dim", highlight=False, soft_wrap=True)


def _failed(console: Console, cell: str, failure: Failure) -> None:
    tries = f"attempt {failure.attempt}, " if failure.attempt > 1 else ""
    console.print(
        f"[bold red]failed:[/bold red] {cell} ({tries}{failure.type}): {escape(failure.sentence)}",
        highlight=False,
        soft_wrap=True,
    )


class StudyProgress:
    """Cells done, rate and time left; below, a bar for each running cell. Without a terminal a line for each end."""

    def __init__(self, console: Console, study: Study, states: dict[str, State], pace: Pace) -> None:
        self._console, self._study, self._pace = console, study, pace
        self._rounds = {name: state.rounds for name, state in states.items()}
        self._open = {name for name, state in states.items() if state.kind != "complete"}
        self._running: dict[str, float] = {}
        self._began, self._watched, self._failed = time.monotonic(), 0, 0
        self._note = ""
        self._live = Live(console=console, refresh_per_second=4, get_renderable=self._render)

    def __enter__(self) -> StudyProgress:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def started(self, cell: Cell) -> None:
        self._running[cell.id] = time.monotonic()

    def committed(self, cell: Cell, rounds: int) -> None:
        now = time.monotonic()
        self._pace.add(cell, now - self._running[cell.id])
        self._running[cell.id] = now
        self._rounds[cell.id] = rounds
        self._watched += 1

    def ended(self, cell: Cell, outcome: str, failure: Failure | None) -> None:
        self._running.pop(cell.id)
        if outcome != "stopped":
            self._open.discard(cell.id)
        if failure is not None:
            self._failed += 1
            _failed(self._console, cell.id, failure)
        if not self._console.is_terminal:
            self._console.print(f"{cell.id} {outcome}; {self._sums()}", highlight=False, soft_wrap=True)

    def stopping(self) -> None:
        self._note = "stopping after the current rounds; once more Ctrl-C: at once"
        if not self._console.is_terminal:
            self._console.print(self._note)

    def _sums(self) -> str:
        cells = self._study.cells
        todo = [(cells[name], cells[name].config.rounds - self._rounds[name]) for name in self._open]
        elapsed = time.monotonic() - self._began
        failed = f", {self._failed} failed" if self._failed else ""
        done = len(cells) - len(self._open) - self._failed
        return (
            f"{done}/{len(cells)} cells{failed}  {60 * self._watched / elapsed:.1f} rounds/min  "
            f"{duration(elapsed)}  left {duration(self._pace.left(todo, len(self._running)))}"
        )

    def _render(self) -> RenderableType:
        cells = self._study.cells
        table = Table.grid(
            Column(no_wrap=True), Column(ratio=1), Column(justify="right"), padding=(0, 1), expand=True
        )
        total = sum(cell.config.rounds for cell in cells.values())
        done = sum(self._rounds.values())
        table.add_row(f"[bold]{self._study.plan.name}", ProgressBar(total, done), f"{done}/{total} rounds")
        for name in list(self._running)[:SHOWN]:
            rounds, due = self._rounds[name], cells[name].config.rounds
            table.add_row(f"  {name}", ProgressBar(due, rounds), f"{rounds}/{due}")
        lines: list[RenderableType] = [table]
        if len(self._running) > SHOWN:
            lines.append(Text(f"  and {len(self._running) - SHOWN} more running", style="dim"))
        lines.append(Text(self._sums()))
        if self._note:
            lines.append(Text(self._note, style="yellow"))
        return Group(*lines)
