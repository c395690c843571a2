"""Plots of bytes: layer by layer, round by round, tensor by tensor; and of the accuracy that they bought."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, fields
from html import escape
from itertools import pairwise
from typing import Any

import plotly.graph_objects as go

from fedreuse.proto.ledger import Direction
from fedreuse.sim.report.chronicle import MEASURED, Chronicle, Stage, TensorShare
from fedreuse.sim.report.plot import (
    BOTH,
    COLOURS,
    DOWN,
    LAYER_NAMES,
    MB,
    UP,
    WAY_NAMES,
    WHOLE,
    Plot,
    make_plot,
)
from fedreuse.sim.sums import WAYS

SHARE_COLOURS = {"modelled": "#7d8794", "index": "#c2591a", "value": "#0f7bc4"}
STEPS: dict[Stage, str] = {
    "payload": "coding",
    "message": "protobuf",
    "grpc": "gRPC prefix",
    "tcp_payload": "sent again",
    "ip": "headers, ACKs",
}
"""What a layer adds to the one before it; of the socket it depends on what the connections were."""
MOST_TENSORS = 40


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
    return make_plot(
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
    return make_plot(
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
    return make_plot(
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
    return make_plot(
        "bytes-rounds",
        "Modelled and measured, round by round",
        "Solid: the measured layer chosen above. Dotted: the modelled fields, for the downlink by the symmetric "
        "convention (one dense model per selected client).",
        figure,
        columns,
        rows,
        wide=True,
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
    labels = [f"{escape(name)}<br><i>{_form(there)}</i>" for name, there in groups]
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
    return make_plot(
        f"tensors-{run}-{way}",
        f"Payload by tensor, {WAY_NAMES[way]}",
        "Grey: the modelled fields. Coloured: the bytes that were sent, indices and values apart. In italics the mode "
        "that the byte model charges for, and how most of its bytes were coded: indices / values. Small tensors that "
        "share a section stand under the name of the first, with the number of the others.",
        figure,
        [field.name for field in fields(TensorShare)],
        (astuple(share) for share in shares),
        min(1200, max(300, 150 + 42 * len(groups))),
        run=run,
        way=way,
    )


def _form(shares: Sequence[TensorShare]) -> str:
    """The model's mode, and the wire's codings that carried most bytes."""
    most = max(shares, key=lambda share: share.index_bytes + share.value_bytes)
    more = " and others" if len({(s.modes, s.index_coding, s.value_coding) for s in shares}) > 1 else ""
    return escape(f"{most.modes}: {most.index_coding} / {most.value_coding}{more}")


def measured_stages(stories: Sequence[Chronicle]) -> list[Stage]:
    """Measured stages that some run has, in order."""
    return [s for s in MEASURED if any((way, s) in story.series for story in stories for way in WAYS)]
