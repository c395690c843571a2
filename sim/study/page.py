"""A study as one HTML page that needs nothing but itself."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from rich.console import Console

from fedreuse.server.store import RunError
from fedreuse.sim.page import Lines, Page
from fedreuse.sim.report import shell
from fedreuse.sim.report.plot import COLOURS, LAYER_NAMES, WAY_NAMES, Plot
from fedreuse.sim.study import figures
from fedreuse.sim.study.show import Block, Showing, many
from fedreuse.sim.study.tables import everything, heads, lacking, legend, overview

MOST_METHODS = len(COLOURS)

Group = tuple[str, Lines]
"""Lines of a table below one heading."""


@dataclass(frozen=True)
class Section:
    """A data set: its plots, and its tables by heading."""

    block: Block
    pareto: Plot
    curves: Plot
    groups: tuple[Group, ...]


def write_page(showing: Showing, path: Path) -> None:
    """Write the page of a study. Raises RunError if no row is complete."""
    shell.write(path, render(showing))


def render(showing: Showing) -> str:
    """The page as text. Raises RunError."""
    study = showing.study
    methods = [level.label for level in study.plan.methods]
    if not showing.blocks:
        raise RunError(f"no row of {study.folder} is complete yet; there is nothing to report")
    if len(methods) > MOST_METHODS:
        raise RunError(f"{len(methods)} methods; a page shows up to {MOST_METHODS}, --csv has them all")
    page = Page(Console(file=io.StringIO(), width=200))
    sections = [
        Section(
            block,
            figures.pareto(showing, n, block, methods),
            figures.curves(n, block, methods),
            tuple(_groups(everything(showing, block, page))),
        )
        for n, block in enumerate(showing.blocks)
    ]
    forest, fairness = figures.forest(showing, methods), figures.fairness(showing, methods)
    stages = figures.measured_stages(showing)
    plots = [*(s.pareto for s in sections), *(s.curves for s in sections), forest, fairness]
    return shell.fill(
        "fedreuse.sim.study",
        title=f"fedreuse study: {study.plan.name}",
        showing=showing,
        seeds=many(len(study.plan.seeds)),
        methods=methods,
        colours=[figures.colour(n) for n in range(len(methods))],
        heads=[head.replace("\n", " ") for head in heads(showing)],
        overview=[list(overview(showing, block, page)) for block in showing.blocks],
        sections=sections,
        forest=forest,
        fairness=fairness,
        lacking=list(lacking(showing)),
        legend=list(legend(showing)),
        stages=[(stage, LAYER_NAMES[stage]) for stage in stages],
        definition=yaml.safe_dump(
            study.plan.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=110
        ),
        data={
            "plots": shell.embeddable(plot for plot in plots if plot is not None),
            "layers": {stage: LAYER_NAMES[stage] for stage in stages},
            "ways": WAY_NAMES,
            "runs": methods,
            "absent": [],
        },
    )


def _groups(lines: Sequence[tuple[str, list[str]]]) -> Iterator[Group]:
    """Lines split at their headings; lines without anything to say are left out."""
    heading, found = "", []
    for label, cells in [*lines, ("", [])]:
        if cells:
            found += [(label, cells)] if any(cells) else []
            continue
        if found:
            yield heading, found
        heading, found = label, []
