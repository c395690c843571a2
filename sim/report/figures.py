"""The plots of the report, each with the table of its numbers.

What a filter of the page can hide carries its keys in `meta`: `run` (an index), `way` ("up", "down", "both")
and `layer` (a stage). The page shows what matches every key. Axis titles may hold {layer} and {way}.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from html import escape
from itertools import pairwise
from typing import Any

import plotly.graph_objects as go

from fedreuse.proto.ledger import Direction
from fedreuse.sim.report.chronicle import CLAUSES, FATES, MEASURED, Chronicle, Stage, TensorShare
from fedreuse.sim.sums import WAYS

COLOURS = ("#0f7bc4", "#c2591a", "#2a8f5c", "#a5529b", "#8a7412", "#6f6ad6", "#c43e4d", "#23878f")
"""Of runs; each has a contrast of 3 or more against white and against the dark page."""
CLAUSE_COLOURS = {
    "cacheless": "#6f6ad6",
    "age": "#0f7bc4",
    "threshold": "#c2591a",
    "quota": "#a5529b",
    "always": "#23878f",
    "reused": "#2a8f5c",
    "fault": "#c43e4d",
}
CLAUSE_NAMES = {
    "cacheless": "fresh: nothing cached",
    "age": "fresh: too old",
    "threshold": "fresh: score reached the threshold",
    "quota": "fresh: quota",
    "always": "fresh: no gate",
    "reused": "reused",
    "fault": "failed",
}
FATE_COLOURS = ("#0f7bc4", "#2a8f5c", "#c43e4d", "#c98a1b")
FATE_NAMES = ("fresh", "reused", "failed", "failed, cached update stood in")
SHARE_COLOURS = {"modelled": "#7d8794", "index": "#c2591a", "value": "#0f7bc4"}
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
STEPS: dict[Stage, str] = {
    "payload": "coding",
    "message": "protobuf",
    "grpc": "gRPC prefix",
    "tcp_payload": "sent again",
    "ip": "headers, ACKs",
}
"""What a layer adds to the one before it; of the socket it depends on what the connections were."""
MOST_CELLS = 200_000
"""Of one map of clients by rounds."""
MOST_TENSORS = 40
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


def _plot(
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


# ---------------------------------------------------------------- layers


def waterfall(run: int, story: Chronicle, way: Direction) -> Plot | None:
    """From the modelled fields of one direction to its packets; None if nothing is known of it."""
    found = [(stage, n) for stage in LAYER_NAMES if (n := story.total(stage, way)) is not None]
    if not found or not any(n for _, n in found):
        return None
    (first, base), (last, end) = found[0], found[-1]
    bars = [(LAYER_NAMES[first], base, "absolute", _size(base))]
    for (_, before), (stage, count) in pairwise(found):
        share = f" ({100 * (count - before) / base:+.2f} %)" if base else ""
        name = _socket(story, way) if stage == "socket" else STEPS[stage]
        bars.append((name, count - before, "relative", _size(count - before, sign=True) + share))
    if len(found) > 1:
        share = f" ({100 * end / base:.2f} %)" if base else ""
        bars.append((LAYER_NAMES[last], end, "total", _size(end) + share))
    figure = go.Figure(
        go.Waterfall(
            y=[f"{name}<br><b>{text}</b>" for name, _, _, text in bars],
            x=[count / MB for _, count, _, _ in bars],
            measure=[kind for _, _, kind, _ in bars],
            orientation="h",
            increasing={"marker": {"color": UP}},
            decreasing={"marker": {"color": DOWN}},
            totals={"marker": {"color": WHOLE}},
            connector={"line": {"width": 1, "color": "#7d8794"}},
            hovertemplate="%{y}<extra></extra>",
        )
    )
    figure.update_layout(
        xaxis={"title": f"{WAY_NAMES[way]}, MB", "rangemode": "tozero"},
        yaxis={"autorange": "reversed", "tickfont": {"size": 11}},
        showlegend=False,
    )
    rows = ((stage, count) for stage, count in found)
    return _plot(
        f"waterfall-{run}-{way}",
        f"{WAY_NAMES[way].capitalize()}",
        f"From {LAYER_NAMES[first]} down: what each layer adds or saves, in bytes and in per cent of the first bar; "
        f"the last bar is the deepest layer that was observed, {LAYER_NAMES[last]}.",
        figure,
        ("layer", "bytes over the whole run"),
        rows,
        120 + 42 * len(bars),
        run=run,
        way=way,
    )


def _socket(story: Chronicle, way: Direction) -> str:
    there = story.run.connections[way]
    return "HTTP/2" if not there.seen["tls"] else "HTTP/2 + TLS" if not there.seen["http2"] else "HTTP/2, TLS"


def _size(count: int, *, sign: bool = False) -> str:
    plus = "+" if sign and count >= 0 else ""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(count) >= scale:
            return f"{plus}{count / scale:.4g} {unit}"
    return f"{plus}{count} B"


# ---------------------------------------------------------------- over rounds


def _curves(
    figure: go.Figure,
    stories: Sequence[Chronicle],
    stages: Sequence[Stage],
    curve: Callable[[Chronicle, Stage, tuple[Direction, ...]], tuple[Sequence[Any], Sequence[Any]] | None],
    **style: Any,
) -> None:
    """One trace a run, direction and stage, so that the page can choose among them."""
    for run, story in enumerate(stories):
        for way, ways in BOTH.items():
            for stage in stages:
                points = curve(story, stage, ways)
                if points is None:
                    continue
                meta: dict[str, Any] = {"run": run, "way": way}
                if stage != "modelled":
                    meta["layer"] = stage
                modelled = stage == "modelled"
                figure.add_scatter(
                    x=points[0],
                    y=points[1],
                    mode="lines+markers" if len(points[0]) == 1 else "lines",
                    name=escape(f"{story.run.name}, {LAYER_NAMES[stage]}"),
                    line={
                        "color": COLOURS[run % len(COLOURS)],
                        "dash": "dot" if modelled else "solid",
                        "width": 1.5 if modelled else 2.5,
                    },
                    meta=meta,
                    **style,
                )


def accuracy_by_bytes(stories: Sequence[Chronicle]) -> Plot:
    """Validation accuracy against what had crossed by then, for every layer and direction."""

    def curve(
        story: Chronicle, stage: Stage, ways: tuple[Direction, ...]
    ) -> tuple[list[Any], list[Any]] | None:
        sums = story.cumulative(stage, *ways)
        if sums is None:
            return None
        points = [(x / MB, 100 * y) for x, y in zip(sums, story.validation, strict=True) if y is not None]
        return ([x for x, _ in points], [y for _, y in points]) if points else None

    figure = go.Figure()
    _curves(
        figure,
        stories,
        tuple(LAYER_NAMES),
        curve,
        hovertemplate="%{x:.4g} MB<br>%{y:.2f} %<extra>%{fullData.name}</extra>",
    )
    figure.update_layout(
        xaxis={"title": "cumulative {way}, MB<br>layer: {layer}"},
        yaxis={"title": "validation accuracy, %"},
    )
    columns = ["run", "round", "validation_accuracy"]
    keys = [(way, stage) for way in WAYS for stage in LAYER_NAMES]
    columns += [f"cumulative_{way}link_{stage}_bytes" for way, stage in keys]
    rows = (
        (story.run.name, n + 1, story.validation[n], *(None if s is None else s[n] for s in sums))
        for story in stories
        for sums in [[story.cumulative(stage, way) for way, stage in keys]]
        for n in range(story.run.rounds)
    )
    return _plot(
        "accuracy-bytes",
        "Accuracy for the bytes it took",
        "Solid: the measured layer chosen above. Dotted: the modelled fields. Bytes that belong to no round (joins, "
        "heartbeats before the first) count from the start.",
        figure,
        columns,
        rows,
    )


def accuracy_by_rounds(stories: Sequence[Chronicle]) -> Plot:
    figure = go.Figure()
    for run, story in enumerate(stories):
        points = [(n, 100 * y) for n, y in enumerate(story.validation, 1) if y is not None]
        figure.add_scatter(
            x=[n for n, _ in points],
            y=[y for _, y in points],
            mode="lines+markers" if len(points) == 1 else "lines",
            name=escape(story.run.name),
            line={"color": COLOURS[run % len(COLOURS)], "width": 2.5},
            meta={"run": run},
            hovertemplate="round %{x}<br>%{y:.2f} %<extra>%{fullData.name}</extra>",
        )
    figure.update_layout(
        xaxis={"title": "round"}, yaxis={"title": "validation accuracy, %"}, showlegend=len(stories) > 1
    )
    rows = (
        (story.run.name, n, y, seconds)
        for story in stories
        for n, (y, seconds) in enumerate(zip(story.validation, story.seconds, strict=True), 1)
    )
    return _plot(
        "accuracy-rounds",
        "Accuracy by rounds",
        "Of the global model after each round, on validation data cut from the training data.",
        figure,
        ("run", "round", "validation_accuracy", "round_seconds"),
        rows,
    )


def bytes_by_rounds(stories: Sequence[Chronicle]) -> Plot:
    def curve(
        story: Chronicle, stage: Stage, ways: tuple[Direction, ...]
    ) -> tuple[list[Any], list[Any]] | None:
        counts = story.per_round(stage, *ways)
        return None if counts is None else (list(range(1, len(counts) + 1)), [n / MB for n in counts])

    figure = go.Figure()
    _curves(
        figure,
        stories,
        tuple(LAYER_NAMES),
        curve,
        hovertemplate="round %{x}<br>%{y:.4g} MB<extra>%{fullData.name}</extra>",
    )
    figure.update_layout(
        xaxis={"title": "round"},
        yaxis={"title": "{way} a round, MB", "rangemode": "tozero"},
    )
    keys = [(way, stage) for way in WAYS for stage in LAYER_NAMES]
    columns = ["run", "round", *(f"{way}link_{stage}_bytes" for way, stage in keys)]
    rows = (
        (story.run.name, n + 1, *(None if s is None else s[n] for s in sums))
        for story in stories
        for sums in [[story.per_round(stage, way) for way, stage in keys]]
        for n in range(story.run.rounds)
    )
    return _plot(
        "bytes-rounds",
        "Modelled and measured, round by round",
        "Solid: the measured layer chosen above. Dotted: the modelled fields, for the downlink by the symmetric "
        "convention (one dense model per selected client).",
        figure,
        columns,
        rows,
        wide=True,
    )


# ---------------------------------------------------------------- the gate


def clauses(run: int, story: Chronicle) -> Plot | None:
    """How many of each cohort each clause of the gate sent to train, and how many were reused; None without a gate,
    unless clients failed."""
    if story.run.config.gate.kind == "none" and not story.run.clients["fault"]:
        return None
    figure = go.Figure()
    rounds = list(range(1, story.run.rounds + 1))
    for clause in CLAUSES:
        if any(story.clauses[clause]):
            figure.add_bar(
                x=rounds,
                y=story.clauses[clause],
                name=CLAUSE_NAMES[clause],
                marker={"color": CLAUSE_COLOURS[clause], "line": {"width": 0}},
                hovertemplate="round %{x}: %{y}<extra>%{fullData.name}</extra>",
            )
    figure.update_layout(
        barmode="stack",
        bargap=0.08,
        xaxis={"title": "round"},
        yaxis={"title": "selected clients, number"},
        showlegend=True,
    )
    rows = ((n, *(story.clauses[clause][n - 1] for clause in CLAUSES)) for n in rounds)
    return _plot(
        f"clauses-{run}",
        "What the gate decided",
        "Clients of each round's cohort, by the clause that sent them to train afresh, and those reused.",
        figure,
        ("round", *CLAUSES),
        rows,
        run=run,
    )


def scores(run: int, story: Chronicle) -> Plot | None:
    if not story.scores:
        return None
    figure = go.Figure()
    for reached, name, colour in ((False, "below: reused", DOWN), (True, "reached: train afresh", UP)):
        there = [s for s in story.scores if (s.score >= s.threshold) == reached]
        figure.add_scatter(
            x=[s.round for s in there],
            y=[s.score for s in there],
            mode="markers",
            name=name,
            marker={"color": colour, "size": 6, "opacity": 0.8, "symbol": "diamond" if reached else "circle"},
            customdata=[s.client for s in there],
            hovertemplate="round %{x}, client %{customdata}<br>D = %{y:.4f}<extra></extra>",
        )
    line = sorted({(s.round, s.threshold) for s in story.scores})
    figure.add_scatter(
        x=[n for n, _ in line],
        y=[threshold for _, threshold in line],
        mode="lines",
        name="threshold",
        line={"color": "#7d8794", "dash": "dash", "shape": "hv"},
        hovertemplate="round %{x}<br>threshold %{y:.4f}<extra></extra>",
    )
    figure.update_layout(
        xaxis={"title": "round"}, yaxis={"title": "discrepancy D, no unit", "rangemode": "tozero"}
    )
    return _plot(
        f"scores-{run}",
        "Scores against the threshold",
        "The discrepancy D that each scored client sent, and the threshold of its round.",
        figure,
        ("round", "client", "D", "threshold"),
        ((s.round, s.client, s.score, s.threshold) for s in story.scores),
        run=run,
    )


def fates(run: int, story: Chronicle) -> Plot:
    """Client by round: fresh, reused, failed, or not selected."""
    seen = sorted({client for _, client in story.fates})
    rounds = list(range(1, story.run.rounds + 1))
    last = rounds[-min(len(rounds), 1000) :]
    room = max(1, MOST_CELLS // max(1, len(last)))
    shown = seen[:room]
    cells = [[story.fates.get((round, client)) for round in last] for client in shown]
    names = [["not selected" if c is None else FATE_NAMES[c] for c in row] for row in cells]
    steps = [
        [at / len(FATES), colour] for n, colour in enumerate(FATE_COLOURS) for at in (n, n + 1)
    ]  # flat bands
    figure = go.Figure(
        go.Heatmap(
            x=last,
            y=[str(client) for client in shown],
            z=cells,
            text=names,
            zmin=-0.5,
            zmax=len(FATES) - 0.5,
            colorscale=steps,
            showscale=False,
            xgap=0.5,
            ygap=0.5,
            hovertemplate="client %{y}, round %{x}<br>%{text}<extra></extra>",
        )
    )
    for name, colour, index in zip(FATE_NAMES, FATE_COLOURS, range(len(FATES)), strict=True):
        if index in story.fates.values():
            figure.add_scatter(
                x=[None],
                y=[None],
                mode="markers",
                name=name,
                marker={"color": colour, "symbol": "square", "size": 11},
            )
    figure.update_layout(
        xaxis={"title": "round", "showgrid": False},
        yaxis={"title": "client, index", "type": "category", "autorange": "reversed", "showgrid": False},
        showlegend=True,
    )
    about = "A square for each selected client and round; empty where a client was not selected."
    if len(last) < len(rounds) or len(shown) < len(seen):
        about += (
            f" Shown: clients {shown[0]} to {shown[-1]} of {len(seen)} that were ever selected, rounds "
            f"{last[0]} to {last[-1]}; the table has them all."
        )
    rows = ((round, client, FATES[fate]) for (round, client), fate in sorted(story.fates.items()))
    height = min(1400, max(320, 130 + 11 * len(shown)))
    return _plot(
        f"map-{run}",
        "Clients by rounds",
        about,
        figure,
        ("round", "client", "fate"),
        rows,
        height,
        wide=True,
        run=run,
    )


# ---------------------------------------------------------------- payloads


def tensors(run: int, story: Chronicle, way: Direction) -> Plot | None:
    """Bytes of bodies by tensor, beside what the model charges for the same."""
    shares = [s for s in story.shares or () if s.direction == way]
    if not shares:
        return None
    by_tensor: dict[str, list[TensorShare]] = {}
    for share in shares:
        by_tensor.setdefault(share.tensors, []).append(share)
    order = sorted(by_tensor, key=lambda name: -sum(s.modelled for s in by_tensor[name]))
    kept, rest = order[:MOST_TENSORS], order[MOST_TENSORS:]
    groups = [(name, by_tensor[name]) for name in kept]
    if rest:
        groups.append((f"{len(rest)} smaller ones", [s for name in rest for s in by_tensor[name]]))
    labels = [escape(name) for name, _ in groups]
    parts: dict[str, Callable[[TensorShare], int]] = {
        "modelled": lambda s: s.modelled,
        "index": lambda s: s.index_bytes,
        "value": lambda s: s.value_bytes,
    }
    titles = {"modelled": "modelled fields", "index": "payload: indices", "value": "payload: values"}
    figure = go.Figure()
    for part, of in parts.items():
        counts = [sum(map(of, there)) for _, there in groups]
        figure.add_bar(
            y=labels,
            x=[count / MB for count in counts],
            orientation="h",
            name=titles[part],
            marker={"color": SHARE_COLOURS[part]},
            offsetgroup="model" if part == "modelled" else "wire",
            hovertemplate="%{y}<br>%{x:.4g} MB<extra>%{fullData.name}</extra>",
        )
    figure.update_layout(
        barmode="stack",
        xaxis={"title": f"{WAY_NAMES[way]}, MB"},
        yaxis={"autorange": "reversed", "automargin": True},
    )
    return _plot(
        f"tensors-{run}-{way}",
        f"Payload by tensor, {WAY_NAMES[way]}",
        "Grey: the modelled fields. Coloured: the bytes that were sent, indices and values apart. Small tensors that "
        "share a section stand under the name of the first, with the number of the others.",
        figure,
        [field.name for field in fields(TensorShare)],
        (astuple(share) for share in shares),
        min(1200, max(300, 150 + 42 * len(groups))),
        run=run,
        way=way,
    )


def measured_stages(stories: Sequence[Chronicle]) -> list[Stage]:
    """Measured stages that some run has, in order."""
    return [s for s in MEASURED if any((way, s) in story.series for story in stories for way in WAYS)]
