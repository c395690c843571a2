"""Figures and tables that fit the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

Lines = list[tuple[str, list[str]]]
"""Lines of a table: a label and its cells; no cells make a heading."""


@dataclass(frozen=True)
class Page:
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

    def ratio(self, count: int | None, charge: int | None) -> str:
        """Bytes in terms of what the model charges; empty where it charges nothing."""
        if count is None or charge is None:
            return self.absent
        return f"{count / charge:.4f}" if charge else ""

    def part(self, fraction: float | None) -> str:
        """A quotient of bytes."""
        return self.absent if fraction is None else f"{fraction:.4f}"

    def mean(self, count: float | None) -> str:
        """Bytes on average."""
        return self.absent if count is None else f"{count:.1f} B"

    def number(self, count: int | None) -> str:
        """A count of something that is not bytes."""
        return self.absent if count is None else f"{count}"

    def shown(self, text: str) -> str:
        """What the console can show of a text."""
        if not self.console.options.ascii_only:
            return text
        return text.replace("±", "+-").encode("ascii", "replace").decode()

    def heading(self, text: str) -> None:
        self.console.print(Text(self.shown(text), "bold"))

    def note(self, text: str) -> None:
        self.console.print(Text(self.shown(text), "dim"))
        self.console.print()

    def list(self, items: Iterable[tuple[str, str]]) -> None:
        """Sentences that hang on their marks."""
        grid = Table.grid(padding=(0, 1, 0, 0))
        for mark, text in items:
            grid.add_row(Text(self.shown(mark), "bold"), Text(self.shown(text), overflow="fold"))
        if grid.row_count:
            self.console.print(grid)
            self.console.print()

    def table(self, heads: Sequence[str], lines: Lines) -> None:
        """One table, or several below each other where the width asks for it; all have the labels."""
        heads = [self.shown(head) for head in heads]
        lines = [(self.shown(label), [self.shown(cell) for cell in cells]) for label, cells in lines]
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
