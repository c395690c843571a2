"""What a study shows: rows of complete cells, and each method against the control; nothing claimed beyond the plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fedreuse.server.store import RunError
from fedreuse.sim.report.chronicle import Stage
from fedreuse.sim.study.folder import State, Study
from fedreuse.sim.study.outcomes import Figure, Outcome, measured_stage, read_outcome
from fedreuse.sim.study.pairing import unpaired
from fedreuse.sim.study.plan import Cell, Comparison
from fedreuse.sim.study.statistics import FEWEST_SEEDS, Paired, holm, paired, seeds_needed, spread

Verdict = Literal["equivalent", "not shown", "no claim"]


@dataclass(frozen=True)
class Row:
    """One method on one data set with all its seeds, in the plan's order.

    `figures` has each figure seed by seed; of the target, `target_round` is None where it was not reached.
    """

    method: str
    outcomes: tuple[Outcome, ...]
    figures: Mapping[str, tuple[Figure, ...]]

    def values(self, name: str) -> list[float] | None:
        """A figure seed by seed; None unless every seed has it."""
        found = [value for value in self.figures[name] if value is not None]
        return found if found and len(found) == len(self.outcomes) else None


@dataclass(frozen=True)
class Compared:
    """A method against the control on one data set, in percentage points of the plan's metric.

    `adjusted` is p after Holm's correction over the study's data sets. `retention` is the ratio of the means.
    `needed` seeds could show equivalence at this spread if there were no difference at all (None: over 1000).
    """

    method: str
    paired: Paired
    adjusted: float | None
    retention: float | None
    needed: int | None
    verdict: Verdict


@dataclass(frozen=True)
class Block:
    """A data set: the labels of task, partition and override, as far as there is a choice of them."""

    name: str
    rows: tuple[Row, ...]
    comparisons: tuple[Compared, ...]


@dataclass(frozen=True)
class Incomplete:
    """A method on a data set that enters no table, with what is the matter with each unfinished cell."""

    block: str
    method: str
    reasons: Mapping[str, str]


@dataclass(frozen=True)
class Showing:
    """`measured` is the layer of measured bytes: the deepest that all complete cells have."""

    study: Study
    measured: Stage | None
    blocks: tuple[Block, ...]
    incomplete: tuple[Incomplete, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]


def show(folder: Path, progress: Callable[[list[Cell]], Iterable[Cell]] = iter) -> Showing:
    """Read a study, finished or not. `progress` may follow the cells as they are read. Raises RunError."""
    study = Study.open(folder)
    groups: dict[str, dict[str, list[Cell]]] = {}
    for cell in study.cells.values():
        groups.setdefault(_name(study, cell), {}).setdefault(cell.factors["method"], []).append(cell)
    states = study.states()
    reasons = {name: _reason(state, study.cells[name]) for name, state in states.items()}
    outcomes: dict[str, Outcome] = {}
    for cell in progress([cell for cell in study.cells.values() if not reasons[cell.id]]):
        try:
            outcomes[cell.id] = read_outcome(cell, study.path(cell))
        except RunError as error:
            reasons[cell.id] = f"cannot be read: {error}"
    measured = measured_stage(list(outcomes.values()))
    blocks, incomplete = [], []
    for name, methods in groups.items():
        found = {}
        for method, cells in methods.items():
            lacking = {cell.id: reasons[cell.id] for cell in cells if reasons[cell.id]}
            if lacking:
                incomplete.append(Incomplete(name, method, lacking))
            else:
                found[method] = tuple(outcomes[cell.id] for cell in cells)
        if found:
            blocks.append(_block(study, name, found, measured))
    blocks = _corrected(study, blocks, planned=len(groups))
    return Showing(
        study,
        measured,
        tuple(blocks),
        tuple(incomplete),
        tuple(_warnings(study, outcomes)),
        tuple(_notes(study, blocks, incomplete, measured)),
    )


def _name(study: Study, cell: Cell) -> str:
    """The cell's data set: labels of all factors but the method, of which there is more than one level or the task."""
    chosen = study.plan.factors
    return ", ".join(
        label
        for factor, label in cell.factors.items()
        if factor == "task" or (factor != "method" and len(chosen[factor]) > 1)
    )


def _reason(state: State, cell: Cell) -> str:
    """Why a cell is not complete; empty if it is."""
    if state.kind in ("complete", "missing"):
        return "" if state.kind == "complete" else "not begun"
    far = f"round {state.rounds} of {cell.config.rounds}"
    if state.failure is None:
        return f"not finished: {far}"
    failed = state.failure
    return f"failed in {far}, attempt {failed.attempt}, {failed.time}: {failed.type}: {failed.sentence}"


# ---------------------------------------------------------------- one data set


def _block(
    study: Study, name: str, found: Mapping[str, tuple[Outcome, ...]], measured: Stage | None
) -> Block:
    targets = _targets(study, found)
    rows = tuple(_row(method, outcomes, targets, measured) for method, outcomes in found.items())
    plan = study.plan.compare
    control = next((row for row in rows if plan and row.method == plan.control), None)
    if plan is None or control is None:
        return Block(name, rows, ())
    compared = [_compared(row, control, plan) for row in rows if row is not control]
    return Block(name, rows, tuple(one for one in compared if one is not None))


