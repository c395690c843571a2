"""Plots of a study: accuracy against bytes, differences against the margin, accuracy over rounds, fairness.

`run` in a trace's `meta` is the index of its method, so that the page's filters choose methods.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import product

import plotly.graph_objects as go

from fedreuse.sim.report.chronicle import STAGES, Stage
from fedreuse.sim.report.plot import BOTH, COLOURS, LAYER_NAMES, MB, Plot, make_plot
from fedreuse.sim.study.show import Block, Compared, Row, Showing
from fedreuse.sim.study.statistics import spread

BAND = "rgba(42,143,92,0.16)"
"""Of the margin."""


def colour(method: int) -> str:
    return COLOURS[method % len(COLOURS)]


def _faint(method: int, alpha: float = 0.18) -> str:
    red, green, blue = (int(colour(method)[at : at + 2], 16) for at in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha})"


def pareto(showing: Showing, number: int, block: Block, methods: Sequence[str]) -> Plot:
    """Test accuracy against the bytes of the whole run: every seed, and the means."""
    figure = go.Figure()
    for row, way, stage in product(block.rows, BOTH, _stages(showing)):
        known = [
            (x / MB, 100 * y, outcome.cell.seed)
            for outcome, y in zip(row.outcomes, row.figures["test_accuracy"], strict=True)
            if (x := outcome.story.total(stage, *BOTH[way])) is not None and y is not None
        ]
        if len(known) < len(row.outcomes):
            continue
        method, modelled = methods.index(row.method), stage == "modelled"
        symbol = "-open" if modelled else ""
        style = {
            "mode": "markers",
            "name": escape(row.method),
            "legendgroup": row.method,
            "meta": {"run": method, "way": way} | ({} if modelled else {"layer": stage}),
        }
        where = f"%{{x:.4g}} MB, {LAYER_NAMES[stage]}<br>%{{y:.2f}} %<extra>%{{fullData.name}}</extra>"
        figure.add_scatter(
            x=[x for x, _, _ in known],
            y=[y for _, y, _ in known],
            customdata=[seed for _, _, seed in known],
            showlegend=False,
            marker={"color": colour(method), "size": 7, "opacity": 0.55, "symbol": f"circle{symbol}"},
            hovertemplate="seed %{customdata}<br>" + where,
            **style,
        )
        figure.add_scatter(
            x=[spread([x for x, _, _ in known]).mean],
            y=[spread([y for _, y, _ in known]).mean],
            showlegend=modelled,  # the one that is there whatever layer is chosen
            marker={"color": colour(method), "size": 14, "symbol": f"diamond{symbol}", "line": {"width": 2}},
            hovertemplate="mean<br>" + where,
            **style,
        )
    figure.update_layout(xaxis={"title": "{way}, MB<br>layer: {layer}"}, yaxis={"title": "test accuracy, %"})
    columns = [
        "method",
        "seed",
        "test_accuracy",
        *(f"{way}_{stage}_bytes" for way, stage in product(BOTH, STAGES)),
    ]
    return make_plot(
        f"pareto-{number}",
        block.name,
        "Each seed a dot, their mean a diamond. Filled: the measured layer chosen above; open: the modelled fields. Up "
        "and to the left is better.",
        figure,
        columns,
        (
            (
                row.method,
                o.cell.seed,
                o.figures["test_accuracy"],
                *(o.story.total(stage, *BOTH[way]) for way, stage in product(BOTH, STAGES)),
            )
            for row in block.rows
            for o in row.outcomes
        ),
        height=430,
    )


def _stages(showing: Showing) -> list[Stage]:
    """Layers that some complete cell has in both directions."""
    outcomes = [o for block in showing.blocks for row in block.rows for o in row.outcomes]
    return [s for s in STAGES if any(o.story.total(s, *BOTH["both"]) is not None for o in outcomes)]


def measured_stages(showing: Showing) -> list[Stage]:
    return [stage for stage in _stages(showing) if stage != "modelled"]


def forest(showing: Showing, methods: Sequence[str]) -> Plot | None:
    """Differences to the control with their intervals, against the margin; None without any."""
    plan = showing.study.plan.compare
    found = [(block, one) for block in showing.blocks for one in block.comparisons]
    if plan is None or not found:
        return None
    figure = go.Figure()
    for method in dict.fromkeys(one.method for _, one in found):
        mine = [
            (f"{escape(method)}<br><i>{escape(block.name)}</i>", one.paired)
            for block, one in found
            if one.method == method
        ]
        index = methods.index(method)
        style = {"name": escape(method), "legendgroup": method, "meta": {"run": index}}
        for limits, width in (("interval", 2), ("inner", 6)):
            xs: list[float | None] = []
            ys: list[str] = []
            for label, one in mine:
                low, high = getattr(one, limits) or (None, None)
                xs += [low, high, None]
                ys += [label, label, label]
            figure.add_scatter(
                x=xs,
                y=ys,
                mode="lines",
                showlegend=False,
                hoverinfo="skip",
                line={"color": colour(index), "width": width},
                opacity=1 if width == 2 else 0.5,
                **style,
            )
        figure.add_scatter(
            x=[d for _, one in mine for d in one.differences],
            y=[label for label, one in mine for _ in one.differences],
            customdata=[seed for _ in mine for seed in showing.study.plan.seeds],
            mode="markers",
            showlegend=False,
            marker={"color": colour(index), "size": 7, "opacity": 0.9, "symbol": "circle-open"},
            hovertemplate="seed %{customdata}: %{x:+.2f}<extra>%{fullData.name}</extra>",
            **style,
        )
        figure.add_scatter(
            x=[one.mean for _, one in mine],
            y=[label for label, _ in mine],
            mode="markers",
            marker={"color": colour(index), "size": 12, "symbol": "diamond"},
            hovertemplate="mean %{x:+.2f}<extra>%{fullData.name}</extra>",
            **style,
        )
    band = {"type": "rect", "yref": "paper", "y0": 0, "y1": 1, "layer": "below"}
    zero = {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "x0": 0, "x1": 0, "layer": "below"}
    figure.update_layout(
        shapes=[
            band | {"x0": -plan.margin, "x1": plan.margin, "fillcolor": BAND, "line": {"width": 0}},
            zero | {"line": {"width": 1, "dash": "dash", "color": "#7d8794"}},
        ],
        xaxis={
            "title": f"difference in {_words(plan.metric)}, points",
            "zeroline": False,
        },
        yaxis={"autorange": "reversed", "automargin": True, "tickfont": {"size": 11}},
    )
    outer, inner = 100 * plan.confidence, 100 * (2 * plan.confidence - 1)
    return make_plot(
        "forest",
        f"Differences to {plan.control}",
        f"Green: the margin of ±{plan.margin:g} points, fixed before the first run. Diamond: mean; thin: {outer:g} % "
        f"interval; thick: {inner:g} % interval, which lies inside the margin where equivalence is shown (before "
        "correction for several data sets); rings: seeds.",
        figure,
        ("data_set", "method", "seed", "difference_points"),
        _differences(found, showing.study.plan.seeds),
        height=150 + 46 * len(found),
        wide=True,
    )


def _differences(
    found: Sequence[tuple[Block, Compared]], seeds: Sequence[int]
) -> Iterator[tuple[str, str, int, float]]:
    for block, one in found:
        for seed, difference in zip(seeds, one.paired.differences, strict=True):
            yield block.name, one.method, seed, difference


def curves(number: int, block: Block, methods: Sequence[str]) -> Plot:
    """Validation accuracy over rounds: mean over the seeds, and from the lowest to the highest."""
    figure = go.Figure()
    for row in block.rows:
        index = methods.index(row.method)
        points = _over_seeds(row)
        rounds = [n for n, _ in points]
        style = {"meta": {"run": index}, "name": escape(row.method), "mode": "lines"}
        hidden = {"showlegend": False, "hoverinfo": "skip", "line": {"width": 0, "color": colour(index)}}
        if len(row.outcomes) > 1:
            figure.add_scatter(x=rounds, y=[100 * min(ys) for _, ys in points], **style, **hidden)
            figure.add_scatter(
                x=rounds,
                y=[100 * max(ys) for _, ys in points],
                fill="tonexty",
                fillcolor=_faint(index),
                **style,
                **hidden,
            )
        figure.add_scatter(
            x=rounds,
            y=[100 * spread(ys).mean for _, ys in points],
            line={"color": colour(index), "width": 2.5},
            hovertemplate="round %{x}<br>%{y:.2f} %<extra>%{fullData.name}</extra>",
            **style,
        )
    targets = block.rows[0].values("target_accuracy")
    if targets:
        level = 100 * spread(targets).mean
        line = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": level, "y1": level}
        figure.add_shape(line | {"line": {"width": 1, "dash": "dash", "color": "#7d8794"}})
    figure.update_layout(xaxis={"title": "round"}, yaxis={"title": "validation accuracy, %"})
    return make_plot(
        f"curves-{number}",
        block.name,
        "Mean over the seeds; shaded from the lowest to the highest."
        + (" Dashed: the target, on average." if targets else ""),
        figure,
        ("method", "seed", "round", "validation_accuracy"),
        (
            (row.method, o.cell.seed, n, y)
            for row in block.rows
            for o in row.outcomes
            for n, y in o.evaluations
        ),
    )


def _over_seeds(row: Row) -> list[tuple[int, list[float]]]:
    """Rounds that every seed evaluated, with the accuracies."""
    found = [dict(outcome.evaluations) for outcome in row.outcomes]
    return [(n, [one[n] for one in found]) for n in sorted(set.intersection(*map(set, found)))]


def fairness(showing: Showing, methods: Sequence[str]) -> Plot | None:
    """From the worst to the best client, on average over seeds; None where no task can say it."""
    found = [(block, row) for block in showing.blocks for row in block.rows if row.values("fairness_mean")]
    if not found:
        return None
    figure = go.Figure()
    for method in dict.fromkeys(row.method for _, row in found):
        index = methods.index(method)
        mine = [
            (f"{escape(method)}<br><i>{escape(block.name)}</i>", row)
            for block, row in found
            if row.method == method
        ]
        style = {"name": escape(method), "meta": {"run": index}}
        ends = [[_mean(row, name) for name in ("min", "max")] for _, row in mine]
        figure.add_scatter(
            x=[x for low, high in ends for x in (low, high, None)],
            y=[y for y, _ in mine for _ in range(3)],
            mode="lines",
            line={"color": colour(index), "width": 2},
            showlegend=False,
            hoverinfo="skip",
            **style,
        )
        for name, symbol, size in (("mean", "diamond", 12), ("worst_tenth", "triangle-right", 11)):
            figure.add_scatter(
                x=[_mean(row, name) for _, row in mine],
                y=[y for y, _ in mine],
                mode="markers",
                marker={"color": colour(index), "size": size, "symbol": symbol},
                showlegend=name == "mean",
                hovertemplate=f"{_words(name)} %{{x:.2f}} %<extra>%{{fullData.name}}</extra>",
                **style,
            )
    figure.update_layout(
        xaxis={"title": "test accuracy of a client, %"},
        yaxis={"autorange": "reversed", "automargin": True, "tickfont": {"size": 11}},
    )
    columns = ("method", "data_set", "seed", "clients", "mean", "std", "min", "worst_tenth", "max", "jain")
    return make_plot(
        "fairness",
        "Fairness over clients",
        "Line: from the worst to the best client; diamond: mean over clients; triangle: mean of the worst tenth; each "
        "averaged over seeds. Clients with at least 10 test examples count.",
        figure,
        columns,
        (
            (row.method, block.name, o.cell.seed, *(o.figures[f"fairness_{name}"] for name in columns[3:]))
            for block, row in found
            for o in row.outcomes
        ),
        height=150 + 46 * len(found),
        wide=True,
    )


def _mean(row: Row, name: str) -> float | None:
    values = row.values(f"fairness_{name}")
    return None if values is None else 100 * spread(values).mean


def _words(name: str) -> str:
    return name.replace("_", " ")
