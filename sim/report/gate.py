"""Plots of who trained, and why: the gate's clauses, its scores, and what became of every client."""

from __future__ import annotations

import plotly.graph_objects as go

from fedreuse.sim.report.chronicle import CLAUSES, FATES, Chronicle
from fedreuse.sim.report.plot import DOWN, UP, Plot, make_plot

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
MOST_CELLS = 200_000
"""Of one map of clients by rounds."""


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
    return make_plot(
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
    for reached, name, colour in ((False, "below the threshold", DOWN), (True, "threshold reached", UP)):
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
    return make_plot(
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
    return make_plot(
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
