"""Holdings as tables that fit the terminal."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedreuse.sim.holdings import QUARTILES, Holdings
from fedreuse.sim.page import Page

ALL_SHOWN = 50
SOME_SHOWN = 20
"""Of more than ALL_SHOWN clients so many are shown."""

BARS = " ▁▂▃▄▅▆▇█"
ASCII_BARS = " .:-=+*#@"


def show(holdings: Holdings, console: Console, *, everybody: bool = False) -> None:
    """Print what was divided, quartiles over clients, and a line a client."""
    page = Page(console)
    page.list(_facts(holdings))
    page.list(("Note:", text) for text in holdings.notes())
    _quartiles(holdings, console)
    shown = _shown(holdings, everybody)
    if len(shown) < len(holdings.counts):
        page.heading(
            f"{len(shown)} of {len(holdings.counts):,} clients, evenly from the smallest to the largest"
        )
    _table(holdings, shown, console)


def _facts(holdings: Holdings) -> Iterator[tuple[str, str]]:
    rule = holdings.rule
    yield (
        "Partition:",
        f"{holdings.partition}; {holdings.task} over {holdings.clients:,} clients, seed {holdings.seed}",
    )
    of = "" if holdings.used == rule["examples"] else f" of {rule['examples']:,}"
    yield (
        "Examples:",
        f"{holdings.used:,}{of} training examples in use; validation has {holdings.validation:,}",
    )
    if rule["redraws"]:
        yield "Redraws:", f"{rule['redraws']:,}, since a client held too little"
    yield "SHA-256:", rule["sha256"]


def _quartiles(holdings: Holdings, console: Console) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("Over clients")
    for name in QUARTILES:
        table.add_column(name.replace(" ", "\n"), justify="right", vertical="bottom")
    names = {"examples": "examples", "labels": "different labels", "entropy": "entropy of labels (bits)"}
    for name, figures in holdings.figures().items():
        style = "{:.2f}" if name == "entropy" else "{:,.10g}"
        table.add_row(names[name], *(style.format(figures[part]) for part in QUARTILES))
    console.print(table)
    console.print()


def _shown(holdings: Holdings, everybody: bool) -> NDArray[np.int64]:
    """Clients that get a line: all in their order, or some in the order of their sizes."""
    count = len(holdings.counts)
    if everybody or count <= ALL_SHOWN:
        return np.arange(count)
    by_size = np.argsort(holdings.sizes, kind="stable")
    return by_size[np.linspace(0, count - 1, SOME_SHOWN).round().astype(np.int64)]


def _table(holdings: Holdings, shown: NDArray[np.int64], console: Console) -> None:
    """A column a label where they fit, else a bar a label (or a few neighbouring labels)."""
    counts, sizes = holdings.counts[shown], holdings.sizes[shown]
    left = [f"{client:,}" for client in shown]
    right = [
        (f"{size:,}", f"{labels}", f"{bits:.2f}")
        for size, labels, bits in zip(sizes, holdings.labels[shown], holdings.entropy[shown], strict=True)
    ]
    heads = [str(value) for value in holdings.values]
    widest = max(len(f"{counts.max():,}"), max(map(len, heads)))
    beside = max(6, *map(len, left)) + max(8, *(len(row[0]) for row in right)) + 6 + 4
    room = console.width - beside - 4 * 2
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="bold")
    table.add_column("client", justify="right")
    if len(heads) * (widest + 2) <= room + 2:
        for head in heads:
            table.add_column(head, justify="right", min_width=widest)
        cells = [[_number(count, row.max()) for count in row] for row in counts]
    else:
        each = -(-len(heads) // max(room, 10))
        title = "labels, ascending" if each == 1 else f"labels, {each} a sign"
        table.add_column(title, no_wrap=True, min_width=min(len(title), room))
        bars = ASCII_BARS if console.options.ascii_only else BARS
        cells = [[_bars(row, each, bars)] for row in counts]
    for head in ("examples", "labels", "bits"):
        table.add_column(head, justify="right", no_wrap=True)
    for name, middle, end in zip(left, cells, right, strict=True):
        table.add_row(name, *middle, *end)
    console.print(table)


def _number(count: int, most: int) -> Text:
    """Bold where a client has most of its examples, dim where it has none."""
    if count == 0:
        return Text("·", "dim")
    return Text(f"{count:,}", "bold cyan" if 2 * count >= most else "")


def _bars(row: NDArray[np.int64], each: int, bars: str) -> Text:
    """One sign for `each` labels: as high as their share in what the client has most of."""
    sums = np.add.reduceat(row, np.arange(0, len(row), each))
    heights = np.ceil(sums * (len(bars) - 1) / max(int(sums.max()), 1)).astype(int)
    return Text("".join(bars[height] for height in heights), "cyan")