def _targets(study: Study, found: Mapping[str, tuple[Outcome, ...]]) -> dict[int, float]:
    """The validation accuracy to be reached by seed; empty where the method that sets it is not complete."""
    target = study.plan.target
    if target is None:
        return {}
    if target.accuracy is not None:
        return dict.fromkeys(study.plan.seeds, target.accuracy)
    setting = found.get(target.of or "", ())
    ends = {outcome.cell.seed: outcome.figures["validation_accuracy"] for outcome in setting}
    return {seed: target.share * end for seed, end in ends.items() if end is not None}


def _row(
    method: str, outcomes: tuple[Outcome, ...], targets: Mapping[int, float], measured: Stage | None
) -> Row:
    found = [
        dict(outcome.figures) | outcome.to_target(targets.get(outcome.cell.seed), measured)
        for outcome in outcomes
    ]
    return Row(method, outcomes, {name: tuple(figures[name] for figures in found) for name in found[0]})


def _compared(row: Row, control: Row, plan: Comparison) -> Compared | None:
    """None where the metric is absent."""
    values, against = row.values(plan.metric), control.values(plan.metric)
    if values is None or against is None:
        return None
    points, theirs = [100 * value for value in values], [100 * value for value in against]
    result = paired(points, theirs, plan.margin, plan.confidence)
    base = spread(theirs).mean
    return Compared(
        row.method,
        result,
        None,
        spread(points).mean / base if base else None,
        None if result.sd is None else seeds_needed(result.sd, plan.margin, plan.confidence),
        "no claim",
    )


def _corrected(study: Study, blocks: Sequence[Block], planned: int) -> list[Block]:
    """With p-values corrected over the data sets, method by method, and verdicts.

    A data set that is not complete yet counts with p = 1, so that the family is the planned one from the start.
    """
    plan = study.plan.compare
    if plan is None:
        return list(blocks)
    adjusted: dict[tuple[str, str], float] = {}
    for method in dict.fromkeys(one.method for block in blocks for one in block.comparisons):
        mine = [
            (block.name, one.paired.p)
            for block in blocks
            for one in block.comparisons
            if one.method == method and one.paired.p is not None
        ]
        family = [p for _, p in mine] + [1.0] * (planned - len(mine))
        corrected = holm(family) if plan.holm else family
        adjusted |= {(name, method): p for (name, _), p in zip(mine, corrected, strict=False)}
    return [
        Block(
            block.name,
            block.rows,
            tuple(_judged(one, adjusted.get((block.name, one.method)), plan) for one in block.comparisons),
        )
        for block in blocks
    ]


def _judged(one: Compared, adjusted: float | None, plan: Comparison) -> Compared:
    verdict: Verdict = "no claim"
    if adjusted is not None and len(one.paired.differences) >= FEWEST_SEEDS:
        verdict = "equivalent" if adjusted < 1 - plan.confidence else "not shown"
    return Compared(one.method, one.paired, adjusted, one.retention, one.needed, verdict)


def many(seeds: int) -> str:
    """How many seeds, in words: "1 seed", "5 seeds"."""
    return f"{seeds} seed{'s' if seeds != 1 else ''}"


# ---------------------------------------------------------------- what to beware of


def _warnings(study: Study, outcomes: Mapping[str, Outcome]) -> Iterator[str]:
    seeds = len(study.plan.seeds)
    if seeds < FEWEST_SEEDS:
        yield f"{many(seeds)}: figures are shown, but with fewer than {FEWEST_SEEDS} nothing is claimed"
    for outcome in outcomes.values():
        faults = outcome.story.run.clients["fault"]
        if faults:
            yield (
                f"{outcome.cell.id}: {faults} of {outcome.story.run.selected} selected clients failed; no uplink is "
                "charged for them, which raises the savings"
            )
        if outcome.story.run.rounds < outcome.cell.config.rounds:
            yield f"{outcome.cell.id}: stopped after {outcome.story.run.rounds} of {outcome.cell.config.rounds} rounds"
    yield from (f"not paired: {sentence}" for sentence in unpaired(study, outcomes))
    stray = study.strangers()
    if stray:
        yield f"not of this study, and not read: {', '.join(stray)}"


def _notes(
    study: Study, blocks: Sequence[Block], incomplete: Sequence[Incomplete], measured: Stage | None
) -> Iterator[str]:
    plan = study.plan
    for addition in study.additions:
        yield f"added on {addition.at}, after the study was frozen: {', '.join(addition.cells)}"
    waiting = {one.block for one in incomplete if plan.compare and one.method == plan.compare.control}
    for name in sorted(waiting & {block.name for block in blocks}):
        yield f"{name}: no comparison yet, the control is not complete"
    if measured is None and blocks:
        yield "no measured layer is common to all cells, so only modelled bytes are shown"
    if plan.compare and any(
        row.values(plan.compare.metric) is None for block in blocks for row in block.rows
    ):
        yield f"{plan.compare.metric} is absent in some cells: runs of older versions, or a task that has none"
