"""A page about a partition: who holds how much of which label."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from fedreuse.sim.holdings import QUARTILES, Holdings
from fedreuse.sim.report import shell

IN_ORDER = 100
"""Up to so many clients stand in the order of their indices; more are sorted by what they have most of."""

MOST_COLUMNS = 1000
"""As many clients as there are columns on a screen."""

COLOURS = (
    *("#0f7bc4", "#c2591a", "#2a8f5c", "#a5529b", "#b5930d"),
    *("#6f6ad6", "#d1495b", "#23a3ad", "#7d8795", "#8b5e3c"),
)
"""Of labels, where there are no more than these."""


@dataclass(frozen=True)
class Drawn:
    """A figure as JSON of plotly, with what it shows."""

    key: str
    title: str
    about: str
    height: int
    figure: dict[str, Any]


def write_page(holdings: Holdings, path: Path) -> None:
    """Write one page that needs no network. Raises OSError."""
    shell.write(path, render(holdings))


def render(holdings: Holdings) -> str:
    """The page as text."""
    plots = [_labels(holdings), _sizes(holdings)]
    style = {"examples": "{:,.10g}", "labels": "{:,.10g}", "entropy": "{:.2f}"}
    names = {"examples": "examples", "labels": "different labels", "entropy": "entropy of labels (bits)"}
    return shell.fill(
        shell.HERE,
        template="holdings.html",
        script="holdings.js",
        holdings=holdings,
        notes=holdings.notes(),
        quartiles=QUARTILES,
        rows=[
            (names[name], [style[name].format(figures[part]) for part in QUARTILES])
            for name, figures in holdings.figures().items()
        ],
        plots=plots,
        data={plot.key: plot.figure for plot in plots},
    )


def _order(holdings: Holdings, sort: NDArray[np.int64], words: str) -> tuple[NDArray[np.int64], str]:
    """Clients from left to right, and that order in words: of many clients they are sorted."""
    count = len(holdings.counts)
    if count <= IN_ORDER:
        return np.arange(count), "Clients in order."
    if count > MOST_COLUMNS:
        sort = sort[np.linspace(0, count - 1, MOST_COLUMNS).round().astype(np.int64)]
        words += f" {MOST_COLUMNS:,} of {count:,} are shown, taken evenly from that order."
    return sort, words


def _labels(holdings: Holdings) -> Drawn:
    share = holdings.counts.max(axis=1) / holdings.sizes
    order, about = _order(
        holdings,
        np.lexsort((-share, holdings.counts.argmax(axis=1))),
        "Clients sorted by the label they have most of, then by its share.",
    )
    counts = holdings.counts[order].T
    top = int(counts.max())
    ticks = sorted({0, 1, *(int(top * part) for part in (0.05, 0.25, 0.6)), top})
    many = len(holdings.values) > 40
    figure = go.Figure(
        go.Heatmap(
            # The square root: a few examples are seen beside hundreds.
            z=np.sqrt(counts).round(3).tolist(),
            customdata=counts.tolist(),
            x=[str(client) for client in order],
            y=[str(value) for value in holdings.values],
            hovertemplate="client %{x}, label %{y}: %{customdata:,} examples<extra></extra>",
            zmin=0,
            xgap=1 if len(order) <= IN_ORDER else 0,
            ygap=0 if many else 1,
            colorbar={
                "tickvals": [tick**0.5 for tick in ticks],
                "ticktext": [f"{tick:,}" for tick in ticks],
                "thickness": 12,
                "title": {"text": "examples"},
            },
        )
    )
    figure.update_yaxes(title="label", type="category", showgrid=False, nticks=20)
    height = min(640, 140 + (10 if many else 24) * len(holdings.values))
    return _drawn(
        "labels",
        "Labels of each client",
        f"The darker (in the dark theme: the lighter), the more examples. {about}",
        figure,
        height,
    )


def _sizes(holdings: Holdings) -> Drawn:
    """Bars stacked by label, or plain ones where there are too many clients or labels to tell colours apart."""
    order, about = _order(
        holdings, np.argsort(holdings.sizes, kind="stable"), "Clients from the smallest to the largest."
    )
    names, counts = [str(client) for client in order], holdings.counts[order]
    figure = go.Figure()
    if len(holdings.values) <= len(COLOURS) and len(order) <= IN_ORDER:
        for value, colour, column in zip(holdings.values, COLOURS, counts.T, strict=False):
            figure.add_bar(
                x=names,
                y=column.tolist(),
                name=str(value),
                marker={"color": colour, "line": {"width": 0}},
                hovertemplate=f"client %{{x}}, label {value}: %{{y:,}} examples<extra></extra>",
            )
        words = "One colour a label. "
    else:
        figure.add_bar(
            x=names,
            y=holdings.sizes[order].tolist(),
            marker={"color": COLOURS[0], "line": {"width": 0}},
            hovertemplate="client %{x}: %{y:,} examples<extra></extra>",
        )
        words = ""
    figure.update_layout(
        barmode="stack",
        bargap=0.1 if len(order) <= IN_ORDER else 0,
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "traceorder": "normal"},
    )
    figure.update_yaxes(title="examples")
    return _drawn("sizes", "Examples of each client", f"{words}{about}", figure, 400)


def _drawn(key: str, title: str, about: str, figure: go.Figure, height: int) -> Drawn:
    figure.update_xaxes(title="client", type="category", showgrid=False, nticks=20)
    figure.update_layout(height=height, margin={"t": 36, "b": 56}, hovermode="closest")
    spec = json.loads(figure.to_json())
    spec["layout"].pop("template", None)  # the page has its own, one a theme
    return Drawn(key, title, about, height, spec)
