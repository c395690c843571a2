"""Puts the report together: one HTML file that needs nothing but itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fedreuse.proto.ledger import LAYERS, MESSAGE_LAYERS, Direction
from fedreuse.server.store import RunError
from fedreuse.sim.compare import Comparison, Run, compare
from fedreuse.sim.report import figures, gate, shell
from fedreuse.sim.report.chronicle import Chronicle, Stage, read_chronicle
from fedreuse.sim.report.plot import BOTH, COLOURS, LAYER_NAMES, WAY_NAMES, Plot
from fedreuse.sim.sums import COUNTED, WAYS

MOST_RUNS = 8
"""As many as there are colours that can be told apart."""


@dataclass(frozen=True)
class Line:
    """A line of the layer table: a name, whether it is measured, and a cell for each direction."""

    name: str
    measured: bool
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Cell:
    """A figure; `absent` has the reason where there is none."""

    exact: str
    to_modelled: str = ""
    to_dense: str = ""
    absent: str = ""


@dataclass(frozen=True)
class Section:
    """All that the page shows of one run."""

    index: int
    story: Chronicle
    facts: tuple[tuple[str, str], ...]
    figures: tuple[tuple[str, str, str], ...]
    layers: tuple[Line, ...]
    how: tuple[str, ...]
    gate: tuple[Plot, ...]
    falls: tuple[Plot, ...]
    tensors: tuple[Plot, ...]
    config: str

    @property
    def run(self) -> Run:
        return self.story.run

    @property
    def plots(self) -> tuple[Plot, ...]:
        return self.falls + self.gate + self.tensors


def write_report(folders: Sequence[Path], path: Path) -> None:
    """Write the report of one or more runs, finished or not. Raises RunError."""
    shell.write(path, render(folders))


def render(folders: Sequence[Path]) -> str:
    """The page as text. Raises RunError."""
    if len(folders) > MOST_RUNS:
        raise RunError(
            f"{len(folders)} runs; a report shows up to {MOST_RUNS}, more are better in `fedreuse compare --csv`"
        )
    comparison = compare(folders)
    stories = [read_chronicle(f, run) for f, run in zip(folders, comparison.runs, strict=True)]
    if not any(story.run.rounds for story in stories):
        raise RunError("no run has a committed round yet; there is nothing to report")
    sections = [_section(n, story) for n, story in enumerate(stories)]
    shared = [
        figures.accuracy_by_bytes(stories),
        figures.accuracy_by_rounds(stories),
        figures.bytes_by_rounds(stories),
    ]
    stages = figures.measured_stages(stories)
    plots = [*shared, *(plot for section in sections for plot in section.plots)]
    return shell.fill(
        "fedreuse.sim.report",
        title=_title(comparison),
        comparison=comparison,
        sections=sections,
        shared=shared,
        stages=[(stage, LAYER_NAMES[stage]) for stage in stages],
        chosen=_deepest(stories, stages),
        colours=COLOURS,
        data=_data(plots, stories, stages),
    )


def _title(comparison: Comparison) -> str:
    names = [run.name for run in comparison.runs]
    stamp = " (archival)" if any(run.config.evaluation.archival for run in comparison.runs) else ""
    return f"fedreuse: {', '.join(names[:3])}{' …' if len(names) > 3 else ''}{stamp}"


def _deepest(stories: Sequence[Chronicle], stages: Sequence[Stage]) -> Stage | None:
    """The layer shown at first: the deepest that all runs have in both directions, or else any."""
    everywhere = [s for s in stages if all(story.total(s, *WAYS) is not None for story in stories)]
    return everywhere[-1] if everywhere else stages[-1] if stages else None


def _data(plots: Sequence[Plot], stories: Sequence[Chronicle], stages: Sequence[Stage]) -> dict[str, Any]:
    """What the script works on: figures, tables, and where a layer is absent."""
    return {
        "plots": shell.embeddable(plots),
        "layers": {stage: LAYER_NAMES[stage] for stage in stages},
        "ways": WAY_NAMES,
        "runs": [story.run.name for story in stories],
        "absent": [
            {"run": n, "way": way, "layer": stage, "reason": reason}
            for n, story in enumerate(stories)
            for way, ways in BOTH.items()
            for stage in stages
            if (reason := _why(story, stage, ways))
        ],
    }


def _why(story: Chronicle, stage: Stage, ways: Sequence[Direction]) -> str:
    """Why a stage cannot be shown; empty where it can."""
    if story.total(stage, *ways) is not None:
        return ""
    layers = {"socket": ("http2", "tls")}.get(stage, (stage,))
    wanted = {f"{way}link {layer}" for way in ways for layer in layers}
    reasons = [absence.reason for absence in story.run.absences if wanted & set(absence.layers)]
    return "; ".join(dict.fromkeys(reasons)) or "not observed for every message or connection"


# ---------------------------------------------------------------- one run


def _section(index: int, story: Chronicle) -> Section:
    run = story.run
    falls = [figures.waterfall(index, story, way) for way in WAYS]
    who = [gate.clauses(index, story), gate.scores(index, story), gate.fates(index, story)]
    payloads = [figures.tensors(index, story, way) for way in WAYS]
    return Section(
        index,
        story,
        facts=tuple(_facts(run)),
        figures=tuple(_figures(story)),
        layers=tuple(_layers(run)),
        how=tuple(_how(run)),
        gate=tuple(plot for plot in who if plot is not None),
        falls=tuple(plot for plot in falls if plot is not None),
        tensors=tuple(plot for plot in payloads if plot is not None),
        config=yaml.safe_dump(run.config.model_dump(mode="json"), sort_keys=False, allow_unicode=True),
    )


def _how(run: Run) -> Iterator[str]:
    """How figures of connections were obtained, where the reason of an absence does not say it already."""
    said = {absence.reason for absence in run.absences}
    found = dict.fromkeys(text for there in run.connections.values() for text in there.how if text)
    return (text for text in found if text not in said)


def _facts(run: Run) -> Iterator[tuple[str, str]]:
    config = run.config
    yield "method", config.method
    yield "task", config.task.name
    yield "seed", str(config.seed)
    if config.evaluation.archival:
        yield "evaluation", "archival, no evidence"
    if not config.evaluation.test:
        yield "evaluation", "validation only, test set left closed"
    if run.finished and run.rounds == config.rounds:
        yield "rounds", str(run.rounds)
    else:
        state = "stopped early" if run.finished else "unfinished"
        yield "rounds", f"{run.rounds} of {config.rounds}, {state}"
    yield "clients", f"{config.clients.total}, of them {config.clients.per_round} a round"
    yield "dense model", f"{run.dense_bytes:,} B"
    body = {"sim": "in process", "launch": "gRPC, own processes", "server": "gRPC"}.get(
        run.body or "", run.body
    )
    yield "run by", body or "not recorded"
    socket = [run.connections[way] for way in WAYS]
    if all(there.rows for there in socket):
        encrypted = sum(there.seen["tls"] for there in socket)
        yield "connections", "TLS" if encrypted else "plaintext"


def _figures(story: Chronicle) -> Iterator[tuple[str, str, str]]:
    """Headline figures: value, what it is, and its layer."""
    run = story.run
    if run.test is not None:
        archival = run.config.evaluation.archival
        how = "archival: looked at often" if archival else "opened once, last round's model"
        yield _percent(run.test), "test accuracy", how
    else:
        yield _percent(run.validation), "validation accuracy", "as last measured"
    yield _percent(run.uplink_saving()["modelled"]), "uplink saved", "modelled fields, of dense"
    for ways, what in ((("up",), "uplink saved"), (WAYS, "uplink + downlink saved")):
        deepest = [s for s in LAYER_NAMES if s != "modelled" and story.total(s, *ways) is not None]
        if deepest:
            count = story.total(deepest[-1], *ways)
            dense = run.to_dense(count, *ways)
            yield (
                _percent(None if dense is None else 1 - dense),
                what,
                f"{LAYER_NAMES[deepest[-1]]}, of dense",
            )
    yield _percent(run.reuse_fraction), "clients reused", "of those selected"


def _percent(fraction: float | None) -> str:
    return "—" if fraction is None else f"{100 * fraction:.2f} %"


def _layers(run: Run) -> Iterator[Line]:
    reasons = {layer: absence.reason for absence in run.absences for layer in absence.layers}
    for layer in LAYERS:
        cells = []
        for ways in BOTH.values():
            count = run.measured(*ways)[layer]
            if count is None:
                why = [reasons[key] for way in ways if (key := f"{way}link {layer}") in reasons]
                if not run.applies(layer, *ways) and layer not in MESSAGE_LAYERS:
                    why = ["no connection of this kind"]
                cells.append(Cell("—", absent="; ".join(dict.fromkeys(why)) or "not observed"))
            elif layer in COUNTED:
                cells.append(Cell(f"{count:,}"))
            else:
                to_modelled, to_dense = run.to_modelled(count, *ways), run.to_dense(count, *ways)
                cells.append(Cell(f"{count:,}", _part(to_modelled), _part(to_dense)))
        unit = " (number)" if layer in COUNTED else ""
        yield Line(layer.replace("_", " ") + unit, layer != "modelled", tuple(cells))


def _part(fraction: float | None) -> str:
    return "" if fraction is None else f"{fraction:.4f}"
