"""What all plots of the report have: a figure, the table of its numbers, names and colours.

What a filter of the page can hide carries its keys in `meta`: `run` (an index), `way` ("up", "down", "both")
and `layer` (a stage). The page shows what matches every key. Axis titles may hold {layer} and {way}.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from fedreuse.proto.ledger import Direction
from fedreuse.sim.report.chronicle import Stage
from fedreuse.sim.sums import WAYS

COLOURS = ("#0f7bc4", "#c2591a", "#2a8f5c", "#a5529b", "#8a7412", "#6f6ad6", "#c43e4d", "#23878f")
"""Of runs; each has a contrast of 3 or more against white and against the dark page."""
DOWN, UP, WHOLE = "#2a8f5c", "#c2591a", "#0f7bc4"
LAYER_NAMES: dict[Stage, str] = {
    "modelled": "modelled fields",
    "payload": "payload",
    "message": "protobuf messages",
    "grpc": "gRPC messages",
    "socket": "HTTP/2 or TLS",
    "tcp_payload": "TCP payload",
    "ip": "IP packets",
}
WAY_NAMES = {"up": "uplink", "down": "downlink", "both": "uplink + downlink"}
BOTH: dict[str, tuple[Direction, ...]] = {"up": ("up",), "down": ("down",), "both": WAYS}
MB = 1e6


@dataclass(frozen=True)
class Table:
    """Numbers behind a plot: column names with their units, and rows."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]


@dataclass(frozen=True)
class Plot:
    """A figure as JSON of plotly. `key` names it in the page and in file names; `keys` are the filters on all of it.

    `about` says what is shown, on which layer and in which direction; a `wide` one has the page's width.
    """

    key: str
    title: str
    about: str
    figure: dict[str, Any]
    table: Table
    keys: dict[str, Any]
    wide: bool


def make_plot(
    key: str,
    title: str,
    about: str,
    figure: go.Figure,
    columns: Sequence[str],
    rows: Iterator[tuple[Any, ...]],
    height: int = 380,
    wide: bool = False,
    **keys: Any,
) -> Plot:
    below = 80 if "<br>" in str(figure.layout.xaxis.title.text) else 60
    figure.update_layout(
        height=height,
        margin={"l": 64, "r": 16, "t": 32, "b": 56},
        legend={
            "orientation": "h",
            "y": -below / (height - 110),
            "x": 0,
            "yanchor": "top",
            "traceorder": "normal",
        },
        hovermode="closest",
    )
    spec = json.loads(figure.to_json())
    spec["layout"].pop("template", None)  # the page has its own, one a theme
    return Plot(key, title, about, spec, Table(tuple(columns), tuple(rows)), keys, wide)
